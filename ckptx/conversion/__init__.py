"""HF to DCP and back. Read convert.py, then to_dcp.py and to_huggingface.py."""
