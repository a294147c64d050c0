"""Proving that two checkpoints are the same: by their bytes, by loading, by what they compute."""
