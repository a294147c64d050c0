"""Find in the corrections which form of a trainer's names a class has.

A form is a set of names that several classes share, such as "head_norms": a key of the tables of that trainer.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from ckptx.architecture.correction_schema import InvalidCorrectionError
from ckptx.architecture.correction_types import filter_by_class
from ckptx.architecture.corrections import corrections_of, corrections_of_class, model_types_with_corrections

Section = Literal["torchtitan", "megatron"]  # of a file of corrections


def find_form(section: Section, class_name: str, forms: Collection[str]) -> str | None:
    """Return the form of the names of a class; None if the trainer's names for it are unknown.

    Args:
        section: Section of the corrections.
        class_name: Name as in `architectures` of `config.json`.
        forms: Forms that the tables of the trainer have.

    Raises:
        InvalidCorrectionError: The correction names another form.
    """
    corrections = filter_by_class(getattr(corrections_of_class(class_name), section), class_name)
    if not corrections:
        return None
    form: str = corrections[0].form
    if form not in forms:
        raise InvalidCorrectionError(f'{class_name}: "{form}" is not a form of names; use one of {", ".join(forms)}')
    return form


def list_classes(section: Section) -> list[str]:
    """Return the names of all classes for which the corrections have a form, sorted."""
    return sorted(
        correction.class_name
        for model_type in model_types_with_corrections()
        for correction in getattr(corrections_of(model_type), section)
    )
