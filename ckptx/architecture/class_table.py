"""Look up a class in the generated files, without importing torch."""

from __future__ import annotations

import functools

from ckptx.architecture.architecture import Architecture
from ckptx.architecture.class_rows import ClassRow, decode_row
from ckptx.architecture.model_files import read_index, sections_of
from ckptx.architecture.shape_rows import decode_shapes
from ckptx.architecture.shape_rules import ShapeRules


def lookup(class_name: str, model_type: str | None = None) -> Architecture | None:
    """Return the architecture of a class if the generated files are sufficient for it.

    Args:
        class_name: Name as in ``architectures`` of ``config.json``.
        model_type: Required model type, because another model may use the same class name; None to skip this check.

    Returns:
        The architecture, or None for an unknown class, another model type, or a class that needs its real config.
    """
    row = find_row(class_name, model_type)
    return row.architecture if row and row.shared_layers is None else None


@functools.cache
def find_row(class_name: str, model_type: str | None = None) -> ClassRow | None:
    """Return the row of a class, even if it only has the reason to introspect the class; None if unknown."""
    sections, own = sections_of(class_name), read_index()["classes"].get(class_name)
    if sections is None or (model_type is not None and own != model_type):
        return None
    return decode_row(class_name, own, sections, read_index()["transformers"])


@functools.cache
def shape_rules(class_name: str) -> ShapeRules | None:
    """Return the shape rules of a class; None if there are none."""
    sections = sections_of(class_name)
    return None if sections is None else decode_shapes(class_name, sections)
