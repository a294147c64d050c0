"""Models of transformers, built without storage and given storage; their layers; small models with the same layers."""
