"""Writers of blocks, and the two sinks that distribute the bytes of a tensor over them."""

from __future__ import annotations

from collections.abc import Callable

from ckptx.catalog.entry import Frame
from ckptx.transfer.columns import cut_rows
from ckptx.transfer.digest import TreeDigest, block_digest, crc32
from ckptx.transfer.grid import Grid
from ckptx.transfer.outfile import OutFile
from ckptx.transfer.small_tensors import crc_note

_LONG = 256 << 10  # bytes; a longer piece is written with its own system call


class BlockWriter:
    """Writer of a block, or of the share of it that belongs to this run.

    Attributes:
        out: Output file.
        at: Position of the next byte in the file.
        left: Number of bytes still to write.
        begin: Number of bytes of the block before this share.
        nbytes: Number of bytes of this share.
        frame: Frame around the block; None for none.
        crc: CRC-32 of the bytes so far; 0 without a frame.
        hash: Hash of the bytes so far; None with a frame, or if the block is the whole tensor, which has a digest.
    """

    __slots__ = ("at", "begin", "crc", "frame", "hash", "is_hashed", "left", "nbytes", "out")

    def __init__(self, out: OutFile, at: int, begin: int, nbytes: int, frame: Frame | None, is_hashed: bool) -> None:
        self.out, self.at, self.begin, self.nbytes, self.frame = out, at, begin, nbytes, frame
        self.left = nbytes
        self.crc = 0
        self.is_hashed = is_hashed
        self.hash = block_digest() if is_hashed and frame is None else None

    def evidence(self) -> bytes:
        """Return the journal entry of the block; empty for a block that is the whole tensor."""
        if not self.is_hashed:
            return b""
        return crc_note(self.crc) if self.hash is None else self.hash.digest()

    def add(self, view: memoryview) -> None:
        """Account for bytes that were put into the buffer of `out`."""
        self._note(view)
        self.out.advance(len(view))

    def pass_on(self, view: memoryview) -> None:
        """Write bytes that are not in a buffer of `out`, and account for them."""
        self._note(view)
        self.out.write_through(view)

    def _note(self, view: memoryview) -> None:
        if self.frame is not None:
            self.crc = crc32(view, self.crc)
        elif self.hash is not None:
            self.hash.update(view)
        self.at += len(view)
        self.left -= len(view)


Close = Callable[[BlockWriter], None]  # called with each complete block


class Direct:
    """Sink that fills the buffer of the file that is written next.

    Long pieces go through one shared buffer instead, which stays in the cache: the buffer of a file would be evicted
    before the next piece of that file comes.
    """

    def __init__(self, close: Close, grid: Grid, blocks: dict[int, BlockWriter], buffer: memoryview | None) -> None:
        """Start at the first piece of the grid.

        Args:
            close: Called with each complete block.
            grid: Grid of the tensor.
            blocks: Writers by index in the grid.
            buffer: Buffer for long pieces; None if there is one block.
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
    """Sink that collects whole rows, or a part of one long row, and copies the blocks out of them."""

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
