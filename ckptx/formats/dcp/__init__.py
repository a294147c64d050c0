"""torch.distributed.checkpoint directories: `.metadata` and the files it points into."""
