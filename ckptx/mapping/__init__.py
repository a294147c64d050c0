"""Map tensor names between checkpoints: prefixes, wrappers, optimizer and trainer state. Does not import torch."""
