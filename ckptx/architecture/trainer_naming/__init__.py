"""Names of trainers that have their own model code."""
