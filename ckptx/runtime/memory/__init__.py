"""Memory of a training step: which storages are alive, what GPUs reserve beside them."""
