"""Ranks of a run: processes that live for several phases, forked from a preloaded process, measured after each task.

    this process           compares results; imports no torch, has no process group, uses no device
      preload process      fork server of multiprocessing; imports torch once, while it has a single thread
        rank 0..n          forked from it; each task has its own process group

Forking saves the imports, which take several times as long as the steps of a small recipe. Under torchrun each of its
processes has one rank as a child, so that a killed rank is not the process that torchrun monitors.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import multiprocessing
import os
import pickle
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from signal import SIG_BLOCK, SIG_SETMASK, SIGINT, SIGKILL, pthread_sigmask
from typing import Any, NamedTuple

from ckptx.errors import CkptxError, EnvironmentProblem, PeerFailure
from ckptx.processes.fork import hide_main_module, run_in_child
from ckptx.processes.rendezvous import is_launched, launched_world_size, open_store, rank_variables
from ckptx.processes.worker import Worker, WorkerDied, send_result, use_one_thread
from ckptx.robustness_suite.short_sockets import shorten_socket_paths

_PRELOAD = "ckptx.robustness_suite.preload"
_TASKS = "ckptx.robustness_suite.tasks"
_MAX_CONSTANT_BYTES = 64  # smaller tensors are constants of modules, and not counted
# Numbers of process groups; shared by all `Ranks`, as under torchrun they use one store, which keeps all addresses.
_world_numbers = itertools.count()
_FAILURE_GRACE_SECONDS = 30.0  # for other ranks to end after one has failed or died
_CLOSE_SECONDS = 0.5  # for an idle rank to end when it is closed
_THREAD_END_SECONDS = 1.0  # for the threads of a destroyed process group to end


class RetainedMemory(NamedTuple):
    """Memory and threads of a rank after a task, when its process group is destroyed.

    Attributes:
        tensor_bytes: Bytes of live tensors, each storage counted once, without small constants of modules.
        parameters: Number of live model parameters, with storage or without.
        threads: Number of threads of the process; threads that are ending get time to end.
    """

    tensor_bytes: int
    parameters: int
    threads: int


@dataclass(frozen=True, slots=True)
class TaskResult:
    """Result of a task on one rank.

    Attributes:
        value: Return value of the task; None if the rank did not complete it.
        memory: Memory and threads after the task; None if the rank did not complete it.
        end_signal: Number of the signal that ended the process; None if no signal did.
    """

    value: Any = None
    memory: RetainedMemory | None = None
    end_signal: int | None = None


class RankSettings(NamedTuple):
    """Settings of a rank, sent when it starts.

    Attributes:
        device: "auto", "cpu" or "cuda".
        backend: "auto", "gloo" or "nccl".
        gpu_memory: Limit of GPU memory in bytes; None for no limit.
        local_ranks: Number of ranks of this machine that must each have a GPU if "auto" is to be cuda; None for those
            of the launcher.
        directory: Folder for the rendezvous of the ranks of this machine.
        is_launched: True if a launcher such as torchrun started the parent processes of the ranks.
    """

    device: str
    backend: str
    gpu_memory: int | None
    local_ranks: int | None
    directory: str
    is_launched: bool


class Ranks:
    """Ranks of this machine, or under torchrun the one rank below this process."""

    def __init__(
        self,
        *,
        device: str = "auto",
        backend: str = "auto",
        gpu_memory: int | None = None,
        local_ranks: int | None = None,
        uses_new_interpreters: bool = False,
    ) -> None:
        """Prepare ranks, which start with the first task.

        Args:
            device: "auto", "cpu" or "cuda".
            backend: "auto", "gloo" or "nccl".
            gpu_memory: Limit of GPU memory of a rank in bytes; None for no limit.
            local_ranks: Number of ranks that must each have a GPU if "auto" is to be cuda, for tasks of any number of
                ranks; None for the ranks of each task. Ignored under torchrun.
            uses_new_interpreters: True to start each rank as a new interpreter instead of forking it.
        """
        self._uses_new_interpreters = uses_new_interpreters
        self._workers: dict[int, Worker] = {}
        self._peaks = [0]  # shared with the result of `with_new_interpreters`
        self._directory = tempfile.TemporaryDirectory(prefix="ckptx-ranks-")
        self._settings = RankSettings(
            device, backend, gpu_memory, None if is_launched() else local_ranks, self._directory.name, is_launched()
        )

    def run(
        self, task: str | Callable[..., Any], *args: Any, world_size: int, may_die: bool = False
    ) -> dict[int, TaskResult]:
        """Call `task(rank_context, *args)` on all ranks, in a new process group, and return the results of local ranks.

        Args:
            task: Function of a module, or its name in `robustness_suite/tasks.py`, which is not imported here.
            args: Picklable arguments.
            world_size: Number of ranks; under torchrun, that of torchrun.
            may_die: True if a rank that a signal ends is a result, not a failure; errors of other ranks are then
                ignored.

        Raises:
            CkptxError: A rank raised it.
            PeerFailure: A signal ended a rank.
            EnvironmentProblem: A rank exited without an error message.
        """
        local_ranks = [int(os.environ["RANK"])] if self._settings.is_launched else list(range(world_size))
        world = next(_world_numbers)
        for rank in local_ranks:
            if rank not in self._workers or not self._workers[rank].is_alive:
                self._workers[rank] = self._start(rank)
        call = pickle.dumps((task, args, world_size, world))
        for rank in local_ranks:
            self._workers[rank].pipe.send_bytes(call)
        results = self._collect_results(local_ranks)
        errors = {rank: each for rank, each in results.items() if isinstance(each, BaseException)}
        signals = {rank: each.signal for rank, each in errors.items() if isinstance(each, _RankKilled)}
        if errors:
            self._stop(local_ranks)
        is_expected = may_die and (signals or self._settings.is_launched)  # it may be the rank of another process
        if errors and not is_expected:
            raise _first_error(errors)
        return {
            rank: each if isinstance(each, TaskResult) else TaskResult(end_signal=signals.get(rank))
            for rank, each in results.items()
        }

    def run_in_subprocess(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in a new process, which is not a rank and may have children, and return its result.

        Args:
            function: Function of a module.
            args: Picklable arguments.

        Raises:
            CkptxError: The function raised it.
            InternalError: The function raised another error, or its process died.
        """
        with _inherited_environment():
            return run_in_child(function, *args, context=_fork_server())

    def with_new_interpreters(self) -> Ranks:
        """Return ranks with the same settings that start as new interpreters with their first task."""
        settings = self._settings
        ranks = Ranks(
            device=settings.device, backend=settings.backend, gpu_memory=settings.gpu_memory,
            local_ranks=settings.local_ranks, uses_new_interpreters=True,
        )  # fmt: skip
        ranks._peaks = self._peaks
        return ranks

    @property
    def peak_rss(self) -> int:
        """Return the peak resident set size of the largest rank on this machine so far, in bytes; 0 if unknown."""
        return max(self._peaks)

    @property
    def is_launched(self) -> bool:
        """Return True if a launcher such as torchrun started this process, which then has one rank."""
        return self._settings.is_launched

    def supports_world_size(self, world_size: int) -> bool:
        """Return True if this number of ranks is possible: under torchrun, only that of torchrun."""
        return launched_world_size() in (None, world_size)

    def close(self) -> None:
        """End the ranks."""
        self._stop(list(self._workers))
        self._directory.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, rank: int) -> Worker:
        with _inherited_environment():
            with _block_sigint():
                context = multiprocessing.get_context("spawn") if self._uses_new_interpreters else _fork_server()
            # SIGINT is not blocked for a fork, as it waits for the imports of the preload process.
            with _block_sigint() if self._uses_new_interpreters else nullcontext():
                return Worker(context, _run_rank, rank, self._settings, name=f"ckptx-rank-{rank}", daemon=True)

    def _collect_results(self, ranks: Sequence[int]) -> dict[int, TaskResult | BaseException]:
        """Return the result or the error of each rank; after a failure, the other ranks have a limited time."""
        pending: dict[Any, int] = {self._workers[rank].pipe: rank for rank in ranks}
        results: dict[int, TaskResult | BaseException] = {}
        # After a rank was killed, the others only report the dead peer.
        while pending and not any(isinstance(each, _RankKilled) for each in results.values()):
            is_failing = any(isinstance(each, BaseException) for each in results.values())
            ready = wait(list(pending), _FAILURE_GRACE_SECONDS if is_failing else None)
            for pipe in ready:
                rank = pending.pop(pipe)
                results[rank] = self._receive_result(rank)
            if not ready:
                break
        for rank in pending.values():
            results[rank] = PeerFailure(
                f"rank {rank}: did not answer after another rank had ended", 7, is_reported=False
            )
        return results

    def _receive_result(self, rank: int) -> TaskResult | BaseException:
        worker = self._workers[rank]
        try:
            value, memory = worker.wait_for_result()
            return TaskResult(pickle.loads(value), memory)
        except WorkerDied as died:
            if died.code is not None and died.code < 0:
                return _RankKilled(rank, -died.code)
            return EnvironmentProblem(
                f"rank {rank}: ended with exit code {died.code} and no error message; see its output"
            )
        except CkptxError as error:
            return error
        finally:
            self._peaks[:] = [max(self.peak_rss, worker.peak_rss)]

    def _stop(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            worker = self._workers.pop(rank, None)
            if worker is not None:
                self._peaks[:] = [max(self.peak_rss, worker.peak_rss)]
                worker.end(_CLOSE_SECONDS)


class _RankKilled(PeerFailure):
    """A signal ended a rank."""

    def __init__(self, rank: int, signal: int) -> None:
        cause = ", possibly by the kernel because memory was short" if signal == SIGKILL else ""
        super().__init__(f"rank {rank}: ended by signal {signal}{cause}; see its output", 7, is_reported=False)
        self.signal = signal


def _first_error(failures: Mapping[int, BaseException]) -> BaseException:
    """Return the most direct error: a killed rank, then a rank that failed by itself, then one that lost a peer."""
    errors = [failures[rank] for rank in sorted(failures)]
    return min(errors, key=lambda each: (not isinstance(each, _RankKilled), isinstance(each, PeerFailure)))


@contextmanager
def _block_sigint() -> Iterator[None]:
    """Block SIGINT in processes that start within the block; they end when this process does.

    A terminal sends SIGINT to all processes, and each would print a traceback. This process handles a SIGINT that
    arrives within the block after it.
    """
    resource_tracker.ensure_running()  # it unblocks SIGINT when it starts, so it must run already
    before = pthread_sigmask(SIG_BLOCK, {SIGINT})
    try:
        yield
    finally:
        pthread_sigmask(SIG_SETMASK, before)


def _fork_server() -> Any:
    """Start the preload process unless it runs, and return the context of multiprocessing that forks from it."""
    shorten_socket_paths()
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOAD])
    forkserver.ensure_running()
    return context


@contextmanager
def _inherited_environment() -> Iterator[None]:
    """Set the environment that child processes inherit: no main module, and one thread each unless already set."""
    variables = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    missing = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in missing})
    try:
        with hide_main_module():
            yield
    finally:
        for name in missing:
            del os.environ[name]


# ---------------------------------------------------------------------------------------------- in a rank


def _run_rank(pipe: Connection, rank: int, settings: RankSettings) -> None:
    """Run tasks until the pipe is closed."""
    importlib.import_module(_PRELOAD)  # already imported, except in a new interpreter
    from transformers.utils import logging

    use_one_thread()
    logging.set_verbosity_error()
    while True:
        try:
            call = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        if not send_result(pipe, _run_task, call, rank, settings):  # the parent process has closed the pipe
            return


def _run_task(call: bytes, rank: int, settings: RankSettings) -> tuple[bytes, RetainedMemory]:
    """Run one task in its own process group; return the pickled result, and memory and threads after it."""
    from ckptx.runtime.parallel.distributed import process_group, report_failure_to_peers

    task, args, world_size, world = pickle.loads(call)
    if not settings.is_launched:
        os.environ.update(rank_variables(rank, world_size))
    store = _open_store(settings, rank, world, world_size)
    if isinstance(task, str):
        task = getattr(importlib.import_module(_TASKS), task)
    group = process_group(settings.device, settings.backend, store, settings.local_ranks)
    with group as rank_context, report_failure_to_peers():
        _limit_gpu_memory(settings, rank_context.device)
        result = pickle.dumps(task(rank_context, *args))
    del args, rank_context, store
    return result, _measure_memory()


def _limit_gpu_memory(settings: RankSettings, device: Any) -> None:
    """Limit the GPU memory of a rank to that of the settings; nothing is done without a limit or on a CPU."""
    if settings.gpu_memory is None:
        return
    if device.type != "cuda":  # the forecast has checked that it fits
        return
    import torch

    total_memory = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, settings.gpu_memory / total_memory), device)


def _open_store(settings: RankSettings, rank: int, world: int, world_size: int) -> Any:
    """Return the store of a process group: a file, or a prefix in the store of the launcher."""
    import torch.distributed as dist

    if not settings.is_launched:
        return dist.FileStore(str(Path(settings.directory, f"world-{world}")), world_size)
    store = open_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), rank, f"world-{world}")
    _last_store[:] = [store]
    return store


# The last store. Without an agent, that of rank 0 is the server, and must live until the next exists.
_last_store: list[Any] = []


def _measure_memory() -> RetainedMemory:
    """Measure live tensors, parameters and threads of this process after a garbage collection."""
    import torch

    from ckptx.runtime.parallel.live_tensors import iter_live_tensors, select_tensors
    from ckptx.runtime.torch_private import storage_key

    gc.collect()
    alive = select_tensors(gc.get_objects())
    storages: dict[int, int] = {}
    for each in iter_live_tensors(alive):
        storage = each.untyped_storage()
        if storage.nbytes() > _MAX_CONSTANT_BYTES:
            storages[storage_key(storage)] = storage.nbytes()
    parameters = sum(issubclass(type(each), torch.nn.Parameter) for each in alive)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return RetainedMemory(sum(storages.values()), parameters, _count_threads())


_min_threads: list[int] = []  # smallest number of threads after a task so far


def _count_threads() -> int:
    """Count threads, after waiting for those of a destroyed process group to end."""
    deadline = time.monotonic() + _THREAD_END_SECONDS
    count = _read_thread_count()
    while _min_threads and count > _min_threads[0] and time.monotonic() < deadline:
        time.sleep(0.01)
        count = _read_thread_count()
    _min_threads[:] = [min([count, *_min_threads])]
    return count


def _read_thread_count() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()
