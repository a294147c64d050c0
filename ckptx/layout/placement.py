"""Where a tensor is cut, and the rectangles that the ranks of one pipeline stage get.

TP cuts first, along one dim; FSDP then cuts the rows of what a TP rank holds. Both cut as `torch.chunk` and DTensor
do: pieces of ceil(n / parts), then a shorter one, then none at all.

    10 rows, tp=2, dp_shard=2       rows    dp0   dp1
                                    tp0     0:3   3:5
                                    tp1     5:8   8:10

A fused tensor is cut group by group, so that a rank gets its part of each: one rectangle per rank and group.

    [gate|up] of 8 + 8 rows, tp=2   tp0     0:4   8:12
                                    tp1     4:8   12:16
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

from ckptx.catalog.entry import Block
from ckptx.catalog.region import Region, Shape, whole
from ckptx.errors import Defect
from ckptx.layout.parallel_dims import ParallelDims

Span = tuple[int, int]  # where it begins, how long it is

_UNKNOWN = "no known scale of its weight, replicated"


class Placement(NamedTuple):
    """How TP cuts a tensor.

    Attributes:
        dim: The dim it is cut along.
        groups: Widths along `dim` of what is fused there ([q|k|v], [gate|up]), each cut on its own; they add up to
            the dim. One group is DTensor's `Shard(dim)`.
        align: Width of a head. It never moves a cut, it tells whether the cut falls between heads.
    """

    dim: int
    groups: tuple[int, ...]
    align: int = 1


def ceil_chunks(n: int, parts: int) -> tuple[Span, ...]:
    """`parts` spans of 0..n, as `torch.chunk` cuts and DTensor shards; the last ones may be shorter or empty.

    Example:
        >>> ceil_chunks(5, 4)
        ((0, 2), (2, 2), (4, 1), (5, 0))
    """
    return _chunks(n, parts, 1)


def tp_rectangles(shape: Shape, placement: Placement | None, tp: int, pack: int = 1) -> tuple[tuple[Region, ...], ...]:
    """What each TP rank holds of a tensor.

    Args:
        shape: Of the whole tensor.
        placement: How it is cut; None when every rank holds all of it.
        tp: Number of TP ranks.
        pack: Elements that share a byte along the last dim and stay together; 2 for F4.

    Returns:
        By TP rank, its rectangles in the order of the groups; empty ones are left out. A rank's local tensor is their
        concatenation along the dim. A tensor whose groups do not divide into whole bytes is not cut.

    Raises:
        Defect: The placement is not one of this shape.
    """
    if placement is None or not _is_cut(shape, placement, pack):
        return ((whole(shape),),) * tp
    dim, groups, _ = placement
    unit = pack if dim == len(shape) - 1 else 1
    starts = accumulate(groups, initial=0)
    cut_groups = [
        [(start + a, n) for a, n in _chunks(width, tp, unit)] for start, width in zip(starts, groups, strict=False)
    ]
    return tuple(
        tuple(_narrow(whole(shape), dim, span) for span in (spans[index] for spans in cut_groups) if span[1])
        for index in range(tp)
    )


@lru_cache(maxsize=4096)  # layers and experts repeat a few shapes, and share their blocks
def cut(
    shape: Shape, placement: Placement | None, dims: ParallelDims, replicate: bool, pack: int = 1
) -> tuple[Block, ...]:
    """The blocks that the ranks of one pipeline stage hold of a tensor.

    Args:
        shape: Of the whole tensor.
        placement: How TP cuts it; None when it does not.
        dims: The mesh; of pp nothing is used.
        replicate: Give a tensor that TP does not cut to every TP rank, marked as replicas but for the first. Otherwise
            the first TP rank alone holds it.
        pack: Elements that share a byte along the last dim and stay together; 2 for F4.

    Returns:
        Blocks by `rank_in_stage`, then group. Those that are no replicas tile the tensor. A block without elements is
        left out, but a tensor without elements is one block of rank 0. FSDP never cuts a 0-d tensor: the first of its
        ranks holds it.

    Raises:
        Defect: The placement is not one of this shape.
    """
    if not prod(shape):
        return (Block(0, whole(shape)),)
    local_regions = tp_rectangles(shape, placement, dims.tp, pack)
    is_cut = placement is not None and _is_cut(shape, placement, pack)
    stacked = is_cut and placement is not None and placement.dim == 0  # the rows of the groups lie one after another
    unit = pack if len(shape) == 1 else 1
    return tuple(
        Block(dims.rank_in_stage(dp, tp), region, replica=not is_cut and tp > 0)
        for dp in range(dims.dp_shard)
        for tp in range(dims.tp if is_cut or replicate else 1)
        for region in _rows_of(local_regions[tp], stacked, dp, dims.dp_shard, unit)
    )


def is_aligned(shape: Shape, placement: Placement | None, tp: int) -> bool:
    """True when TP cuts between heads only, in every group."""
    if placement is None or not shape:
        return True
    return all(
        begin % placement.align == 0 for width in placement.groups for begin, size in ceil_chunks(width, tp) if size
    )


def scale_placement(
    weight_shape: Shape, weight_placement: Placement | None, shape: Shape, tp: int
) -> tuple[Placement | None, str]:
    """How TP cuts a scale, given how it cuts the weight.

    Args:
        weight_shape: Of the whole weight.
        weight_placement: How the weight is cut, None when it is not.
        shape: Of the whole scale.
        tp: Number of TP ranks.

    Returns:
        The placement, None to replicate, and a few words for the report.
    """
    if not shape:
        return None, "scale replicated: one value for the whole weight"
    if len(shape) != len(weight_shape):
        return None, _UNKNOWN
    blocks = [_block(n, size) for n, size in zip(weight_shape, shape, strict=True)]
    if None in blocks:
        return None, _UNKNOWN
    if weight_placement is None:
        return None, "scale replicated like its weight"
    dim, groups, _ = weight_placement
    block = blocks[dim]
    if shape[dim] == weight_shape[dim]:
        return weight_placement, "scale follows its weight"
    if block is None or shape[dim] == 1:
        return None, f"scale replicated: one value along dim {dim}"
    starts = list(accumulate(groups, initial=0))[:-1]
    if any(start % block for start in starts) or any(not _cuts_between_blocks(n, block, tp) for n in groups):
        return None, f"scale replicated: the weight is cut inside a block of {block}"
    return Placement(dim, tuple(-(-n // block) for n in groups)), f"scale follows its weight in blocks of {block}"


def _is_cut(shape: Shape, placement: Placement, pack: int) -> bool:
    """False when a group along the last dim does not divide into packs."""
    dim, groups, _ = placement
    if not 0 <= dim < len(shape) or sum(groups) != shape[dim]:
        raise Defect(
            f"placement: dim {dim} with groups {list(groups)}, needed groups that add up to that dim of "
            f"{list(shape)}; please report this"
        )
    return dim != len(shape) - 1 or all(width % pack == 0 for width in groups)


def _rows_of(rectangles: tuple[Region, ...], stacked: bool, dp: int, dp_shard: int, unit: int) -> list[Region]:
    """The part of a TP rank's local tensor that one of its FSDP ranks holds, as rectangles of the whole tensor."""
    if dp_shard == 1 or not rectangles:
        return list(rectangles)
    if not rectangles[0].sizes:
        return list(rectangles) if dp == 0 else []
    heights = [region.sizes[0] for region in rectangles]
    rows = sum(heights) if stacked else heights[0]
    begin, size = _chunks(rows, dp_shard, unit)[dp]
    kept = []
    first = 0  # local row where the rectangle begins
    for region, height in zip(rectangles, heights, strict=True):
        low, high = max(begin, first), min(begin + size, first + height)
        if low < high:
            kept.append(_narrow(region, 0, (region.offsets[0] + low - first, high - low)))
        if stacked:
            first += height
    return kept


@lru_cache(maxsize=4096)
def _chunks(n: int, parts: int, unit: int) -> tuple[Span, ...]:
    """`ceil_chunks` in whole units; all of it is the first part's when it does not divide into units."""
    if n % unit:
        return ((0, n), *((n, 0),) * (parts - 1))
    step = -(-(n // unit) // parts) * unit
    edges = [min(i * step, n) for i in range(parts + 1)]
    return tuple((a, b - a) for a, b in pairwise(edges))


def _narrow(region: Region, dim: int, span: Span) -> Region:
    """The rectangle with its extent along one dim replaced."""
    offsets, sizes = region
    return Region((*offsets[:dim], span[0], *offsets[dim + 1 :]), (*sizes[:dim], span[1], *sizes[dim + 1 :]))


def _block(n: int, size: int) -> int | None:
    """Elements of the weight for each of the scale's, along one dim; None when no number explains the sizes.

    `size` is ceil(n / block) for several blocks. At most one of them is a power of two, and that is the block in every
    published format; failing that the blocks must divide the dim.
    """
    if size == n:
        return 1
    if size == 1:
        return n
    if not 1 < size < n:
        return None
    low, high = -(-n // size), (n - 1) // (size - 1)
    power = 1 << (high.bit_length() - 1)
    if low <= power <= high:
        return power
    return low if n % size == 0 else None


def _cuts_between_blocks(n: int, block: int, tp: int) -> bool:
    """True when cutting the blocks of a group gives each rank the blocks of the elements it has."""
    blocks = ceil_chunks(-(-n // block), tp)
    return all(min(i * block, n) == begin for (begin, _), (i, _) in zip(ceil_chunks(n, tp), blocks, strict=True))
