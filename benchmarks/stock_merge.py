"""Merge an adapter with PEFT: python stock_merge.py MODEL ADAPTER DST; the whole model is in memory."""

from __future__ import annotations

import sys
import warnings

import transformers
from peft import PeftModel


def main(model: str, adapter: str, dst: str) -> None:
    """Load MODEL in its dtype, merge ADAPTER, and save the result to DST."""
    warnings.simplefilter("ignore")
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(dst, max_shard_size="2GB")


if __name__ == "__main__":
    main(*sys.argv[1:])
