"""Call a function in a separate process, whose memory is freed afterwards.

The process is a fork: it inherits the imports and open files of this process, and has no peers. A process that has run
a backward pass cannot be forked for another one; it starts new interpreters instead, which takes seconds.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from ckptx.errors import Defect
from ckptx.processes.worker import Worker, WorkerDied, reply, use_one_thread

T = TypeVar("T")
_FORKED = "fork-based multiprocessing"  # in the error of autograd
_LEAVING = 5.0  # seconds between an answer and the end of its process


def in_child(work: Callable[..., T], *args: Any, context: Any = None) -> T:
    """Return the result of a function that runs in a separate process.

    Args:
        work: Function with a result that can be pickled.
        args: Arguments of the function.
        context: multiprocessing context that starts the process. None forks this process, or starts an interpreter if
            the fork fails because this process has run a backward pass.

    Raises:
        CkptxError: The function raised it.
        Defect: It raised something else, or the process died.
    """
    return _answers(work, [args], 1, context)[0]


def in_children(work: Callable[..., T], calls: Sequence[tuple[Any, ...]], most: int | None = None) -> list[T]:
    """Return the results of a function for several calls that run in parallel, each in a separate process.

    Args:
        work: Function with results that can be pickled.
        calls: Arguments of each call.
        most: Maximum number of processes at a time; None for the number of cores.

    Raises:
        CkptxError, Defect: See `in_child`; the other processes are then ended.
    """
    return _answers(work, calls, most or len(os.sched_getaffinity(0)), None)


def _answers(work: Callable[..., T], calls: Sequence[tuple[Any, ...]], most: int, context: Any) -> list[T]:
    try:
        return _side_by_side(work, calls, most, context or multiprocessing.get_context("fork"))
    except Defect as error:
        message = f"{error} {error.__cause__}"  # a pipeline of torch wraps the error in its own
        if context is not None or _FORKED not in message:
            raise
    with hide_main_module():
        return _side_by_side(work, calls, most, multiprocessing.get_context("spawn"))


def _side_by_side(work: Callable[..., T], calls: Sequence[tuple[Any, ...]], most: int, context: Any) -> list[T]:
    waiting = deque(enumerate(calls))
    running: dict[Any, tuple[int, Worker]] = {}
    found: dict[int, T] = {}
    try:
        while waiting or running:
            while waiting and len(running) < most:
                number, args = waiting.popleft()
                started = Worker(context, _run, work, args)
                running[started.pipe] = number, started
            for pipe in wait(list(running)):
                number, worker = running[pipe]
                found[number] = worker.answer()
                del running[pipe]
                worker.end(_LEAVING)
    except WorkerDied as died:
        raise Defect(
            f"a child process ended with code {died.code} and without a result; "
            "check whether the machine is out of memory"
        ) from None
    finally:
        for _, worker in running.values():
            worker.end()
    return [found[number] for number in range(len(calls))]


@contextmanager
def hide_main_module() -> Iterator[None]:
    """Keep multiprocessing from importing the main script of this process into every process that it starts."""
    before = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = before


def _leave(*_: Any) -> None:
    """End this process and its children without raising: an exception in a callback would be lost."""
    for each in multiprocessing.active_children():
        each.terminate()
    os._exit(128 + signal.SIGTERM)


def _run(pipe: Connection, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a terminal sends it to all; the process that started this one ends it
    signal.signal(signal.SIGTERM, _leave)
    use_one_thread()  # threads of the parent do not exist in a fork
    gc.freeze()  # objects of the parent are never freed here
    reply(pipe, work, *args)
    os._exit(0)  # skips exit handlers of the parent
