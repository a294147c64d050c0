"""LoRA adapters: their config and tensors, the weights that they change, and the merged weights."""
