"""Conversion from HF to DCP and back, and resharding for a mesh. Read pipeline.py, then the module of a step."""
