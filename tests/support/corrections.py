"""List and replace the manual corrections."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any
from unittest import mock

from ckptx.architecture import corrections
from ckptx.architecture.correction_types import Corrections, ForwardCorrection, LayersCorrection


def all_corrections() -> dict[str, Corrections]:
    """Return the corrections of every model type that has any."""
    return {each: corrections.corrections_of(each) for each in corrections.model_types_with_corrections()}


@contextmanager
def patched_corrections(model_type: str, **sections: Any) -> Iterator[None]:
    """Replace sections of the corrections of a model type during the block."""
    other = corrections.corrections_of(model_type)._replace(**sections)
    real, files = corrections._read_corrections, corrections._corrected_model_types()
    with (
        mock.patch.object(corrections, "_read_corrections", lambda name: other if name == model_type else real(name)),
        mock.patch.object(corrections, "_corrected_model_types", lambda: files | {model_type}),
    ):
        yield


def layers_rows() -> dict[str, LayersCorrection]:
    """Return the corrections of layer lists of multimodal classes, by class name."""
    return {row.class_name: row for rows in all_corrections().values() for row in rows.layers}


def forward_rows() -> dict[str, list[ForwardCorrection]]:
    """Return the corrections of forward passes under tensor parallelism, by class name."""
    found: dict[str, list[ForwardCorrection]] = {}
    for row in chain.from_iterable(rows.forward for rows in all_corrections().values()):
        found.setdefault(row.class_name, []).append(row)
    return found


def model_types_with_inputs(*kinds: str) -> set[str]:
    """Return the model types with inputs of these kinds, or the class if only one class of the type has them."""
    return {
        row.class_name or model_type
        for model_type, rows in all_corrections().items()
        for row in rows.inputs
        if row.kind in kinds
    }
