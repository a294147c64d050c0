"""Positions of the shards of one parameter in the whole tensor, from ranges along one dim.

    whole     [ q of rank 0 | q of rank 1 | k of rank 0 | k of rank 1 ]
    rank 0    [ q | k ]      ranges 0:q and q:q+k of the shard, at 0 and 2q of the whole tensor
    rank 1    [ q | k ]

Several ranks can have the same range of the whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby
from math import prod
from typing import Any, NamedTuple

from ckptx.catalog.region import Region, Shape, full_region
from ckptx.untrusted.limits import find_shape_fault

_MAX_PIECES = 1 << 16  # of one parameter

Shapes = Sequence[Shape]  # of one parameter, one for each tensor parallel rank


class ShardFault(ValueError):
    """Shards do not have the shapes that their ranges require.

    The message is a predicate that follows "the shapes ... of the tensor parallel ranks", such as "are not equal".
    """


class Piece(NamedTuple):
    """A region of a shard.

    Attributes:
        rank: Tensor parallel rank of the shard.
        local: The region in the shard.
        offsets: Position of the region in the whole tensor.
    """

    rank: int
    local: Region
    offsets: Shape


class Join(NamedTuple):
    """Positions of the shards of all tensor parallel ranks in one parameter.

    Attributes:
        shape: Shape of the whole parameter.
        groups: For each region of the whole parameter, the pieces that contain this region, by ascending rank. The
            regions tile the parameter.
        is_averaged: True if every rank has a copy, and DeepSpeed averages the copies.
        padding: Number of rows (along dim 0) of padding in the shards that were left out of `shape`.
    """

    shape: Shape
    groups: tuple[tuple[Piece, ...], ...]
    is_averaged: bool = False
    padding: int = 0

    def without_rows_after(self, rows: int) -> Join:
        """Return the join of the first rows alone; the rest is padding."""
        if self.shape[0] <= rows:
            return self
        groups: list[tuple[Piece, ...]] = []
        for group in self.groups:
            kept = min(group[0].local.sizes[0], rows - group[0].offsets[0])
            if kept > 0:
                regions = [Region(piece.local.offsets, (kept, *piece.local.sizes[1:])) for piece in group]
                groups.append(tuple(piece._replace(local=region) for piece, region in zip(group, regions, strict=True)))
        return self._replace(shape=(rows, *self.shape[1:]), groups=tuple(groups), padding=self.shape[0] - rows)


class ShardRange(NamedTuple):
    """A range along one dim.

    Attributes:
        rank: Tensor parallel rank of the shard.
        local: Begin in the shard.
        whole: Begin in the whole tensor.
        size: Number of elements along the dim.
    """

    rank: int
    local: int
    whole: int
    size: int


class MergedDim(NamedTuple):
    """A dim of a tensor that merges several dims of the shape in its rule, one of which is sharded.

    Attributes:
        dim: Index of the dim in the tensor. Its size is outer * size of the sharded dim * inner.
        outer: Product of the sizes of the merged dims before the sharded one.
        inner: Product of the sizes of those after it.
    """

    dim: int
    outer: int = 1
    inner: int = 1


def join_replicas(shapes: Shapes, *, is_averaged: bool = False) -> Join:
    """Return the join of a tensor that every rank has.

    Raises:
        ShardFault: The shapes differ.
    """
    if any(shape != shapes[0] for shape in shapes):
        raise ShardFault("are not equal, as required for a tensor that every rank has")
    region = full_region(shapes[0])
    return Join(shapes[0], (tuple(Piece(rank, region, region.offsets) for rank in range(len(shapes))),), is_averaged)


def concatenated_ranges(widths: Sequence[Sequence[int]]) -> tuple[list[ShardRange], int]:
    """Return the ranges of concatenated parts, each of which is sharded separately, and the size of the whole dim.

    Args:
        widths: For each part, its size on each rank.
    """
    ranges: list[ShardRange] = []
    local_ends = [0] * len(widths[0])
    whole_end = 0
    for part in widths:
        for rank, size in enumerate(part):
            if size:
                ranges.append(ShardRange(rank, local_ends[rank], whole_end, size))
            local_ends[rank] += size
            whole_end += size
    return ranges, whole_end


def join_ranges(shapes: Shapes, merged: MergedDim, size: int, ranges: Sequence[ShardRange]) -> Join:
    """Return the join of ranges along one dim, which must tile every shard and the whole tensor.

    Args:
        shapes: Shape of the shard of each rank.
        merged: The sharded dim, alone or merged with others.
        size: Size of the sharded dim in the whole tensor, without dims that are merged with it.
        ranges: Ranges along the sharded dim.

    Raises:
        ShardFault: The shapes differ in other dims, the ranges do not tile, or the result has an invalid shape or too
            many pieces.
    """
    dim, outer, inner = merged
    others = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    if len({len(shape) for shape in shapes}) > 1 or len(others) > 1:
        raise ShardFault(f"cannot be concatenated along dim {dim}")
    by_rank: list[list[tuple[int, int]]] = [[] for _ in shapes]
    for each in ranges:
        by_rank[each.rank].append((each.local, each.size))
    in_order = sorted(ranges, key=_range_and_rank)
    by_range = [(*key, list(found)) for key, found in groupby(in_order, _whole_range)]
    local_sizes = [shape[dim] // (outer * inner) for shape in shapes]
    if not _tile((each[:2] for each in by_range), size) or not all(map(_tile, by_rank, local_sizes)):
        raise ShardFault(f"do not tile the whole tensor along dim {dim}")
    shape = (*shapes[0][:dim], outer * size * inner, *shapes[0][dim + 1 :])
    fault = find_shape_fault(shape)
    if fault is not None:
        raise ShardFault(f"make up a shape of {fault}")
    if outer * len(in_order) > _MAX_PIECES:
        raise ShardFault(f"make up a tensor of more than {_MAX_PIECES:,} pieces")
    groups: list[tuple[Piece, ...]] = []
    for index in range(outer if in_order else 0):
        for begin, length, found in by_range:
            offsets = _at_dim((0,) * len(shape), dim, (index * size + begin) * inner)
            pieces: list[Piece] = []
            for each in found:
                local_shape = shapes[each.rank]
                first = (index * local_sizes[each.rank] + each.local) * inner
                local = Region(_at_dim((0,) * len(shape), dim, first), _at_dim(local_shape, dim, length * inner))
                pieces.append(Piece(each.rank, local, offsets))
            groups.append(tuple(pieces))
    return Join(shape, tuple(groups))


def merge_dims(whole: tuple[Any, ...], dim: int, shapes: Shapes) -> MergedDim | None:
    """Return the dim of a tensor that contains a dim of its rule; None if the shapes have no such form.

    Args:
        whole: Shape of the rule; -1 stands for any size, also in several dims that are not merged.
        dim: Sharded dim of this shape.
        shapes: Shapes of the shards, with as many or fewer dims, of which the first is the product of several.

    Example:
        A rule of shape (4, 6, 16) that shards dim 1 is about shards of shape (4 * 3, 16): dim 0, outer 4 and inner 1.
    """
    ndim = len(shapes[0])
    merged_count = len(whole) - ndim + 1  # number of the first dims of the rule that are dim 0 of the tensor
    if not ndim or merged_count < 1 or any(len(shape) != ndim for shape in shapes):
        return None
    sharded_dim = max(dim - merged_count + 1, 0)  # of the tensor
    required = [*enumerate(whole[merged_count:], 1)]  # (dim of the tensor, its size)
    before, after = whole[: min(dim, merged_count)], whole[dim + 1 : merged_count]
    if any(type(size) is not int or size < 1 for size in (*before, *after)):
        if merged_count > 1 and not sharded_dim:
            return None
    elif sharded_dim:
        required.append((0, prod(before)))
    if any(shape[at] != size for shape in shapes for at, size in required if size != -1 and at != sharded_dim):
        return None
    return MergedDim(sharded_dim) if sharded_dim else MergedDim(0, prod(before), prod(after))


def _at_dim(values: Shape, dim: int, value: int) -> Shape:
    """Return the values with `value` at index `dim`."""
    return (*values[:dim], value, *values[dim + 1 :])


def _whole_range(each: ShardRange) -> tuple[int, int]:
    return each.whole, each.size


def _range_and_rank(each: ShardRange) -> tuple[int, int, int]:
    return each.whole, each.size, each.rank


def _tile(ranges: Iterable[tuple[int, int]], size: int) -> bool:
    """Return True if ranges, given as begin and size, cover 0 to `size` once."""
    in_order = sorted(ranges)
    ends = [0, *accumulate(length for _, length in in_order)]
    return [begin for begin, _ in in_order] == ends[:-1] and ends[-1] == size
