"""Rectangles of a tensor, and the proof that a set of them covers it exactly.

Stock torch hands out uninitialised memory for a part of a tensor that no chunk covers, and silently takes one of two
chunks that overlap. Here both are refused, so the proof must be exact, and cheap for a tensor cut into thousands.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
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
    """Why regions do not tile a shape: `kind` is "gap", "overlap" or "outside", `region` where."""

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
    return _slab_fault(shape, filled, 0, (), ())


def _slab_fault(shape: Shape, regions: list[Region], dim: int, offsets: Shape, sizes: Shape) -> CoverageFault | None:
    """Checks `regions`, which all span the slab fixed by `offsets` and `sizes` in the dims before `dim`."""
    rest = shape[dim:]
    if not regions:
        return CoverageFault("gap", Region(offsets + (0,) * len(rest), sizes + rest))
    if dim == len(shape):
        if len(regions) == 1:
            return None
        return CoverageFault("overlap", Region(offsets, sizes))
    groups: dict[tuple[int, int], list[Region]] = {}
    for region in regions:
        groups.setdefault((region.offsets[dim], region.sizes[dim]), []).append(region)
    spans = sorted(groups)
    if _are_disjoint(spans):
        slabs = [(begin, size, groups[begin, size]) for begin, size in spans]
    else:
        slabs = _cut_into_slabs(groups)
    position = 0
    for begin, size, members in slabs:
        if begin > position:
            break
        fault = _slab_fault(shape, members, dim + 1, (*offsets, begin), (*sizes, size))
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


def _are_disjoint(spans: list[tuple[int, int]]) -> bool:
    return all(a + n <= b for (a, n), (b, _) in pairwise(spans))


def _cut_into_slabs(groups: dict[tuple[int, int], list[Region]]) -> list[tuple[int, int, list[Region]]]:
    """Elementary intervals between all cut points, each with every region that spans it."""
    points = sorted({point for begin, size in groups for point in (begin, begin + size)})
    index = {point: i for i, point in enumerate(points)}
    members: list[list[Region]] = [[] for _ in points[1:]]
    for (begin, size), regions in groups.items():
        for i in range(index[begin], index[begin + size]):
            members[i].extend(regions)
    return [
        (begin, end - begin, inside) for begin, end, inside in zip(points, points[1:], members, strict=False) if inside
    ]
