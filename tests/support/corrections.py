"""What tests of the corrections by hand begin with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any
from unittest import mock

from ckptx.architecture import corrections
from ckptx.architecture.correction_rows import Corrections, ForwardRow, LayersRow


def every() -> dict[str, Corrections]:
    """The rows of every model type that has some."""
    return {each: corrections.corrections_of(each) for each in corrections.model_types_with_corrections()}


@contextmanager
def changed(model_type: str, **sections: Any) -> Iterator[None]:
    """Within it, these sections of a model type hold other rows."""
    other = corrections.corrections_of(model_type)._replace(**sections)
    real, files = corrections._read_corrections, corrections._corrected_model_types()
    with (
        mock.patch.object(
            corrections, "_read_corrections", lambda asked: other if asked == model_type else real(asked)
        ),
        mock.patch.object(corrections, "_corrected_model_types", lambda: files | {model_type}),
    ):
        yield


def layers_rows() -> dict[str, LayersRow]:
    """Where multimodal classes keep their layers, by the name of the class."""
    return {row.class_name: row for rows in every().values() for row in rows.layers}


def forward_rows() -> dict[str, list[ForwardRow]]:
    """What forward passes may do under tensor parallelism, by the name of the class."""
    found: dict[str, list[ForwardRow]] = {}
    for row in chain.from_iterable(rows.forward for rows in every().values()):
        found.setdefault(row.class_name, []).append(row)
    return found


def with_inputs(*kinds: str) -> set[str]:
    """The model types that take something of these kinds; the class, where only one of them does."""
    return {
        row.class_name or model_type for model_type, rows in every().items() for row in rows.inputs if row.kind in kinds
    }
