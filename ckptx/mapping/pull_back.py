"""Shards of tensors on disk, derived from the shards of the model tensors into which they are converted.

The conversion is applied once to tensors without bytes; the resulting chunks show which region of a model tensor is
which region of a tensor on disk.

    model [E, 2I, H], rows of gate and of up split in two      disk, any expert
    rank 0: [0:E, 0:I/2, :] and [0:E, I:3I/2, :]        ->     gate: [0:I/2, :]    up: [0:I/2, :]
    rank 1: [0:E, I/2:I, :] and [0:E, 3I/2:2I, :]       ->     gate: [I/2:I, :]    up: [I/2:I, :]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, product
from math import prod
from typing import NamedTuple

from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import Block, Chunk, TensorEntry
from ckptx.catalog.object_ids import ObjectIds
from ckptx.catalog.region import Region, Shape, full_region
from ckptx.errors import UnsupportedError
from ckptx.mapping.destinations import Destination, name_in_run
from ckptx.mapping.ops import Conversion, convert
from ckptx.mapping.rules import NameRules, check_complete, group_by_run

BlockFunction = Callable[[str, Shape], tuple[Block, ...]]  # name and shape of a model tensor -> its blocks

_BYTE = DTYPES_BY_NAME["U8"]  # dtype of traced tensors, with which byte offsets are element offsets


class _SourceSpan(NamedTuple):
    """Part of a model tensor that is stored in one disk tensor.

    Attributes:
        target: Index of the model tensor in `_Trace.shapes`.
        chunk: Region of the model tensor, and its position in the disk tensor as an offset and strides in elements.
    """

    target: int
    chunk: Chunk


class _Trace(NamedTuple):
    """Record of which region of each model tensor comes from which disk tensor, for one conversion and given shapes.

    Attributes:
        shapes: Shapes of the model tensors.
        targets: (index of the target pattern, index in its module list) of each model tensor.
        spans: (index of the source pattern, index in its module list) of a disk tensor -> positions of its elements in
            model tensors.
    """

    shapes: tuple[Shape, ...]
    targets: tuple[tuple[int, int], ...]
    spans: dict[tuple[int, int], list[_SourceSpan]]


class PullBack:
    """Mapping from shards of model tensors back to shards of the disk tensors that they are made of.

    It holds for the tensors of one checkpoint; results are cached.
    """

    def __init__(self, rules: NameRules, shapes: Mapping[str, Shape], blocks_of: BlockFunction) -> None:
        """Look up the destinations of all names.

        Args:
            rules: Rules from disk names to model names.
            shapes: Shapes of all tensors on disk.
            blocks_of: Function that returns the blocks of a model tensor from its name and shape.
        """
        self._rules, self._shapes, self._blocks_of = rules, shapes, blocks_of
        self._destinations = rules.destinations(shapes)
        self._runs = group_by_run(self._destinations, rules.conversions)
        self._traces: dict[tuple[object, ...], _Trace | None] = {}
        self._trace_by_run: dict[tuple[int, tuple[int, ...]], _Trace | None] = {}
        self._blocks_by_name: dict[str, tuple[Block, ...]] = {}
        self._interned: dict[tuple[Block, ...], tuple[Block, ...]] = {}
        self._disk_blocks: dict[tuple[object, ...], tuple[Block, ...] | None] = {}
        self._ids = ObjectIds()

    def blocks(self, disk_name: str) -> tuple[Block, ...] | None:
        """Return the blocks of a disk tensor, each on the rank that holds its elements in the model.

        Returns:
            Blocks that tile the tensor, apart from replicas. None if no model tensor is made of it, if its elements do
            not form rectangular regions (rows permuted across shards), or if ckptx does not support its conversion.

        Raises:
            InputError: Tensors that are converted together with it are missing or do not match.
        """
        destination = self._destinations[disk_name]
        shape = self._shapes[disk_name]
        if destination is None:
            return None
        if isinstance(destination, str):
            return self._model_blocks(destination, shape)
        if not prod(shape):
            return (Block(0, full_region(shape)),)
        trace = self._find_trace(destination)
        if trace is None:
            return None
        conversion = self._rules.conversions[destination.conversion]
        model_blocks = [
            self._model_blocks(
                name_in_run(conversion.targets[pattern_index], destination.shared_indices, list_index), shape
            )
            for (pattern_index, list_index), shape in zip(trace.targets, trace.shapes, strict=True)
        ]
        key = (self._ids(trace), destination.pattern_index, destination.list_index, *map(self._ids, model_blocks))
        if key not in self._disk_blocks:
            pulled = _pull_back_blocks(
                shape, trace.spans.get((destination.pattern_index, destination.list_index), []), model_blocks
            )
            self._disk_blocks[key] = None if pulled is None else self._interned.setdefault(pulled, pulled)
        return self._disk_blocks[key]

    def _model_blocks(self, model_name: str, shape: Shape) -> tuple[Block, ...]:
        blocks = self._blocks_by_name.get(model_name)
        if blocks is None:
            blocks = self._blocks_of(model_name, shape)
            blocks = self._blocks_by_name[model_name] = self._interned.setdefault(blocks, blocks)
        return blocks

    def _find_trace(self, destination: Destination) -> _Trace | None:
        if destination.run_key not in self._trace_by_run:
            self._trace_by_run[destination.run_key] = self._cached_trace(destination, self._runs[destination.run_key])
        return self._trace_by_run[destination.run_key]

    def _cached_trace(self, destination: Destination, members: list[dict[int, str]]) -> _Trace | None:
        """Return the trace of one run of a conversion, see `RunKey`.

        Runs with the same shapes, such as those of other layers, share it.
        """
        conversion = self._rules.conversions[destination.conversion]
        check_complete(conversion, destination.shared_indices, members)
        columns = [[self._shapes[column[list_index]] for list_index in sorted(column)] for column in members]
        expected_shapes = [
            self._rules.shape_of(name_in_run(target, destination.shared_indices, 0)) for target in conversion.targets
        ]
        key = (destination.conversion, *(tuple(shapes) for shapes in columns), tuple(expected_shapes))
        if key not in self._traces:
            self._traces[key] = _trace_conversion(conversion, columns, expected_shapes)
        return self._traces[key]


def _trace_conversion(
    conversion: Conversion, columns: list[list[Shape]], expected_shapes: Sequence[Shape | None]
) -> _Trace | None:
    """Apply a conversion to byte tensors whose "file" identifies them; return None if it is unsupported."""
    entries = [
        [
            TensorEntry(
                f"{column_index}/{list_index}",
                _BYTE,
                shape,
                (Chunk(full_region(shape), f"{column_index}/{list_index}", 0, prod(shape)),),
            )
            for list_index, shape in enumerate(column)
        ]
        for column_index, column in enumerate(columns)
    ]
    try:
        results = convert(conversion, entries, expected_shapes)
    except UnsupportedError:
        return None
    shapes: list[Shape] = []
    targets: list[tuple[int, int]] = []
    spans: dict[tuple[int, int], list[_SourceSpan]] = {}
    for pattern_index, entries_of_target in enumerate(results):
        for list_index, entry in enumerate(entries_of_target):
            for chunk in entry.chunks:
                column_index, _, position = chunk.file.partition("/")
                spans.setdefault((int(column_index), int(position)), []).append(_SourceSpan(len(shapes), chunk))
            shapes.append(entry.shape)
            targets.append((pattern_index, list_index))
    return _Trace(tuple(shapes), tuple(targets), spans)


def _pull_back_blocks(
    shape: Shape, spans: Iterable[_SourceSpan], model_blocks: list[tuple[Block, ...]]
) -> tuple[Block, ...] | None:
    """Return the blocks of one disk tensor; None if it has more blocks per rank than the model tensors."""
    regions_by_rank: dict[tuple[int, bool], list[Region]] = {}
    max_blocks: dict[tuple[int, bool], int] = {}
    for target in {span.target for span in spans}:
        for block in model_blocks[target]:
            rank_key = block.rank_in_stage, block.is_replica
            max_blocks[rank_key] = max_blocks.get(rank_key, 0) + 1
    for target, chunk in spans:
        for block in model_blocks[target]:
            overlap = chunk.region.intersect(block.region)
            if overlap is not None:
                regions_by_rank.setdefault((block.rank_in_stage, block.is_replica), []).extend(
                    _disk_regions(shape, chunk, overlap)
                )
    blocks = []
    for rank_key in sorted(regions_by_rank, key=lambda each: (each[0], each[1])):
        regions = _merge_adjacent(regions_by_rank[rank_key])
        if len(regions) > max_blocks[rank_key]:
            return None
        blocks += [Block(rank_key[0], region, rank_key[1]) for region in regions]
    return tuple(blocks)


def _disk_regions(shape: Shape, chunk: Chunk, part: Region) -> Iterator[Region]:
    """Yield `part` of a chunk as regions of the disk tensor, which is row-major and begins at byte 0 of its file.

    A dim of the chunk whose stride is not that of a dim of the disk tensor is split into one region for each index.
    """
    disk_strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    lengths = chunk.region.sizes
    strides = chunk.strides or tuple(prod(lengths[dim + 1 :]) for dim in range(len(lengths)))
    starts = [a - b for a, b in zip(part.offsets, chunk.region.offsets, strict=True)]
    first = chunk.offset + sum(a * b for a, b in zip(starts, strides, strict=True))
    sizes = [1] * len(shape)
    steps: list[range] = []
    for length, stride in zip(part.sizes, strides, strict=True):
        if length == 1:
            continue
        dim = next(
            (dim for dim, disk_stride in enumerate(disk_strides) if disk_stride == stride and shape[dim] > 1), None
        )
        if dim is None:
            steps.append(range(0, length * stride, stride))
        else:
            sizes[dim] = length
    for offsets_of_steps in product(*steps):
        position, offsets = first + sum(offsets_of_steps), []
        for disk_stride in disk_strides:
            index, position = divmod(position, disk_stride)
            offsets.append(index)
        yield Region(tuple(offsets), tuple(sizes))


def _merge_adjacent(regions: list[Region]) -> list[Region]:
    """Merge regions that are adjacent along one dim and equal in the others, until no two can be merged; sort them."""
    dims = len(regions[0].sizes)
    previous_count = 0
    while previous_count != len(regions) and len(regions) > 1:
        previous_count = len(regions)
        for dim in range(dims):
            regions = _merge_along(regions, dim)
    return sorted(regions)


def _merge_along(regions: list[Region], dim: int) -> list[Region]:
    """Merge regions that are adjacent along `dim` and equal in the other dims."""

    def others(region: Region) -> tuple[Shape, Shape]:
        offsets, sizes = region
        return (*offsets[:dim], *offsets[dim + 1 :]), (*sizes[:dim], *sizes[dim + 1 :])

    merged: list[Region] = []
    regions = sorted(regions, key=lambda region: (others(region), region.offsets[dim]))
    for _, aligned in groupby(regions, others):
        last: Region | None = None
        for region in aligned:
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
