"""Checkpoints of a model on a mesh: load, save, save in the background, training state."""
