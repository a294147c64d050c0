"""Chunks of tensors that ZeRO stores as ranges of flat tensors, one flat tensor per rank.

A parameter is a range of elements, in row-major order. Stages 1 and 2 concatenate the parameters of an optimizer group
and split the result into equal ranges, one per rank; stage 3 splits each parameter into equal ranges, and concatenates
those of a rank. Element k of a parameter is on rank (shift + k) // numel_per_rank, and there at index
first + (shift + k) % numel_per_rank of the flat tensor, with these numbers of elements:

                      numel_per_rank             shift                     first
    stages 1 and 2    length of a flat tensor    before the parameter,     0
                                                 in the concatenation
    stage 3           ceil(numel / ranks)        0                         before the parameter, in the flat tensor

A range that begins or ends within a row is several regions (`flat_range_regions`). The chunks of a tensor are created
when they are read, because a checkpoint of 512 ranks has a million of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from ckptx.catalog.dtype import DType
from ckptx.catalog.entry import Chunk, ComputedChunks, Record
from ckptx.catalog.region import Region, Shape, flat_range_regions, full_region


class FlatPart(NamedTuple):
    """One flat tensor, on one rank.

    Attributes:
        dtype: Dtype of its elements.
        numel: Number of its elements.
        file: File name.
        offset: Position of its first element in the file, in bytes.
        record: The checksummed record that contains it.
    """

    dtype: DType
    numel: int
    file: str
    offset: int
    record: Record


class _Piece(NamedTuple):
    """A region of a parameter on one rank.

    Attributes:
        rank: Data parallel rank.
        position: Index of its first element in the flat tensor of the rank, minus `first` (see the module).
        region: The region.
    """

    rank: int
    position: int
    region: Region


class FlatLayout:
    """Positions of the elements of a parameter in the flat tensors of all ranks.

    Attributes:
        shape: Shape of the parameter.
        shift: See the module.
        numel_per_rank: See the module; at least 1.
    """

    __slots__ = ("_pieces", "numel_per_rank", "shape", "shift")

    def __init__(self, shape: Shape, shift: int, numel_per_rank: int) -> None:
        self.shape, self.shift, self.numel_per_rank = shape, shift, numel_per_rank
        self._pieces: tuple[_Piece, ...] | None = None

    @property
    def ranks(self) -> range:
        """The ranks that hold elements of the parameter."""
        numel = prod(self.shape)
        first = self.shift // self.numel_per_rank
        return range(first, (self.shift + numel - 1) // self.numel_per_rank + 1) if numel else range(0)

    @property
    def pieces(self) -> tuple[_Piece, ...]:
        """The regions of all ranks, in the order of their elements."""
        if self._pieces is None:
            self._pieces = tuple(self._split())
        return self._pieces

    def _split(self) -> Iterator[_Piece]:
        numel = prod(self.shape)
        for rank in self.ranks:
            begin = max(rank * self.numel_per_rank - self.shift, 0)
            end = min((rank + 1) * self.numel_per_rank - self.shift, numel)
            for region in flat_range_regions(self.shape, begin, end):
                yield _Piece(rank, self.shift + begin - rank * self.numel_per_rank, region)
                begin += region.numel


class FlatChunks(ComputedChunks):
    """The chunks of one tensor in the flat tensors of all ranks, created on access.

    Attributes:
        layout: Positions of the elements; tensors of one parameter share it.
        parts: The flat tensor of each rank.
        first: Index of the first element of the tensor in the flat tensors, see the module.
        checked_ranks: Ranks whose flat tensor is checked against its CRC-32 when this tensor is read. Each flat tensor
            is assigned to one of its parameters, because a check reads all of it.
    """

    __slots__ = ("checked_ranks", "first", "layout", "parts")

    def __init__(
        self, layout: FlatLayout, parts: Sequence[FlatPart], first: int, checked_ranks: frozenset[int]
    ) -> None:
        self.layout, self.parts, self.first, self.checked_ranks = layout, parts, first, checked_ranks

    def __len__(self) -> int:
        return len(self.layout.pieces) if prod(self.layout.shape) else 1

    def __iter__(self) -> Iterator[Chunk]:
        if not prod(self.layout.shape):
            yield Chunk(full_region(self.layout.shape), self.parts[0].file, self.parts[0].offset, 0)
        for piece in self.layout.pieces:
            yield self._chunk(piece)

    def _chunk(self, piece: _Piece) -> Chunk:
        part = self.parts[piece.rank]
        itemsize = part.dtype.itemsize
        offset = part.offset + (self.first + piece.position) * itemsize
        record = part.record if piece.rank in self.checked_ranks else None
        return Chunk(piece.region, part.file, offset, piece.region.numel * itemsize, None, record)

    def make_chunk(self, index: int) -> Chunk:
        return self._chunk(self.layout.pieces[index]) if prod(self.layout.shape) else tuple(self)[index]
