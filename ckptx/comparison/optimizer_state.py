"""Comparison of training state by name: moments, counters, and other tensors that a trainer stores.

Trainers name state differently, so names are compared after the parameter in each is replaced with its model name. On a
mesh, each of two tied tensors may have its own copy of the state, so a state that one side lacks is compared with the
state of the tied tensor on that side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptx.catalog.entry import BytesEntry, TensorEntry
from ckptx.comparison.headers import TiedNames, compare_entries
from ckptx.mapping.state_names import ParameterIndex, StateName
from ckptx.model_view.view import ModelView, rules_of, trainer_rules
from ckptx.storage.interface import SourceFiles
from ckptx.wording import counted, first_of

_READ_BYTES = 1 << 20  # bytes of an object per read


@dataclass(frozen=True, slots=True)
class StatePairs:
    """Training state of two checkpoints, paired for a comparison.

    Attributes:
        pairs: Name on disk of the first tensor, and both tensors, which have equal dtypes and shapes.
        rows: Rows of the report for names, shapes or dtypes that differ.
        notes: Notes on state that is not compared, for the report.
    """

    pairs: tuple[tuple[str, TensorEntry, TensorEntry], ...] = ()
    rows: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()


def has_state(view: ModelView) -> bool:
    """Return True if the checkpoint has tensors besides the model."""
    return bool(view.optimizer or view.other)


def pair_state(a: ModelView, b: ModelView, ties: TiedNames, *, in_model_names: bool) -> StatePairs:
    """Pair the training state of two checkpoints.

    If they have no name in common, the result has only notes that nothing is compared.

    Args:
        a: First view, with every block located; its entries have their names on disk.
        b: Second view, likewise.
        ties: Tied names, in the names that are compared.
        in_model_names: True to compare model names, False to compare names of the views.
    """
    first, second = (_index_state(view, in_model_names) for view in (a, b))
    if not first.keys() & second.keys():
        return StatePairs(notes=(describe_uncompared_state(a), describe_uncompared_state(b)))
    pairs, rows = [], []
    for key in dict.fromkeys((*first, *second)):
        x = first.get(key) or _find_tied_state(second[key], first, ties)
        y = second.get(key) or _find_tied_state(first[key], second, ties)
        name = (first.get(key) or second[key]).entry.name
        if x is not None and y is not None and (x.entry.dtype, x.entry.shape) == (y.entry.dtype, y.entry.shape):
            pairs.append((name, x.entry, y.entry))
            continue
        row = compare_entries(name, None if x is None else x.entry, None if y is None else y.entry)
        assert row is not None
        rows.append(row)
    return StatePairs(tuple(pairs), tuple(rows))


def describe_object_differences(
    a: Mapping[str, BytesEntry], b: Mapping[str, BytesEntry], files: tuple[SourceFiles, SourceFiles]
) -> list[str]:
    """Return notes on pickled objects with different bytes, which may still be equal values, or on one side only."""
    differing = [name for name in a if name in b and not _are_equal(a[name], b[name], files)]
    unpaired = [name for name in (*a, *b) if name not in a or name not in b]
    groups = ((differing, "with different bytes"), (unpaired, "in only one checkpoint"))
    return [
        f"not compared: {counted(len(names), 'pickled object')} {reason}: {first_of(names)}"
        for names, reason in groups
        if names
    ]


@dataclass(frozen=True, slots=True)
class _StateTensor:
    """Tensor of the training state, with the parts of its name if it belongs to a parameter."""

    entry: TensorEntry
    state: StateName | None
    parameter: str = ""


def _index_state(view: ModelView, in_model_names: bool) -> dict[str, _StateTensor]:
    parameters = ParameterIndex.of({name: entry.name for name, entry in view.tensors.items()}, view.prefix)
    state_by_key: dict[str, _StateTensor] = {}
    for name in (*view.optimizer, *view.other):
        entry, state = view.catalog.tensors[name], parameters.find(name)
        if state is None:
            state_by_key[name] = _StateTensor(entry, None)
            continue
        parameter = _model_name(view, state.parameter) if in_model_names else state.parameter
        key = state.name_for(parameter)
        state_by_key[name if key in state_by_key else key] = _StateTensor(entry, state, parameter)
    return state_by_key


def _model_name(view: ModelView, name: str) -> str:
    if view.trainer_conversions:
        name = trainer_rules(view.trainer_conversions).model_name(name) or name
    rules = rules_of(view)
    return name if rules is None else rules.model_name(name) or name


def _find_tied_state(
    state_tensor: _StateTensor, others: Mapping[str, _StateTensor], ties: TiedNames
) -> _StateTensor | None:
    """Return the same state of a name that the parameter is tied to; None if there is none."""
    if state_tensor.state is None:
        return None
    keys = (state_tensor.state.name_for(name) for name in sorted(ties.groups.get(state_tensor.parameter, ())))
    return next((others[key] for key in keys if key in others), None)


def describe_uncompared_state(view: ModelView) -> str:
    """Return the note on a checkpoint whose training state is not compared."""
    kinds = ((view.optimizer, "optimizer tensor"), (view.other, "other tensor"))
    counts = ", ".join(counted(len(names), noun) for names, noun in kinds if names)
    return f"{view.catalog.root}: not compared: {counts}"


def _are_equal(a: BytesEntry, b: BytesEntry, files: tuple[SourceFiles, SourceFiles]) -> bool:
    if a.nbytes != b.nbytes:
        return False
    for offset in range(0, a.nbytes, _READ_BYTES):
        blocks = []
        for entry, source_files in zip((a, b), files, strict=True):
            block = bytearray(min(_READ_BYTES, entry.nbytes - offset))
            if source_files.read_into(entry.file, entry.offset + offset, [memoryview(block)]) < len(block):
                return False  # the file ends before the object does
            blocks.append(block)
        if blocks[0] != blocks[1]:
            return False
    return True
