"""The version of ckptx; the only place that defines it."""

__version__ = "0.1.0"
