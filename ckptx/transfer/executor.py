"""The only code that moves bytes.

Each worker thread takes runs of blocks and passes over them front to back with one buffer of 1 MiB: it is filled from
the source, checksummed while in cache, and written with one call at a multiple of its size. Results depend on the plan
alone, never on the number of workers or their timing.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ckptx.storage import FilePool, create, write_at
from ckptx.transfer.digest import LEAF, TreeDigest, crc32, leaf_digest, tree_digest
from ckptx.transfer.plan import CopyPlan, Item, Run, TargetFile
from ckptx.transfer.sinks import stream_as
from ckptx.transfer.stream import TensorReader

BLOCK = 1 << 20
_DIGEST_BYTES = 16


class Cancelled(Exception):
    """Another worker failed, or the run was interrupted."""


@dataclass(slots=True)
class Outcome:
    """What a copy found out on its way.

    Attributes:
        digests: Digest of each block by target name; one per tensor when tensors are not cut.
        file_digests: Digest of each target file by name.
        bytes_read: Bytes read from the source.
        bytes_written: Bytes written; less than planned when a run was resumed.
        unrecorded: Source records whose writer left no CRC.
    """

    digests: dict[str, str] = field(default_factory=dict)
    file_digests: dict[str, str] = field(default_factory=dict)
    bytes_read: int = 0
    bytes_written: int = 0
    unrecorded: int = 0


def execute(
    plan: CopyPlan,
    source: FilePool,
    tree: Path,
    journal: Path,
    *,
    workers: int,
    max_memory: int,
    on_progress: Callable[[int], None] = lambda nbytes: None,
) -> Outcome:
    """Writes the files of `plan` below `tree`.

    Args:
        plan: What to copy.
        source: Files of the source.
        tree: Where the target files go.
        journal: Directory that remembers finished blocks; blocks it names are checked and not copied again.
        workers: Number of threads.
        max_memory: Bytes of buffers in flight, all workers together.
        on_progress: Called by the calling thread now and then with the bytes written so far.

    Raises:
        InputError: The source turned out to be corrupt.
        SpaceError: The disk is full.
        OutputError: The target cannot be written.
    """
    return _Copy(plan, source, tree, journal, workers, max_memory).run(on_progress)


class _Copy:
    """One execution: the queue, the threads, what they found."""

    def __init__(
        self, plan: CopyPlan, source: FilePool, tree: Path, journal: Path, workers: int, max_memory: int
    ) -> None:
        self.plan, self.source, self.tree, self.journal = plan, source, tree, journal
        self.queue = deque(plan.runs())
        self.workers = max(1, min(workers, len(self.queue)))
        self.memory_each = max_memory // self.workers
        self.outcome = Outcome()
        self.leaves: list[dict[int, bytes]] = [{} for _ in plan.files]
        self.descriptors: list[int] = []
        self.errors: list[BaseException] = []
        self.stop = threading.Event()
        self.written = [0] * self.workers
        self._lock = threading.Lock()

    def run(self, on_progress: Callable[[int], None]) -> Outcome:
        try:
            self.descriptors.extend(create(self.tree / file.name) for file in self.plan.files)
            threads = [threading.Thread(target=self._work, args=(i,), daemon=True) for i in range(self.workers)]
            for thread in threads:
                thread.start()
            try:
                for thread in threads:
                    while thread.is_alive():
                        thread.join(0.1)
                        on_progress(sum(self.written))
                on_progress(sum(self.written))
            except BaseException:
                self.stop.set()
                for thread in threads:
                    thread.join()
                raise
            if self.errors:
                raise self.errors[0]
            self._digest_files()
        finally:
            for descriptor in self.descriptors:
                os.close(descriptor)
        self.outcome.bytes_written = sum(self.written)
        return self.outcome

    def _work(self, worker: int) -> None:
        reader = TensorReader(self.source, self.memory_each)
        block = memoryview(mmap.mmap(-1, BLOCK))
        try:
            while not self.stop.is_set():
                try:
                    run = self.queue.popleft()
                except IndexError:
                    break
                _Pass(self, run, reader, block, worker).run()
        except Cancelled:
            pass
        except BaseException as error:  # handed to the calling thread, which raises it
            self.errors.append(error)
            self.stop.set()
        with self._lock:
            self.outcome.bytes_read += reader.bytes_read
            self.outcome.unrecorded += reader.unrecorded

    def _digest_files(self) -> None:
        """Joins the digests of file blocks; blocks that straddle two runs are read back, they are in the page cache."""
        buffer = bytearray(LEAF)
        for file, leaves, descriptor in zip(self.plan.files, self.leaves, self.descriptors, strict=True):
            os.ftruncate(descriptor, file.nbytes)
            count = -(-file.nbytes // LEAF)
            for index in range(count):
                if index not in leaves:
                    view = memoryview(buffer)[: min(LEAF, file.nbytes - index * LEAF)]
                    os.preadv(descriptor, [view], index * LEAF)
                    leaves[index] = leaf_digest(view)
            self.outcome.file_digests[file.name] = tree_digest(leaves[index] for index in range(count)).hex()


class _Pass:
    """One pass over a run. It is the sink of its reader: memory it hands out is the buffer that is written next."""

    def __init__(self, copy: _Copy, run: Run, reader: TensorReader, block: memoryview, worker: int) -> None:
        file: TargetFile = copy.plan.files[run.file]
        self.copy, self.reader, self.block, self.worker = copy, reader, block, worker
        self.path = copy.tree / file.name
        self.descriptor = copy.descriptors[run.file]
        self.leaves = copy.leaves[run.file]
        self.items = file.items[run.first : run.stop]
        self.prologue = file.prologue if run.first == 0 else b""
        self.begin = self.position = 0 if run.first == 0 else self.items[0].offset
        self.fill = 0  # bytes in the buffer; `position` is where they go
        self.file_digest: TreeDigest | None = None
        self.file_nbytes = file.nbytes
        self.item_digest = TreeDigest()
        self.item_left = 0
        self.item_crc = 0
        self.want_crc = False
        self.finished: deque[tuple[int, bytes]] = deque()  # (end, digest) of items still in the buffer
        self.journal_path = copy.journal / f"{run.file:05d}-{run.first:07d}"

    def run(self) -> None:
        done = self._resume()
        journal = create(self.journal_path)
        self.journal, self.journal_at = journal, done * _DIGEST_BYTES
        try:
            if done == 0:
                self._raw(self.prologue)
            else:
                self.position = self.items[done - 1].end
            for item in self.items[done:]:
                self._copy_item(item)
            if self.fill:
                self._flush()
        finally:
            os.close(journal)

    def _copy_item(self, item: Item) -> None:
        frame = item.frame
        if frame is not None:
            self._raw(frame.head)
        if 0 < item.nbytes <= BLOCK - (self.position + self.fill) % BLOCK and self._copy_at_once(item):
            return
        self.item_digest = TreeDigest()
        self.item_left, self.item_crc, self.want_crc = item.nbytes, 0, frame is not None
        stream_as(self.reader, item.source, item.region, item.dtype, self)
        assert self.item_left == 0, f"{item.name}: {self.item_left} bytes were not produced"
        if frame is not None:
            self._raw(frame.tail(self.item_crc))
        self._finish_item(item, self.item_digest.digest())

    def _copy_at_once(self, item: Item) -> bool:
        """Copies a block that is one piece in the source and fits into the buffer; False when it is not one piece.

        What `_copy_item` does in general, in a third of the time: in a checkpoint of many small tensors the calls
        cost more than the bytes.
        """
        view = self.block[self.fill : self.fill + item.nbytes]
        if item.dtype is not item.source.dtype or not self.reader.read_at_once(item.source, item.region, view):
            return False
        digest = tree_digest([leaf_digest(view)])
        crc = crc32(view) if item.frame is not None else 0
        self._advance(item.nbytes)
        if item.frame is not None:
            self._raw(item.frame.tail(crc))
        self._finish_item(item, digest)
        return True

    def _finish_item(self, item: Item, digest: bytes) -> None:
        self.copy.outcome.digests[item.name] = digest.hex()
        self.finished.append((self.position + self.fill, digest))

    def space(self, nbytes: int) -> memoryview:
        """Part of the buffer: at most `nbytes`, and not across a block of the tensor's digest."""
        room = BLOCK - (self.position + self.fill) % BLOCK
        return self.block[self.fill : self.fill + min(nbytes, room, self.item_digest.room)]

    def commit(self, view: memoryview) -> None:
        nbytes = len(view)
        if self.want_crc:
            self.item_crc = crc32(view, self.item_crc)
        self.item_left -= nbytes
        self.item_digest.update(view, last=not self.item_left)
        self._advance(nbytes)

    def _raw(self, data: bytes) -> None:
        """Adds bytes that belong to the file alone: a header, a frame."""
        at = 0
        while at < len(data):
            nbytes = min(len(data) - at, BLOCK - (self.position + self.fill) % BLOCK)
            self.block[self.fill : self.fill + nbytes] = data[at : at + nbytes]
            at += nbytes
            self._advance(nbytes)

    def _advance(self, nbytes: int) -> None:
        self.fill += nbytes
        if (self.position + self.fill) % BLOCK == 0:
            self._flush()

    def _flush(self) -> None:
        if self.copy.stop.is_set():
            raise Cancelled
        view = self.block[: self.fill]
        self._digest_file(view)
        write_at(self.descriptor, view, self.position, self.path)
        self.position += self.fill
        self.copy.written[self.worker] += self.fill
        self.fill = 0
        done = b""
        while self.finished and self.finished[0][0] <= self.position:
            done += self.finished.popleft()[1]
        if done:
            write_at(self.journal, done, self.journal_at, self.journal_path)
            self.journal_at += len(done)

    def _digest_file(self, view: memoryview) -> None:
        """Digests blocks of the file that lie wholly inside this pass; `_digest_files` reads the others back."""
        if self.position % LEAF == 0:
            self.file_digest = TreeDigest()
        if self.file_digest is None:
            return
        end = self.position + len(view)
        self.file_digest.update(view, last=end == self.file_nbytes)
        if end % LEAF == 0 or end == self.file_nbytes:
            self.leaves[(end - 1) // LEAF] = self.file_digest.leaves[-1]
            self.file_digest = None

    def _resume(self) -> int:
        """Number of items that an interrupted run finished: those whose bytes on disk still have their digest."""
        if not self.journal_path.exists():
            return 0
        recorded = self.journal_path.read_bytes()
        if os.pread(self.descriptor, len(self.prologue), 0) != self.prologue:
            return 0
        for index, item in enumerate(self.items[: len(recorded) // _DIGEST_BYTES]):
            digest = self._digest_on_disk(item)
            if digest is None or digest != recorded[index * _DIGEST_BYTES : (index + 1) * _DIGEST_BYTES]:
                return index
            self.copy.outcome.digests[item.name] = digest.hex()
        return min(len(recorded) // _DIGEST_BYTES, len(self.items))

    def _digest_on_disk(self, item: Item) -> bytes | None:
        """The digest of a finished block as it lies in the target, or None when its frame is not whole."""
        head = item.frame.head if item.frame else b""
        start = item.offset + len(head)
        digest, crc, at = TreeDigest(), 0, 0
        while at < item.nbytes:
            view = self.block[: min(BLOCK, item.nbytes - at)]
            if os.preadv(self.descriptor, [view], start + at) != len(view):
                return None
            crc = crc32(view, crc)
            at += len(view)
            digest.update(view, last=at == item.nbytes)
        if item.frame is not None:
            tail = item.frame.tail(crc)
            whole = os.pread(self.descriptor, len(head), item.offset) == head
            if not whole or os.pread(self.descriptor, len(tail), start + item.nbytes) != tail:
                return None
        return digest.digest()
