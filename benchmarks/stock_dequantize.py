"""Decode an fp8 checkpoint with torch: python stock_dequantize.py SRC DST; the whole model is in memory."""

from __future__ import annotations

import sys

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader


def main(src: str, dst: str) -> None:
    """Load every weight of SRC as bf16, then save it to DST, in one process without a process group."""
    reader = QuantizedHuggingFaceStorageReader(src, target_dtype=torch.bfloat16)
    metadata = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=torch.bfloat16)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata) and not name.endswith("_scale_inv")
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(dst), no_dist=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
