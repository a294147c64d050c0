"""Detect, open and plan checkpoints: DCP, HF, sharded safetensors, per-rank FSDP files, `torch.save` archives."""
