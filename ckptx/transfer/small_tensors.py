"""Copy tensors that fit into a buffer, with fewer calls than `StepRangeCopier` makes for larger ones.

A MoE checkpoint has tens of thousands of them, for which calls take more time than bytes. Each chunk of such a tensor
is read with one call, its blocks are copied from memory, and each block enters the buffer of its file together with its
frame. This takes a third of the time of the general path.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ckptx.catalog.entry import ArchiveFrame, ShardedChunks, TensorEntry
from ckptx.transfer.columns import extract_columns
from ckptx.transfer.digest import block_hash, crc32, leaf_digest
from ckptx.transfer.grid import Grid
from ckptx.transfer.output_file import FileWriter
from ckptx.transfer.stream import TensorReader

HASH_NBYTES = 8  # bytes per hash of a block in the journal


def encode_crc(crc: int) -> bytes:
    """Return a CRC-32 as a journal entry of `HASH_NBYTES` bytes, little-endian."""
    return crc.to_bytes(HASH_NBYTES, "little")


class _ColumnBlock(NamedTuple):
    """Block as a part of a tensor in memory: `width` bytes at byte `column` of each row of `pitch` bytes.

    `begin` and `end` are the byte range of its rows in the tensor; `nbytes` is the size of its elements, and
    `nbytes_with_frame` that of elements and frame, in bytes. `frame` is None for a block without a frame.
    """

    begin: int
    end: int
    pitch: int
    column: int
    width: int
    frame: ArchiveFrame | None
    nbytes: int
    nbytes_with_frame: int


class SmallSharding(NamedTuple):
    """Sharding of a small tensor.

    Attributes:
        blocks: Blocks of the tensor.
        nbytes: Size of the tensor in bytes.
        max_block_nbytes: Size of the largest block in bytes, including the frame.
    """

    blocks: tuple[_ColumnBlock, ...]
    nbytes: int
    max_block_nbytes: int


class CopiedTensor(NamedTuple):
    """Result of the copy of a small tensor.

    Attributes:
        leaf: Digest of its only leaf.
        block_hashes: Hash or CRC-32 of each block, `HASH_NBYTES` bytes each; empty if one block is the whole tensor.
        block_ends: Writer of the file of each block, and the position in the file at which the block ends.
    """

    leaf: bytes
    block_hashes: bytes
    block_ends: list[tuple[FileWriter, int]]


def build_small_sharding(grid: Grid, frames: Sequence[ArchiveFrame | None]) -> SmallSharding:
    """Return the sharding of a small tensor from its grid and the frame of each block (None for none)."""
    blocks = []
    for cell, frame in zip(grid.cells, frames, strict=True):
        frame_nbytes = 0 if frame is None else len(frame.head) + frame.tail_nbytes
        row_nbytes = grid.width
        if grid.rows == 1:
            begin, end, pitch, column = cell.left, cell.right, cell.right - cell.left, 0
        else:
            begin, end, pitch, column = cell.top * row_nbytes, cell.bottom * row_nbytes, row_nbytes, cell.left
        width = cell.right - cell.left
        blocks.append(_ColumnBlock(begin, end, pitch, column, width, frame, cell.nbytes, cell.nbytes + frame_nbytes))
    return SmallSharding(tuple(blocks), grid.nbytes, max(block.nbytes_with_frame for block in blocks))


class SmallTensorCopier:
    """Copier of the small tensors of one step range."""

    def __init__(
        self,
        reader: TensorReader,
        tile: memoryview,
        file_writers: dict[str, FileWriter],
        open_file_writer: Callable[[str, int], FileWriter],
    ) -> None:
        """Store the arguments.

        Args:
            reader: Reader of the source.
            tile: Memory for one tensor.
            file_writers: Writers of the output files by name.
            open_file_writer: Function that returns the writer of an output file, positioned at an offset in bytes.
        """
        self._reader, self._tile, self._file_writers, self._open_file_writer = (
            reader,
            tile,
            file_writers,
            open_file_writer,
        )

    def copy(
        self, target: TensorEntry, source: TensorEntry, sharding: SmallSharding, is_whole: bool
    ) -> CopiedTensor | None:
        """Copy `source` into the blocks of `target`; return None if it cannot be read with one call per chunk.

        Nothing is written in that case.

        Args:
            target: Target tensor.
            source: Source tensor of the same dtype and shape.
            sharding: Sharding of the target; each block with its frame fits into the buffer of a file writer.
            is_whole: True if the only block is the whole tensor.

        Raises:
            InputError: See `TensorReader.read_tensor`.
        """
        if is_whole:
            return self._copy_whole(target, source, sharding)
        tile = self._tile[: sharding.nbytes]
        if not self._reader.read_tensor(source, tile):
            return None
        file_writers, block_ends, block_hashes = self._file_writers, [], []
        chunks = target.chunks
        if type(chunks) is ShardedChunks:
            files, offsets = chunks.files, chunks.offsets
        else:
            files, offsets = tuple([chunk.file for chunk in chunks]), array("q", [chunk.offset for chunk in chunks])
        for block, name, offset in zip(sharding.blocks, files, offsets, strict=True):
            begin, end, pitch, column, width, frame, nbytes, nbytes_with_frame = block
            file_writer = file_writers.get(name)
            if file_writer is None:
                file_writer = self._open_file_writer(name, offset)
            elif file_writer.position + file_writer.buffered != offset:
                file_writer.seek(offset)
            output = file_writer.reserve(nbytes_with_frame)
            if frame is None:
                extract_columns(output, tile[begin:end], pitch, column, width)
                block_hashes.append(block_hash(output))
            else:
                head = len(frame.head)
                output[:head] = frame.head
                view = output[head : head + nbytes]
                extract_columns(view, tile[begin:end], pitch, column, width)
                crc = crc32(view)
                output[head + nbytes :] = frame.build_tail(crc)
                block_hashes.append(encode_crc(crc))
            file_writer.advance(nbytes_with_frame)
            block_ends.append((file_writer, offset + nbytes_with_frame))
        return CopiedTensor(leaf_digest(tile), b"".join(block_hashes), block_ends)

    def _copy_whole(self, target: TensorEntry, source: TensorEntry, sharding: SmallSharding) -> CopiedTensor | None:
        """Read the tensor directly into the buffer of its file."""
        (block,), (file, offset) = sharding.blocks, target.position
        frame = block.frame
        file_writer = self._open_file_writer(file, offset)
        output = file_writer.reserve(block.nbytes_with_frame)
        head = 0 if frame is None else len(frame.head)
        view = output[head : head + block.nbytes]
        if not self._reader.read_tensor(source, view):
            return None
        if frame is not None:
            output[:head] = frame.head
            output[head + block.nbytes :] = frame.build_tail(crc32(view))
        leaf = leaf_digest(view)
        file_writer.advance(block.nbytes_with_frame)
        return CopiedTensor(leaf, b"", [(file_writer, offset + block.nbytes_with_frame)])
