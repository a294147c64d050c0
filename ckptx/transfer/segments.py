"""Plan the reads that give a region of a tensor in row-major order from its chunks.

    chunks split along rows           chunks split along columns
    +---------+                       +----+----+
    |    A    |   A, then B:          | A  | B  |   row by row, A and B in turn: the tile
    +---------+   two spans           |    |    |   reads whole rows of A and of B, then
    |    B    |                       |    |    |   merges their rows
    +---------+                       +----+----+

The order is that of the target, so that one pass can copy, checksum and digest; each chunk is nevertheless read front
to back, so that its recorded CRC can be checked in the same pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.region import Region, Shape

# A shorter row segment is read together with its neighbors and reordered in memory, because one system call per row of
# a narrow shard would cost more than its bytes.
_MIN_SPAN_NBYTES = 64 << 10
TILE_NBYTES = 1 << 20


class Span(NamedTuple):
    """Bytes that are contiguous in both source and target.

    `chunk` is the index of the chunk in its entry, `offset` a position in the file of that chunk.
    """

    chunk: int
    offset: int
    nbytes: int


class Strip(NamedTuple):
    """Part of a tile: `rows` rows of `width` bytes, which go to byte `column` of the rows of the tile.

    `chunk` is the index of the chunk in its entry. In its file, the first row is at `offset`, and the next row always
    `pitch` bytes after the one before.
    """

    chunk: int
    offset: int
    pitch: int
    rows: int
    column: int
    width: int


class Tile(NamedTuple):
    """Rows of `width` bytes, made of strips that cover them exactly."""

    rows: int
    width: int
    strips: tuple[Strip, ...]


class StridedRegion(NamedTuple):
    """Part of a chunk whose elements are not row-major: `region` of the tensor, read through strides.

    `chunk` is the index of the chunk in its entry.
    """

    chunk: int
    region: Region


Segment = Span | Tile | StridedRegion


def iterate_segments(entry: TensorEntry, region: Region) -> Iterator[Segment]:
    """Yield the reads that give `region` of `entry` in row-major order.

    Chunks of sub-byte dtypes (F4) must begin and end at whole bytes.
    """
    if not region.numel:
        return
    chunks = entry.chunks
    if len(chunks) == 1 and chunks[0].region == region and chunks[0].strides is None:
        yield Span(0, chunks[0].offset, entry.dtype.nbytes(region.numel))
        return
    overlaps = [(i, overlap) for i, chunk in enumerate(chunks) if (overlap := chunk.region.intersect(region))]
    yield from _RegionSplitter(entry, region, overlaps).iterate_segments()


class _RegionSplitter:
    """Splitter of a region into reads.

    The dims of the region are split into outer dims, which are looped; dims that are flattened to rows; the sharded
    dim, along which a row is made up of several chunks; and the dims after it, one unit.

    Attributes:
        entry: Tensor to read.
        region: Region of the tensor.
        overlaps: Index of each chunk that overlaps the region, and the intersection of both.
        sharded_dim: Last dim along which the region is not whole in every chunk; 0 if there is none.
        row_dim: The one before it; 0 if there is none.
        unit_bits: Size of one index of `sharded_dim` in bits.
    """

    def __init__(self, entry: TensorEntry, region: Region, overlaps: list[tuple[int, Region]]) -> None:
        self.entry, self.region, self.overlaps = entry, region, overlaps
        sharded_dims = [
            dim
            for dim in range(len(region.sizes))
            if any(
                not overlap.sizes[dim] == region.sizes[dim] == entry.chunks[i].region.sizes[dim]
                for i, overlap in overlaps
            )
        ]
        self.sharded_dim = sharded_dims[-1] if sharded_dims else 0
        self.row_dim = sharded_dims[-2] if len(sharded_dims) > 1 else 0
        # In bits, because one F4 element is not a whole byte if the last dim is sharded.
        self.unit_bits = prod(region.sizes[self.sharded_dim + 1 :]) * entry.dtype.bits

    def iterate_segments(self) -> Iterator[Segment]:
        begin, sizes = self.region
        has_strides = any(self.entry.chunks[i].strides is not None for i, _ in self.overlaps)
        outer_dims = self.sharded_dim if has_strides else self.row_dim
        overlaps_by_index = self._group_by_first_index() if outer_dims else {}
        for outer in product(*(range(b, b + n) for b, n in zip(begin, sizes[:outer_dims], strict=False))):
            overlaps = overlaps_by_index[outer[0]] if outer else self.overlaps
            if len(outer) > 1:
                overlaps = [
                    (i, overlap)
                    for i, overlap in overlaps
                    if all(o <= at < o + n for o, n, at in zip(*overlap, outer, strict=False))
                ]
            if has_strides or self.sharded_dim == self.row_dim:
                yield from self._iterate_chunks(outer, overlaps, has_strides)
            else:
                yield from self._iterate_rows(outer, overlaps)

    def _group_by_first_index(self) -> dict[int, list[tuple[int, Region]]]:
        """Return index of dim 0 -> chunks that hold it, as in `overlaps`; fast for hundreds of experts."""
        overlaps: dict[int, list[tuple[int, Region]]] = {}
        for i, overlap in self.overlaps:
            for index in range(overlap.offsets[0], overlap.offsets[0] + overlap.sizes[0]):
                overlaps.setdefault(index, []).append((i, overlap))
        return overlaps

    def _iterate_chunks(self, outer: Shape, overlaps: list[tuple[int, Region]], has_strides: bool) -> Iterator[Segment]:
        """Yield the read of each chunk, one after the other along the sharded dim."""
        dim = self.sharded_dim
        for i, overlap in sorted(overlaps, key=lambda item: item[1].offsets[dim : dim + 1]):
            if has_strides and self.entry.chunks[i].strides is not None:
                yield StridedRegion(i, Region((*outer, *overlap.offsets[dim:]), (1,) * dim + overlap.sizes[dim:]))
            else:
                yield Span(i, self._position(i, outer, overlap, dim), self._nbytes(prod(overlap.sizes[dim : dim + 1])))

    def _iterate_rows(self, outer: Shape, overlaps: list[tuple[int, Region]]) -> Iterator[Segment]:
        """Yield the reads of rows that several chunks make up: tiles of rows, or spans if the rows are long.

        Args:
            outer: Indices of the dims before the rows.
            overlaps: Index of each chunk, and its intersection with the region.
        """
        first, dim = self.row_dim, self.sharded_dim
        inner_rows = prod(self.region.sizes[first + 1 : dim])  # whole dims in between: their rows follow each other
        width = self._nbytes(self.region.sizes[dim])
        for low, high, members in _iterate_row_ranges(overlaps, first):
            members = sorted(members, key=lambda item: item[1].offsets[dim])
            rows = (high - low) * inner_rows
            min_width = self._nbytes(min(overlap.sizes[dim] for _, overlap in members))
            starts = [
                (i, overlap, self._position(i, (*outer, low), overlap, dim), self._pitch(i)) for i, overlap in members
            ]
            if min_width >= _MIN_SPAN_NBYTES or width > TILE_NBYTES:
                for row in range(rows):
                    for i, overlap, start, pitch in starts:
                        yield Span(i, start + row * pitch, self._nbytes(overlap.sizes[dim]))
                continue
            step = max(1, TILE_NBYTES // max(width, *(pitch for *_, pitch in starts)))  # gaps between rows are read too
            for row in range(0, rows, step):
                count = min(step, rows - row)
                yield Tile(
                    count,
                    width,
                    tuple(
                        Strip(
                            chunk=i,
                            offset=start + row * pitch,
                            pitch=pitch,
                            rows=count,
                            column=self._nbytes(overlap.offsets[dim] - self.region.offsets[dim]),
                            width=self._nbytes(overlap.sizes[dim]),
                        )
                        for i, overlap, start, pitch in starts
                    ),
                )

    def _pitch(self, index: int) -> int:
        """Return the number of bytes from one row to the next in a chunk."""
        return self._nbytes(self.entry.chunks[index].region.sizes[self.sharded_dim])

    def _nbytes(self, units: int) -> int:
        return units * self.unit_bits // 8

    def _position(self, index: int, outer: Shape, overlap: Region, dim: int) -> int:
        """Return the position in its file at which an overlap begins, given the coordinates of the outer dims."""
        chunk: Chunk = self.entry.chunks[index]
        begin, sizes = chunk.region
        index_in_tensor = (*outer, *overlap.offsets[len(outer) :])
        flat = 0
        for position, start, size in zip(index_in_tensor[: dim + 1], begin, sizes, strict=False):
            flat = flat * size + position - start
        return chunk.offset + self._nbytes(flat)


def _iterate_row_ranges(
    overlaps: list[tuple[int, Region]], dim: int
) -> Iterator[tuple[int, int, list[tuple[int, Region]]]]:
    """Yield begin and end of each range along `dim` in which the same chunks make up all rows, with these chunks."""
    points = sorted(
        {
            point
            for _, overlap in overlaps
            for point in (overlap.offsets[dim], overlap.offsets[dim] + overlap.sizes[dim])
        }
    )
    pending = sorted(overlaps, key=lambda item: item[1].offsets[dim], reverse=True)
    members: list[tuple[int, Region]] = []
    for low, high in pairwise(points):
        members = [(i, overlap) for i, overlap in members if low < overlap.offsets[dim] + overlap.sizes[dim]]
        while pending and pending[-1][1].offsets[dim] <= low:
            members.append(pending.pop())
        yield low, high, members
