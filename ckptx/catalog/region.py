"""Rectangular regions of a tensor, and an exact check that a set of them tiles it.

Stock torch returns uninitialized memory for a part of a tensor that no chunk covers, and silently uses one of two
chunks that overlap. Here both are refused, so the check must be exact, and fast for a tensor of thousands of shards.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby, pairwise
from math import prod
from typing import NamedTuple

Shape = tuple[int, ...]


class Region(NamedTuple):
    """A rectangular region: offset and size in each dim. Both are empty tuples for a 0-d tensor."""

    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    def intersect(self, other: Region) -> Region | None:
        """Return the intersection, or None if it is empty."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(end - begin for begin, end in zip(offsets, ends, strict=True))
        return Region(offsets, sizes) if all(size > 0 for size in sizes) else None

    def with_extent(self, dim: int, offset: int, size: int) -> Region:
        """Return the region with another offset and size along one dim."""
        offsets, sizes = self
        return Region((*offsets[:dim], offset, *offsets[dim + 1 :]), (*sizes[:dim], size, *sizes[dim + 1 :]))

    def __str__(self) -> str:
        spans = (f"{begin}:{begin + size}" for begin, size in zip(self.offsets, self.sizes, strict=True))
        return f"[{', '.join(spans)}]"


def full_region(shape: Shape) -> Region:
    """Return the region that covers all of a shape."""
    return Region((0,) * len(shape), shape)


class CoverageFault(NamedTuple):
    """The reason why regions do not tile a shape, and the region of the fault.

    Attributes:
        kind: "gap", "overlap", "outside" or "unverifiable". Unverifiable regions may tile the shape, but have so many
            different boundaries that checking them would take too long; no mesh produces them.
        region: Region without a chunk, with several chunks, of a chunk that is out of bounds, or that was not checked.
    """

    kind: str
    region: Region


def find_coverage_fault(shape: Shape, regions: Sequence[Region]) -> CoverageFault | None:
    """Return the first reason why regions do not tile a shape exactly, or None if they do.

    Regions without elements (from uneven sharding) are ignored. For every layout of a mesh, the cost is O(n log n) in
    the number of regions: they are split into slabs, dim by dim.

    Example:
        [0:3, 0:2] and [3:4, 0:2] tile shape (4, 2); without the second, there is a gap at [3:4, 0:2].
    """
    for region in regions:
        if len(region.offsets) != len(shape) or any(
            begin < 0 or size < 0 or begin + size > dim
            for begin, size, dim in zip(region.offsets, region.sizes, shape, strict=True)
        ):
            return CoverageFault("outside", region)
    nonempty_regions = [region for region in regions if region.numel]
    if prod(shape) == 0:
        return None
    return _find_slab_fault(shape, nonempty_regions, 0, (), (), [_MAX_SLAB_REGIONS + 16 * len(nonempty_regions)])


def _find_slab_fault(
    shape: Shape, regions: list[Region], dim: int, offsets: Shape, sizes: Shape, budget: list[int]
) -> CoverageFault | None:
    """Check regions that all span the slab given by `offsets` and `sizes` in the dims before `dim`.

    `budget[0]` is the number of regions that may still be added to slabs, where a region counts once for each slab that
    it spans. Splitting reduces it, and the check is given up if it would become negative.
    """
    rest = shape[dim:]
    if not regions:
        return CoverageFault("gap", Region(offsets + (0,) * len(rest), sizes + rest))
    if dim == len(shape):
        if len(regions) == 1:
            return None
        return CoverageFault("overlap", Region(offsets, sizes))
    groups = _group_by_span(regions, dim)
    slabs = groups if _are_disjoint(groups) else _split_into_slabs(groups, budget)
    if slabs is None:
        return CoverageFault("unverifiable", Region(offsets + (0,) * len(rest), sizes + rest))
    position = 0
    for begin, size, members in slabs:
        if begin > position:
            break
        fault = _find_slab_fault(shape, members, dim + 1, (*offsets, begin), (*sizes, size), budget)
        if fault is not None:
            return fault
        position = begin + size
    else:
        begin = shape[dim]
    if position < begin:
        tail = shape[dim + 1 :]
        gap = Region((*offsets, position) + (0,) * len(tail), (*sizes, begin - position, *tail))
        return CoverageFault("gap", gap)
    return None


_MAX_SLAB_REGIONS = 1 << 20  # part of the budget of `_find_slab_fault` that does not depend on the number of regions
_Slab = tuple[int, int, list[Region]]  # begin and size along one dim, and the regions that span them


def _group_by_span(regions: list[Region], dim: int) -> list[_Slab]:
    """Group regions with equal bounds along `dim`, in order; by sorting, because hashes can be made to collide."""

    def span(region: Region) -> tuple[int, int]:
        return region.offsets[dim], region.sizes[dim]

    return [(begin, size, list(inside)) for (begin, size), inside in groupby(sorted(regions, key=span), span)]


def _are_disjoint(groups: list[_Slab]) -> bool:
    """Return True if no two groups, which are in order, overlap along their dim."""
    return all(a + n <= b for (a, n, _), (b, _, _) in pairwise(groups))


def _split_into_slabs(groups: list[_Slab], budget: list[int]) -> list[_Slab] | None:
    """Split at all bounds: return the intervals, each with all regions that span it; None if over budget."""
    points = [point for point, _ in groupby(sorted(p for begin, size, _ in groups for p in (begin, begin + size)))]
    point_ranges = [(bisect_left(points, begin), bisect_left(points, begin + size)) for begin, size, _ in groups]
    budget[0] -= sum((stop - first) * len(group[2]) for (first, stop), group in zip(point_ranges, groups, strict=True))
    if budget[0] < 0:
        return None
    members: list[list[Region]] = [[] for _ in points[1:]]
    for (first, stop), (_, _, regions) in zip(point_ranges, groups, strict=True):
        for i in range(first, stop):
            members[i].extend(regions)
    return [
        (begin, end - begin, inside) for (begin, end), inside in zip(pairwise(points), members, strict=True) if inside
    ]


def flat_range_regions(shape: Shape, begin: int, end: int) -> list[Region]:
    """Return the regions of a range of the row-major elements of a tensor, in the order of its elements.

    Args:
        shape: Shape of the tensor, without dims of size 0.
        begin: Index of the first element.
        end: Index after the last element; not before `begin`.

    Returns:
        At most 2n - 1 regions for n dims: parts of rows at both ends, and whole rows between them.

    Example:
        Elements 1 to 8 of shape (3, 4) are [0:1, 1:4], [1:2, 0:4] and [2:3, 0:1], for `begin` 1 and `end` 9.
    """
    if begin == end:
        return []
    if len(shape) < 2:
        return [Region((begin,), (end - begin,)) if shape else Region((), ())]
    row = prod(shape[1:])
    first, first_offset = divmod(begin, row)
    last, last_offset = divmod(end, row)
    if first == last:
        return _regions_in_row(shape, first, first_offset, last_offset)
    regions: list[Region] = []
    if first_offset:
        regions += _regions_in_row(shape, first, first_offset, row)
        first += 1
    if first < last:
        regions.append(Region((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])))
    return regions + _regions_in_row(shape, last, 0, last_offset)


def _regions_in_row(shape: Shape, index: int, begin: int, end: int) -> list[Region]:
    """Return the regions of elements `begin` to `end`, counted from its first one, of the slice `index` of dim 0."""
    return [
        Region((index, *region.offsets), (1, *region.sizes)) for region in flat_range_regions(shape[1:], begin, end)
    ]
