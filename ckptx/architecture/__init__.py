"""Facts about model classes: names, ties, precision rules."""
