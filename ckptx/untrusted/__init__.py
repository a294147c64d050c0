"""Limits, checks and printing for untrusted values from checkpoints."""
