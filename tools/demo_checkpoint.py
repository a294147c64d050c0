"""Write a small Qwen3 checkpoint with random weights and tied embeddings.

Run it as `python tools/demo_checkpoint.py DIRECTORY`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(directory: Path) -> None:
    """Save the model with transformers, in several safetensors files."""
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=32000,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory, max_shard_size="40MB")
    for file in directory.glob("*.safetensors"):
        file.chmod(0o644)  # safetensors writes 0600 and ignores the umask


if __name__ == "__main__":
    main(Path(sys.argv[1]))
