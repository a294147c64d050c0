"""Pipeline stages: the model's own forward on each of them, and what must travel between them."""
