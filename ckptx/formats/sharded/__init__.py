"""Sharded safetensors: files of the shards of each rank, in the format of torch's HuggingFaceStorageWriter."""
