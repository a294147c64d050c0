"""How many models there are in the names of a checkpoint, for every class of the table."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ckptx.architecture.architecture import Architecture
from ckptx.architecture.class_table import lookup
from ckptx.architecture.model_files import class_names
from ckptx.architecture.model_names import ModelNames, find_model_names
from ckptx.errors import CkptxError
from ckptx.mapping.duplicates import find_duplicate_names
from ckptx.mapping.rules import NameRules

CLASSES = class_names()
CHUNKS = [pytest.param(chunk, marks=[pytest.mark.slow] if chunk else []) for chunk in range(8)]
ONE = ("", "model.", "state.model.", "module.")
TWO = (("model.", "ema."), ("", "ema."), ("state.model.", "state.ema."), ("actor.", "ref_policy."), ("a.b.c.d.", "m."))


def names_of(known: Architecture) -> list[str]:
    """The names of a model of the class with two of everything, as the model itself calls them."""
    found: list[str] = []
    for pattern in sorted(known.model_name_patterns):
        if "**" not in pattern:
            found += _filled(pattern.split("."))
    return list(dict.fromkeys(found))


def _filled(parts: list[str]) -> Iterator[str]:
    at = [i for i, part in enumerate(parts) if part == "*"]
    for index in "01" if at else "0":
        yield ".".join(index if i in at else part for i, part in enumerate(parts))


def found(known: Architecture, names: list[str], prefix: str | None = None) -> ModelNames:
    return find_model_names(names, known, {"architectures": [known.class_name], "model_type": known.model_type}, prefix)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_the_names_of_one_model_are_those_of_one_model(chunk: int) -> None:
    """Towers, encoders and decoders, heads and base models are no second model, whatever the class."""
    for class_name in CLASSES[chunk::8]:
        known = lookup(class_name)
        if known is None or not known.model_name_patterns:
            continue
        names = names_of(known)
        for prefix in ONE:
            there = found(known, [prefix + name for name in names])
            assert len(there.models.complete_prefixes) == 1, (class_name, prefix, there.models.complete_prefixes)
            assert not there.unwrapped.duplicates, (class_name, prefix)
            assert not there.models.duplicates, (class_name, prefix)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_the_names_of_two_models_are_those_of_two(chunk: int) -> None:
    for class_name in CLASSES[chunk::8]:
        known = lookup(class_name)
        if known is None or not known.model_name_patterns:
            continue
        names = names_of(known)
        for prefixes in TWO:
            together = [prefix + name for prefix in prefixes for name in names]
            there = found(known, together)
            if there.models.roles.prefix in prefixes:
                assert {*there.models.complete_prefixes} == {*prefixes}, (
                    class_name,
                    prefixes,
                    there.models.complete_prefixes,
                )


@pytest.mark.parametrize("chunk", CHUNKS)
def test_no_class_has_two_names_for_one_tensor(chunk: int) -> None:
    for class_name in CLASSES[chunk::8]:
        known = lookup(class_name)
        if known is None or not known.model_name_patterns:
            continue
        config = {"architectures": [class_name], "model_type": known.model_type}
        try:
            rules = NameRules(known.conversions(config), known.base_prefix, known.model_name_patterns)
        except CkptxError:
            continue
        assert find_duplicate_names(rules, names_of(known)) == {}, class_name
