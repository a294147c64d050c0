"""The version of ckptx, stated once."""

__version__ = "0.1.0"
