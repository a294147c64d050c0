"""Look up classes in the generated files."""

from __future__ import annotations

from ckptx.architecture.architecture import Architecture
from ckptx.architecture.class_table import lookup


def architecture_of(class_name: str) -> Architecture:
    """Return the architecture of a class from the files."""
    found = lookup(class_name)
    assert found is not None, class_name
    return found
