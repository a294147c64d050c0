"""Work in a process of its own, whose memory is gone afterwards."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from ckptx.errors import CkptxError, Defect

T = TypeVar("T")
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
    try:
        return _answer(context or multiprocessing.get_context("fork"), work, args)
    except Defect as error:
        if context is not None or _FORKED not in str(error):
            raise
    with nobodys_script():
        return _answer(multiprocessing.get_context("spawn"), work, args)


def _answer(context: Any, work: Callable[..., T], args: tuple[Any, ...]) -> T:
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(theirs, work, args))
    child.start()
    theirs.close()
    try:
        is_done, found = ours.recv()
    except EOFError:
        child.join()
        raise Defect(
            f"a process of its own ended with code {child.exitcode}, needed a result; is the machine out of memory?"
        ) from None
    except BaseException:  # interrupted
        child.kill()
        raise
    finally:
        ours.close()
        child.join()
    if is_done:
        return found  # type: ignore[no-any-return]  # what `work` gave
    kind, text, trace = found
    error: CkptxError = kind(text) if kind is not None else Defect(text)
    raise error from RuntimeError(trace)


@contextmanager
def nobodys_script() -> Iterator[None]:
    """Keeps multiprocessing from importing the script that started this process into every process that it starts."""
    before = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = before


def _run(pipe: Connection, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)  # threads of the parent are not here
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
