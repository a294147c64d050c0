"""A process that answers calls over a pipe: start it, call it, return its errors, and end it.

    call      sent to the worker, in a form that the caller chooses
    answer    pickled: True and the result, or False and the class, message, exit code and traceback of an error

A worker forked for one call gets the call with the fork (`fork.py`). The ranks of a run get many calls, pickled
(`robustness_suite/ranks.py`).
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from ckptx.errors import CkptxError, InternalError, PeerFailure, exit_code_of
from ckptx.processes.peak_memory import peak_memory

_EXIT_TIMEOUT = 30.0  # seconds between the last message of a process and its end
_TERMINATE_TIMEOUT = 5.0  # seconds between SIGTERM and SIGKILL


class WorkerDied(Exception):
    """A worker ended without an answer.

    Attributes:
        code: Exit code of the process; negative for the signal that ended it, None if it still runs.
    """

    def __init__(self, code: int | None) -> None:
        super().__init__(f"ended with code {code}")
        self.code = code


class Worker:
    """A process that answers calls, from the view of the process that started it.

    Attributes:
        pipe: Pipe that becomes readable when an answer is there or the worker has ended.
    """

    def __init__(self, context: Any, target: Callable[..., None], *args: Any, **process_options: Any) -> None:
        """Start the process.

        Args:
            context: multiprocessing context, which starts the process by fork or spawn.
            target: Called in the process with its end of the pipe and `args`; sends each answer with `send_result`.
            args: Further arguments of `target`.
            process_options: Further arguments of `multiprocessing.Process`.
        """
        self.pipe, child_pipe = context.Pipe()
        arguments: tuple[Any, ...] = (child_pipe, *args)
        if context.get_start_method() == "fork":
            target, arguments = _run_in_fork, (self.pipe, target, *arguments)
        self._process = context.Process(target=target, args=arguments, **process_options)
        self._process.start()
        child_pipe.close()

    @property
    def is_alive(self) -> bool:
        """Return True while the process runs."""
        return bool(self._process.is_alive())

    @property
    def peak_rss(self) -> int:
        """Return the peak resident set size of the process in bytes; 0 once it has ended, or without /proc."""
        return peak_memory(self._process.pid)

    def wait_for_result(self) -> Any:
        """Wait for an answer, and return the result.

        Raises:
            CkptxError: The call raised it.
            InternalError: The call raised something else.
            WorkerDied: The worker ended without an answer.
        """
        try:
            has_result, value = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self._process.join(_EXIT_TIMEOUT)
            raise WorkerDied(self._process.exitcode) from None
        if has_result:
            return value
        error_class, text, exit_code, trace = value
        raise (
            PeerFailure(text, exit_code, is_reported=False)
            if issubclass(error_class, PeerFailure)
            else error_class(text)
        ) from RuntimeError(trace)

    def end(self, timeout: float = 0.0) -> None:
        """End the process: wait, then send SIGTERM, then SIGKILL. A fork ends its own children at SIGTERM.

        Args:
            timeout: Seconds to wait before SIGTERM; an idle process ends by itself once the pipe is closed.
        """
        self.pipe.close()
        self._process.join(timeout)
        self._process.terminate()
        self._process.join(_TERMINATE_TIMEOUT)
        self._process.kill()
        self._process.join()


def _run_in_fork(inherited_pipe: Connection, target: Callable[..., None], *args: Any) -> None:
    """Call a function in a fork, which first closes the end of the pipe that it inherited from its parent.

    If a fork kept both ends, its pipe would never be closed, and it would outlive a parent that is killed.
    """
    inherited_pipe.close()
    target(*args)


def send_result(pipe: Connection, function: Callable[..., Any], *args: Any) -> bool:
    """Call a function in a worker, and send its result or error; return False if the pipe is closed."""
    try:
        answer = pickle.dumps((True, function(*args)))
    except BaseException as error:  # raised again in the calling process
        error_class, text = type(error), str(error)
        if not isinstance(error, CkptxError):
            error_class, text = InternalError, f"{type(error).__name__}: {error}; please report this"
        answer = pickle.dumps((False, (error_class, text, exit_code_of(error), traceback.format_exc())))
    try:
        pipe.send_bytes(answer)
    except BrokenPipeError:
        return False
    return True


def use_one_thread() -> None:
    """Let torch compute in one thread, as workers share the cores, and keep transformers from drawing progress bars."""
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.disable_progress_bar()
