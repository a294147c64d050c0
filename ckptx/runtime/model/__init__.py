"""Models of transformers: building, materializing, finding their layers, and small models with the same layers."""
