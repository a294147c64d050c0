"""Writers of blocks, and the two sinks that distribute the bytes of a tensor over them."""

from __future__ import annotations

from collections.abc import Callable

from ckptx.catalog.entry import ArchiveFrame
from ckptx.transfer.columns import extract_columns
from ckptx.transfer.digest import BlockHasher, TreeDigest, crc32
from ckptx.transfer.grid import Grid
from ckptx.transfer.output_file import FileWriter
from ckptx.transfer.small_tensors import encode_crc

_MIN_UNBUFFERED_NBYTES = 256 << 10  # length from which on `DirectSink` writes an extent through the shared buffer


class BlockWriter:
    """Writer of a block, or of the part of it in one step range.

    Attributes:
        out: Writer of the output file.
        position: Position of the next byte in the file.
        remaining: Number of bytes of elements still to write.
        offset_in_block: Number of bytes of the block before this part.
        nbytes: Number of bytes of this part, without the frame.
        frame: Archive frame around the block; None for a block without one.
        crc: CRC-32 of the bytes so far; 0 without a frame.
        hasher: Hash of the bytes so far; None with a frame, or if the block is the whole tensor, which has a digest.
        is_hashed: True if the journal has a hash of the block; False if the block is the whole tensor.
    """

    __slots__ = ("crc", "frame", "hasher", "is_hashed", "nbytes", "offset_in_block", "out", "position", "remaining")

    def __init__(
        self,
        out: FileWriter,
        position: int,
        offset_in_block: int,
        nbytes: int,
        frame: ArchiveFrame | None,
        is_hashed: bool,
    ) -> None:
        self.out, self.position, self.offset_in_block, self.nbytes, self.frame = (
            out,
            position,
            offset_in_block,
            nbytes,
            frame,
        )
        self.remaining = nbytes
        self.crc = 0
        self.is_hashed = is_hashed
        self.hasher = BlockHasher() if is_hashed and frame is None else None

    def to_journal_entry(self) -> bytes:
        """Return the hash of the block for the journal entry of its step; empty if the block is the whole tensor."""
        if not self.is_hashed:
            return b""
        return encode_crc(self.crc) if self.hasher is None else self.hasher.digest()

    def advance(self, view: memoryview) -> None:
        """Update checksum and position for bytes that were put into the buffer of `out`."""
        self._update_checksum(view)
        self.out.advance(len(view))

    def write_through(self, view: memoryview) -> None:
        """Write bytes that are not in the buffer of `out`, and update checksum and position."""
        self._update_checksum(view)
        self.out.write_through(view)

    def _update_checksum(self, view: memoryview) -> None:
        if self.frame is not None:
            self.crc = crc32(view, self.crc)
        elif self.hasher is not None:
            self.hasher.update(view)
        self.position += len(view)
        self.remaining -= len(view)


OnComplete = Callable[[BlockWriter], None]  # called with each complete block


class DirectSink:
    """Sink that provides the buffers of the files, so that bytes are read directly into them.

    Long extents go through one shared buffer instead, which stays in the CPU cache: the buffer of a file would be
    evicted before the next extent of that file.
    """

    def __init__(
        self, on_complete: OnComplete, grid: Grid, writers: dict[int, BlockWriter], buffer: memoryview | None
    ) -> None:
        """Start at the first extent of the grid.

        Args:
            on_complete: Called with each complete block.
            grid: Grid of the tensor, or its part in the step range, without replicas.
            writers: Index of the block -> its writer.
            buffer: Buffer for long extents; None to read these, too, into the buffers of the files.
        """
        self.digest = TreeDigest()
        self._on_complete, self._writers, self._shared_buffer = on_complete, writers, buffer
        self._extents = iter(grid.iterate_extents())
        self._extent_remaining = 0
        self._tensor_remaining = grid.nbytes
        self._writer: BlockWriter
        self._unbuffered_view: memoryview | None = None  # the shared buffer, during a long extent

    def space(self, nbytes: int) -> memoryview:
        if not self._extent_remaining:
            index, self._extent_remaining = next(self._extents)
            self._writer = self._writers[index]
            self._writer.out.seek(self._writer.position)
            self._unbuffered_view = self._shared_buffer if self._extent_remaining >= _MIN_UNBUFFERED_NBYTES else None
        nbytes = min(nbytes, self._extent_remaining, self.digest.leaf_remaining)
        return self._writer.out.space(nbytes) if self._unbuffered_view is None else self._unbuffered_view[:nbytes]

    def commit(self, view: memoryview) -> None:
        self._extent_remaining -= len(view)
        self._tensor_remaining -= len(view)
        self.digest.update(view, is_last=not self._tensor_remaining)
        if self._unbuffered_view is None:
            self._writer.advance(view)
        else:
            self._writer.write_through(view)
        if not self._writer.remaining:
            self._on_complete(self._writer)


class TileSink:
    """Sink that collects whole rows, or a part of one long row, and copies the blocks out of them."""

    def __init__(
        self, on_complete: OnComplete, grid: Grid, writers: dict[int, BlockWriter], buffer: memoryview
    ) -> None:
        """Start at the first row of the grid.

        Args:
            on_complete: Called with each complete block.
            grid: Grid of the tensor, or its part in the step range.
            writers: Index of the block -> its writer.
            buffer: Buffer for a tile: whole rows, or a part of one row that is longer than the buffer.
        """
        self.digest = TreeDigest()
        self._on_complete, self._grid, self._writers, self._buffer = on_complete, grid, writers, buffer
        self._tensor_remaining = grid.nbytes
        self._fill = 0
        self._row = self._column = 0  # row and column of the first byte in the tile
        self._tile_nbytes = self._next_tile_nbytes()

    def _next_tile_nbytes(self) -> int:
        room, width = len(self._buffer), self._grid.width
        if width > room:
            return min(room, width - self._column)
        return min(self._grid.rows - self._row, room // width) * width

    def space(self, nbytes: int) -> memoryview:
        end = min(self._fill + min(nbytes, self.digest.leaf_remaining), self._tile_nbytes)
        return self._buffer[self._fill : end]

    def commit(self, view: memoryview) -> None:
        self._tensor_remaining -= len(view)
        self.digest.update(view, is_last=not self._tensor_remaining)
        self._fill += len(view)
        if self._fill == self._tile_nbytes:
            self._write_tile()

    def _write_tile(self) -> None:
        grid, tile = self._grid, self._buffer[: self._tile_nbytes]
        if grid.width > len(self._buffer):
            rows, first, last = 1, self._column, self._column + self._tile_nbytes
        else:
            rows, first, last = self._tile_nbytes // grid.width, 0, grid.width
        for cell in grid.cells:
            top, bottom = max(cell.top, self._row), min(cell.bottom, self._row + rows)
            left, right = max(cell.left, first), min(cell.right, last)
            if top >= bottom or left >= right:
                continue
            writer = self._writers[cell.block]
            writer.out.seek(writer.position)
            view = writer.out.reserve((bottom - top) * (right - left))
            pitch = last - first
            extract_columns(
                view, tile[(top - self._row) * pitch : (bottom - self._row) * pitch], pitch, left - first, right - left
            )
            writer.advance(view)
            if not writer.remaining:
                self._on_complete(writer)
        self._fill = 0
        self._column = 0 if last == grid.width else last
        self._row += rows if last == grid.width else 0
        if self._tensor_remaining:
            self._tile_nbytes = self._next_tile_nbytes()
