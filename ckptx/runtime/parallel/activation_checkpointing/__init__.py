"""Activation checkpointing: what is wrapped, and what selective mode keeps."""
