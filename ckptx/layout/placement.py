"""Sharding of a tensor by TP, and the regions that the ranks of one pipeline stage hold.

TP shards first, along one dim; FSDP then shards the rows of each TP shard. Both follow `torch.chunk` and DTensor:
chunks of ceil(n / parts), then a shorter one, then empty ones.

    10 rows, tp=2, dp_shard=2       rows    dp0   dp1
                                    tp0     0:3   3:5
                                    tp1     5:8   8:10

The fused parts of a tensor (groups) are sharded one by one, so that a rank gets its shard of each: one region per rank
and group.

    [gate|up] of 8 + 8 rows, tp=2   tp0     0:4   8:12
                                    tp1     4:8   12:16
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

from ckptx.catalog.entry import Block
from ckptx.catalog.region import Region, Shape, full_region
from ckptx.errors import InternalError
from ckptx.layout.parallel_dims import ParallelDims

Span = tuple[int, int]  # start and length

_UNKNOWN_SCALE = "not a known kind of scale, replicated"


class Placement(NamedTuple):
    """Sharding of a tensor by TP; None in its place means that TP replicates the tensor.

    Unlike torch's `Placement`, it can shard the parts of a fused tensor separately, and there is no partial one.

    Attributes:
        dim: Sharded dim, from 0.
        groups: Widths along `dim` of the groups, the parts that are fused there ([q|k|v], [gate|up]). Each is sharded
            separately, and they add up to the dim. One group is DTensor's `Shard(dim)`.
        align: Size of a head along `dim`; 1 without heads. It does not change the shards, but shows whether they begin
            and end between heads.
    """

    dim: int
    groups: tuple[int, ...]
    align: int = 1


def ceil_chunks(n: int, parts: int) -> tuple[Span, ...]:
    """Return `parts` spans of 0..n, as `torch.chunk` and DTensor split it; the last ones may be shorter or empty.

    Example:
        >>> ceil_chunks(5, 4)
        ((0, 2), (2, 2), (4, 1), (5, 0))
    """
    return _chunks(n, parts, 1)


def tp_regions(shape: Shape, placement: Placement | None, tp: int, pack: int = 1) -> tuple[tuple[Region, ...], ...]:
    """Return the regions of a tensor that each TP rank holds.

    Args:
        shape: Shape of the whole tensor.
        placement: TP placement; None if every rank holds the whole tensor.
        tp: Number of TP ranks.
        pack: Elements that share a byte along the last dim and stay together; 2 for F4.

    Returns:
        For each TP rank its nonempty regions, in the order of `placement.groups`. The local tensor of a rank is
        their concatenation along the dim. A tensor with a group that does not divide into whole bytes is replicated.

    Raises:
        InternalError: The placement does not match the shape.
    """
    if placement is None or not _is_sharded(shape, placement, pack):
        return ((full_region(shape),),) * tp
    dim, groups, _ = placement
    granularity = pack if dim == len(shape) - 1 else 1
    starts = accumulate(groups, initial=0)
    spans_by_group = [
        [(start + a, n) for a, n in _chunks(width, tp, granularity)]
        for start, width in zip(starts, groups, strict=False)
    ]
    return tuple(
        tuple(
            full_region(shape).with_extent(dim, *span) for span in (spans[index] for spans in spans_by_group) if span[1]
        )
        for index in range(tp)
    )


@lru_cache(maxsize=4096)  # layers and experts repeat a few shapes, and share their blocks
def blocks_of_stage(
    shape: Shape, placement: Placement | None, dims: ParallelDims, replicate: bool, pack: int = 1
) -> tuple[Block, ...]:
    """Return the blocks of a tensor that the ranks of one pipeline stage hold.

    Args:
        shape: Shape of the whole tensor.
        placement: TP placement; None if TP does not shard it.
        dims: Mesh dimensions; `pp` is ignored.
        replicate: True to store a tensor that TP does not shard on every TP rank, all but the first marked as
            replicas; False to store it on the first only.
        pack: Elements that share a byte along the last dim and stay together; 2 for F4.

    Returns:
        Blocks by `rank_in_stage`, then group. Those that are not replicas tile the tensor. Empty blocks are omitted,
        but a tensor without elements is one block of rank 0. FSDP never shards a 0-d tensor: its first rank holds it.

    Raises:
        InternalError: The placement does not match the shape.
    """
    if not prod(shape):
        return (Block(0, full_region(shape)),)
    local_regions = tp_regions(shape, placement, dims.tp, pack)
    is_sharded = placement is not None and _is_sharded(shape, placement, pack)
    # With TP on dim 0, the local tensor has the rows of all groups one after another.
    is_dim0_sharded = is_sharded and placement is not None and placement.dim == 0
    granularity = pack if len(shape) == 1 else 1
    return tuple(
        Block(dims.rank_in_stage(dp, tp), region, is_replica=not is_sharded and tp > 0)
        for dp in range(dims.dp_shard)
        for tp in range(dims.tp if is_sharded or replicate else 1)
        for region in _fsdp_shard(local_regions[tp], is_dim0_sharded, dp, dims.dp_shard, granularity)
    )


def is_aligned(shape: Shape, placement: Placement | None, tp: int) -> bool:
    """Return True if the bounds of all TP shards fall between heads, in every group."""
    if placement is None or not shape:
        return True
    return all(
        begin % placement.align == 0 for width in placement.groups for begin, size in ceil_chunks(width, tp) if size
    )


def scale_placement(
    weight_shape: Shape, weight_placement: Placement | None, shape: Shape, tp: int
) -> tuple[Placement | None, str]:
    """Return the TP placement of a scale, derived from that of its weight.

    Args:
        weight_shape: Shape of the whole weight.
        weight_placement: TP placement of the weight; None if it is not sharded.
        shape: Shape of the whole scale.
        tp: Number of TP ranks.

    Returns:
        The placement of the scale (None to replicate it), and a reason for the report.
    """
    if not shape:
        return None, "scale replicated: one value for the whole weight"
    if len(shape) != len(weight_shape):
        return None, _UNKNOWN_SCALE
    blocks = [_infer_block_size(n, size) for n, size in zip(weight_shape, shape, strict=True)]
    if None in blocks:
        return None, _UNKNOWN_SCALE
    if weight_placement is None:
        return None, "scale replicated like its weight"
    dim, groups, _ = weight_placement
    block = blocks[dim]
    if shape[dim] == weight_shape[dim]:
        return weight_placement, "scale follows its weight"
    if block is None or shape[dim] == 1:
        return None, f"scale replicated: one value along dim {dim}"
    starts = list(accumulate(groups, initial=0))[:-1]
    if any(start % block for start in starts) or any(not _shards_end_between_blocks(n, block, tp) for n in groups):
        return None, f"scale replicated: a shard of the weight ends inside a block of {block}"
    return Placement(dim, tuple(-(-n // block) for n in groups)), f"scale follows its weight in blocks of {block}"


def _is_sharded(shape: Shape, placement: Placement, pack: int) -> bool:
    """Return False if a group along the last dim does not divide into packs, so that the tensor is not sharded.

    Raises:
        InternalError: The placement does not match the shape.
    """
    dim, groups, _ = placement
    if not 0 <= dim < len(shape) or sum(groups) != shape[dim]:
        raise InternalError(
            f"placement: groups {list(groups)} of dim {dim} must add up to the size of that dim in {list(shape)}; "
            "please report this"
        )
    return dim != len(shape) - 1 or all(width % pack == 0 for width in groups)


def _fsdp_shard(
    regions: tuple[Region, ...], is_dim0_sharded: bool, dp: int, dp_shard: int, granularity: int
) -> list[Region]:
    """Return the FSDP shard of a TP rank's local tensor, as regions of the whole tensor.

    Args:
        regions: Regions of the TP rank, one per group.
        is_dim0_sharded: True if TP shards dim 0, so that the local rows are those of all regions, one after another;
            False if all regions have the same rows.
        dp: Index of the FSDP rank.
        dp_shard: Number of FSDP ranks.
        granularity: Number of rows that stay together.
    """
    if dp_shard == 1 or not regions:
        return list(regions)
    if not regions[0].sizes:
        return list(regions) if dp == 0 else []
    heights = [region.sizes[0] for region in regions]
    rows = sum(heights) if is_dim0_sharded else heights[0]
    begin, size = _chunks(rows, dp_shard, granularity)[dp]
    fsdp_regions = []
    local_row = 0  # local row where the region begins
    for region, height in zip(regions, heights, strict=True):
        low, high = max(begin, local_row), min(begin + size, local_row + height)
        if low < high:
            fsdp_regions.append(region.with_extent(0, region.offsets[0] + low - local_row, high - low))
        if is_dim0_sharded:
            local_row += height
    return fsdp_regions


@lru_cache(maxsize=4096)
def _chunks(n: int, parts: int, granularity: int) -> tuple[Span, ...]:
    """Split like `ceil_chunks`, in units of `granularity`; the first part gets all if `n` is no multiple of it."""
    if n % granularity:
        return ((0, n), *((n, 0),) * (parts - 1))
    chunk_size = -(-(n // granularity) // parts) * granularity
    edges = [min(i * chunk_size, n) for i in range(parts + 1)]
    return tuple((a, b - a) for a, b in pairwise(edges))


def _infer_block_size(n: int, size: int) -> int | None:
    """Return the number of weight elements per scale element along one dim; None if no number explains the sizes.

    Several block sizes give the same `size`, ceil(n / block). At most one of them is a power of two, which every
    published format uses; if none is, `size` must divide `n`.
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


def _shards_end_between_blocks(n: int, block: int, tp: int) -> bool:
    """Return True if every shard of `n` elements begins where a shard of their scales, one per block, begins."""
    blocks = ceil_chunks(-(-n // block), tp)
    return all(min(i * block, n) == begin for (begin, _), (i, _) in zip(ceil_chunks(n, tp), blocks, strict=True))
