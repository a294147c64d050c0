"""Names that trainers give to models they have code of their own for."""
