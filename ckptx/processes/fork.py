"""Call functions in separate processes, whose memory is freed afterwards.

The processes are forks: they inherit the imports and open files of this process, and are not ranks. Autograd cannot
run in a fork of a process that has already run a backward pass; new interpreters are started then, which takes
seconds.

`run_in_children` starts a process for each call. `run_flows` keeps processes for several calls, which is faster if a
function caches values that later calls need, too.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from ckptx.errors import InternalError
from ckptx.processes.worker import Worker, WorkerDied, send_result, use_one_thread

T = TypeVar("T")
Call = tuple[Callable[..., Any], tuple[Any, ...]]  # a function and its arguments
# Generator that yields batches of calls which do not depend on each other, receives the results of each batch in order,
# and returns a result.
Flow = Generator[Sequence[Call], Sequence[Any], T]
OnWait = Callable[[Collection[int]], None]  # called with the indices of the calls that have ended
_AUTOGRAD_FORK_ERROR = "fork-based multiprocessing"  # part of the error message of autograd
_WAIT_INTERVAL = 1.0  # seconds between calls of a function that shows progress
_EXIT_TIMEOUT = 5.0  # seconds for a process to exit after its result


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
    function: Callable[..., T],
    calls: Sequence[tuple[Any, ...]],
    max_processes: int | None = None,
    on_wait: OnWait | None = None,
) -> list[T]:
    """Return the results of a function for several calls that run in parallel, each in a separate process.

    Args:
        function: Function with results that can be pickled.
        calls: Arguments of each call.
        max_processes: Maximum number of processes at a time; None for the number of cores.
        on_wait: Called about once a second with the indices of the calls that have ended; None for no callback.

    Raises:
        CkptxError, InternalError: See `run_in_child`; the other processes are then ended.
    """
    return _run_calls(function, calls, max_processes or len(os.sched_getaffinity(0)), None, on_wait)


def _run_calls(
    function: Callable[..., T],
    calls: Sequence[tuple[Any, ...]],
    max_processes: int,
    context: Any,
    on_wait: OnWait | None = None,
) -> list[T]:
    """Run the calls in processes of `context`; without one in forks, or in new interpreters if autograd refuses forks.

    Raises:
        CkptxError, InternalError: See `run_in_child`.
    """
    try:
        return _run_in_parallel(function, calls, max_processes, context or multiprocessing.get_context("fork"), on_wait)
    except InternalError as error:
        if context is not None or not _is_autograd_fork_error(error):
            raise
    with hide_main_module():
        return _run_in_parallel(function, calls, max_processes, multiprocessing.get_context("spawn"), on_wait)


def _run_in_parallel(
    function: Callable[..., T],
    calls: Sequence[tuple[Any, ...]],
    max_processes: int,
    context: Any,
    on_wait: OnWait | None,
) -> list[T]:
    """Run each call in a process of its own, at most `max_processes` at a time; return the results in order.

    Raises:
        CkptxError, InternalError: See `run_in_child`; the other processes are then ended.
    """
    pending = deque(enumerate(calls))
    running: dict[Any, tuple[int, Worker]] = {}  # pipe of a process -> index of its call, and the process
    results: dict[int, T] = {}
    try:
        while pending or running:
            while pending and len(running) < max_processes:
                index, args = pending.popleft()
                new_worker = Worker(context, _run_worker, function, args)
                running[new_worker.pipe] = index, new_worker
            if on_wait is not None:
                on_wait(results)
            for pipe in wait(list(running), None if on_wait is None else _WAIT_INTERVAL):
                index, worker = running[pipe]
                results[index] = worker.wait_for_result()
                del running[pipe]
                worker.end(_EXIT_TIMEOUT)
    except WorkerDied as died:
        raise _make_death_error(died) from None
    finally:
        for _, worker in running.values():
            worker.end()
    return [results[index] for index in range(len(calls))]


def run_flow(flow: Flow[T]) -> T:
    """Return the result of a flow; its calls run in this process, one after another."""
    results: Sequence[Any] | None = None
    while True:
        try:
            calls = next(flow) if results is None else flow.send(results)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        results = [function(*args) for function, args in calls]


def run_flows(
    flows: Sequence[Flow[T]],
    max_processes: int | None = None,
    on_wait: Callable[[int, int], None] | None = None,
) -> list[T]:
    """Return the results of flows; their calls run in parallel in processes that each run several calls.

    Args:
        flows: Flows of calls with results that can be pickled.
        max_processes: Maximum number of processes; None for the number of cores.
        on_wait: Called about once a second with the number of calls that have ended, and that of all calls so far; None
            for no callback.

    Raises:
        CkptxError, InternalError: See `run_in_child`; the other calls are then ended.
    """
    pool = _WorkerPool(max_processes or len(os.sched_getaffinity(0)), on_wait)
    results: dict[int, T] = {}
    call_results: dict[int, list[Any]] = {}  # for each flow, the results of the calls that it waits for
    pending_counts: dict[int, int] = {}  # for each flow, the number of these calls that have not ended

    def advance(flow_index: int, previous_results: Sequence[Any] | None) -> None:
        """Send a flow the results of its last calls, and submit its next ones; None starts the flow."""
        flow = flows[flow_index]
        try:
            calls = next(flow) if previous_results is None else flow.send(previous_results)
            while not calls:
                calls = flow.send([])
        except StopIteration as stop:
            results[flow_index] = stop.value
            return
        call_results[flow_index], pending_counts[flow_index] = [None] * len(calls), len(calls)
        for call_index, call in enumerate(calls):
            pool.submit((flow_index, call_index), call)

    try:
        for flow_index in range(len(flows)):
            advance(flow_index, None)
        while len(results) < len(flows):
            (flow_index, call_index), result = pool.wait_for_result()
            call_results[flow_index][call_index] = result
            pending_counts[flow_index] -= 1
            if not pending_counts[flow_index]:
                advance(flow_index, call_results.pop(flow_index))
    except WorkerDied as died:
        raise _make_death_error(died) from None
    finally:
        pool.end()
    return [results[flow_index] for flow_index in range(len(flows))]


class _WorkerPool:
    """Pool of processes that each run one call after another; a process is started when there is a call for it.

    Its user must call `end`, also after an error.
    """

    def __init__(self, max_processes: int, on_wait: Callable[[int, int], None] | None) -> None:
        self._max_processes, self._on_wait = max_processes, on_wait
        self._ended_count = self._call_count = 0
        self._context: Any = multiprocessing.get_context("fork")
        self._pending: deque[tuple[Any, Call]] = deque()
        self._idle: list[Worker] = []
        self._running: dict[Any, tuple[Worker, Any, Call]] = {}  # by pipe: process, key, call

    def submit(self, key: Any, call: Call) -> None:
        """Add a call to the queue; `wait_for_result` starts it when a process is free.

        Args:
            key: Value that `wait_for_result` returns with the result.
            call: Function and arguments.
        """
        self._call_count += 1
        self._pending.append((key, call))

    def wait_for_result(self) -> tuple[Any, Any]:
        """Wait until any call has ended; return its key and its result.

        Raises:
            CkptxError: The call raised it.
            InternalError: It raised something else.
            WorkerDied: Its process died.
        """
        while True:
            self._start_calls()
            if self._on_wait is not None:
                self._on_wait(self._ended_count, self._call_count)
            ready = wait(list(self._running), None if self._on_wait is None else _WAIT_INTERVAL)
            if not ready:
                continue
            worker, key, call = self._running.pop(ready[0])
            self._idle.append(worker)
            try:
                result = worker.wait_for_result()
                self._ended_count += 1
                return key, result
            except InternalError as error:
                if self._context.get_start_method() == "spawn" or not _is_autograd_fork_error(error):
                    raise
            # Autograd refuses forks of this process: end them all, and run their calls in new interpreters.
            self._pending.appendleft((key, call))
            self._pending.extendleft((key, call) for _, key, call in reversed(self._running.values()))
            self.end()
            self._context = multiprocessing.get_context("spawn")

    def _start_calls(self) -> None:
        """Start pending calls, as long as a process is idle or another one may be started."""
        while self._pending and (self._idle or len(self._running) < self._max_processes):
            key, call = self._pending.popleft()
            if self._idle:
                worker = self._idle.pop()
            else:
                with hide_main_module():
                    worker = Worker(self._context, _serve_calls)
            self._running[worker.pipe] = worker, key, call
            worker.pipe.send_bytes(pickle.dumps(call))

    def end(self) -> None:
        """End all processes."""
        for worker in (*self._idle, *(worker for worker, *_ in self._running.values())):
            worker.end()
        self._idle, self._running = [], {}


def _is_autograd_fork_error(error: InternalError) -> bool:
    return _AUTOGRAD_FORK_ERROR in f"{error} {error.__cause__}"  # a pipeline of torch wraps the error in its own


def _make_death_error(died: WorkerDied) -> InternalError:
    return InternalError(
        f"a child process ended with code {died.code} and without a result; check whether the machine is out of memory"
    )


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
    """End this process and its children at SIGTERM. It does not raise: an exception in a callback would be lost."""
    for child in multiprocessing.active_children():
        child.terminate()
    os._exit(128 + signal.SIGTERM)


def _prepare_worker() -> None:
    """Set up signals, threads and garbage collection in a new process."""
    # A terminal sends SIGINT to all processes; the process that started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit_with_children)
    use_one_thread()  # threads of the parent do not exist in a fork
    gc.freeze()  # objects of the parent are never freed here
    gc.enable()  # models, unlike catalogs, are full of reference cycles


def _run_worker(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Run one call in a new process, send its result, and end the process."""
    _prepare_worker()
    send_result(pipe, function, *args)
    os._exit(0)  # skips exit handlers of the parent


def _serve_calls(pipe: Connection) -> None:
    """Run one call after another, until the pipe is closed."""
    _prepare_worker()
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)  # skips exit handlers of the parent
        send_result(pipe, _run_pickled_call, message)


def _run_pickled_call(message: bytes) -> Any:
    function, args = pickle.loads(message)
    return function(*args)
