"""Checkpoints in Hugging Face format: safetensors or `pytorch_model.bin`, an index, a config."""
