"""Worker processes that live for a whole test session and run functions under gloo.

Importing torch and transformers takes four seconds, so one process imports them when a test first needs it, and workers
are forked from that process. They receive functions (by import path) with arguments.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import multiprocessing
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.forked_programs import preloaded_context

MAX_WORLD_SIZE = 8
_CRASH_LOG = "crash-log"
_TIMEOUT = 120.0  # timeout of one function, in seconds
# gloo keeps the threads of a mesh while any object refers to it, and caches of torch refer to many. A worker with this
# many threads is replaced, because a thousand threads slow down the machine.
_MAX_THREADS = 120
_MANY_THREADS = 60  # collect garbage above this number of threads
_NEW_MODULES = 50  # about as many as a class of transformers imports
GC_THRESHOLDS = (10_000, 10, 10)  # garbage collection thresholds; the default of 700 takes a tenth of the time
# Messages of gloo on a rank whose peer has ended, and the number of characters of them to show.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
_SHORT_LENGTH = 700


class WorkerError(AssertionError):
    """Raised if a function fails in a worker; the message has the worker's traceback."""


class WorkerDied(WorkerError):
    """Raised if a signal ends a worker; the message has the signal and the worker's stack."""


class GlooPool:
    """A pool of at most `MAX_WORLD_SIZE` processes, which start when a test needs them."""

    def __init__(self) -> None:
        self._workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        self._stores = tempfile.TemporaryDirectory(prefix="gloo-stores-")
        self._started = itertools.count()
        self._runs = itertools.count()

    def run(self, function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        """Call `function(rank, world_size, *args)` on every rank in a new gloo process group.

        Returns:
            Return value of each rank, by rank.

        Raises:
            WorkerError: If a rank fails or takes too long; the workers are restarted. If a signal ends a rank (a crash
                of native code, or too little memory), the function runs once more, with a warning in pytest's summary.
        """
        if not 1 <= world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"world size {world_size}, expected 1 to {MAX_WORLD_SIZE}")
        try:
            return self._run(function, world_size, *args)
        except WorkerDied as died:
            warnings.warn(f"a worker died in {function.__name__}, which runs again: {died}", stacklevel=2)
            return self._run(function, world_size, *args)

    def _run(self, function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        while len(self._workers) < world_size:
            self._workers.append(self._start())
        store = str(Path(self._stores.name, f"store-{next(self._runs)}"))
        members = self._workers[:world_size]
        for rank, (_, pipe) in enumerate(members):
            pipe.send((function, rank, world_size, store, args))
        answers = [_answer(*member) for member in members]
        died = any(process.exitcode is not None and process.exitcode < 0 for process, _ in members)
        if not all(ok for ok, _ in answers) or any(_threads_of(process) > _MAX_THREADS for process, _ in members):
            self.stop()
        if not all(ok for ok, _ in answers):
            raise (WorkerDied if died else WorkerError)(_join_errors(answers))
        return [value for _, value in answers]

    def stop(self) -> None:
        """End the workers."""
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._workers = []

    def close(self) -> None:
        """End the workers and remove their files."""
        self.stop()
        self._stores.cleanup()

    def _start(self) -> tuple[multiprocessing.process.BaseProcess, Connection]:
        context = preloaded_context()
        here, there = context.Pipe()
        crash_log = Path(self._stores.name, f"{_CRASH_LOG}-{next(self._started)}")
        process = context.Process(target=_work, args=(there, crash_log), name=str(crash_log), daemon=True)
        process.start()
        there.close()
        return process, here


def _join_errors(answers: list[tuple[bool, Any]]) -> str:
    """Join the errors of ranks: first those with their own error, then shortened those that lost the connection."""
    lost = [not ok and any(each in said for each in _LOST) for ok, said in answers]
    found = []
    for rank in sorted(range(len(answers)), key=lambda rank: (answers[rank][0], lost[rank])):
        ok, said = answers[rank]
        text = f"gave {said!r:.300}" if ok else f"... {said[-_SHORT_LENGTH:]}" if lost[rank] else said
        found.append(f"rank {rank}:\n{text}")
    return "\n".join(found)


def _threads_of(process: multiprocessing.process.BaseProcess) -> int:
    try:
        return len(os.listdir(f"/proc/{process.pid}/task"))
    except OSError:
        return 0


def _answer(process: multiprocessing.process.BaseProcess, pipe: Connection) -> tuple[bool, Any]:
    if not pipe.poll(_TIMEOUT):
        return False, f"no answer within {_TIMEOUT:.0f} s"
    try:
        return pipe.recv()
    except (EOFError, ConnectionError):
        process.join(1)
        crash_log = Path(process.name)
        return False, f"ended with {process.exitcode}\n{crash_log.read_text() if crash_log.exists() else ''}"


def _work(pipe: Connection, crash_log: Path) -> None:
    assert "torch" in sys.modules, "torch was not imported before the fork, so each worker imports it"
    os.environ.update(GLOO_SOCKET_IFNAME="lo", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    known = _freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    crash_file = crash_log.open("w")
    faulthandler.enable(crash_file)
    while True:
        try:
            function, rank, world_size, store, args = pipe.recv()
        except EOFError:
            return
        try:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
            try:
                torch.manual_seed(0)
                answer = (True, function(rank, world_size, *args))
            finally:
                gc.collect()  # pending sends and receives of a schedule must end before their group
                dist.destroy_process_group()
                _forget_meshes()
                if len(os.listdir("/proc/self/task")) > _MANY_THREADS:
                    gc.collect()  # objects that refer to a mesh keep its threads
                if len(sys.modules) > known + _NEW_MODULES:
                    known = _freeze()
        except BaseException:  # sent to the test, which fails with it
            answer = (False, traceback.format_exc())
        pipe.send(answer)


def _freeze() -> int:
    """Exclude all current objects from garbage collection, and return the number of imported modules.

    Called before the first function, and after the garbage of a function was collected.
    """
    gc.freeze()
    return len(sys.modules)


def _forget_meshes() -> None:
    """Clear the sharding cache of DTensor, which can return a mesh of an ended group for one with the same ranks."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
