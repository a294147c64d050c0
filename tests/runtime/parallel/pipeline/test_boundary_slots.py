"""Where a value lies among arguments: it is found there, put there, and nothing else changes."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from ckptx.runtime.parallel.pipeline.boundary_slots import (
    BoundarySlot,
    PathStep,
    get_value,
    is_identical,
    iter_leaves,
    set_value,
)

VALUES = some.one_of(some.none(), some.booleans(), some.integers(), some.text(max_size=3))
KEYS = some.one_of(some.integers(0, 3), some.sampled_from(["hidden_states", "mask", "full_attention"]))
CONTAINERS = some.recursive(
    VALUES,
    lambda inner: some.one_of(
        some.dictionaries(KEYS, inner, max_size=3),
        some.dictionaries(KEYS, inner, max_size=3).map(UserDict),
        some.lists(inner, max_size=3),
        some.lists(inner, max_size=3).map(tuple),
    ),
    max_leaves=8,
)
ARGUMENTS = some.dictionaries(KEYS, CONTAINERS, min_size=1, max_size=3)


def shape_of(value: Any) -> Any:
    """The containers, with their types, and what is in them."""
    if isinstance(value, (dict, UserDict)):
        return type(value), {key: shape_of(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [shape_of(item) for item in value]
    return value


@settings(max_examples=50)
@given(ARGUMENTS, some.integers(0, 7))
def test_what_is_put_is_found_and_others_are_as_before(arguments: dict[Any, Any], which: int) -> None:
    before = dict(iter_leaves(arguments))
    if not before:
        return
    steps = list(before)[which % len(before)]
    set_value(arguments, steps, "here")
    assert get_value(arguments, steps) == "here"
    assert dict(iter_leaves(arguments)) == before | {steps: "here"}


@given(ARGUMENTS)
def test_what_lies_there_put_there_changes_nothing(arguments: dict[Any, Any]) -> None:
    before = shape_of(arguments)
    for steps, value in list(iter_leaves(arguments)):
        set_value(arguments, steps, value)
    assert shape_of(arguments) == before


@given(ARGUMENTS)
def test_every_leaf_is_found(arguments: dict[Any, Any]) -> None:
    for steps, value in iter_leaves(arguments):
        assert get_value(arguments, steps) is value


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_a_dict_that_layers_share_is_changed_in_place(kind: Any) -> None:
    shared = kind(full=kind(keys=1))
    arguments = {0: "x", "shared_kv_states": shared}
    set_value(arguments, (PathStep("shared_kv_states"), PathStep("full"), PathStep("keys")), 2)
    assert arguments["shared_kv_states"] is shared
    assert shared["full"]["keys"] == 2


def test_a_tuple_is_made_anew_and_one_that_somebody_else_has_stays() -> None:
    pair = (1, 2)
    arguments = {"position_embeddings": pair, "caches": [pair, pair]}
    set_value(arguments, (PathStep("position_embeddings"), PathStep(1, 2)), 3)
    set_value(arguments, (PathStep("caches"), PathStep(0, 2), PathStep(0, 2)), 4)
    assert arguments == {"position_embeddings": (1, 3), "caches": [(4, 2), (1, 2)]}
    assert pair == (1, 2)


def test_a_tuple_below_a_shared_dict_is_put_into_that_dict() -> None:
    shared = {"full": (1, 2)}
    set_value({"kv": shared}, (PathStep("kv"), PathStep("full"), PathStep(0, 2)), 3)
    assert shared == {"full": (3, 2)}


def test_containers_that_are_lacking_are_made() -> None:
    arguments: dict[Any, Any] = {"kv": None}
    set_value(arguments, (PathStep("kv"), PathStep("full"), PathStep(1, 2)), 3)
    set_value(arguments, (PathStep("bias"), PathStep(0, 1)), 4)
    assert arguments == {"kv": {"full": (None, 3)}, "bias": (4,)}


@pytest.mark.parametrize(
    "steps",
    [
        (PathStep("absent"),),
        (PathStep("pair"), PathStep(5, 6)),
        (PathStep("pair"), PathStep("key")),
        (PathStep("plain"), PathStep(0, 1)),
        (PathStep("plain"), PathStep("key")),
        (PathStep("absent"), PathStep("key"), PathStep("key")),
    ],
)
def test_nothing_is_found_where_nothing_is(steps: tuple[PathStep, ...]) -> None:
    assert get_value({"pair": (1, 2), "plain": 7}, steps) is None


def test_a_slot_is_written_as_who_reads_code_would() -> None:
    steps = (PathStep("shared_kv_states"), PathStep("full_attention"), PathStep(1, 2))
    assert str(BoundarySlot("layers.3", 0, steps)) == "layers.3(shared_kv_states['full_attention'][1])"
    assert str(BoundarySlot("layers.3", 1, (PathStep(0),))) == "layers.3(0), call 2"


def test_values_are_the_same_bit_for_bit_and_nan_is_like_nothing() -> None:
    ones = torch.ones(2)
    assert is_identical(ones, ones.clone())
    assert not is_identical(ones, ones.double())
    assert not is_identical(ones, torch.ones(2, 1))
    assert not is_identical(ones, ones + 1e-7)
    nan = torch.full((2,), float("nan"))
    assert not is_identical(nan, nan)
    assert not is_identical(ones, None)
    assert is_identical("sdpa", "sdpa")
    assert not is_identical(1, True)
    assert is_identical(object(), object()), "of what cannot be sent, types alone"
