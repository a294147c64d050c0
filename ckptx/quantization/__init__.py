"""Quantized checkpoints: their schemes, the tensors that are quantized, and decoding to plain floats."""
