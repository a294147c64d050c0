"""A process that answers calls over a pipe: start it, call it, return its errors, and end it.

    call      sent to the worker, in a form that the caller chooses
    answer    pickled: True and the result, or False and the class, the message and the traceback of an error

A worker forked for one call gets the call with the fork (`fork.py`). The ranks of a run get many calls, pickled
(`robustness_suite/ranks.py`).
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from ckptx.errors import CkptxError, Defect, PeerFailure
from ckptx.processes.peak_memory import peak_memory

_GRACE = 30.0  # seconds between the last message of a process and its end
_PATIENCE = 5.0  # seconds between SIGTERM and SIGKILL


class WorkerDied(Exception):
    """A worker ended without an answer.

    Attributes:
        code: Its exit code, below zero the signal that ended it; None if it still runs.
    """

    def __init__(self, code: int | None) -> None:
        super().__init__(f"ended with code {code}")
        self.code = code


class Worker:
    """A process that answers calls, from the view of the process that started it.

    Attributes:
        pipe: Pipe that becomes readable when an answer is there or the worker has ended.
    """

    def __init__(self, context: Any, target: Callable[..., None], *args: Any, **how: Any) -> None:
        """Start the process.

        Args:
            context: Context of multiprocessing, which decides how the process is started.
            target: Called in the process with its end of the pipe and `args`; sends each answer with `reply`.
            args: Further arguments of `target`.
            how: Further arguments of `multiprocessing.Process`.
        """
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, *args), **how)
        self._process.start()
        theirs.close()

    @property
    def is_alive(self) -> bool:
        """True while the process runs."""
        return bool(self._process.is_alive())

    @property
    def peak_rss(self) -> int:
        """Peak resident set size of the process in bytes; 0 once it has ended."""
        return peak_memory(self._process.pid)

    def answer(self) -> Any:
        """Wait for an answer, and return the result.

        Raises:
            CkptxError: The call raised it.
            Defect: The call raised something else.
            WorkerDied: The worker ended without an answer.
        """
        try:
            is_done, found = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self._process.join(_GRACE)
            raise WorkerDied(self._process.exitcode) from None
        if is_done:
            return found
        kind, text, trace = found
        raise (
            PeerFailure(text, 7, is_reported=False) if issubclass(kind, PeerFailure) else kind(text)
        ) from RuntimeError(trace)

    def end(self, patience: float = 0.0) -> None:
        """End the process and its children, whatever it does.

        Args:
            patience: Seconds to wait for the process to end on its own, as an idle one does once the pipe is closed.
        """
        self.pipe.close()
        self._process.join(patience)
        self._process.terminate()
        self._process.join(_PATIENCE)
        self._process.kill()
        self._process.join()


def reply(pipe: Connection, work: Callable[..., Any], *args: Any) -> bool:
    """Call a function in a worker and send its result or error; return False if the caller has gone."""
    try:
        answer = pickle.dumps((True, work(*args)))
    except BaseException as error:  # raised again in the calling process
        kind, text = type(error), str(error)
        if not isinstance(error, CkptxError):
            kind, text = Defect, f"{type(error).__name__}: {error}; please report this"
        answer = pickle.dumps((False, (kind, text, traceback.format_exc())))
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
