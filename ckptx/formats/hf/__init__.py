"""Checkpoints as Hugging Face publishes them: safetensors or `pytorch_model.bin`, an index, a config."""
