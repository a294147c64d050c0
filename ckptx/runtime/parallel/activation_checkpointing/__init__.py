"""Activation checkpointing: the layers that are wrapped, and the results that selective mode saves."""
