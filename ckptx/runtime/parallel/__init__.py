"""A model on a mesh: TP, PP, FSDP2 and activation checkpointing, gradients, and the ranks that run it."""
