"""Executor of a copy plan, the only code that copies tensor data.

Each worker thread takes ranges of steps and copies their tensors front to back: buffers of at most 1 MiB are filled
from the source, checksummed while in cache, and written to the files of their file group. Results depend on the plan
alone, never on the number of workers or their timing.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from ckptx.catalog.region import Region, full_region
from ckptx.errors import OutputError
from ckptx.processes.threads import run_threads, short_switch_interval
from ckptx.storage.interface import OutputFile, OutputTree, SourceFiles
from ckptx.transfer import digest
from ckptx.transfer.digest import TreeDigest, tree_digest
from ckptx.transfer.output_file import FileDigests
from ckptx.transfer.overflow_counts import OverflowCountsByTensor
from ckptx.transfer.plan import CopyPlan, StepRange
from ckptx.transfer.split_tensor import SplitTensor
from ckptx.transfer.step_range_copier import BUFFER_NBYTES, Buffers, Cancelled, CopyContext, StepRangeCopier
from ckptx.transfer.stream import CheckedRecords, TensorReader, strided_row_nbytes

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class CopyResult:
    """Result of a copy.

    Attributes:
        digests: Digest of the row-major bytes of each tensor or pickled object, in hex, by target name; it does not
            depend on how the tensor is sharded.
        file_digests: Digest of each target file, in hex, by name.
        bytes_read: Number of bytes read from the source, including those that a resumed run only compares.
        bytes_written: Number of bytes written; less than planned if the run was resumed.
        records_without_crc: Number of archive records of the source without a CRC-32, which could not be checked.
        was_locked: False if the file system of the output has no locks.
        leftover: Path of the staging directory if it could not be removed; "" if it was.
        was_complete: True if nothing was copied because the files were already complete.
        overflows: Number of finite elements that a cast made infinite, by target name.
        underflows: Number of nonzero elements that a cast made zero, by target name.
        peak_rss: Peak resident set size in bytes, maximum over the other processes that copied; 0 for none.
        restart_reason: Reason why `--resume` discarded the output of an interrupted run; "" if it did not.
    """

    digests: dict[str, str] = field(default_factory=dict)
    file_digests: dict[str, str] = field(default_factory=dict)
    bytes_read: int = 0
    bytes_written: int = 0
    records_without_crc: int = 0
    was_locked: bool = True
    leftover: str = ""
    was_complete: bool = False
    overflows: dict[str, int] = field(default_factory=dict)
    underflows: dict[str, int] = field(default_factory=dict)
    peak_rss: int = 0
    restart_reason: str = ""

    def add(self, other: CopyResult) -> None:
        """Add the digests and counts of another process, which copied other files.

        The other attributes, which describe the whole copy, do not change.
        """
        self.digests |= other.digests
        self.file_digests |= other.file_digests
        self.bytes_read += other.bytes_read
        self.bytes_written += other.bytes_written
        self.records_without_crc += other.records_without_crc
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
    group_indices: Collection[int] | None = None,
) -> CopyResult:
    """Write the files of `plan` to `tree`.

    Args:
        plan: Copy plan.
        source: Files of the source.
        tree: Directory of the target files, which it keeps open to detect replaced files.
        journal: Directory of the journals of finished tensors. With `resumed`, recorded tensors that are still equal in
            source and target are not written again.
        workers: Number of threads.
        max_memory: Limit for the buffers of strided reads of all workers together, in bytes; the other buffers have
            fixed sizes.
        resumed: True if files and journals of an interrupted run may exist; False to refuse existing files.
        on_progress: Called regularly in the calling thread with the number of bytes written so far.
        group_indices: Indices in the plan of the file groups to write; None for all. The result covers only these.

    Raises:
        InputError: The source is corrupt.
        UnsupportedError: A strided tensor cannot be read within `max_memory`.
        SpaceError: The disk is full.
        OutputError: The target cannot be written.
    """
    return CopyExecution(plan, source, tree, journal, workers, max_memory, resumed, group_indices).run(on_progress)


class CopyExecution:
    """One execution of a plan, with its queue, threads and results.

    Attributes:
        plan: Copy plan.
        source: Files of the source.
        tree: Directory of the target files.
        resumed: True if files and journals of an interrupted run may exist.
        files: Indices in the plan of the files to write, sorted.
        queue: Step ranges that no worker has taken yet.
        workers: Number of threads, at most as many as `max_memory` allows to read tensors that are not row-major.
        memory_per_worker: Limit for the buffers of strided reads of one worker, in bytes.
        result: Result, complete after `run`.
        file_digests: Digests of the leaves of each target file, by index in the plan.
        target_files: Open target files, by index in the plan.
        errors: Exceptions of the workers; `run` raises the first.
        stop_event: Set when a worker failed or the run is interrupted.
        bytes_written: Number of bytes written by each worker, by index of the worker.
    """

    def __init__(
        self,
        plan: CopyPlan,
        source: SourceFiles,
        tree: OutputTree,
        journal: OutputTree,
        workers: int,
        max_memory: int,
        resumed: bool,
        group_indices: Collection[int] | None,
    ) -> None:
        self.plan, self.source, self.tree, self.resumed = plan, source, tree, resumed
        step_ranges = [
            each for each in plan.step_ranges() if group_indices is None or each.group_index in group_indices
        ]
        indices = range(len(plan.file_groups)) if group_indices is None else group_indices
        self.files = sorted(index for group in indices for index in plan.file_groups[group].files)
        self.queue = deque(step_ranges)
        largest_row = max((strided_row_nbytes(step.source) for step in plan.steps()), default=0)
        workers_in_memory = max_memory // largest_row if largest_row else workers
        self.workers = max(1, min(workers, len(step_ranges), workers_in_memory))
        self.memory_per_worker = max_memory // self.workers
        self.result = CopyResult()
        self.file_digests = {index: FileDigests() for index in self.files}
        self.target_files: dict[int, OutputFile] = {}
        self.errors: list[BaseException] = []
        self._checked_records = CheckedRecords()
        self.stop_event = threading.Event()
        self.bytes_written = [0] * self.workers
        self._lock = threading.Lock()
        self._overflow_counts = OverflowCountsByTensor()
        self._context = CopyContext(
            plan,
            tree,
            journal,
            resumed,
            _create_split_tensors(step_ranges),
            self.target_files,
            self.file_digests,
            self.result.digests,
            self._overflow_counts,
            self.bytes_written,
            self.stop_event,
        )

    def run(self, on_progress: Callable[[int], None]) -> CopyResult:
        """Copy everything; raise the error of the first worker that failed."""
        with short_switch_interval():
            for index in self.files:
                name, nbytes = self.plan.files[index].name, self.plan.files[index].nbytes
                self.target_files[index] = self.tree.open_output(name, nbytes, keep=self.resumed)

            def report_progress() -> None:
                on_progress(sum(self.bytes_written))

            run_threads(self._work, self.workers, stop=self.stop_event.set, on_wait=report_progress)
            report_progress()
            if self.errors:
                raise self.errors[0]
            self._digest_files()
        self.result.bytes_written = sum(self.bytes_written)
        self.result.overflows, self.result.underflows = (
            self._overflow_counts.overflows,
            self._overflow_counts.underflows,
        )
        return self.result

    def _work(self, worker: int) -> None:
        """Copy step ranges of the queue in the worker thread with this index, until none is left or a worker fails."""
        reader = TensorReader(self.source, self.memory_per_worker, self._checked_records)
        buffers = Buffers()
        try:
            while not self.stop_event.is_set():
                try:
                    step_range = self.queue.popleft()
                except IndexError:
                    break
                _logger.debug("worker %d: %s", worker, step_range)
                self.source.hint_reads(_chunk_spans(self.plan, step_range))
                StepRangeCopier(self._context, step_range, reader, buffers, worker).copy()
        except Cancelled:
            pass
        except BaseException as error:  # re-raised in the calling thread
            self.errors.append(error)
            self.stop_event.set()
        with self._lock:
            self.result.bytes_read += reader.bytes_read
            self.result.records_without_crc += reader.records_without_crc

    def _digest_files(self) -> None:
        """Combine the leaf digests of each file; leaves that were not written front to back are read back for this."""
        undigested: deque[tuple[int, int, int]] = deque()  # see `_digest_leaves`
        for index in self.files:
            nbytes = self.plan.files[index].nbytes
            actual = self.target_files[index].size
            if actual != nbytes:
                raise self._size_error(index, actual)
            undigested += [(index, *each) for each in self.file_digests[index].find_undigested_leaves(nbytes)]
        run_threads(
            lambda _: self._digest_leaves(undigested), min(self.workers, len(undigested)), stop=undigested.clear
        )
        if self.errors:
            raise self.errors[0]
        for index in self.files:
            file, leaves = self.plan.files[index], self.file_digests[index].leaves
            self.result.file_digests[file.name] = tree_digest(leaves[leaf] for leaf in sorted(leaves)).hex()

    def _size_error(self, index: int, nbytes: int) -> OutputError:
        file = self.plan.files[index]
        return OutputError(
            f"{self.tree.path / file.name}: has {nbytes} bytes, but {file.nbytes} were written; another process "
            "changed the staging directory, no output was created, run again"
        )

    def _digest_leaves(self, undigested: deque[tuple[int, int, int]]) -> None:
        """Digest the leaves in the queue, each given as file index, leaf index and first byte to read."""
        buffer = memoryview(bytearray(BUFFER_NBYTES))
        try:
            while undigested:
                try:
                    index, leaf, begin = undigested.popleft()
                except IndexError:
                    return
                digests = self.file_digests[index]
                end = min((leaf + 1) * digest.LEAF_NBYTES, self.plan.files[index].nbytes)
                tree = digests.partial_leaves.get(begin) or TreeDigest()
                for position in range(begin, end, BUFFER_NBYTES):
                    view = buffer[: min(BUFFER_NBYTES, end - position)]
                    nbytes_read = self.target_files[index].read_into(view, position)
                    if nbytes_read != len(view):
                        raise self._size_error(index, position + nbytes_read)
                    tree.update(view, is_last=position + len(view) == end)
                (digests.leaves[leaf],) = tree.leaves
        except BaseException as error:  # re-raised in the calling thread
            self.errors.append(error)


def _chunk_spans(plan: CopyPlan, step_range: StepRange) -> Iterator[tuple[str, int, int]]:
    """Yield file, offset and number of bytes of each chunk that a step range reads, in order."""
    for step in plan.file_groups[step_range.group_index].steps[step_range.first_step : step_range.stop_step]:
        entry = step.source
        region = full_region(entry.shape)
        if step_range.dim0_range is not None:
            first, stop = step_range.dim0_range
            region = Region((first, *region.offsets[1:]), (stop - first, *region.sizes[1:]))
        for chunk in entry.chunks:
            if chunk.region.intersect(region) is not None:
                yield chunk.file, chunk.offset, chunk.nbytes


def _create_split_tensors(step_ranges: list[StepRange]) -> dict[tuple[int, int], SplitTensor]:
    """Return the shared results of each tensor that several workers copy, by index of file group and step."""
    counts: dict[tuple[int, int], int] = {}  # number of step ranges for the tensor
    for step_range in step_ranges:
        if step_range.dim0_range is not None:
            counts[step_range.group_index, step_range.first_step] = (
                counts.get((step_range.group_index, step_range.first_step), 0) + 1
            )
    return {key: SplitTensor(count) for key, count in counts.items()}
