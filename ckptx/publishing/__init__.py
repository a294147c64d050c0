"""Publish an output: stage it next to the target, check it, and rename it atomically."""
