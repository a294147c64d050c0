"""Facts about model classes: names and shapes of tensors, tied weights, TP plans, layers, precision rules."""
