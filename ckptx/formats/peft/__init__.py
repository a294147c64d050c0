"""Adapters in PEFT's format: `adapter_config.json` with `adapter_model.safetensors` or `adapter_model.bin`."""
