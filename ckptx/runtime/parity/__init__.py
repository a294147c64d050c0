"""`verify --run`: what two checkpoints compute, compared module by module against measured noise."""
