"""Detect, open and plan checkpoints: DCP, HF, sharded safetensors, FSDP and DeepSpeed files, `torch.save` archives."""
