"""Executor of a copy plan, the only code that copies tensor data.

Each worker thread takes runs of tensors and copies them front to back: blocks of 1 MiB are filled from the source,
checksummed while in cache, and written to the files of the group. Results depend on the plan alone, never on the number
of workers or their timing.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from ckptx.catalog.region import Region, whole
from ckptx.errors import OutputError
from ckptx.storage.interface import OutputFile, OutputTree, SourceFiles
from ckptx.transfer import digest
from ckptx.transfer.cast_losses import LossesByTensor
from ckptx.transfer.copy_run import BLOCK, Buffers, Cancelled, CopyContext, CopyRun
from ckptx.transfer.digest import TreeDigest, tree_digest
from ckptx.transfer.outfile import FileDigests
from ckptx.transfer.plan import CopyPlan, StepRange
from ckptx.transfer.split_tensor import SplitTensor
from ckptx.transfer.stream import TensorReader

# Maximum wait of a worker for the interpreter after a system call; the default equals ten system calls.
_SWITCH = 0.0002  # seconds
_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class CopyResult:
    """Result of a copy.

    Attributes:
        digests: Digest of the row-major bytes of each tensor by target name, independent of its shards.
        file_digests: Digest of each target file by name.
        bytes_read: Number of bytes read from the source, including those that a resumed run only compares.
        bytes_written: Number of bytes written; less than planned if the run was resumed.
        unrecorded: Number of source records without a CRC.
        was_locked: False if the file system of the output has no locks.
        was_complete: True if nothing was copied because the files were already complete.
        overflows: Number of finite elements that a cast made infinite, by target name.
        underflows: Number of nonzero elements that a cast made zero, by target name.
        peak_rss: Peak resident set size in bytes, maximum over the other processes that copied; 0 for none.
    """

    digests: dict[str, str] = field(default_factory=dict)
    file_digests: dict[str, str] = field(default_factory=dict)
    bytes_read: int = 0
    bytes_written: int = 0
    unrecorded: int = 0
    was_locked: bool = True
    was_complete: bool = False
    overflows: dict[str, int] = field(default_factory=dict)
    underflows: dict[str, int] = field(default_factory=dict)
    peak_rss: int = 0

    def add(self, other: CopyResult) -> None:
        """Add the result of another process, which copied other files."""
        self.digests |= other.digests
        self.file_digests |= other.file_digests
        self.bytes_read += other.bytes_read
        self.bytes_written += other.bytes_written
        self.unrecorded += other.unrecorded
        self.overflows |= other.overflows
        self.underflows |= other.underflows


def execute(
    plan: CopyPlan,
    source: SourceFiles,
    tree: OutputTree,
    journal: OutputTree,
    *,
    workers: int,
    max_memory: int,
    resumed: bool = False,
    on_progress: Callable[[int], None] = lambda nbytes: None,
    groups: Collection[int] | None = None,
) -> CopyResult:
    """Write the files of `plan` to `tree`.

    Args:
        plan: Copy plan.
        source: Files of the source.
        tree: Directory of the target files, which it keeps open to detect replaced files.
        journal: Directory of the journals of finished tensors; recorded tensors are compared with the source and not
            written again.
        workers: Number of threads.
        max_memory: Memory for I/O buffers of all workers together, in bytes.
        resumed: True if files and journals of an interrupted run may exist; False to refuse existing files.
        on_progress: Called regularly in the calling thread with the number of bytes written so far.
        groups: Indices of the groups to write; None for all. The result covers only these.

    Raises:
        InputError: The source is corrupt.
        SpaceError: The disk is full.
        OutputError: The target cannot be written.
    """
    return Copy(plan, source, tree, journal, workers, max_memory, resumed, groups).run(on_progress)


class Copy:
    """One execution of a plan, with its queue, threads and results."""

    def __init__(
        self,
        plan: CopyPlan,
        source: SourceFiles,
        tree: OutputTree,
        journal: OutputTree,
        workers: int,
        max_memory: int,
        resumed: bool,
        groups: Collection[int] | None,
    ) -> None:
        self.plan, self.source, self.tree, self.resumed = plan, source, tree, resumed
        runs = [run for run in plan.runs() if groups is None or run.group in groups]
        indices = range(len(plan.groups)) if groups is None else groups
        self.files = sorted(index for group in indices for index in plan.groups[group].files)
        self.queue = deque(runs)
        self.workers = max(1, min(workers, len(runs)))
        self.memory_each = max_memory // self.workers
        self.outcome = CopyResult()
        self.file_digests = {index: FileDigests() for index in self.files}
        self.targets: dict[int, OutputFile] = {}
        self.errors: list[BaseException] = []
        self.stop = threading.Event()
        self.written = [0] * self.workers
        self._lock = threading.Lock()
        self._losses = LossesByTensor()
        self._context = CopyContext(
            plan,
            tree,
            journal,
            resumed,
            _split_steps(runs),
            self.targets,
            self.file_digests,
            self.outcome.digests,
            self._losses,
            self.written,
            self.stop,
        )

    def run(self, on_progress: Callable[[int], None]) -> CopyResult:
        """Copy everything; raise the error of the first worker that failed."""
        interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH)
        try:
            for index in self.files:
                name, nbytes = self.plan.files[index].name, self.plan.files[index].nbytes
                self.targets[index] = self.tree.open_output(name, nbytes, keep=self.resumed)
            threads = [threading.Thread(target=self._work, args=(i,), daemon=True) for i in range(self.workers)]
            for thread in threads:
                thread.start()
            try:
                for thread in threads:
                    while thread.is_alive():
                        thread.join(0.1)
                        on_progress(sum(self.written))
                on_progress(sum(self.written))
            except BaseException:  # stop the workers first, then re-raise
                self.stop.set()
                for thread in threads:
                    thread.join()
                raise
            if self.errors:
                raise self.errors[0]
            self._digest_files()
        finally:
            sys.setswitchinterval(interval)
        self.outcome.bytes_written = sum(self.written)
        self.outcome.overflows, self.outcome.underflows = self._losses.overflows, self._losses.underflows
        return self.outcome

    def _work(self, worker: int) -> None:
        reader = TensorReader(self.source, self.memory_each)
        buffers = Buffers()
        try:
            while not self.stop.is_set():
                try:
                    run = self.queue.popleft()
                except IndexError:
                    break
                _logger.debug("worker %d: %s", worker, run)
                self.source.expect(_spans(self.plan, run))
                CopyRun(self._context, run, reader, buffers, worker).run()
        except Cancelled:
            pass
        except BaseException as error:  # re-raised in the calling thread
            self.errors.append(error)
            self.stop.set()
        with self._lock:
            self.outcome.bytes_read += reader.bytes_read
            self.outcome.unrecorded += reader.unrecorded

    def _digest_files(self) -> None:
        """Combine the digests of file blocks; blocks that span two runs are read back from the page cache."""
        missing: deque[tuple[int, int, int]] = deque()
        for index in self.files:
            nbytes = self.plan.files[index].nbytes
            found = self.targets[index].size
            if found != nbytes:
                raise self._size_error(index, found)
            missing += [(index, *each) for each in self.file_digests[index].missing(nbytes)]
        readers = [
            threading.Thread(target=self._read_back, args=(missing,), daemon=True)
            for _ in range(min(self.workers, len(missing)))
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        if self.errors:
            raise self.errors[0]
        for index in self.files:
            file, leaves = self.plan.files[index], self.file_digests[index].leaves
            self.outcome.file_digests[file.name] = tree_digest(leaves[leaf] for leaf in sorted(leaves)).hex()

    def _size_error(self, index: int, found: int) -> OutputError:
        file = self.plan.files[index]
        return OutputError(
            f"{self.tree.path / file.name}: has {found} bytes, but {file.nbytes} were written; another process changed "
            "the staging directory, nothing was published, run again"
        )

    def _read_back(self, missing: deque[tuple[int, int, int]]) -> None:
        """Digest the rest of the file blocks in the queue: file, block, first position."""
        buffer = memoryview(bytearray(BLOCK))
        try:
            while missing:
                try:
                    index, leaf, begin = missing.popleft()
                except IndexError:
                    return
                digests = self.file_digests[index]
                end = min((leaf + 1) * digest.LEAF, self.plan.files[index].nbytes)
                tree = digests.begun.get(begin) or TreeDigest()
                for at in range(begin, end, BLOCK):
                    view = buffer[: min(BLOCK, end - at)]
                    got = self.targets[index].read_into(view, at)
                    if got != len(view):
                        raise self._size_error(index, at + got)
                    tree.update(view, last=at + len(view) == end)
                (digests.leaves[leaf],) = tree.leaves
        except BaseException as error:  # re-raised in the calling thread
            self.errors.append(error)


def _spans(plan: CopyPlan, run: StepRange) -> Iterator[tuple[str, int, int]]:
    """Yield file, offset and number of bytes of the chunks that a run reads, in order."""
    for step in plan.groups[run.group].steps[run.first : run.stop]:
        entry = step.source
        region = whole(entry.shape)
        if run.rows is not None:
            first, stop = run.rows
            region = Region((first, *region.offsets[1:]), (stop - first, *region.sizes[1:]))
        for chunk in entry.chunks:
            if chunk.region.intersect(region) is not None:
                yield chunk.file, chunk.offset, chunk.nbytes


def _split_steps(runs: list[StepRange]) -> dict[tuple[int, int], SplitTensor]:
    """Create the shared results of each tensor that several workers copy, by group and step."""
    counts: dict[tuple[int, int], int] = {}
    for run in runs:
        if run.rows is not None:
            counts[run.group, run.first] = counts.get((run.group, run.first), 0) + 1
    return {key: SplitTensor(count) for key, count in counts.items()}
