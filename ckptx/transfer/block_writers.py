"""Blocks while they are written, and the two ways in which the bytes of a tensor reach them."""

from __future__ import annotations

from collections.abc import Callable

from ckptx.catalog.entry import Frame
from ckptx.transfer.columns import cut_rows
from ckptx.transfer.digest import TreeDigest, block_digest, crc32
from ckptx.transfer.grid import Grid
from ckptx.transfer.outfile import OutFile
from ckptx.transfer.small_tensors import crc_note

_LONG = 256 << 10  # bytes of a piece that are worth a write of their own


class BlockWriter:
    """A block while it is written, or the share of it that belongs to this run.

    Attributes:
        out: The file.
        at: Where its next byte goes.
        left: Bytes that are missing.
        begin: Bytes of the block before this share.
        nbytes: Bytes of this share.
        frame: Around the block, or None.
        crc: Of the bytes so far, when there is a frame.
        hash: Of the bytes so far, when there is no CRC and the digest of the tensor does not say as much.
    """

    __slots__ = ("at", "begin", "crc", "frame", "hash", "is_hashed", "left", "nbytes", "out")

    def __init__(self, out: OutFile, at: int, begin: int, nbytes: int, frame: Frame | None, is_hashed: bool) -> None:
        self.out, self.at, self.begin, self.nbytes, self.frame = out, at, begin, nbytes, frame
        self.left = nbytes
        self.crc = 0
        self.is_hashed = is_hashed
        self.hash = block_digest() if is_hashed and frame is None else None

    def evidence(self) -> bytes:
        """What the journal notes of it; nothing for a block that is the whole tensor."""
        if not self.is_hashed:
            return b""
        return crc_note(self.crc) if self.hash is None else self.hash.digest()

    def add(self, view: memoryview) -> None:
        """Takes note of bytes that were put into the buffer of `out`."""
        self._note(view)
        self.out.advance(len(view))

    def pass_on(self, view: memoryview) -> None:
        """Takes note of bytes that are in no buffer of `out`, and has them written."""
        self._note(view)
        self.out.write_through(view)

    def _note(self, view: memoryview) -> None:
        if self.frame is not None:
            self.crc = crc32(view, self.crc)
        elif self.hash is not None:
            self.hash.update(view)
        self.at += len(view)
        self.left -= len(view)


Close = Callable[[BlockWriter], None]  # called with each block when it is full


class Direct:
    """A sink whose memory is the buffer of the file that is written next.

    Long pieces of blocks in turn go through one buffer instead, which stays in the cache: what is left of a piece in
    the buffer of its file would be out of it when the next piece of that file comes.
    """

    def __init__(self, close: Close, grid: Grid, blocks: dict[int, BlockWriter], buffer: memoryview | None) -> None:
        """Begins.

        Args:
            close: Called with each block when it is full.
            grid: How the tensor is cut.
            blocks: By index in the grid.
            buffer: For long pieces; None where there is one block.
        """
        self.digest = TreeDigest()
        self._close, self._blocks, self._buffer = close, blocks, buffer
        self._pieces = iter(grid.pieces())
        self._left = 0
        self._missing = grid.nbytes
        self._block: BlockWriter
        self._passing: memoryview | None = None  # the buffer, while a long piece goes through it

    def space(self, nbytes: int) -> memoryview:
        if not self._left:
            index, self._left = next(self._pieces)
            self._block = self._blocks[index]
            self._block.out.seek(self._block.at)
            self._passing = self._buffer if self._left >= _LONG else None
        nbytes = min(nbytes, self._left, self.digest.room)
        return self._block.out.space(nbytes) if self._passing is None else self._passing[:nbytes]

    def commit(self, view: memoryview) -> None:
        self._left -= len(view)
        self._missing -= len(view)
        self.digest.update(view, last=not self._missing)
        if self._passing is None:
            self._block.add(view)
        else:
            self._block.pass_on(view)
        if not self._block.left:
            self._close(self._block)


class Tiles:
    """A sink that collects whole rows, or a part of one long row, and cuts the blocks out of them."""

    def __init__(self, close: Close, grid: Grid, blocks: dict[int, BlockWriter], buffer: memoryview) -> None:
        self.digest = TreeDigest()
        self._close, self._grid, self._blocks, self._buffer = close, grid, blocks, buffer
        self._missing = grid.nbytes
        self._fill = 0
        self._row = self._column = 0  # of the first byte in the tile
        self._size = self._next_size()

    def _next_size(self) -> int:
        room, width = len(self._buffer), self._grid.width
        if width > room:
            return min(room, width - self._column)
        return min(self._grid.rows - self._row, room // width) * width

    def space(self, nbytes: int) -> memoryview:
        end = min(self._fill + min(nbytes, self.digest.room), self._size)
        return self._buffer[self._fill : end]

    def commit(self, view: memoryview) -> None:
        self._missing -= len(view)
        self.digest.update(view, last=not self._missing)
        self._fill += len(view)
        if self._fill == self._size:
            self._cut()

    def _cut(self) -> None:
        grid, tile = self._grid, self._buffer[: self._size]
        if grid.width > len(self._buffer):
            rows, first, last = 1, self._column, self._column + self._size
        else:
            rows, first, last = self._size // grid.width, 0, grid.width
        for cell in grid.cells:
            top, bottom = max(cell.top, self._row), min(cell.bottom, self._row + rows)
            left, right = max(cell.left, first), min(cell.right, last)
            if top >= bottom or left >= right:
                continue
            block = self._blocks[cell.block]
            block.out.seek(block.at)
            view = block.out.reserve((bottom - top) * (right - left))
            pitch = last - first
            cut_rows(
                view, tile[(top - self._row) * pitch : (bottom - self._row) * pitch], pitch, left - first, right - left
            )
            block.add(view)
            if not block.left:
                self._close(block)
        self._fill = 0
        self._column = 0 if last == grid.width else last
        self._row += rows if last == grid.width else 0
        if self._missing:
            self._size = self._next_size()
