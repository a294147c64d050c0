"""Runs a model on a mesh: TP, PP, FSDP2, activation checkpointing, gradients and process groups."""
