"""Tensor parallelism: which plan a model gets, how it is cut, and how the stock forward pass runs on the pieces."""
