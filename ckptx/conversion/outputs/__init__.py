"""Output formats of a conversion, one module each."""
