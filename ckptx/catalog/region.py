"""Rectangles of a tensor, and the proof that a set of them covers it exactly.

Stock torch hands out uninitialised memory for a part of a tensor that no chunk covers, and silently takes one of two
chunks that overlap. Here both are refused, so the proof must be exact, and cheap for a tensor cut into thousands.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby, pairwise
from math import prod
from typing import NamedTuple

Shape = tuple[int, ...]


class Region(NamedTuple):
    """A rectangle: where it begins in each dim, and how long it is there. A 0-d tensor has empty tuples."""

    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        """Elements inside."""
        return prod(self.sizes)

    def intersect(self, other: Region) -> Region | None:
        """The rectangle both share, or None when they share no element."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(end - begin for begin, end in zip(offsets, ends, strict=True))
        return Region(offsets, sizes) if all(size > 0 for size in sizes) else None

    def __str__(self) -> str:
        spans = (f"{begin}:{begin + size}" for begin, size in zip(self.offsets, self.sizes, strict=True))
        return f"[{', '.join(spans)}]"


def whole(shape: Shape) -> Region:
    """The region that is all of a tensor of `shape`."""
    return Region((0,) * len(shape), shape)


class CoverageFault(NamedTuple):
    """Why regions do not tile a shape: `kind` is "gap", "overlap", "outside" or "tangle", `region` where.

    A tangle may be a tiling: regions end beside each other in so many places that nobody cuts a tensor so.
    """

    kind: str
    region: Region


def coverage_fault(shape: Shape, regions: Sequence[Region]) -> CoverageFault | None:
    """The first reason why `regions` do not tile `shape` exactly, or None when they do.

    Regions without elements (an uneven shard that got no rows) neither help nor hurt. The cost is linear in the
    number of regions, times a logarithm, for every layout a mesh produces: dim after dim is cut into slabs.

    Example:
        shape (4, 2) cut as [0:3, 0:2] and [3:4, 0:2] has no fault; without the second, gap [3:4, 0:2].
    """
    for region in regions:
        if len(region.offsets) != len(shape) or any(
            begin < 0 or size < 0 or begin + size > dim
            for begin, size, dim in zip(region.offsets, region.sizes, shape, strict=True)
        ):
            return CoverageFault("outside", region)
    filled = [region for region in regions if region.numel]
    if prod(shape) == 0:
        return None
    return _slab_fault(shape, filled, 0, (), (), [_TANGLE + 16 * len(filled)])


def _slab_fault(
    shape: Shape, regions: list[Region], dim: int, offsets: Shape, sizes: Shape, budget: list[int]
) -> CoverageFault | None:
    """Checks `regions`, which all span the slab fixed by `offsets` and `sizes` in the dims before `dim`.

    `budget` holds how often a region may still be cut into slabs.
    """
    rest = shape[dim:]
    if not regions:
        return CoverageFault("gap", Region(offsets + (0,) * len(rest), sizes + rest))
    if dim == len(shape):
        if len(regions) == 1:
            return None
        return CoverageFault("overlap", Region(offsets, sizes))
    groups = _by_span(regions, dim)
    slabs = groups if _are_disjoint(groups) else _cut_into_slabs(groups, budget)
    if slabs is None:
        return CoverageFault("tangle", Region(offsets + (0,) * len(rest), sizes + rest))
    position = 0
    for begin, size, members in slabs:
        if begin > position:
            break
        fault = _slab_fault(shape, members, dim + 1, (*offsets, begin), (*sizes, size), budget)
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


_TANGLE = 1 << 20
_Slab = tuple[int, int, list[Region]]


def _by_span(regions: list[Region], dim: int) -> list[_Slab]:
    """Regions that begin and end together along `dim`, in order. Sorted: hashes of numbers can be made to collide."""

    def span(region: Region) -> tuple[int, int]:
        return region.offsets[dim], region.sizes[dim]

    return [(begin, size, list(inside)) for (begin, size), inside in groupby(sorted(regions, key=span), span)]


def _are_disjoint(groups: list[_Slab]) -> bool:
    return all(a + n <= b for (a, n, _), (b, _, _) in pairwise(groups))


def _cut_into_slabs(groups: list[_Slab], budget: list[int]) -> list[_Slab] | None:
    """Elementary intervals between all cut points, each with every region that spans it; None beyond the budget."""
    points = [point for point, _ in groupby(sorted(p for begin, size, _ in groups for p in (begin, begin + size)))]
    spanned = [(bisect_left(points, begin), bisect_left(points, begin + size)) for begin, size, _ in groups]
    budget[0] -= sum((stop - first) * len(group[2]) for (first, stop), group in zip(spanned, groups, strict=True))
    if budget[0] < 0:
        return None
    members: list[list[Region]] = [[] for _ in points[1:]]
    for (first, stop), (_, _, regions) in zip(spanned, groups, strict=True):
        for i in range(first, stop):
            members[i].extend(regions)
    return [
        (begin, end - begin, inside) for (begin, end), inside in zip(pairwise(points), members, strict=True) if inside
    ]
