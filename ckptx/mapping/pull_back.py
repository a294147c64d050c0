"""Shards of tensors on disk, derived from the shards of the model tensors that are made of them.

The conversion is run once on tensors without bytes; the resulting chunks show which rectangle of a model tensor is
which rectangle of a tensor on disk.

    model [E, 2I, H], rows of gate and of up split in two      disk, any expert
    rank_in_stage 0: [0:E, 0:I/2, :] and [0:E, I:3I/2, :]        ->     gate: [0:I/2, :]    up: [0:I/2, :]
    rank_in_stage 1: [0:E, I/2:I, :] and [0:E, 3I/2:2I, :]       ->     gate: [I/2:I, :]    up: [I/2:I, :]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, product
from math import prod
from typing import NamedTuple

from ckptx.catalog.dtype import BY_NAME
from ckptx.catalog.entry import Block, Chunk, TensorEntry
from ckptx.catalog.object_ids import ObjectIds
from ckptx.catalog.region import Region, Shape, whole
from ckptx.errors import UnsupportedError
from ckptx.mapping.destinations import Destination, named
from ckptx.mapping.ops import Conversion, convert
from ckptx.mapping.rules import NameRules, check_complete, gather

BlocksOf = Callable[[str, Shape], tuple[Block, ...]]

_BYTE = BY_NAME["U8"]


class _SourceSpan(NamedTuple):
    """Part of a model tensor that lies in one disk tensor; `target` is the index of the model tensor."""

    target: int
    chunk: Chunk


class _Trace(NamedTuple):
    """Trace of one conversion for given shapes.

    Attributes:
        shapes: Shapes of the model tensors.
        names: Index of the pattern and position in its module list, for each model tensor.
        parts: (column, position) of a disk tensor -> positions of its elements in model tensors.
    """

    shapes: tuple[Shape, ...]
    names: tuple[tuple[int, int], ...]
    parts: dict[tuple[int, int], list[_SourceSpan]]


class PullBack:
    """Mapping from shards of the model to shards on disk, for the tensors of one checkpoint; results are cached."""

    def __init__(self, rules: NameRules, shapes: Mapping[str, Shape], cut: BlocksOf) -> None:
        """Look up the destinations of all names.

        Args:
            rules: Rules from disk names to model names.
            shapes: Shapes of all tensors on disk.
            cut: Function that returns the blocks of a model tensor from its name and shape.
        """
        self._rules, self._shapes, self._cut = rules, shapes, cut
        self._places = rules.places(shapes)
        self._runs = gather(self._places, rules.conversions)
        self._traces: dict[tuple[object, ...], _Trace | None] = {}
        self._trace_of: dict[tuple[int, tuple[int, ...]], _Trace | None] = {}
        self._cuts: dict[str, tuple[Block, ...]] = {}
        self._interned: dict[tuple[Block, ...], tuple[Block, ...]] = {}
        self._answers: dict[tuple[object, ...], tuple[Block, ...] | None] = {}
        self._ids = ObjectIds()

    def blocks(self, disk_name: str) -> tuple[Block, ...] | None:
        """Return the blocks of a disk tensor, each on the rank that holds its elements in the model.

        Returns:
            Blocks that tile the tensor, apart from replicas. None if no model tensor is made of it, if its elements do
            not form rectangles (rows permuted across shards), or if ckptx does not support its conversion.
        """
        place = self._places[disk_name]
        shape = self._shapes[disk_name]
        if place is None:
            return None
        if isinstance(place, str):
            return self._blocks_of(place, shape)
        if not prod(shape):
            return (Block(0, whole(shape)),)
        trace = self._trace(place)
        if trace is None:
            return None
        conversion = self._rules.conversions[place.conversion]
        cuts = [
            self._blocks_of(named(conversion.targets[column], place.fixed, at), shape)
            for (column, at), shape in zip(trace.names, trace.shapes, strict=True)
        ]
        key = (self._ids(trace), place.column, place.at, *map(self._ids, cuts))
        if key not in self._answers:
            pulled = _pull_back_blocks(shape, trace.parts.get((place.column, place.at), []), cuts)
            self._answers[key] = None if pulled is None else self._interned.setdefault(pulled, pulled)
        return self._answers[key]

    def _blocks_of(self, model_name: str, shape: Shape) -> tuple[Block, ...]:
        blocks = self._cuts.get(model_name)
        if blocks is None:
            blocks = self._cut(model_name, shape)
            blocks = self._cuts[model_name] = self._interned.setdefault(blocks, blocks)
        return blocks

    def _trace(self, place: Destination) -> _Trace | None:
        if place.run not in self._trace_of:
            self._trace_of[place.run] = self._traced(place, self._runs[place.run])
        return self._trace_of[place.run]

    def _traced(self, place: Destination, members: list[dict[int, str]]) -> _Trace | None:
        """Return the trace of a run, shared with runs of the same shapes, such as other layers."""
        conversion = self._rules.conversions[place.conversion]
        check_complete(conversion, place.fixed, members)
        columns = [[self._shapes[column[at]] for at in sorted(column)] for column in members]
        wanted = [self._rules.shape_of(named(target, place.fixed, 0)) for target in conversion.targets]
        key = (place.conversion, *(tuple(shapes) for shapes in columns), tuple(wanted))
        if key not in self._traces:
            self._traces[key] = _traced(conversion, columns, wanted)
        return self._traces[key]


def _traced(conversion: Conversion, columns: list[list[Shape]], wanted: Sequence[Shape | None]) -> _Trace | None:
    """Run a conversion on byte tensors whose "file" identifies them; return None if it is unsupported."""
    entries = [
        [
            TensorEntry(f"{i}/{at}", _BYTE, shape, (Chunk(whole(shape), f"{i}/{at}", 0, prod(shape)),))
            for at, shape in enumerate(column)
        ]
        for i, column in enumerate(columns)
    ]
    try:
        results = convert(conversion, entries, wanted)
    except UnsupportedError:
        return None
    shapes: list[Shape] = []
    names: list[tuple[int, int]] = []
    parts: dict[tuple[int, int], list[_SourceSpan]] = {}
    for column, made in enumerate(results):
        for at, entry in enumerate(made):
            for chunk in entry.chunks:
                i, _, position = chunk.file.partition("/")
                parts.setdefault((int(i), int(position)), []).append(_SourceSpan(len(shapes), chunk))
            shapes.append(entry.shape)
            names.append((column, at))
    return _Trace(tuple(shapes), tuple(names), parts)


def _pull_back_blocks(
    shape: Shape, parts: Iterable[_SourceSpan], cuts: list[tuple[Block, ...]]
) -> tuple[Block, ...] | None:
    """Return the blocks of one disk tensor; None if it has more blocks per rank than the model tensors."""
    by_holder: dict[tuple[int, bool], list[Region]] = {}
    allowed: dict[tuple[int, bool], int] = {}
    for target in {part.target for part in parts}:
        for block in cuts[target]:
            holder = block.rank_in_stage, block.replica
            allowed[holder] = allowed.get(holder, 0) + 1
    for target, chunk in parts:
        for block in cuts[target]:
            share = chunk.region.intersect(block.region)
            if share is not None:
                by_holder.setdefault((block.rank_in_stage, block.replica), []).extend(_rectangles(shape, chunk, share))
    blocks = []
    for holder in sorted(by_holder, key=lambda each: (each[0], each[1])):
        regions = _merge(by_holder[holder])
        if len(regions) > allowed[holder]:
            return None
        blocks += [Block(holder[0], region, holder[1]) for region in regions]
    return tuple(blocks)


def _rectangles(shape: Shape, chunk: Chunk, share: Region) -> Iterator[Region]:
    """Yield `share` of a chunk as rectangles of the disk tensor, which is row-major and begins at byte 0 of its file.

    A dim that steps over rows gives one rectangle for each index.
    """
    pitches = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    lengths = chunk.region.sizes
    strides = chunk.strides or tuple(prod(lengths[dim + 1 :]) for dim in range(len(lengths)))
    starts = [a - b for a, b in zip(share.offsets, chunk.region.offsets, strict=True)]
    first = chunk.offset + sum(a * b for a, b in zip(starts, strides, strict=True))
    sizes = [1] * len(shape)
    steps: list[range] = []
    for length, stride in zip(share.sizes, strides, strict=True):
        if length == 1:
            continue
        dim = next((dim for dim, pitch in enumerate(pitches) if pitch == stride and shape[dim] > 1), None)
        if dim is None:
            steps.append(range(0, length * stride, stride))
        else:
            sizes[dim] = length
    for jumps in product(*steps):
        position, offsets = first + sum(jumps), []
        for pitch in pitches:
            at, position = divmod(position, pitch)
            offsets.append(at)
        yield Region(tuple(offsets), tuple(sizes))


def _merge(regions: list[Region]) -> list[Region]:
    """Merge adjacent rectangles that differ along one dim."""
    dims = len(regions[0].sizes)
    before = 0
    while before != len(regions) and len(regions) > 1:
        before = len(regions)
        for dim in range(dims):
            regions = _merge_along(regions, dim)
    return sorted(regions)


def _merge_along(regions: list[Region], dim: int) -> list[Region]:
    def others(region: Region) -> tuple[Shape, Shape]:
        offsets, sizes = region
        return (*offsets[:dim], *offsets[dim + 1 :]), (*sizes[:dim], *sizes[dim + 1 :])

    merged: list[Region] = []
    regions = sorted(regions, key=lambda region: (others(region), region.offsets[dim]))
    for _, row in groupby(regions, others):
        last: Region | None = None
        for region in row:
            if last is not None and last.offsets[dim] + last.sizes[dim] == region.offsets[dim]:
                sizes = last.sizes
                last = last._replace(sizes=(*sizes[:dim], sizes[dim] + region.sizes[dim], *sizes[dim + 1 :]))
                continue
            if last is not None:
                merged.append(last)
            last = region
        if last is not None:
            merged.append(last)
    return merged
