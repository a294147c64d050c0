"""Manual corrections, one file for each model type next to the generated one; this is the only reader of them.

    corrections/gemma3n_text.json    {"plan": [{"modules": ..., "style": ..., "reason": ...}, ...], "absent": [...]}

A section is a list of rows, each with its reason; `correction_rows` defines the meaning of rows, and
`correction_schema` refuses invalid ones. A model type without a file needs no correction. Only the file of the required
model type is opened: the model type of a checkpoint is looked up among the names of the files, and never becomes part
of a path.
"""

from __future__ import annotations

import functools
import os
from itertools import chain
from pathlib import Path

from ckptx.architecture.correction_rows import AbsentRow, Corrections, PlanRow
from ckptx.architecture.expressions import keys_of
from ckptx.architecture.model_files import index, source_of

CORRECTIONS = Path(__file__).with_name("corrections")

_NOTHING = Corrections()


def model_types_with_corrections() -> list[str]:
    """Return the model types that have a file, sorted."""
    return sorted(_files())


def corrections_of(model_type: str) -> Corrections:
    """Return the rows of a model type; empty if it has no file.

    Raises:
        FaultyCorrectionError: The file has an invalid row.
    """
    return _contents(model_type) if model_type in _files() else _NOTHING


def corrections_of_class(class_name: str, module: str | None = None) -> Corrections:
    """Return the rows of the model type of a class; empty for an unknown class.

    Args:
        class_name: Name of the class.
        module: Module that defines the class. If given, a third-party class of the same name counts as unknown: the
            module must be in one of the directories from which the generated file was made. None skips this check.
    """
    model_type = index()["classes"].get(class_name)
    if model_type is None:
        return _NOTHING
    if module is not None:
        source = source_of(class_name)
        directories = source["directories"] if source is not None else ()
        if not any(module.startswith(f"transformers.models.{each}.") for each in directories):
            return _NOTHING
    return corrections_of(model_type)


def plan_rows(text_type: str, model_type: str) -> tuple[PlanRow, ...]:
    """Return the plan rows of a class: those of the model type of its text model, else those of its own.

    Rows of the text model apply to every composite around it.
    """
    return corrections_of(text_type).plan or corrections_of(model_type).plan


def absent_rows(text_type: str, model_type: str) -> tuple[AbsentRow, ...]:
    """Return the rows of absent tensors, found like plan rows."""
    return corrections_of(text_type).absent or corrections_of(model_type).absent


def plan_keys(text_type: str, model_type: str) -> frozenset[str]:
    """Return the keys of the text model's config that its plan rows and rows of absent tensors read."""
    expressions = [row.first for row in absent_rows(text_type, model_type)]
    for row in plan_rows(text_type, model_type):
        expressions += [*row.groups, *chain.from_iterable(row.heads), row.when]
    return frozenset(chain.from_iterable(map(keys_of, expressions)))


@functools.cache
def _files() -> frozenset[str]:
    return frozenset(name.removesuffix(".json") for name in os.listdir(CORRECTIONS) if name.endswith(".json"))


@functools.cache
def _contents(model_type: str) -> Corrections:
    from ckptx.architecture.correction_schema import decode  # most model types have no file to decode

    path = CORRECTIONS / f"{model_type}.json"
    return decode(path.read_bytes(), f"{CORRECTIONS.name}/{path.name}")
