"""Proves that what a training run saved can be read back, exported, re-laid and resumed, and names what was lost."""
