"""Copy a range of steps in one worker: read each tensor once, in row-major order, and fill its blocks.

A block with long rows is read directly into the buffer that is written next. Short rows are read into a tile first and
copied out of it in memory, because a system call per row of a narrow shard would cost more than its bytes.

Each step range has a journal, a file in a directory of its own, from which an interrupted run is resumed. It has one
entry per completely written step, in order: the digests of the leaves of the tensor, or of its part in the step range,
and, if the tensor has several blocks, a hash of each block (its CRC-32 in formats with frames).
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Event
from typing import NamedTuple

from ckptx.catalog.dtype import DType
from ckptx.catalog.entry import ArchiveFrame, ShardedChunks
from ckptx.catalog.object_ids import ObjectIds
from ckptx.catalog.region import Region, Shape, full_region
from ckptx.storage.interface import OutputFile, OutputTree
from ckptx.transfer import digest
from ckptx.transfer.block_writers import BlockWriter, DirectSink, TileSink
from ckptx.transfer.digest import BlockHasher, TreeDigest, crc32, leaf_digest, tree_digest
from ckptx.transfer.digest_sink import DigestSink, stream_cast
from ckptx.transfer.grid import Grid, build_grid
from ckptx.transfer.output_file import FileDigests, FileWriter
from ckptx.transfer.overflow_counts import OverflowCounts, OverflowCountsByTensor
from ckptx.transfer.plan import CopyPlan, CopyStep, StepRange
from ckptx.transfer.small_tensors import HASH_NBYTES, SmallSharding, SmallTensorCopier, build_small_sharding, encode_crc
from ckptx.transfer.split_tensor import ChecksumPart, RecordPart, SplitTensor, join_parts
from ckptx.transfer.stream import Sink, TensorReader

BUFFER_NBYTES = 1 << 20
_MIN_BUFFER_NBYTES = 64 << 10  # of one file, also if the buffers of its file group exceed the limit below
# Limit for the buffers of all files of a file group together: they should be in the cache when they are written.
_GROUP_BUFFERS_NBYTES = 4 << 20
_MIN_DIRECT_ROW_NBYTES = 64 << 10  # bytes per row of a block from which one system call per row pays off

_LEAF_DIGEST_NBYTES = 16  # bytes per digest in the journal
_MAX_JOURNAL_NBYTES = 64 << 20  # per step range; later entries are ignored, their tensors copied again


class Cancelled(Exception):
    """Another worker failed, or the run was interrupted."""


@dataclass(frozen=True, slots=True)
class CopyContext:
    """State that all workers of one copy share; they add their results to the dicts and lists.

    Attributes:
        plan: Copy plan.
        tree: Directory of the target files.
        journal: Directory of the journals of finished tensors.
        resumed: True if files and journals of an interrupted run may exist; False to refuse existing files.
        split_tensors: Index of the file group and of the step in it -> shared results of the step ranges that each
            copy a part of this large tensor.
        files: Open target files by index in the plan.
        file_digests: Digests of the leaves of target files written so far, by index in the plan.
        digests: Digest of each finished tensor or pickled object by target name, in hex.
        overflow_counts: Number of elements that casts made infinite or zero, by target name.
        bytes_written: Number of bytes written by each worker, by index of the worker.
        stop_event: Set when a worker failed or the run is interrupted.
    """

    plan: CopyPlan
    tree: OutputTree
    journal: OutputTree
    resumed: bool
    split_tensors: dict[tuple[int, int], SplitTensor]
    files: dict[int, OutputFile]
    file_digests: dict[int, FileDigests]
    digests: dict[str, str]
    overflow_counts: OverflowCountsByTensor
    bytes_written: list[int]
    stop_event: Event


class Buffers:
    """Buffers of one worker, allocated on first use; untouched pages use no memory."""

    def __init__(self) -> None:
        self._buffers: dict[int, memoryview] = {}

    def get(self, index: int) -> memoryview:
        """Return buffer number `index`, of `BUFFER_NBYTES` bytes."""
        if index not in self._buffers:
            self._buffers[index] = memoryview(mmap.mmap(-1, BUFFER_NBYTES))
        return self._buffers[index]


class _StepSharding(NamedTuple):
    """Sharding of a target tensor, shared by all tensors with the same blocks, dtype and shape.

    Attributes:
        grid: Grid of the tensor.
        frames: Archive frame around each block; None for a block without one.
        block_nbytes: Size of each block in bytes, without its frame.
        has_replicas: True if a block is a replica of another one.
        is_whole: True if the only block is the whole tensor.
        small: The same sharding for `SmallTensorCopier`; None if the tensor is empty or larger than half a buffer.
    """

    grid: Grid
    frames: tuple[ArchiveFrame | None, ...]
    block_nbytes: tuple[int, ...]
    has_replicas: bool
    is_whole: bool
    small: SmallSharding | None


def _is_buffered(block_ends: list[tuple[FileWriter, int]]) -> bool:
    """Return True if a block is not completely written yet, given the writer of its file and its end there in bytes."""
    for file_writer, end in block_ends:  # noqa: SIM110 (any() takes three times as long)
        if file_writer.position < end and file_writer.buffered:
            return True
    return False


class StepRangeCopier:
    """Copier of one step range, used by one worker and once."""

    def __init__(
        self, context: CopyContext, step_range: StepRange, reader: TensorReader, buffers: Buffers, worker: int
    ) -> None:
        """Prepare the buffers without reading or writing.

        Args:
            context: State of the whole copy, to which results are added.
            step_range: Steps to copy, or a step and the range of dim 0 of its large tensor.
            reader: Reader of the source.
            buffers: Buffers of the worker.
            worker: Index of the worker in `CopyContext.bytes_written`.
        """
        self._context, self._plan, self._reader, self._worker = context, context.plan, reader, worker
        self._step_range, self._buffers = step_range, buffers
        self._group = context.plan.file_groups[step_range.group_index]
        self._index_in_group = {context.plan.files[file].name: number for number, file in enumerate(self._group.files)}
        self._buffer_nbytes = BUFFER_NBYTES
        while (
            self._buffer_nbytes > _MIN_BUFFER_NBYTES
            and self._buffer_nbytes * len(self._group.files) > _GROUP_BUFFERS_NBYTES
        ):
            self._buffer_nbytes //= 2
        self._file_writers: dict[str, FileWriter] = {}
        self._small_tensor_copier = SmallTensorCopier(
            reader, buffers.get(0), self._file_writers, self._open_file_writer
        )
        self._shardings: dict[tuple[int, DType, Shape, bool], _StepSharding] = {}
        self._ids = ObjectIds()
        self._split_tensor = (
            context.split_tensors[step_range.group_index, step_range.first_step]
            if step_range.dim0_range is not None
            else None
        )
        # For each copied step without journal entry yet: file writer and end in bytes of each block, and the entry.
        self._unjournaled: deque[tuple[list[tuple[FileWriter, int]], bytes]] = deque()
        suffix = "" if step_range.dim0_range is None else f"-{step_range.dim0_range[0]}"
        self._journal_name = f"{step_range.group_index:05d}-{step_range.first_step:07d}{suffix}"

    def copy(self) -> None:
        """Copy the tensors of the step range, except those that an interrupted run finished.

        Raises:
            Cancelled: Another worker failed, or the run is interrupted.
            InputError: The source is corrupt.
            UnsupportedError: A strided tensor cannot be read within the memory limit of the reader.
            SpaceError, OutputError: The target cannot be written.
        """
        steps = self._group.steps[self._step_range.first_step : self._step_range.stop_step]
        self._journal = self._context.journal.open_output(self._journal_name, None, keep=self._context.resumed)
        try:
            finished_count, self._journal_position = self._count_finished_steps(steps)
            if self._step_range.first_step == 0 and self._step_range.dim0_range is None:
                self._write_prologues(fresh=not finished_count)
            for step in steps[finished_count:]:
                self._copy_step(step)
            for file_writer in self._file_writers.values():
                file_writer.suspend()
            self._write_journal()
        finally:
            self._journal.close()

    # ------------------------------------------------------------------------------------------------------- files

    def _target_file(self, name: str) -> OutputFile:
        return self._context.files[self._group.files[self._index_in_group[name]]]

    def _open_file_writer(self, name: str, position: int) -> FileWriter:
        """Return the writer of an output file, moved to byte `position`; create the writer on first use."""
        file_writer = self._file_writers.get(name)
        if file_writer is not None:
            file_writer.seek(position)
            return file_writer
        number = self._index_in_group[name]
        file = self._group.files[number]
        file_writer = self._file_writers[name] = FileWriter(
            self._context.files[file],
            self._plan.files[file].nbytes,
            self._buffers.get(number + 1)[: self._buffer_nbytes],
            self._context.file_digests[file],
            self._on_write,
            position,
        )
        return file_writer

    def _on_write(self, nbytes: int) -> None:
        """Count bytes that are about to be written, and record finished tensors in the journal.

        Raises:
            Cancelled: Another worker failed, or the run is interrupted.
        """
        if self._context.stop_event.is_set():
            raise Cancelled
        self._context.bytes_written[self._worker] += nbytes
        if self._unjournaled:
            self._write_journal()

    def _write_prologues(self, fresh: bool) -> None:
        """Write the first bytes of each file of the file group, which a previous run may have left incomplete.

        If `fresh` is True, the first step is copied next and continues the writers of the files. If it is False, steps
        are finished already, and the prologues are written without these writers.
        """
        for file in self._group.files:
            name, prologue = self._plan.files[file].name, self._plan.files[file].prologue
            if prologue and fresh:
                self._open_file_writer(name, 0).write(prologue)
            elif prologue:
                self._context.files[file].write(prologue, 0)

    # ------------------------------------------------------------------------------------------------------- tensors

    def _find_sharding(self, step: CopyStep) -> _StepSharding:
        """Return the sharding of the target tensor of a step, cached by its blocks, dtype and shape."""
        chunks = step.target.chunks
        blocks = chunks.blocks if type(chunks) is ShardedChunks else None
        if blocks is None and len(chunks) > 1:
            return self._make_sharding(step, [chunk.region for chunk in chunks], False)
        # A single chunk is always the whole tensor.
        key = (self._ids(blocks), step.target.dtype, step.target.shape, step.is_tensor)
        sharding = self._shardings.get(key)
        if sharding is None:
            regions = [full_region(step.target.shape)] if blocks is None else [block.region for block in blocks]
            has_replicas = blocks is not None and any(block.is_replica for block in blocks)
            sharding = self._shardings[key] = self._make_sharding(step, regions, has_replicas)
        return sharding

    def _make_sharding(self, step: CopyStep, regions: list[Region], has_replicas: bool) -> _StepSharding:
        dtype, shape = step.target.dtype, step.target.shape
        build_frame = self._plan.build_frame if step.is_tensor else None
        frames = tuple([build_frame(dtype, region.sizes) if build_frame else None for region in regions])
        sizes = tuple([dtype.nbytes(region.numel) for region in regions])
        is_whole = len(regions) == 1 and regions[0].sizes == shape
        grid = build_grid(dtype, shape, regions)
        small = build_small_sharding(grid, frames) if 0 < grid.nbytes <= BUFFER_NBYTES // 2 else None
        return _StepSharding(grid, frames, sizes, has_replicas, is_whole, small)

    def _block_positions(self, step: CopyStep) -> Iterator[tuple[str, int]]:
        """Return the file of each block, and the offset in bytes at which its frame, or the block itself, begins."""
        chunks = step.target.chunks
        if type(chunks) is ShardedChunks:
            return zip(chunks.files, chunks.offsets, strict=True)
        return ((chunk.file, chunk.offset) for chunk in chunks)

    def _grid_share(self, step: CopyStep, sharding: _StepSharding) -> Grid:
        """Return the part of the grid in this step range."""
        dim0_range = self._step_range.dim0_range
        return sharding.grid if dim0_range is None else sharding.grid.slice_dim0(*dim0_range, step.target.shape[0])

    def _copy_step(self, step: CopyStep) -> None:
        sharding = self._find_sharding(step)
        if self._split_tensor is None and self._copy_small(step, sharding):
            return
        grid = self._grid_share(step, sharding)
        writers = self._open_blocks(step, sharding, grid)
        sink: DirectSink | TileSink
        if sharding.is_whole or (not sharding.has_replicas and grid.min_cell_width >= _MIN_DIRECT_ROW_NBYTES):
            sink = DirectSink(self.finish_block, grid, writers, None if sharding.is_whole else self._buffers.get(0))
        else:
            sink = TileSink(self.finish_block, grid, writers, self._buffers.get(0)[: self._buffer_nbytes])
        record_parts: list[RecordPart] | None = None if self._split_tensor is None else []
        self._context.overflow_counts.add(step.target.name, self._stream(step, grid, sink, record_parts))
        for block in writers.values():
            assert not block.remaining, f"{step.target.name}: {block.remaining} bytes were not produced"
        self._finish(step, sharding, writers, sink.digest, record_parts)

    def _stream(self, step: CopyStep, grid: Grid, sink: Sink, record_parts: list[RecordPart] | None) -> OverflowCounts:
        """Read and cast the share of a tensor in this step range; return the overflows and underflows of the cast."""
        counts = OverflowCounts()
        if grid.nbytes:
            stream_cast(
                self._reader, step.source, self._source_region(step), step.target.dtype, sink, record_parts, counts
            )
        return counts

    def _source_region(self, step: CopyStep) -> Region:
        shape, dim0_range = step.source.shape, self._step_range.dim0_range
        if dim0_range is None:
            return full_region(shape)
        return Region((dim0_range[0],) + (0,) * (len(shape) - 1), (dim0_range[1] - dim0_range[0], *shape[1:]))

    def _open_blocks(self, step: CopyStep, sharding: _StepSharding, grid: Grid) -> dict[int, BlockWriter]:
        """Return index of the block -> its writer, for each block with bytes in this step range.

        Write the frame head of each block that starts in the step range, and complete blocks without elements.
        """
        positions = list(self._block_positions(step))
        writers = {}
        for cell in grid.cells:
            name, offset = positions[cell.block]
            frame, nbytes = sharding.frames[cell.block], cell.nbytes
            position = offset + (len(frame.head) if frame is not None else 0) + cell.offset_in_block
            file_writer = self._open_file_writer(name, position if cell.offset_in_block else offset)
            if frame is not None and not cell.offset_in_block:
                file_writer.write(frame.head)
            writer = writers[cell.block] = BlockWriter(
                file_writer, position, cell.offset_in_block, nbytes, frame, not sharding.is_whole
            )
            if not nbytes:
                self.finish_block(writer)
        return writers

    def finish_block(self, writer: BlockWriter) -> None:
        """Write the frame tail of a complete block, except of a tensor that several workers copy.

        The last of these workers writes the tails of such a tensor, see `_merge_share`.
        """
        if writer.frame is not None and self._split_tensor is None:
            tail = writer.frame.build_tail(writer.crc)
            writer.out.write(tail)
            writer.position += len(tail)

    def _copy_small(self, step: CopyStep, sharding: _StepSharding) -> bool:
        """Copy a tensor that fits into the buffer with few calls; return False if `_stream` has to copy it."""
        source, target, small = step.source, step.target, sharding.small
        if small is None or small.max_block_nbytes > self._buffer_nbytes or target.dtype is not source.dtype:
            return False
        copied = self._small_tensor_copier.copy(target, source, small, sharding.is_whole)
        if copied is None:
            return False
        leaf, hashes, block_ends = copied
        self._context.digests[target.name] = tree_digest([leaf]).hex()
        self._unjournaled.append((block_ends, leaf + hashes))
        return True

    def _finish(
        self,
        step: CopyStep,
        sharding: _StepSharding,
        writers: dict[int, BlockWriter],
        tree: TreeDigest,
        record_parts: list[RecordPart] | None,
    ) -> None:
        """Record the digests of a tensor, or of its part in this step range, which is in buffers or written."""
        journal_entry = b"".join(tree.leaves) or leaf_digest(b"")
        journal_entry += b"".join([block.to_journal_entry() for block in writers.values()])
        self._unjournaled.append(([(block.out, block.position) for block in writers.values()], journal_entry))
        if record_parts is None:
            self._context.digests[step.target.name] = tree.digest().hex()
        else:
            block_parts = [
                (index, ChecksumPart(block.offset_in_block, block.nbytes, block.crc))
                for index, block in writers.items()
            ]
            self._merge_share(step, sharding, tree.leaves, block_parts, record_parts)

    def _merge_share(
        self,
        step: CopyStep,
        sharding: _StepSharding,
        leaves: list[bytes],
        block_parts: list[tuple[int, ChecksumPart]],
        record_parts: list[RecordPart],
    ) -> None:
        """Add the results for the part of the tensor in this step range to those of the other workers.

        The last worker checks the CRC-32 of source records that were read in parts, and writes the frame tails.

        Raises:
            InputError: The CRC-32 of a record of the source does not match.
        """
        split_tensor, dim0_range = self._split_tensor, self._step_range.dim0_range
        assert split_tensor is not None and dim0_range is not None
        first_leaf = dim0_range[0] * (step.target.nbytes // step.target.shape[0]) // digest.LEAF_NBYTES
        if not split_tensor.add(enumerate(leaves, first_leaf), block_parts, record_parts):
            return
        for (file, record), parts in split_tensor.records.items():
            total = join_parts(parts)
            if total.nbytes == record.nbytes and total.crc != record.crc:
                raise self._reader.crc_error(step.source.name, file, record, total.crc)
        for index, (name, offset) in enumerate(self._block_positions(step)):
            frame = sharding.frames[index]
            if frame is not None:
                tail = frame.build_tail(join_parts(split_tensor.blocks[index]).crc)
                self._on_write(len(tail))
                self._target_file(name).write(tail, offset + len(frame.head) + sharding.block_nbytes[index])
        self._context.digests[step.target.name] = tree_digest(
            split_tensor.leaves[index] for index in sorted(split_tensor.leaves)
        ).hex()

    # ------------------------------------------------------------------------------------------------------- journal

    def _write_journal(self) -> None:
        """Add to the journal, in order, the entries of steps whose blocks are completely written."""
        entries = b""
        while self._unjournaled and not _is_buffered(self._unjournaled[0][0]):
            entries += self._unjournaled.popleft()[1]
        if entries:
            self._journal.write(entries, self._journal_position)
            self._journal_position += len(entries)

    def _count_finished_steps(self, steps: tuple[CopyStep, ...]) -> tuple[int, int]:
        """Return the number of first steps that need not be copied again, and the length of their journal entries.

        An interrupted run finished these steps, and target and source still match their journal entries. The source is
        read again for this, because names, sizes and times do not show whether it was rewritten in place.
        """
        journal = self._journal.read(min(self._journal.size, _MAX_JOURNAL_NBYTES), 0)
        position = 0
        for number, step in enumerate(steps):
            if self._context.stop_event.is_set():
                raise Cancelled
            sharding = self._find_sharding(step)
            grid = self._grid_share(step, sharding)
            leaf_count = max(1, -(-grid.nbytes // digest.LEAF_NBYTES))
            hash_count = 0 if sharding.is_whole else len(grid.cells)
            entry_nbytes = leaf_count * _LEAF_DIGEST_NBYTES + hash_count * HASH_NBYTES
            journal_entry = journal[position : position + entry_nbytes]
            is_complete = len(journal_entry) == entry_nbytes
            if not is_complete or not self._is_already_copied(step, sharding, grid, journal_entry):
                return number, position
            position += entry_nbytes
        return len(steps), position

    def _is_already_copied(self, step: CopyStep, sharding: _StepSharding, grid: Grid, journal_entry: bytes) -> bool:
        """Return True if the blocks in the target match the journal and the source still has these bytes.

        The results of the step are then recorded as if this run had copied it.
        """
        leaves_nbytes = max(1, -(-grid.nbytes // digest.LEAF_NBYTES)) * _LEAF_DIGEST_NBYTES
        leaves = [journal_entry[at : at + _LEAF_DIGEST_NBYTES] for at in range(0, leaves_nbytes, _LEAF_DIGEST_NBYTES)]
        if not grid.nbytes:
            leaves = []
        hashes = b""
        positions = list(self._block_positions(step))
        block_parts = []
        for cell in grid.cells:
            name, offset = positions[cell.block]
            file = self._target_file(name)
            frame = sharding.frames[cell.block]
            start = offset + (len(frame.head) if frame is not None else 0) + cell.offset_in_block
            target_leaves, block_hash, crc = self._digest_target(file, start, cell.nbytes)
            if sharding.is_whole and target_leaves != leaves:
                return False
            if not sharding.is_whole:
                hashes += block_hash if frame is None else encode_crc(crc)
            if frame is not None and not cell.offset_in_block and file.read(len(frame.head), offset) != frame.head:
                return False
            if frame is not None and self._split_tensor is None:
                tail = frame.build_tail(crc)
                if file.read(len(tail), start + cell.nbytes) != tail:
                    return False
            block_parts.append((cell.block, ChecksumPart(cell.offset_in_block, cell.nbytes, crc)))
        if hashes != journal_entry[leaves_nbytes:]:
            return False
        record_parts: list[RecordPart] = []
        source_sink = DigestSink(grid.nbytes, self._buffers.get(0))
        counts = self._stream(step, grid, source_sink, None if self._split_tensor is None else record_parts)
        if source_sink.digest.leaves != leaves:
            return False
        self._context.overflow_counts.add(step.target.name, counts)
        if self._split_tensor is None:
            self._context.digests[step.target.name] = tree_digest(leaves).hex()
        else:
            self._merge_share(step, sharding, leaves, block_parts, record_parts)
        return True

    def _digest_target(self, file: OutputFile, start: int, nbytes: int) -> tuple[list[bytes], bytes, int]:
        """Return leaf digests, hash and CRC-32 of `nbytes` bytes of the target, or of fewer if the file is shorter."""
        tree, hasher, crc, nbytes_read = TreeDigest(), BlockHasher(), 0, 0
        buffer = self._buffers.get(0)
        while nbytes_read < nbytes:
            view = buffer[: min(BUFFER_NBYTES, nbytes - nbytes_read)]
            if file.read_into(view, start + nbytes_read) != len(view):
                break
            crc = crc32(view, crc)
            hasher.update(view)
            nbytes_read += len(view)
            tree.update(view, is_last=nbytes_read == nbytes)
        return tree.leaves, hasher.digest(), crc
