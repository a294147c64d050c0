"""Memory over a step, by kind: the peak, and the tensors that cause it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ckptx.runtime.memory.storage_ledger import (
    ACTIVATIONS,
    BACKWARD,
    FORWARD,
    KINDS,
    TEMPORARIES,
    Event,
    StorageLifetime,
)

LARGEST = 5  # number of tensors that are reported
Bytes = tuple[int, ...]  # bytes of each of KINDS


@dataclass(frozen=True, slots=True)
class Unit:
    """A layer, or everything outside layers.

    Attributes:
        stack: Path of the list that contains the layer; "" outside layers.
        index: Number of the layer in its list.
    """

    stack: str = ""
    index: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive operations of one unit, in one part of a step.

    Attributes:
        part: forward, backward, clipping or optimizer.
        turn: Number of the forward or backward pass.
        unit: Unit that runs.
        most: Bytes of each kind at the largest sum.
        last: Bytes of each kind at the end.
        peak: Storage whose allocation reached the largest sum; None if the sum never rose.
        largest: Largest storages alive at that time, in descending order.
    """

    part: str
    turn: int
    unit: Unit
    most: Bytes
    last: Bytes
    peak: StorageLifetime | None
    largest: tuple[StorageLifetime, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """Memory of a step.

    Attributes:
        segments: Segments in order.
        worst: Segment with the peak.
        between: Bytes of each kind between this step and the next.
    """

    segments: tuple[Segment, ...]
    worst: Segment
    between: Bytes


def kind_of(life: StorageLifetime) -> str:
    """Return the kind of a storage, once it is freed or the step has ended.

    A storage allocated in a forward pass that outlives it is an activation, and so is one that a layer recomputes for
    its backward pass.
    """
    if life.label is not None:
        return life.label
    born, died = life.born, life.died
    if born.part == FORWARD:
        is_over = died is not None and died.part == FORWARD and died.turn == born.turn
        return TEMPORARIES if is_over else ACTIVATIONS
    if born.part == BACKWARD and born.is_again:
        return TEMPORARIES if died is not None and died.is_again else ACTIVATIONS
    return TEMPORARIES


def units_of(layers: Iterable[str]) -> dict[str, Unit]:
    """Return the unit of each layer, by its name."""
    found = {}
    for name in layers:
        stack, _, index = name.rpartition(".")
        found[name] = Unit(stack, int(index)) if index.isdecimal() else Unit(name)
    return found


def timeline_of(events: Sequence[Event], begin: int, layers: Iterable[str]) -> MemoryTimeline:
    """Return the memory of a step.

    Args:
        events: Events of a ledger.
        begin: Index of the first event of the step; earlier allocations may still be alive.
        layers: Names of all layers.
    """
    units = units_of(layers)
    index = {kind: number for number, kind in enumerate(KINDS)}
    now = [0] * len(KINDS)
    found: list[Segment] = []
    known: dict[str, Unit] = {}

    def unit_of(module: str) -> Unit:
        if module not in known:
            parts = module.split(".")
            names = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
            known[module] = next((units[name] for name in names if name in units), Unit())
        return known[module]

    current: tuple[str, int, Unit] | None = None
    most: Bytes = ()
    peak: StorageLifetime | None = None
    for number, (life, is_birth) in enumerate(events):
        kind = index[kind_of(life)]
        if number >= begin:
            moment = life.born if is_birth else life.died
            assert moment is not None
            key = moment.part, moment.turn, unit_of(moment.module)
            if key != current:
                if current is not None:
                    found.append(Segment(*current, most, tuple(now), peak))
                current, most, peak = key, tuple(now), None
        now[kind] += life.nbytes if is_birth else -life.nbytes
        if number >= begin and is_birth and sum(now) > sum(most):
            most, peak = tuple(now), life
    if current is not None:
        found.append(Segment(*current, most, tuple(now), peak))
    return timeline_from(list(_with_largest(found, events)), tuple(now))


def timeline_from(segments: Sequence[Segment], between: Bytes) -> MemoryTimeline:
    """Return the timeline of some segments."""
    return MemoryTimeline(tuple(segments), max(segments, key=lambda each: sum(each.most)), between)


def _with_largest(segments: Iterable[Segment], events: Iterable[Event]) -> Iterator[Segment]:
    """Add the largest storages that are alive at the peak of each segment."""
    alive: dict[int, StorageLifetime] = {}
    changes = iter(events)
    for segment in segments:
        if segment.peak is None:
            yield segment
            continue
        for life, is_birth in changes:
            if is_birth:
                alive[id(life)] = life
            else:
                del alive[id(life)]
            if is_birth and life is segment.peak:
                break
        largest = heapq.nlargest(LARGEST, alive.values(), key=lambda each: each.nbytes)
        yield replace(segment, largest=tuple(largest))
