"""Models of transformers, built without storage and given storage; their layers, and small models with the same layers."""
