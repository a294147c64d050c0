"""What tests of the generated files begin with."""

from __future__ import annotations

from ckptx.architecture.spec import Architecture
from ckptx.architecture.table import lookup


def known(class_name: str) -> Architecture:
    """The architecture of a class that the files answer for."""
    found = lookup(class_name)
    assert found is not None, class_name
    return found
