"""A catalog seen as a model: names without wrappers, ties, the config check, parameter counts, and the rank layout."""
