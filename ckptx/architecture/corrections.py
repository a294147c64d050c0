"""Read the manual corrections of the generated model tables, one file for each model type.

`tools/` extracts facts about each class, such as names, ties and TP plans, from transformers and writes them to
`models/`; a correction replaces or adds a fact where transformers lacks it or is wrong. Only this module opens the
files of corrections.

    corrections/gemma3n_text.json    {"plan": [{"modules": ..., "style": ..., "reason": ...}, ...], "absent": [...]}

A section is a list of corrections, each with its reason; `correction_types` defines their meaning, and
`correction_schema` refuses invalid ones. A model type without a file needs no correction. Only the file of the required
model type is opened: the model type of a checkpoint is looked up among the names of the files, and never becomes part
of a path.
"""

from __future__ import annotations

import functools
import os
from itertools import chain
from pathlib import Path

from ckptx.architecture.correction_types import AbsentCorrection, Corrections, PlanCorrection
from ckptx.architecture.expressions import keys_of
from ckptx.architecture.model_files import read_index, source_of

CORRECTIONS_DIR = Path(__file__).with_name("corrections")

_NO_CORRECTIONS = Corrections()


def model_types_with_corrections() -> list[str]:
    """Return the model types that have a file, sorted."""
    return sorted(_corrected_model_types())


def corrections_of(model_type: str) -> Corrections:
    """Return the corrections of a model type; empty if it has no file.

    Raises:
        InvalidCorrectionError: The file is invalid.
    """
    return _read_corrections(model_type) if model_type in _corrected_model_types() else _NO_CORRECTIONS


def corrections_of_class(class_name: str, module: str | None = None) -> Corrections:
    """Return all corrections of the model type of a class; empty for an unknown class.

    They include the corrections that name other classes of the model type, see `filter_by_class`.

    Args:
        class_name: Name of the class.
        module: Python module that defines the class. If given, a third-party class of the same name counts as unknown:
            the module must be in one of the directories from which the generated file was made. None skips this check.
    """
    model_type = read_index()["classes"].get(class_name)
    if model_type is None:
        return _NO_CORRECTIONS
    if module is not None:
        source = source_of(class_name)
        directories = source["directories"] if source is not None else ()
        if not any(module.startswith(f"transformers.models.{each}.") for each in directories):
            return _NO_CORRECTIONS
    return corrections_of(model_type)


def plan_corrections(text_type: str, model_type: str) -> tuple[PlanCorrection, ...]:
    """Return the corrections of the tensor-parallel plan of a class.

    They are those of the model type of its text model or, if it has none, those of the model type of the class. The
    corrections of a text model thus apply to every multimodal class around it.

    Args:
        text_type: Model type of the text model.
        model_type: Model type of the class.
    """
    return corrections_of(text_type).plan or corrections_of(model_type).plan


def absent_corrections(text_type: str, model_type: str) -> tuple[AbsentCorrection, ...]:
    """Return the corrections about tensors that some layers of a class do not have, see `AbsentCorrection`.

    Arguments and order of precedence are those of `plan_corrections`.
    """
    return corrections_of(text_type).absent or corrections_of(model_type).absent


def config_keys_of_corrections(text_type: str, model_type: str) -> frozenset[str]:
    """Return the keys of the text model's config that the expressions in the corrections of a class read.

    They are the corrections that `plan_corrections` and `absent_corrections` return for these arguments.
    """
    expressions = [absent.first_layer for absent in absent_corrections(text_type, model_type)]
    for correction in plan_corrections(text_type, model_type):
        expressions += [*correction.groups, *chain.from_iterable(correction.heads), correction.when]
    return frozenset(chain.from_iterable(map(keys_of, expressions)))


@functools.cache
def _corrected_model_types() -> frozenset[str]:
    return frozenset(name.removesuffix(".json") for name in os.listdir(CORRECTIONS_DIR) if name.endswith(".json"))


@functools.cache
def _read_corrections(model_type: str) -> Corrections:
    from ckptx.architecture.correction_schema import decode_corrections  # most model types have no file to decode

    path = CORRECTIONS_DIR / f"{model_type}.json"
    return decode_corrections(path.read_bytes(), f"{CORRECTIONS_DIR.name}/{path.name}")
