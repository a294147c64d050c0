"""Training state of tied names: one state under both names if the bytes are equal, otherwise one state that is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path

import pytest

from ckptx.conversion.steps.naming import rename_tensors
from ckptx.conversion.steps.sharding import shard_tensors
from ckptx.conversion.steps.source_model import resolve_ties
from ckptx.conversion.steps.target_tensors import apply_ties
from ckptx.conversion.steps.training_state import TrainingState, map_training_state
from ckptx.formats.dcp.metadata import parse_metadata
from tests.conversion.steps import TIED, source, viewed
from tests.support.checkpoint_writers import Value, flip, llama, value, write_dcp

EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
SHAPE = llama()[EMBED][1]
MOMENT, STEP = "exp_avg", "step"


def in_state(name: str, leaf: str = MOMENT) -> str:
    return f"optimizer.state.{name}.{leaf}"


def tied_checkpoint(root: Path, moments: Mapping[str, Value], objects: Mapping[str, int] | None = None) -> Path:
    """A DCP whose embedding and head are equal, with moments by parameter.

    Args:
        root: Directory to write.
        moments: Moment by parameter.
        objects: Last but one byte of the pickled step by parameter.
    """
    tensors = llama()
    model = {f"model.{name}": each for name, each in {**tensors, HEAD: tensors[EMBED]}.items()}
    state = {in_state(name): each for name, each in moments.items()}
    steps = [in_state(name, STEP) for name in objects or {}]
    write_dcp(root, {**model, **state}, objects=steps, config=TIED)
    storage = parse_metadata((root / ".metadata").read_bytes(), ".metadata").storage
    for name, mask in (objects or {}).items():
        place = storage[in_state(name, STEP), None]
        flip(root / place.path, place.offset + 1, mask)
    return root


def mapped(root: Path, pp: int = 1, rename: Callable[[str], str] = lambda name: name) -> TrainingState:
    """The state of a checkpoint whose parameters get other names in the output."""
    with source(root, pp=pp) as ready:
        view = viewed(ready, with_state=True)
        ties = resolve_ties(view, ready.files, ready.options)
        target = apply_ties(view, ties.decisions, tied="auto", can_alias=True)
        named = rename_tensors(view, target, names=None, default=None)
        sharded = shard_tensors(view, named.target, named.naming, ready.options, [], own_files_only=False)
        assert (sharded.target.copied_aliases or sharded.target.aliases) == {HEAD: EMBED}
        assert bool(sharded.target.copied_aliases) == (pp == 2)
        names = {name: rename(name) for name in (*sharded.target.tensors, *sharded.target.aliases)}
        output_names = {old: names[new] for old, new in named.naming.target_names(view).items()}
        return map_training_state(view, ready.files, sharded.renamed(names), output_names)


def changed(kind: str) -> Value:
    """Another moment than `value("F32", *SHAPE)`, one property at a time."""
    dtype, shape, data = value("F32", *SHAPE)
    if kind == "last bit":
        return dtype, shape, data[:-1] + bytes([data[-1] ^ 1])
    if kind == "first bit":
        return dtype, shape, bytes([data[0] ^ 1]) + data[1:]
    if kind == "dtype":  # the same bytes
        return "I32", shape, data
    if kind == "shape":
        return dtype, shape[::-1], data
    return dtype, shape, data


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("kind", ["equal", "first bit", "last bit", "dtype", "shape"])
def test_two_moments_of_a_tied_tensor_are_one_only_if_they_are_equal(tmp_path: Path, kind: str, pp: int) -> None:
    root = tied_checkpoint(tmp_path / "dcp", {EMBED: value("F32", *SHAPE), HEAD: changed(kind)})
    state = mapped(root, pp)
    is_equal = kind == "equal"
    assert [row["name"] for row in state.dropped] == ([] if is_equal else [in_state(HEAD)])
    assert any("differ although their parameters are tied" in note for note in state.notes) is not is_equal
    assert (in_state(HEAD) in state.shared_stored_names) is is_equal
    assert state.source_names[in_state(EMBED)] == in_state(EMBED)


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize(("first", "second"), list(product([0, 1, 2], repeat=2)))
def test_two_objects_of_a_tied_tensor_are_one_only_if_they_are_equal(
    tmp_path: Path, first: int, second: int, pp: int
) -> None:
    moments = {name: value("F32", *SHAPE) for name in (EMBED, HEAD)}
    state = mapped(tied_checkpoint(tmp_path / "dcp", moments, {EMBED: first, HEAD: second}), pp)
    assert [row["name"] for row in state.dropped] == ([] if first == second else [in_state(HEAD, STEP)])
    assert state.object_source_names == {in_state(name, STEP): in_state(EMBED, STEP) for name in (EMBED, HEAD)}


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("stored", [(EMBED,), (HEAD,), (EMBED, HEAD)], ids=["embedding", "head", "both"])
def test_a_copy_on_another_stage_has_state_of_its_own(tmp_path: Path, stored: tuple[str, ...], pp: int) -> None:
    """Under whichever of the names the trainer stored it; on one stage the second name shares the bytes."""
    state = mapped(tied_checkpoint(tmp_path / "dcp", {name: value("F32", *SHAPE) for name in stored}), pp)
    kept, other = (in_state(EMBED), in_state(HEAD)) if EMBED in stored else (in_state(HEAD), in_state(EMBED))
    assert state.source_names[kept] == kept
    if pp == 1:
        assert (state.aliases, state.copies) == ({other: kept}, {})
        assert other not in state.tensors
        return
    assert (state.aliases, state.copies) == ({}, {other: kept})
    assert state.source_names[other] == kept and state.tensors[other].name == other
    assert {name: state.placements[name][0] for name in (in_state(EMBED), in_state(HEAD))} == {
        in_state(EMBED): 0,
        in_state(HEAD): 1,
    }


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("stored", [(EMBED,), (HEAD,), (EMBED, HEAD)], ids=["embedding", "head", "both"])
@pytest.mark.parametrize("prefix", ["", "model.", "other."])
def test_state_is_named_after_its_parameter_in_the_output(
    tmp_path: Path, prefix: str, stored: tuple[str, ...], pp: int
) -> None:
    """The checkpoint has `model.` before its parameters, but not in the names of their state."""
    moments = {name: value("F32", *SHAPE) for name in (*stored, NORM)}
    state = mapped(tied_checkpoint(tmp_path / "dcp", moments), pp, lambda name: prefix + name)
    in_output = "" if prefix == "model." else prefix  # unchanged names stay as the trainer wrote them
    expected = {in_state(in_output + name) for name in (EMBED, HEAD, NORM)}
    assert {*state.tensors, *state.aliases} == expected
    assert state.source_names[in_state(in_output + NORM)] == in_state(NORM)
    assert {*state.source_names.values()} == {in_state(EMBED if EMBED in stored else HEAD), in_state(NORM)}
