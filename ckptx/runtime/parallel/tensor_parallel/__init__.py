"""Tensor parallelism: plans, sharded parameters, and the stock forward pass on the shards."""
