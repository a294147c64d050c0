"""Work in a process of its own, whose memory is gone afterwards."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import traceback
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from ckptx.errors import CkptxError, Defect

T = TypeVar("T")
_PATIENCE = 5.0  # seconds until what was told to end is ended
_FORKED = "fork-based multiprocessing"  # as autograd says it


def in_child(work: Callable[..., T], *args: Any, context: Any = None) -> T:
    """What a function gives, computed in a process of its own.

    Args:
        work: Its result can be pickled.
        args: Of the function.
        context: Of multiprocessing. When left out, it is a fork of this process; or a new one, which takes seconds,
            where this one has run a backward pass, for autograd cannot be forked then.

    Raises:
        CkptxError: That of the function.
        Defect: It raised something else, or the process died.
    """
    return _answers(work, [args], 1, context)[0]


def in_children(work: Callable[..., T], calls: Sequence[tuple[Any, ...]], most: int | None = None) -> list[T]:
    """What a function gives for each of several calls, computed in processes of their own that run side by side.

    Args:
        work: Its results can be pickled.
        calls: Arguments of each call.
        most: Processes at a time; as many as there are cores when left out.

    Raises:
        CkptxError, Defect: As `in_child`; the others are ended then.
    """
    return _answers(work, calls, most or len(os.sched_getaffinity(0)), None)


def _answers(work: Callable[..., T], calls: Sequence[tuple[Any, ...]], most: int, context: Any) -> list[T]:
    try:
        return _side_by_side(work, calls, most, context or multiprocessing.get_context("fork"))
    except Defect as error:
        said = f"{error} {error.__cause__}"  # a pipeline of torch puts its own words before it
        if context is not None or _FORKED not in said:
            raise
    with nobodys_script():
        return _side_by_side(work, calls, most, multiprocessing.get_context("spawn"))


def _side_by_side(work: Callable[..., T], calls: Sequence[tuple[Any, ...]], most: int, context: Any) -> list[T]:
    waiting = deque(enumerate(calls))
    running: dict[Any, tuple[int, _Child]] = {}
    found: dict[int, T] = {}
    try:
        while waiting or running:
            while waiting and len(running) < most:
                number, args = waiting.popleft()
                started = _Child(context, work, args)
                running[started.pipe] = number, started
            for pipe in wait(list(running)):
                number, child = running.pop(pipe)
                found[number] = child.answer()
    finally:
        for _, child in running.values():
            child.end()
    return [found[number] for number in range(len(calls))]


class _Child:
    """A process that computes one thing.

    Attributes:
        pipe: Has something to read when it is done.
    """

    def __init__(self, context: Any, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.pipe, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(theirs, work, args))
        self._process.start()
        theirs.close()

    def answer(self) -> Any:
        """What it computed; waits for it.

        Raises:
            CkptxError, Defect: As `in_child`.
        """
        try:
            is_done, found = self.pipe.recv()
        except EOFError:
            self._process.join()
            raise Defect(
                f"a process of its own ended with code {self._process.exitcode}, needed a result; is the machine out "
                "of memory?"
            ) from None
        except BaseException:  # interrupted
            self._process.terminate()
            raise
        finally:
            self.pipe.close()
            self._process.join()
        if is_done:
            return found
        kind, text, trace = found
        error: CkptxError = kind(text) if kind is not None else Defect(text)
        raise error from RuntimeError(trace)

    def end(self) -> None:
        """Ends it, done or not, and what it started."""
        self._process.terminate()
        self._process.join(_PATIENCE)
        self._process.kill()
        self._process.join()
        self.pipe.close()


@contextmanager
def nobodys_script() -> Iterator[None]:
    """Keeps multiprocessing from importing the script that started this process into every process that it starts."""
    before = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = before


def _leave(*_: Any) -> None:
    """Ends this process and what it started, without raising: an exception would be lost in a callback."""
    for each in multiprocessing.active_children():
        each.terminate()
    os._exit(128 + signal.SIGTERM)


def _run(pipe: Connection, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch
    from transformers.utils import logging

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; who started this one ends it
    signal.signal(signal.SIGTERM, _leave)
    torch.set_num_threads(1)  # threads of the parent are not here
    gc.freeze()  # what was there before will not go
    logging.disable_progress_bar()
    try:
        said: Any = (True, work(*args))
    except BaseException as error:  # told to the parent, and raised there
        kind = type(error) if isinstance(error, CkptxError) else None
        text = str(error) if kind is not None else f"{type(error).__name__}: {error}; please report this"
        said = (False, (kind, text, traceback.format_exc()))
    pipe.send(said)
    pipe.close()
    os._exit(0)  # without what the parent registered for its own end
