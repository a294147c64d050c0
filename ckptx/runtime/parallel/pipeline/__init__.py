"""Pipeline stages: the model's own forward on each stage, and the values sent between stages."""
