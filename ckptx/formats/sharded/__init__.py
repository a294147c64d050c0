"""Safetensors in which each rank has its part of every tensor, as torch's writer cuts them."""
