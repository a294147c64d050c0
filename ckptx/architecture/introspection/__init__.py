"""Models built without storage, and asked for what no table knows; it imports torch and transformers."""
