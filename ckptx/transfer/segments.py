"""Plan the reads that give a region of a tensor in row-major order from its chunks.

    tensor split along dim 0          tensor split along dim 1
    +---------+                       +----+----+
    |    A    |   chunk A, then B:    | A  | B  |   each row is a row of chunk A and one of B:
    +---------+   two spans           |    |    |   a tile reads several rows of A with one
    |    B    |                       |    |    |   call, those of B with another, and copies
    +---------+                       +----+----+   them side by side

The row-major order is also that of the target, so that one pass can copy, checksum and digest. The reads of each chunk
go from its front to its back, so that its recorded CRC can be checked in the same pass.
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
TILE_NBYTES = 1 << 20  # largest size of a tile, and of the read of one of its strips


class Span(NamedTuple):
    """Bytes that are contiguous in both source and target.

    `chunk` is the index of the chunk in its entry, `offset` a position in the file of that chunk.
    """

    chunk: int
    offset: int
    nbytes: int


class Strip(NamedTuple):
    """Part of a tile: `rows` rows of `width` bytes, which go to byte `column` of the rows of the tile.

    `chunk` is the index of the chunk in its entry. In the file of the chunk, the first row begins at byte `offset`, and
    each next row `pitch` bytes after the one before.
    """

    chunk: int
    offset: int
    pitch: int
    rows: int
    column: int
    width: int


class Tile(NamedTuple):
    """`rows` rows of `width` bytes in memory, made of strips that cover them exactly."""

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

    The dims of the region are, in this order: outer dims, which are looped; dims that are flattened to rows; the
    sharded dim, along which a row consists of several chunks; and the dims after it, which every chunk has in full. A
    unit is one index of the sharded dim with all dims after it.

    Attributes:
        entry: Tensor to read.
        region: Region of the tensor.
        overlaps: Index of each chunk that overlaps the region, and the intersection of both.
        sharded_dim: Last dim along which a chunk has other indices than the region; 0 if there is none.
        row_dim: Last such dim before `sharded_dim`, the first one of the rows; 0 if there is none.
        unit_bits: Size of a unit in bits.
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
        num_outer_dims = self.sharded_dim if has_strides else self.row_dim
        overlaps_by_index = self._group_by_first_index() if num_outer_dims else {}
        for outer in product(
            *(range(start, start + size) for start, size in zip(begin, sizes[:num_outer_dims], strict=False))
        ):
            overlaps = overlaps_by_index[outer[0]] if outer else self.overlaps
            if len(outer) > 1:
                overlaps = [
                    (i, overlap)
                    for i, overlap in overlaps
                    if all(start <= at < start + size for start, size, at in zip(*overlap, outer, strict=False))
                ]
            if has_strides or self.sharded_dim == self.row_dim:
                yield from self._iterate_chunks(outer, overlaps, has_strides)
            else:
                yield from self._iterate_rows(outer, overlaps)

    def _group_by_first_index(self) -> dict[int, list[tuple[int, Region]]]:
        """Return index of dim 0 -> those of `overlaps` that have this index.

        The caller then does not search all chunks for each index, which is slow with hundreds of experts.
        """
        overlaps: dict[int, list[tuple[int, Region]]] = {}
        for i, overlap in self.overlaps:
            for index in range(overlap.offsets[0], overlap.offsets[0] + overlap.sizes[0]):
                overlaps.setdefault(index, []).append((i, overlap))
        return overlaps

    def _iterate_chunks(self, outer: Shape, overlaps: list[tuple[int, Region]], has_strides: bool) -> Iterator[Segment]:
        """Yield one read per chunk, in the order of the chunks along the sharded dim.

        Args:
            outer: Indices of the outer dims.
            overlaps: Index of each chunk with these indices, and its intersection with the region.
            has_strides: True if any chunk of the region has strides.
        """
        dim = self.sharded_dim
        for i, overlap in sorted(overlaps, key=lambda item: item[1].offsets[dim : dim + 1]):
            if has_strides and self.entry.chunks[i].strides is not None:
                yield StridedRegion(i, Region((*outer, *overlap.offsets[dim:]), (1,) * dim + overlap.sizes[dim:]))
            else:
                yield Span(i, self._position(i, outer, overlap, dim), self._nbytes(prod(overlap.sizes[dim : dim + 1])))

    def _iterate_rows(self, outer: Shape, overlaps: list[tuple[int, Region]]) -> Iterator[Segment]:
        """Yield the reads of rows that consist of several chunks: tiles of rows, or spans if the rows are long.

        Args:
            outer: Indices of the outer dims.
            overlaps: Index of each chunk with these indices, and its intersection with the region.
        """
        row_dim, dim = self.row_dim, self.sharded_dim
        inner_rows = prod(self.region.sizes[row_dim + 1 : dim])  # rows of one index of `row_dim`, adjacent in a chunk
        width = self._nbytes(self.region.sizes[dim])
        for low, high, members in _iterate_row_ranges(overlaps, row_dim):
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
            # The pitch counts because the bytes between the rows of a strip are read, too.
            rows_per_tile = max(1, TILE_NBYTES // max(width, *(pitch for *_, pitch in starts)))
            for row in range(0, rows, rows_per_tile):
                count = min(rows_per_tile, rows - row)
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
        """Return the size of this number of units in bytes."""
        return units * self.unit_bits // 8

    def _position(self, index: int, outer: Shape, overlap: Region, dim: int) -> int:
        """Return the byte of its file at which the overlap of a chunk begins.

        Args:
            index: Index of the chunk.
            outer: Indices of the first dims, which replace the begin of the overlap in these dims.
            overlap: Intersection of the chunk and the region.
            dim: The sharded dim; along the dims after it, the overlap begins where the chunk begins.
        """
        chunk: Chunk = self.entry.chunks[index]
        begin, sizes = chunk.region
        index_in_tensor = (*outer, *overlap.offsets[len(outer) :])
        flat = 0
        for coordinate, start, size in zip(index_in_tensor[: dim + 1], begin, sizes, strict=False):
            flat = flat * size + coordinate - start
        return chunk.offset + self._nbytes(flat)


def _iterate_row_ranges(
    overlaps: list[tuple[int, Region]], dim: int
) -> Iterator[tuple[int, int, list[tuple[int, Region]]]]:
    """Yield begin, end and overlaps of each range along `dim` in which all rows consist of the same chunks."""
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
