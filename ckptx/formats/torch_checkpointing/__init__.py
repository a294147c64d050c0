"""Checkpoints of the library torch_checkpointing: items, each with one file per rank."""
