"""What a model type is given besides text, made as for a run of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ckptx.architecture.correction_rows import InputRow
from ckptx.architecture.corrections import corrections_of, model_types_with_corrections
from ckptx.runtime.parity.inputs.batch import FORMS


def model_types(kind: str) -> set[str]:
    """Those with a form of "images", "audio" or "heard"."""
    return {
        name for name in model_types_with_corrections() if any(row.kind == kind for row in corrections_of(name).inputs)
    }


def form_of(kind: str, model_type: str) -> str:
    """The name of the form that a model type takes."""
    return _row(kind, model_type).form


def maker(kind: str, model_type: str) -> Callable[[Mapping[str, Any], int, torch.Generator], Any]:
    """The form of a model type with its settings, as a function of config, rows and generator."""
    row = _row(kind, model_type)
    form = FORMS[kind][row.form]
    return lambda config, rows, generator: form(config, rows, generator, **row.settings)


def _row(kind: str, model_type: str) -> InputRow:
    return next(row for row in corrections_of(model_type).inputs if row.kind == kind)
