"""HF to DCP and back, and cut for a mesh. Read pipeline.py, then the file of a step."""
