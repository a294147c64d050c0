"""Inputs of a model type in addition to text, created as for a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ckptx.architecture.correction_types import InputCorrection
from ckptx.architecture.corrections import corrections_of, model_types_with_corrections
from ckptx.runtime.parity.inputs.batch import FORMS


def model_types(kind: str) -> set[str]:
    """Return the model types with a form of "images", "audio" or "encoder_audio"."""
    return {
        name for name in model_types_with_corrections() if any(row.kind == kind for row in corrections_of(name).inputs)
    }


def form_of(kind: str, model_type: str) -> str:
    """Return the name of the input form of a model type."""
    return _row(kind, model_type).form


def maker(kind: str, model_type: str) -> Callable[[Mapping[str, Any], int, torch.Generator], Any]:
    """Return the input form of a model type with its settings, as a function of config, rows and generator."""
    row = _row(kind, model_type)
    form = FORMS[kind][row.form]
    return lambda config, rows, generator: form(config, rows, generator, **row.settings)


def _row(kind: str, model_type: str) -> InputCorrection:
    return next(row for row in corrections_of(model_type).inputs if row.kind == kind)
