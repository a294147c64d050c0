"""FSDP state dicts that every rank saved with `torch.save`: many archives, one checkpoint (verl)."""
