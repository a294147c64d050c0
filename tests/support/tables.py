"""Helpers for tests of the generated files."""

from __future__ import annotations

from ckptx.architecture.architecture import Architecture
from ckptx.architecture.class_table import lookup


def known(class_name: str) -> Architecture:
    """Return the architecture of a class from the files."""
    found = lookup(class_name)
    assert found is not None, class_name
    return found
