"""Look up a class in the generated files, without importing torch."""

from __future__ import annotations

import functools

from ckptx.architecture.architecture import Architecture
from ckptx.architecture.class_decoding import ClassRecord, decode_class
from ckptx.architecture.model_files import read_index, sections_of
from ckptx.architecture.shape_decoding import decode_shapes
from ckptx.architecture.shape_rules import ShapeRules


def lookup(class_name: str, model_type: str | None = None) -> Architecture | None:
    """Return the architecture of a class if the generated files are sufficient for it without a config.

    Args:
        class_name: Name as in ``architectures`` of ``config.json``.
        model_type: Required model type, because another model may use the same class name; None to skip this check.

    Returns:
        The architecture, or None for an unknown class, another model type, or a class whose names or ties follow only
        from its config.
    """
    record = find_class_record(class_name, model_type)
    return record.architecture if record and record.shared_layers is None else None


@functools.cache
def find_class_record(class_name: str, model_type: str | None = None) -> ClassRecord | None:
    """Return the record of a class, even if it has only the reason to introspect the class.

    None for an unknown class, or if the class has another model type than `model_type`; None skips this check.
    """
    sections, own = sections_of(class_name), read_index()["classes"].get(class_name)
    if sections is None or (model_type is not None and own != model_type):
        return None
    return decode_class(class_name, own, sections, read_index()["transformers"])


@functools.cache
def shape_rules(class_name: str) -> ShapeRules | None:
    """Return the shape rules of a class; None if there are none."""
    sections = sections_of(class_name)
    return None if sections is None else decode_shapes(class_name, sections)
