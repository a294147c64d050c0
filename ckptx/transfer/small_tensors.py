"""Copy of tensors that fit into a buffer; a MoE checkpoint has tens of thousands, and their calls cost more than bytes.

It takes a third of the time of the general path: such a tensor is read with one call, its blocks are copied from
memory, and each block enters the buffer of its file together with its frame.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ckptx.catalog.entry import Frame, ShardedChunks, TensorEntry
from ckptx.transfer.columns import cut_rows
from ckptx.transfer.digest import crc32, hash_of, leaf_digest
from ckptx.transfer.grid import Grid
from ckptx.transfer.outfile import OutFile
from ckptx.transfer.stream import TensorReader

HASH_NBYTES = 8  # bytes per block in the journal


def crc_note(crc: int) -> bytes:
    """Return a CRC-32 in the form of the journal."""
    return crc.to_bytes(HASH_NBYTES, "little")


class _Column(NamedTuple):
    """Block as a part of a tensor in memory: `width` bytes at `column` of each row of `pitch` bytes.

    `begin` and `end` are the byte range of its rows; `total` is its size with the frame.
    """

    begin: int
    end: int
    pitch: int
    column: int
    width: int
    frame: Frame | None
    nbytes: int
    total: int


class SmallSharding(NamedTuple):
    """Sharding of a small tensor; `largest` is the size of its largest block, including the frame."""

    strips: tuple[_Column, ...]
    nbytes: int
    largest: int


class CopiedTensor(NamedTuple):
    """Result of a copy: digest of the tensor, hash or CRC of each block, and the end of each block in its file."""

    leaf: bytes
    hashes: bytes
    ends: list[tuple[OutFile, int]]


def small_sharding(grid: Grid, frames: Sequence[Frame | None]) -> SmallSharding:
    """Return the blocks of a grid, in its order."""
    strips = []
    for cell, frame in zip(grid.cells, frames, strict=True):
        around = 0 if frame is None else len(frame.head) + frame.tail_nbytes
        row = grid.width
        if grid.rows == 1:
            begin, end, pitch, column = cell.left, cell.right, cell.right - cell.left, 0
        else:
            begin, end, pitch, column = cell.top * row, cell.bottom * row, row, cell.left
        width = cell.right - cell.left
        strips.append(_Column(begin, end, pitch, column, width, frame, cell.nbytes, cell.nbytes + around))
    return SmallSharding(tuple(strips), grid.nbytes, max(strip.total for strip in strips))


class SmallCopies:
    """Copier of the small tensors of one pass."""

    def __init__(
        self, reader: TensorReader, tile: memoryview, outs: dict[str, OutFile], open_out: Callable[[str, int], OutFile]
    ) -> None:
        """Store the arguments.

        Args:
            reader: Reader of the source.
            tile: Memory for one tensor.
            outs: Open output files by name.
            open_out: Function that opens an output file at a position.
        """
        self._reader, self._tile, self._outs, self._open_out = reader, tile, outs, open_out

    def copy(self, target: TensorEntry, source: TensorEntry, cut: SmallSharding, is_whole: bool) -> CopiedTensor | None:
        """Copy `source` into the blocks of `target`; return None if it cannot be read with one call per chunk."""
        if is_whole:
            return self._copy_whole(target, source, cut)
        tile = self._tile[: cut.nbytes]
        if not self._reader.read_all(source, tile):
            return None
        outs, ends, hashes = self._outs, [], []
        chunks = target.chunks
        if type(chunks) is ShardedChunks:
            files, offsets = chunks.files, chunks.offsets
        else:
            files, offsets = tuple([chunk.file for chunk in chunks]), array("q", [chunk.offset for chunk in chunks])
        for strip, name, offset in zip(cut.strips, files, offsets, strict=True):
            begin, end, pitch, column, width, frame, nbytes, total = strip
            out = outs.get(name)
            if out is None:
                out = self._open_out(name, offset)
            elif out.position + out.fill != offset:
                out.seek(offset)
            room = out.reserve(total)
            if frame is None:
                cut_rows(room, tile[begin:end], pitch, column, width)
                hashes.append(hash_of(room))
            else:
                head = len(frame.head)
                room[:head] = frame.head
                view = room[head : head + nbytes]
                cut_rows(view, tile[begin:end], pitch, column, width)
                crc = crc32(view)
                room[head + nbytes :] = frame.tail(crc)
                hashes.append(crc_note(crc))
            out.advance(total)
            ends.append((out, offset + total))
        return CopiedTensor(leaf_digest(tile), b"".join(hashes), ends)

    def _copy_whole(self, target: TensorEntry, source: TensorEntry, cut: SmallSharding) -> CopiedTensor | None:
        """Read the tensor directly into the buffer of its file."""
        (strip,), (file, offset) = cut.strips, target.place
        frame = strip.frame
        out = self._open_out(file, offset)
        room = out.reserve(strip.total)
        head = 0 if frame is None else len(frame.head)
        view = room[head : head + strip.nbytes]
        if not self._reader.read_all(source, view):
            return None
        if frame is not None:
            room[:head] = frame.head
            room[head + strip.nbytes :] = frame.tail(crc32(view))
        leaf = leaf_digest(view)
        out.advance(strip.total)
        return CopiedTensor(leaf, b"", [(out, offset + strip.total)])
