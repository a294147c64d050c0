"""Per-rank FSDP files: state dicts that every rank saved with `torch.save`, which are one checkpoint (verl)."""
