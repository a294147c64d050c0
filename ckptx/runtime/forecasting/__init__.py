"""What a training step will take, counted before it runs: the runtime itself, on tensors without storage."""
