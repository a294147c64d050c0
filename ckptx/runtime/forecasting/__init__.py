"""Forecast a training step before it runs: the runtime itself runs on tensors without storage, and is counted."""
