"""Call a function in a separate process, whose memory is freed afterwards.

The process is a fork: it inherits the imports and open files of this process, and has no peers. Autograd
cannot run in a fork of a process that has already run a backward pass; new interpreters are started then, which takes
seconds.
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

from ckptx.errors import InternalError
from ckptx.processes.worker import Worker, WorkerDied, send_result, use_one_thread

T = TypeVar("T")
_AUTOGRAD_FORK_ERROR = "fork-based multiprocessing"  # part of the error message of autograd
_EXIT_TIMEOUT = 5.0  # seconds for a process to exit after its answer


def run_in_child(function: Callable[..., T], *args: Any, context: Any = None) -> T:
    """Return the result of a function that runs in a separate process.

    Args:
        function: Function with a result that can be pickled.
        args: Arguments of the function.
        context: multiprocessing context that starts the process. None forks this process, or starts an interpreter if
            the fork fails because this process has run a backward pass.

    Raises:
        CkptxError: The function raised it.
        InternalError: It raised something else, or the process died.
    """
    return _run_calls(function, [args], 1, context)[0]


def run_in_children(
    function: Callable[..., T], calls: Sequence[tuple[Any, ...]], max_processes: int | None = None
) -> list[T]:
    """Return the results of a function for several calls that run in parallel, each in a separate process.

    Args:
        function: Function with results that can be pickled.
        calls: Arguments of each call.
        max_processes: Maximum number of processes at a time; None for the number of cores.

    Raises:
        CkptxError, InternalError: See `run_in_child`; the other processes are then ended.
    """
    return _run_calls(function, calls, max_processes or len(os.sched_getaffinity(0)), None)


def _run_calls(
    function: Callable[..., T], calls: Sequence[tuple[Any, ...]], max_processes: int, context: Any
) -> list[T]:
    try:
        return _run_in_parallel(function, calls, max_processes, context or multiprocessing.get_context("fork"))
    except InternalError as error:
        message = f"{error} {error.__cause__}"  # a pipeline of torch wraps the error in its own
        if context is not None or _AUTOGRAD_FORK_ERROR not in message:
            raise
    with hide_main_module():
        return _run_in_parallel(function, calls, max_processes, multiprocessing.get_context("spawn"))


def _run_in_parallel(
    function: Callable[..., T], calls: Sequence[tuple[Any, ...]], max_processes: int, context: Any
) -> list[T]:
    pending = deque(enumerate(calls))
    running: dict[Any, tuple[int, Worker]] = {}
    results: dict[int, T] = {}
    try:
        while pending or running:
            while pending and len(running) < max_processes:
                number, args = pending.popleft()
                new_worker = Worker(context, _run_worker, function, args)
                running[new_worker.pipe] = number, new_worker
            for pipe in wait(list(running)):
                number, worker = running[pipe]
                results[number] = worker.wait_for_result()
                del running[pipe]
                worker.end(_EXIT_TIMEOUT)
    except WorkerDied as died:
        raise InternalError(
            f"a child process ended with code {died.code} and without a result; "
            "check whether the machine is out of memory"
        ) from None
    finally:
        for _, worker in running.values():
            worker.end()
    return [results[number] for number in range(len(calls))]


@contextmanager
def hide_main_module() -> Iterator[None]:
    """Keep multiprocessing from importing the main script of this process into every process that it starts."""
    main_module = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main_module


def _exit_with_children(*_: Any) -> None:
    """End this process and its children without raising: an exception in a callback would be lost."""
    for each in multiprocessing.active_children():
        each.terminate()
    os._exit(128 + signal.SIGTERM)


def _run_worker(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    # A terminal sends SIGINT to all processes; the process that started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit_with_children)
    use_one_thread()  # threads of the parent do not exist in a fork
    gc.freeze()  # objects of the parent are never freed here
    send_result(pipe, function, *args)
    os._exit(0)  # skips exit handlers of the parent
