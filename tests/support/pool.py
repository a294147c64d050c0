"""Worker processes that live for a whole test session and run functions under gloo.

A process that imports torch and transformers costs four seconds, so one imports them, when the first test asks, and the
workers are forked from it. They are sent functions (by import path) with arguments.
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

from tests.support.forked import fresh

MAX_WORLD_SIZE = 8
_LAST_WORDS = "last-words"
_TIMEOUT = 120.0  # seconds that one function may take
# gloo keeps the threads of a mesh as long as anything remembers it, and torch remembers many; a thousand of them slow
# the whole machine down, so that a worker with this many is replaced.
_MOST_THREADS = 120
_MANY_THREADS = 60  # what remembers a mesh is looked for then
_NEW_MODULES = 50  # as a class of transformers brings with it
SELDOM = (10_000, 10, 10)  # allocations between searches for garbage; of 700 a tenth of the time goes into them
# What gloo says on a rank whose peer has gone, and how much of that is worth reading.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
_SHORT = 700


class WorkerError(AssertionError):
    """A function failed in a worker; carries the traceback from there."""


class WorkerDied(WorkerError):
    """A signal ended a worker; carries the signal and where the worker was."""


class GlooPool:
    """At most `MAX_WORLD_SIZE` processes; started as far as a test needs them."""

    def __init__(self) -> None:
        self._workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        self._stores = tempfile.TemporaryDirectory(prefix="gloo-stores-")
        self._started = itertools.count()
        self._runs = itertools.count()

    def run(self, function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        """Calls `function(rank, world_size, *args)` on every rank, inside a fresh gloo process group.

        Returns:
            What each rank returned, by rank.

        Raises:
            WorkerError: A rank failed or took too long; the pool starts afresh. Of a rank that a signal ended (a crash
                of native code, a machine without memory) nothing is known about the function: it gets one more run,
                and pytest's summary shows a warning.
        """
        if not 1 <= world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"world size {world_size}, needed 1 to {MAX_WORLD_SIZE}")
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
        if not all(ok for ok, _ in answers) or any(_threads_of(process) > _MOST_THREADS for process, _ in members):
            self.stop()
        if not all(ok for ok, _ in answers):
            raise (WorkerDied if died else WorkerError)(_said_by_all(answers))
        return [value for _, value in answers]

    def stop(self) -> None:
        """Ends the workers."""
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._workers = []

    def close(self) -> None:
        """Ends the workers for good."""
        self.stop()
        self._stores.cleanup()

    def _start(self) -> tuple[multiprocessing.process.BaseProcess, Connection]:
        context = fresh()
        here, there = context.Pipe()
        last_words = Path(self._stores.name, f"{_LAST_WORDS}-{next(self._started)}")
        process = context.Process(target=_work, args=(there, last_words), name=str(last_words), daemon=True)
        process.start()
        there.close()
        return process, here


def _said_by_all(answers: list[tuple[bool, Any]]) -> str:
    """What ranks said: first those that failed by themselves, in short those that only lost the connection to them."""
    lost = [not ok and any(each in said for each in _LOST) for ok, said in answers]
    found = []
    for rank in sorted(range(len(answers)), key=lambda rank: (answers[rank][0], lost[rank])):
        ok, said = answers[rank]
        text = f"gave {said!r:.300}" if ok else f"... {said[-_SHORT:]}" if lost[rank] else said
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
        last_words = Path(process.name)
        return False, f"ended with {process.exitcode}\n{last_words.read_text() if last_words.exists() else ''}"


def _work(pipe: Connection, last_words: Path) -> None:
    assert "torch" in sys.modules, "nothing was imported before the fork, and each worker does it again"
    os.environ.update(GLOO_SOCKET_IFNAME="lo", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    known = _freeze()
    gc.set_threshold(*SELDOM)
    said = last_words.open("w")
    faulthandler.enable(said)
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
                gc.collect()  # sends and receives that a schedule left must not outlive their group
                dist.destroy_process_group()
                _forget_meshes()
                if len(os.listdir("/proc/self/task")) > _MANY_THREADS:
                    gc.collect()  # what still remembers a mesh keeps its threads
                if len(sys.modules) > known + _NEW_MODULES:
                    known = _freeze()
        except BaseException:  # handed to the test, which fails with it
            answer = (False, traceback.format_exc())
        pipe.send(answer)


def _freeze() -> int:
    """What was imported is no garbage, and need not be looked at after each function; gives how many modules it is.

    Called where nothing is garbage: before the first function, and after what one left was collected.
    """
    gc.freeze()
    return len(sys.modules)


def _forget_meshes() -> None:
    """DTensor remembers the results of operations with their mesh, and takes one for another of the same ranks.

    The group of the remembered mesh has ended with the function before.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
