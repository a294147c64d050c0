"""Names of one checkpoint to names of another: prefixes, wrappers, what is not the model. Pure, no torch."""
