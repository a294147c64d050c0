"""The only code that moves bytes.

Each worker thread takes runs of tensors and passes over them front to back: blocks of 1 MiB are filled from the source,
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

# Workers wait for the interpreter after each system call, at most so long; the default is as long as ten of them take.
_SWITCH = 0.0002  # seconds
_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class CopyResult:
    """What a copy found out on its way.

    Attributes:
        digests: Digest of each tensor by target name, of its logical bytes, however it is cut.
        file_digests: Digest of each target file by name.
        bytes_read: Bytes read from the source, those included that a resumed run only compares.
        bytes_written: Bytes written; less than planned when a run was resumed.
        unrecorded: Source records whose writer left no CRC.
        was_locked: False when the file system of the output knows no locks.
        was_complete: True when nothing was copied, as the files were there already.
        overflows: Finite numbers that a cast made infinite, by target name.
        underflows: Numbers other than zero that a cast made zero, by target name.
        peak_rss: Peak resident set size of the largest of the other processes that copied, in bytes.
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
        """Adds what another process found out about other files."""
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
    """Writes the files of `plan` below `tree`.

    Args:
        plan: What to copy.
        source: Files of the source.
        tree: Where the target files go; it keeps them open, to know them again.
        journal: Directory that remembers finished tensors; those it names are compared with the source and not
            written again.
        workers: Number of threads.
        max_memory: Bytes of buffers in flight, all workers together.
        resumed: Files and journal of an interrupted run may be there; otherwise a file that is there is refused.
        on_progress: Called by the calling thread now and then with the bytes written so far.
        groups: Indices of the groups to write; None writes all. The outcome is about these alone.

    Raises:
        InputError: The source turned out to be corrupt.
        SpaceError: The disk is full.
        OutputError: The target cannot be written.
    """
    return Copy(plan, source, tree, journal, workers, max_memory, resumed, groups).run(on_progress)


class Copy:
    """One execution: the queue, the threads, what they found."""

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
        chosen = range(len(plan.groups)) if groups is None else groups
        self.files = sorted(index for group in chosen for index in plan.groups[group].files)
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
        """Does it all; raises what the first failing worker raised."""
        patience = sys.getswitchinterval()
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
            except BaseException:  # workers are ended first; raised again
                self.stop.set()
                for thread in threads:
                    thread.join()
                raise
            if self.errors:
                raise self.errors[0]
            self._digest_files()
        finally:
            sys.setswitchinterval(patience)
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
        except BaseException as error:  # handed to the calling thread, which raises it
            self.errors.append(error)
            self.stop.set()
        with self._lock:
            self.outcome.bytes_read += reader.bytes_read
            self.outcome.unrecorded += reader.unrecorded

    def _digest_files(self) -> None:
        """Joins the digests of file blocks; what straddles two runs is read back, it is in the page cache."""
        missing: deque[tuple[int, int, int]] = deque()
        for index in self.files:
            nbytes = self.plan.files[index].nbytes
            found = self.targets[index].size
            if found != nbytes:
                raise self._cut_short(index, found)
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

    def _cut_short(self, index: int, found: int) -> OutputError:
        file = self.plan.files[index]
        return OutputError(
            f"{self.tree.path / file.name}: has {found} bytes, {file.nbytes} were written; somebody else works in the "
            "staging directory, nothing was published, run again"
        )

    def _read_back(self, missing: deque[tuple[int, int, int]]) -> None:
        """Digests the rest of blocks of files, until none is left: file, block, position to begin at."""
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
                        raise self._cut_short(index, at + got)
                    tree.update(view, last=at + len(view) == end)
                (digests.leaves[leaf],) = tree.leaves
        except BaseException as error:  # handed to the calling thread
            self.errors.append(error)


def _spans(plan: CopyPlan, run: StepRange) -> Iterator[tuple[str, int, int]]:
    """The chunks that a run reads: file, offset and number of bytes, in order."""
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
    """A meeting place for the workers that copy parts of one large tensor, by group and step."""
    counts: dict[tuple[int, int], int] = {}
    for run in runs:
        if run.rows is not None:
            counts[run.group, run.first] = counts.get((run.group, run.first), 0) + 1
    return {key: SplitTensor(count) for key, count in counts.items()}
