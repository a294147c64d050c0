"""Comparison of training state by name: moments, counters, and other tensors that a trainer stores.

Trainers name state differently, so names are compared after the parameter name in each of them is replaced with its
name in the view or in the model. On a mesh, each of two tied tensors may have its own copy of the state, so a state
that one side lacks is compared with the state of the tied tensor on that side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ckptx.catalog.entry import BytesEntry, TensorEntry
from ckptx.comparison.headers import TiedNames, compare_entries
from ckptx.mapping.rules import TrainerRules
from ckptx.mapping.state_names import ParameterIndex, StateName
from ckptx.model_view.view import ModelView, rules_of
from ckptx.storage.interface import SourceFiles
from ckptx.wording import counted, first_of

_PICKLE_MAGIC_NBYTES = 2  # a pickle begins with the opcode PROTO (0x80) and the number of the protocol
_READ_BYTES = 1 << 20  # bytes of an object per read


@dataclass(frozen=True, slots=True)
class StatePairs:
    """Training state of two checkpoints, paired for a comparison.

    Attributes:
        pairs: Stored name in the first checkpoint (or in the second, if only that has it), and both tensors, which have
            equal dtypes and shapes.
        differences: Entries of `differing` in the report: names, shapes or dtypes that differ.
        is_comparable: False if the two have no name in common; then there are neither pairs nor differences.
    """

    pairs: tuple[tuple[str, TensorEntry, TensorEntry], ...] = ()
    differences: tuple[dict[str, Any], ...] = ()
    is_comparable: bool = True


def has_state(view: ModelView) -> bool:
    """Return True if the checkpoint has tensors that are not of the model."""
    return bool(view.optimizer or view.other)


def pair_state(a: ModelView, b: ModelView, ties: TiedNames, *, in_model_names: bool) -> StatePairs:
    """Pair the training state of two checkpoints.

    Args:
        a: First view, with every chunk located; its entries have their stored names.
        b: Second view, with the same requirements.
        ties: Tied names: model names if `in_model_names`, else names of the views.
        in_model_names: True to compare names with the model name of the parameter, False with its name in the view.
    """
    first, second = (_index_state(view, in_model_names) for view in (a, b))
    if not first.keys() & second.keys():
        return StatePairs(is_comparable=False)
    pairs, differences = [], []
    for key in dict.fromkeys((*first, *second)):
        x = first.get(key) or _find_tied_state(second[key], second, first, ties)
        y = second.get(key) or _find_tied_state(first[key], first, second, ties)
        name = (first.get(key) or second[key]).entry.name
        if x is not None and y is not None and (x.entry.dtype, x.entry.shape) == (y.entry.dtype, y.entry.shape):
            pairs.append((name, x.entry, y.entry))
            continue
        difference = compare_entries(name, None if x is None else x.entry, None if y is None else y.entry)
        assert difference is not None
        differences.append(difference)
    return StatePairs(tuple(pairs), tuple(differences))


@dataclass(frozen=True, slots=True)
class UncomparedObjects:
    """Names of pickled objects that cannot be compared.

    Attributes:
        differing: Objects with different bytes, which may still be equal values.
        unpaired: Objects that only one checkpoint has.
    """

    differing: tuple[str, ...]
    unpaired: tuple[str, ...]

    @property
    def count(self) -> int:
        """Number of objects."""
        return len(self.differing) + len(self.unpaired)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the report, at most one for each of the two kinds."""
        groups = ((self.differing, "with different bytes"), (self.unpaired, "in only one checkpoint"))
        return tuple(
            f"not compared: {counted(len(names), 'pickled object')} {reason}: {first_of(names)}"
            for names, reason in groups
            if names
        )


def find_uncompared_objects(
    a: Mapping[str, BytesEntry], b: Mapping[str, BytesEntry], files: tuple[SourceFiles, SourceFiles]
) -> UncomparedObjects:
    """Find the pickled objects that are not the same bytes in both checkpoints."""
    differing = tuple(name for name in a if name in b and not _are_equal(a[name], b[name], files))
    return UncomparedObjects(differing, tuple(name for name in (*a, *b) if name not in a or name not in b))


def check_objects(objects: Mapping[str, BytesEntry], files: SourceFiles) -> None:
    """Check that the archives of pickled objects can be opened; nothing is unpickled.

    Raises:
        InputError: An archive is damaged.
        UnsupportedError: It is compressed.
    """
    if not objects:
        return
    from ckptx.formats.torch_archive.archive import open_archive

    for name, entry in objects.items():
        head = files.read_up_to(entry.file, entry.offset, min(entry.nbytes, _PICKLE_MAGIC_NBYTES))
        if head[:1] != b"\x80":  # a pickle without an archive
            subject = f'{files.root / entry.file}: object "{name}"'
            read = partial(files.read, entry.file)
            open_archive(read, entry.offset, entry.nbytes, subject, lambda data, where: None)


@dataclass(frozen=True, slots=True)
class _StateTensor:
    """Tensor of the training state.

    Attributes:
        entry: Tensor on disk.
        state: Parts of its name; None if it belongs to no parameter.
        parameter: Name of its parameter in the view or in the model, whichever is compared; empty if it belongs to
            none.
    """

    entry: TensorEntry
    state: StateName | None
    parameter: str = ""


def _index_state(view: ModelView, in_model_names: bool) -> dict[str, _StateTensor]:
    """Return the training state by the names that are compared: with the parameter under its name in the view or model.

    State that belongs to no parameter, and the second of two with the same name, is under its stored name.
    """
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
    """Return the model name of a name in the view; a name that the rules do not know stays unchanged."""
    if view.trainer_conversions:
        name = TrainerRules(view.trainer_conversions).disk_name(name) or name
    rules = rules_of(view)
    return name if rules is None else rules.model_name(name) or name


def _find_tied_state(
    state_tensor: _StateTensor, own: Mapping[str, _StateTensor], others: Mapping[str, _StateTensor], ties: TiedNames
) -> _StateTensor | None:
    """Return the same kind of state of a tensor that the parameter is tied to; None if `others` has none.

    Args:
        state_tensor: State that only one checkpoint has.
        own: State of this checkpoint by the names that are compared.
        others: State of the other checkpoint by the names that are compared.
        ties: Tied names.
    """
    keys = []
    if state_tensor.state is not None:
        keys += [state_tensor.state.name_for(name) for name in sorted(ties.groups.get(state_tensor.parameter, ()))]
    recorded = ties.state.get(state_tensor.entry.name)
    if recorded is not None:
        keys += [key for key, each in own.items() if each.entry.name == recorded]
    return next((others[key] for key in keys if key in others), None)


def _are_equal(a: BytesEntry, b: BytesEntry, files: tuple[SourceFiles, SourceFiles]) -> bool:
    """Return True if two objects have the same bytes; False if a file ends before its object does."""
    if a.nbytes != b.nbytes:
        return False
    for offset in range(0, a.nbytes, _READ_BYTES):
        blocks = []
        for entry, source_files in zip((a, b), files, strict=True):
            block = bytearray(min(_READ_BYTES, entry.nbytes - offset))
            if source_files.read_into(entry.file, entry.offset + offset, [memoryview(block)]) < len(block):
                return False
            blocks.append(block)
        if blocks[0] != blocks[1]:
            return False
    return True
