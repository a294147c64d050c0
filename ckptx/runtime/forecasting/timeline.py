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
    StorageEvent,
    StorageLifetime,
)

LARGEST_COUNT = 5  # number of tensors that are reported
BytesByKind = tuple[int, ...]  # bytes of each of KINDS


@dataclass(frozen=True, slots=True)
class LayerKey:
    """A layer, or everything outside layers.

    Attributes:
        stack: Path of the list that contains the layer; "" outside layers.
        index: Number of the layer in its list, from 0.
    """

    stack: str = ""
    index: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive operations of one layer, or outside layers, in one phase of a step.

    Attributes:
        phase: Name of the phase; see `StepPhase`.
        pass_index: Index of the pass; see `StepPhase`.
        layer: Layer that runs; `LayerKey()` outside layers.
        peak_by_kind: Bytes of each kind when their sum was largest.
        end_by_kind: Bytes of each kind at the end.
        peak_storage: Storage whose allocation reached the largest sum; None if the sum was largest at the start.
        largest_storages: Largest storages alive at that time, in descending order; empty if `peak_storage` is None.
    """

    phase: str
    pass_index: int
    layer: LayerKey
    peak_by_kind: BytesByKind
    end_by_kind: BytesByKind
    peak_storage: StorageLifetime | None
    largest_storages: tuple[StorageLifetime, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """Memory of a step.

    Attributes:
        segments: Segments in order.
        peak_segment: Segment with the peak.
        between_steps_by_kind: Bytes of each kind between this step and the next.
    """

    segments: tuple[Segment, ...]
    peak_segment: Segment
    between_steps_by_kind: BytesByKind


def classify_storage(lifetime: StorageLifetime) -> str:
    """Return the kind of a storage, once it is freed or the step has ended.

    A storage allocated in a forward pass that outlives it is an activation, and so is one that a layer recomputes for
    its backward pass.
    """
    if lifetime.label is not None:
        return lifetime.label
    alloc_phase, free_phase = lifetime.alloc_phase, lifetime.free_phase
    if alloc_phase.name == FORWARD:
        is_over = (
            free_phase is not None and free_phase.name == FORWARD and free_phase.pass_index == alloc_phase.pass_index
        )
        return TEMPORARIES if is_over else ACTIVATIONS
    if alloc_phase.name == BACKWARD and alloc_phase.is_recompute:
        return TEMPORARIES if free_phase is not None and free_phase.is_recompute else ACTIVATIONS
    return TEMPORARIES


def make_layer_keys(layers: Iterable[str]) -> dict[str, LayerKey]:
    """Return name of a layer -> its key; a layer whose name ends with no number is a stack of its own."""
    keys = {}
    for name in layers:
        stack, _, index = name.rpartition(".")
        keys[name] = LayerKey(stack, int(index)) if index.isdecimal() else LayerKey(name)
    return keys


def build_timeline(events: Sequence[StorageEvent], begin: int, layers: Iterable[str]) -> MemoryTimeline:
    """Return the memory of a step.

    Args:
        events: Events of a ledger from its beginning to the end of the step.
        begin: Index of the first event of the step; earlier allocations may still be alive.
        layers: Names of all layers on this rank.
    """
    layer_keys = make_layer_keys(layers)
    index_of_kind = {kind: number for number, kind in enumerate(KINDS)}
    current_bytes = [0] * len(KINDS)
    segments: list[Segment] = []
    keys_by_module: dict[str, LayerKey] = {}

    def key_of_module(module: str) -> LayerKey:
        if module not in keys_by_module:
            parts = module.split(".")
            names = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
            keys_by_module[module] = next((layer_keys[name] for name in names if name in layer_keys), LayerKey())
        return keys_by_module[module]

    current_key: tuple[str, int, LayerKey] | None = None
    peak_by_kind: BytesByKind = ()
    peak_storage: StorageLifetime | None = None
    for number, (lifetime, is_alloc) in enumerate(events):
        kind = index_of_kind[classify_storage(lifetime)]
        if number >= begin:
            phase = lifetime.alloc_phase if is_alloc else lifetime.free_phase
            assert phase is not None
            key = phase.name, phase.pass_index, key_of_module(phase.module)
            if key != current_key:
                if current_key is not None:
                    segments.append(Segment(*current_key, peak_by_kind, tuple(current_bytes), peak_storage))
                current_key, peak_by_kind, peak_storage = key, tuple(current_bytes), None
        current_bytes[kind] += lifetime.nbytes if is_alloc else -lifetime.nbytes
        if number >= begin and is_alloc and sum(current_bytes) > sum(peak_by_kind):
            peak_by_kind, peak_storage = tuple(current_bytes), lifetime
    if current_key is not None:
        segments.append(Segment(*current_key, peak_by_kind, tuple(current_bytes), peak_storage))
    return make_timeline(list(_with_largest_storages(segments, events)), tuple(current_bytes))


def make_timeline(segments: Sequence[Segment], between_steps_by_kind: BytesByKind) -> MemoryTimeline:
    """Return the timeline of a step with these segments, at least one."""
    return MemoryTimeline(
        tuple(segments), max(segments, key=lambda each: sum(each.peak_by_kind)), between_steps_by_kind
    )


def _with_largest_storages(segments: Iterable[Segment], events: Iterable[StorageEvent]) -> Iterator[Segment]:
    """Add the largest storages that are alive at the peak of each segment."""
    live_storages: dict[int, StorageLifetime] = {}
    changes = iter(events)
    for segment in segments:
        if segment.peak_storage is None:
            yield segment
            continue
        for lifetime, is_alloc in changes:
            if is_alloc:
                live_storages[id(lifetime)] = lifetime
            else:
                del live_storages[id(lifetime)]
            if is_alloc and lifetime is segment.peak_storage:
                break
        largest = heapq.nlargest(LARGEST_COUNT, live_storages.values(), key=lambda each: each.nbytes)
        yield replace(segment, largest_storages=tuple(largest))
