"""Pass of one worker over a run: read each tensor once, in row-major order, and fill its blocks.

A block with long rows is read directly into the buffer that is written next. Short rows are read into a tile first and
copied out of it in memory, because a system call per row of a narrow shard would cost more than its bytes.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Event
from typing import NamedTuple

from ckptx.catalog.dtype import DType
from ckptx.catalog.entry import Frame, ShardedChunks
from ckptx.catalog.object_ids import ObjectIds
from ckptx.catalog.region import Region, Shape, whole
from ckptx.storage.interface import OutputFile, OutputTree
from ckptx.transfer import digest
from ckptx.transfer.block_writers import BlockWriter, Direct, Tiles
from ckptx.transfer.cast_losses import CastLosses, LossesByTensor
from ckptx.transfer.digest import TreeDigest, block_digest, crc32, leaf_digest, tree_digest
from ckptx.transfer.digest_sink import DigestSink, stream_as
from ckptx.transfer.grid import Grid, grid_of
from ckptx.transfer.outfile import FileDigests, OutFile
from ckptx.transfer.plan import CopyPlan, CopyStep, StepRange
from ckptx.transfer.small_tensors import HASH_NBYTES, SmallCopies, SmallSharding, crc_note, small_sharding
from ckptx.transfer.split_tensor import ChecksumPart, RecordPart, SplitTensor, joined
from ckptx.transfer.stream import Sink, TensorReader

BLOCK = 1 << 20
_LEAST_BLOCK = 64 << 10
# Buffers of all files of a group together; they should still be in the cache when they are written.
_GROUP_BUFFERS = 4 << 20
_DIRECT = 64 << 10  # bytes per row of a block from which one system call per row pays off

_LEAF_NBYTES = 16  # bytes per digest in the journal
_MAX_JOURNAL = 64 << 20  # bytes per run; entries beyond are ignored, and their tensors are copied again


class Cancelled(Exception):
    """Another worker failed, or the run was interrupted."""


@dataclass(frozen=True, slots=True)
class CopyContext:
    """State that the passes of one copy share; they add their results to the dicts and lists.

    Attributes:
        plan: Copy plan.
        tree: Directory of the target files.
        journal: Directory of the journals of finished tensors.
        resumed: True if files and journals of an interrupted run may exist.
        split: (group, step) of a large tensor -> results of the passes that copy parts of it.
        files: Target files by index in the plan.
        file_digests: Partial digests of target files by index in the plan.
        digests: Digest of each finished tensor by target name, in hex.
        losses: Numbers that casts made infinite or zero, by target name.
        written: Number of bytes written by each worker.
        stop: Set when a pass failed or the run is interrupted.
    """

    plan: CopyPlan
    tree: OutputTree
    journal: OutputTree
    resumed: bool
    split: dict[tuple[int, int], SplitTensor]
    files: dict[int, OutputFile]
    file_digests: dict[int, FileDigests]
    digests: dict[str, str]
    losses: LossesByTensor
    written: list[int]
    stop: Event


class Buffers:
    """Buffers of one worker, allocated on first use; untouched pages use no memory."""

    def __init__(self) -> None:
        self._made: dict[int, memoryview] = {}

    def get(self, index: int) -> memoryview:
        """Return buffer number `index`, of `BLOCK` bytes."""
        if index not in self._made:
            self._made[index] = memoryview(mmap.mmap(-1, BLOCK))
        return self._made[index]


class _StepSharding(NamedTuple):
    """Sharding of a tensor, shared by all tensors with the same blocks.

    `is_whole` is True if one block is the whole tensor; `small` is None unless the tensor fits into a buffer.
    """

    grid: Grid
    frames: tuple[Frame | None, ...]
    sizes: tuple[int, ...]
    has_replicas: bool
    is_whole: bool
    small: SmallSharding | None


def _is_buffered(ends: list[tuple[OutFile, int]]) -> bool:
    """Return True if a block that ends at one of these positions is not written yet."""
    for out, end in ends:  # noqa: SIM110 (any() takes thrice as long)
        if out.position < end and out.fill:
            return True
    return False


class CopyRun:
    """Pass of one worker over a run."""

    def __init__(self, copy: CopyContext, run: StepRange, reader: TensorReader, buffers: Buffers, worker: int) -> None:
        """Prepare the buffers; `run` copies."""
        self._copy, self._plan, self._reader, self._worker = copy, copy.plan, reader, worker
        self._run, self._buffers = run, buffers
        self._group = copy.plan.groups[run.group]
        self._numbers = {copy.plan.files[file].name: number for number, file in enumerate(self._group.files)}
        self._size = BLOCK
        while self._size > _LEAST_BLOCK and self._size * len(self._group.files) > _GROUP_BUFFERS:
            self._size //= 2
        self._outs: dict[str, OutFile] = {}
        self._small = SmallCopies(reader, buffers.get(0), self._outs, self._out)
        self._shardings: dict[tuple[int, DType, Shape, bool], _StepSharding] = {}
        self._ids = ObjectIds()
        self._shared = copy.split[run.group, run.first] if run.rows is not None else None
        self._finished: deque[tuple[list[tuple[OutFile, int]], bytes]] = deque()  # (file, end) of blocks, digests
        share = "" if run.rows is None else f"-{run.rows[0]}"
        self._journal_name = f"{run.group:05d}-{run.first:07d}{share}"

    def run(self) -> None:
        """Copy the tensors that an interrupted run did not finish."""
        steps = self._group.steps[self._run.first : self._run.stop]
        self._journal = self._copy.journal.open_output(self._journal_name, None, keep=self._copy.resumed)
        try:
            done, self._journal_at = self._resume(steps)
            if self._run.first == 0 and self._run.rows is None:
                self._write_prologues(fresh=not done)
            for step in steps[done:]:
                self._copy_step(step)
            for out in self._outs.values():
                out.leave()
            self._note_finished()
        finally:
            self._journal.close()

    # ------------------------------------------------------------------------------------------------------- files

    def _file(self, name: str) -> OutputFile:
        return self._copy.files[self._group.files[self._numbers[name]]]

    def _out(self, name: str, position: int) -> OutFile:
        """Return the file `name`, positioned at `position`."""
        out = self._outs.get(name)
        if out is not None:
            out.seek(position)
            return out
        number = self._numbers[name]
        file = self._group.files[number]
        out = self._outs[name] = OutFile(
            self._copy.files[file],
            self._plan.files[file].nbytes,
            self._buffers.get(number + 1)[: self._size],
            self._copy.file_digests[file],
            self._on_write,
            position,
        )
        return out

    def _on_write(self, nbytes: int) -> None:
        if self._copy.stop.is_set():
            raise Cancelled
        self._copy.written[self._worker] += nbytes
        if self._finished:
            self._note_finished()

    def _write_prologues(self, fresh: bool) -> None:
        for file in self._group.files:
            name, prologue = self._plan.files[file].name, self._plan.files[file].prologue
            if prologue and fresh:
                self._out(name, 0).write(prologue)
            elif prologue:
                self._copy.files[file].write(prologue, 0)

    # ------------------------------------------------------------------------------------------------------- tensors

    def _sharding_of(self, step: CopyStep) -> _StepSharding:
        chunks = step.target.chunks
        blocks = chunks.blocks if type(chunks) is ShardedChunks else None
        if blocks is None and len(chunks) > 1:
            return self._make_sharding(step, [chunk.region for chunk in chunks], False)
        # A single chunk is always the whole tensor.
        key = (self._ids(blocks), step.target.dtype, step.target.shape, step.framed)
        sharding = self._shardings.get(key)
        if sharding is None:
            regions = [whole(step.target.shape)] if blocks is None else [block.region for block in blocks]
            replicas = blocks is not None and any(block.replica for block in blocks)
            sharding = self._shardings[key] = self._make_sharding(step, regions, replicas)
        return sharding

    def _make_sharding(self, step: CopyStep, regions: list[Region], has_replicas: bool) -> _StepSharding:
        dtype, shape = step.target.dtype, step.target.shape
        frame_of = self._plan.frame_of if step.framed else None
        frames = tuple([frame_of(dtype, region.sizes) if frame_of else None for region in regions])
        sizes = tuple([dtype.nbytes(region.numel) for region in regions])
        is_whole = len(regions) == 1 and regions[0].sizes == shape
        grid = grid_of(dtype, shape, regions)
        small = small_sharding(grid, frames) if 0 < grid.nbytes <= BLOCK // 2 else None
        return _StepSharding(grid, frames, sizes, has_replicas, is_whole, small)

    def _places(self, step: CopyStep) -> Iterator[tuple[str, int]]:
        """Return file and offset of each block, including its frame."""
        chunks = step.target.chunks
        if type(chunks) is ShardedChunks:
            return zip(chunks.files, chunks.offsets, strict=True)
        return ((chunk.file, chunk.offset) for chunk in chunks)

    def _share(self, step: CopyStep, sharding: _StepSharding) -> Grid:
        """Return the part of the grid that belongs to this run."""
        rows = self._run.rows
        return sharding.grid if rows is None else sharding.grid.share(*rows, step.target.shape[0])

    def _copy_step(self, step: CopyStep) -> None:
        sharding = self._sharding_of(step)
        if self._shared is None and self._copy_small(step, sharding):
            return
        grid = self._share(step, sharding)
        blocks = self._open_blocks(step, sharding, grid)
        sink: Direct | Tiles
        if sharding.is_whole or (not sharding.has_replicas and grid.narrowest >= _DIRECT):
            sink = Direct(self.close, grid, blocks, None if sharding.is_whole else self._buffers.get(0))
        else:
            sink = Tiles(self.close, grid, blocks, self._buffers.get(0)[: self._size])
        records: list[RecordPart] | None = None if self._shared is None else []
        self._copy.losses.add(step.target.name, self._stream(step, grid, sink, records))
        for block in blocks.values():
            assert not block.left, f"{step.target.name}: {block.left} bytes were not produced"
        self._finish(step, sharding, blocks, sink.digest, records)

    def _stream(self, step: CopyStep, grid: Grid, sink: Sink, records: list[RecordPart] | None) -> CastLosses:
        """Read and cast the share of a tensor that belongs to this run; return the losses of the cast."""
        losses = CastLosses()
        if grid.nbytes:
            stream_as(self._reader, step.source, self._region(step), step.target.dtype, sink, records, losses)
        return losses

    def _region(self, step: CopyStep) -> Region:
        shape, rows = step.source.shape, self._run.rows
        if rows is None:
            return whole(shape)
        return Region((rows[0],) + (0,) * (len(shape) - 1), (rows[1] - rows[0], *shape[1:]))

    def _open_blocks(self, step: CopyStep, sharding: _StepSharding, grid: Grid) -> dict[int, BlockWriter]:
        """Return writers for the blocks that this run fills, after writing the head of each that starts here."""
        places = list(self._places(step))
        blocks = {}
        for cell in grid.cells:
            name, offset = places[cell.block]
            frame, nbytes = sharding.frames[cell.block], cell.nbytes
            at = offset + (len(frame.head) if frame is not None else 0) + cell.begin
            out = self._out(name, at if cell.begin else offset)
            if frame is not None and not cell.begin:
                out.write(frame.head)
            block = blocks[cell.block] = BlockWriter(out, at, cell.begin, nbytes, frame, not sharding.is_whole)
            if not nbytes:
                self.close(block)
        return blocks

    def close(self, block: BlockWriter) -> None:
        """Write the tail of a complete block; for a shared block, the last worker does that."""
        if block.frame is not None and self._shared is None:
            tail = block.frame.tail(block.crc)
            block.out.write(tail)
            block.at += len(tail)

    def _copy_small(self, step: CopyStep, sharding: _StepSharding) -> bool:
        """Copy a tensor that fits into the buffer; return False if it does not, or needs the general path."""
        source, target, small = step.source, step.target, sharding.small
        if small is None or small.largest > self._size or target.dtype is not source.dtype:
            return False
        copied = self._small.copy(target, source, small, sharding.is_whole)
        if copied is None:
            return False
        leaf, hashes, ends = copied
        self._copy.digests[target.name] = tree_digest([leaf]).hex()
        self._finished.append((ends, leaf + hashes))
        return True

    def _finish(
        self,
        step: CopyStep,
        sharding: _StepSharding,
        blocks: dict[int, BlockWriter],
        tree: TreeDigest,
        records: list[RecordPart] | None,
    ) -> None:
        """Record the results of a tensor, or of its share, once all of it is in buffers or written."""
        note = b"".join(tree.leaves) or leaf_digest(b"")
        note += b"".join([block.evidence() for block in blocks.values()])
        self._finished.append(([(block.out, block.at) for block in blocks.values()], note))
        if records is None:
            self._copy.digests[step.target.name] = tree.digest().hex()
        else:
            parts = [(index, ChecksumPart(block.begin, block.nbytes, block.crc)) for index, block in blocks.items()]
            self._join(step, sharding, tree.leaves, parts, records)

    def _join(
        self,
        step: CopyStep,
        sharding: _StepSharding,
        leaves: list[bytes],
        parts: list[tuple[int, ChecksumPart]],
        records: list[RecordPart],
    ) -> None:
        """Add the results of this share to those of the other workers; the last worker completes the blocks."""
        shared, rows = self._shared, self._run.rows
        assert shared is not None and rows is not None
        first = rows[0] * (step.target.nbytes // step.target.shape[0]) // digest.LEAF
        if not shared.add(enumerate(leaves, first), parts, records):
            return
        for (file, record), found in shared.records.items():
            total = joined(found)
            if total.nbytes == record.nbytes and total.crc != record.crc:
                raise self._reader.crc_error(step.source.name, file, record, total.crc)
        for index, (name, offset) in enumerate(self._places(step)):
            frame = sharding.frames[index]
            if frame is not None:
                tail = frame.tail(joined(shared.blocks[index]).crc)
                self._file(name).write(tail, offset + len(frame.head) + sharding.sizes[index])
                self._on_write(len(tail))
        self._copy.digests[step.target.name] = tree_digest(
            shared.leaves[index] for index in sorted(shared.leaves)
        ).hex()

    # ------------------------------------------------------------------------------------------------------- journal

    def _note_finished(self) -> None:
        """Record in the journal the tensors that are completely written."""
        done = b""
        while self._finished and not _is_buffered(self._finished[0][0]):
            done += self._finished.popleft()[1]
        if done:
            self._journal.write(done, self._journal_at)
            self._journal_at += len(done)

    def _resume(self, steps: tuple[CopyStep, ...]) -> tuple[int, int]:
        """Return the number of steps that an interrupted run finished and that still match their digests and the
        source, and the position at which the journal continues.

        The source is read again for this, because names, sizes and times do not show whether it was rewritten in place.
        """
        recorded = self._journal.read(min(self._journal.size, _MAX_JOURNAL), 0)
        at = 0
        for number, step in enumerate(steps):
            if self._copy.stop.is_set():
                raise Cancelled
            sharding = self._sharding_of(step)
            grid = self._share(step, sharding)
            count = max(1, -(-grid.nbytes // digest.LEAF))
            hashes = 0 if sharding.is_whole else len(grid.cells)
            note = recorded[at : at + count * _LEAF_NBYTES + hashes * HASH_NBYTES]
            if len(note) < count * _LEAF_NBYTES + hashes * HASH_NBYTES or not self._is_on_disk(
                step, sharding, grid, note
            ):
                return number, at
            at += len(note)
        return len(steps), at

    def _is_on_disk(self, step: CopyStep, sharding: _StepSharding, grid: Grid, note: bytes) -> bool:
        """Return True if the blocks in the target match the journal and the source still has these bytes.

        Their digests are then recorded as if they had been written.
        """
        count = max(1, -(-grid.nbytes // digest.LEAF)) * _LEAF_NBYTES
        leaves = [note[at : at + _LEAF_NBYTES] for at in range(0, count, _LEAF_NBYTES)]
        if not grid.nbytes:
            leaves = []
        hashes = b""
        places = list(self._places(step))
        parts = []
        for cell in grid.cells:
            name, offset = places[cell.block]
            file = self._file(name)
            frame = sharding.frames[cell.block]
            start = offset + (len(frame.head) if frame is not None else 0) + cell.begin
            tree, hashed, crc = self._read_back(file, start, cell.nbytes)
            if sharding.is_whole and tree != leaves:
                return False
            if not sharding.is_whole:
                hashes += hashed if frame is None else crc_note(crc)
            if frame is not None and not cell.begin and file.read(len(frame.head), offset) != frame.head:
                return False
            if frame is not None and self._shared is None:
                tail = frame.tail(crc)
                if file.read(len(tail), start + cell.nbytes) != tail:
                    return False
            parts.append((cell.block, ChecksumPart(cell.begin, cell.nbytes, crc)))
        if hashes != note[count:]:
            return False
        records: list[RecordPart] = []
        source = DigestSink(grid.nbytes, self._buffers.get(0))
        losses = self._stream(step, grid, source, None if self._shared is None else records)
        if source.digest.leaves != leaves:
            return False
        self._copy.losses.add(step.target.name, losses)
        if self._shared is None:
            self._copy.digests[step.target.name] = tree_digest(leaves).hex()
        else:
            self._join(step, sharding, leaves, parts, records)
        return True

    def _read_back(self, file: OutputFile, start: int, nbytes: int) -> tuple[list[bytes], bytes, int]:
        """Return block digests, hash and CRC-32 of bytes in the target, of fewer bytes if the file is shorter."""
        tree, hashed, crc, at = TreeDigest(), block_digest(), 0, 0
        buffer = self._buffers.get(0)
        while at < nbytes:
            view = buffer[: min(BLOCK, nbytes - at)]
            if file.read_into(view, start + at) != len(view):
                break
            crc = crc32(view, crc)
            hashed.update(view)
            at += len(view)
            tree.update(view, last=at == nbytes)
        return tree.leaves, hashed.digest(), crc
