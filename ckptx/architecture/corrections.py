"""What is corrected by hand, one file for each model type beside the generated one, and the only reader of it.

    corrections/gemma3n_text.json    {"plan": [{"modules": ..., "style": ..., "reason": ...}, ...], "absent": [...]}

A section is a list of rows, each with its reason; `correction_rows` says what the rows mean, `correction_schema`
refuses those that mean nothing. A model type without a file is as transformers says. Only the file of the model type
at hand is opened: what a checkpoint calls its model type is looked up among the names of the files, and becomes no
part of a path.
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


def corrected_types() -> list[str]:
    """Every model type that has a file, sorted."""
    return sorted(_files())


def corrections_of(model_type: str) -> Corrections:
    """The rows of a model type, none where it has no file.

    Raises:
        FaultyCorrectionError: The file has a row that means nothing.
    """
    return _contents(model_type) if model_type in _files() else _NOTHING


def corrections_of_class(class_name: str, module: str | None = None) -> Corrections:
    """The rows of the model type of a class, none for an unknown class.

    Args:
        class_name: Of the class.
        module: Where it is defined. When given, a class of somebody else that has the same name is unknown: the module
            must be one of the directory that the generated file was made from.
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
    """The plan rows of a class: those of the model type of its text model, else those of its own.

    Rows that lie with the text model hold for every composite around it.
    """
    return corrections_of(text_type).plan or corrections_of(model_type).plan


def absent_rows(text_type: str, model_type: str) -> tuple[AbsentRow, ...]:
    """The rows of absent tensors, found as the plan rows are."""
    return corrections_of(text_type).absent or corrections_of(model_type).absent


def plan_keys(text_type: str, model_type: str) -> frozenset[str]:
    """The keys of the text model's config that its plan rows and rows of absent tensors read."""
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
