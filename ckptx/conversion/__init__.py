"""Conversion from HF to DCP and back, and resharding for a mesh. Read run_conversion.py, then the module of a step."""
