"""Comparison of two checkpoints: headers for `diff`; contents bit for bit and optimizer state for `verify`."""
