"""What the generated files say of one class, without importing torch."""

from __future__ import annotations

import functools

from ckptx.architecture.model_files import index, sections_of
from ckptx.architecture.rows import Row, decode_row
from ckptx.architecture.shape_rows import decode_shapes
from ckptx.architecture.shape_rules import ShapeRules
from ckptx.architecture.spec import Architecture


def lookup(class_name: str, model_type: str | None = None) -> Architecture | None:
    """The architecture of a class, if the generated files alone can give it.

    Args:
        class_name: As in ``architectures`` of ``config.json``.
        model_type: When given, it must be the one of the class: another model may use the same class name.

    Returns:
        None for an unknown class, another model type, or a class that needs its real config.
    """
    row = find_row(class_name, model_type)
    return row.architecture if row and row.shared is None else None


@functools.cache
def find_row(class_name: str, model_type: str | None = None) -> Row | None:
    """What is known of a class, also where that is only why the class must be introspected."""
    sections, own = sections_of(class_name), index()["classes"].get(class_name)
    if sections is None or (model_type is not None and own != model_type):
        return None
    return decode_row(class_name, own, sections, index()["transformers"])


@functools.cache
def shape_rules(class_name: str) -> ShapeRules | None:
    """The rules for the shapes of a class, None where there are none."""
    sections = sections_of(class_name)
    return None if sections is None else decode_shapes(class_name, sections)
