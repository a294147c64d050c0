"""Saves in the background: `save` comes back when everything is copied, and a thread writes while the run goes on.

    main thread      take copies | the next steps of the run                      | wait
    writing thread               | write, publish, then: over a group of its own  |

Messages of two threads over one group would take each other's places, so the thread has a group of gloo that nobody
else uses. What one rank cannot write fails on all of them, when they wait or save again.
"""

from __future__ import annotations

import sys
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ckptx.errors import CkptxError, UsageError
from ckptx.runtime.checkpointing.save import publish
from ckptx.runtime.checkpointing.save_request import SaveOptions, SaveRequest
from ckptx.runtime.checkpointing.snapshot import Snapshot, take
from ckptx.runtime.parallel.distributed import all_gather_object

if TYPE_CHECKING:  # Python 3.10 has it there alone
    from typing_extensions import Unpack

_TIMEOUT = timedelta(hours=1)  # that ranks may be apart in writing; one that is gone is noticed at once


class Saver:
    """Saves one checkpoint after the other, each as `save` does, while the run goes on. Every rank makes one.

    A context manager: it waits for what is being written, also where the block fails. The interpreter waits for that,
    too, before it ends.

    Raises:
        UsageError: There is no process group.
    """

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise UsageError("Saver: made outside of a process group, needed one; use distributed.process_group")
        self._groups = [dist.new_group(backend="gloo", timeout=_TIMEOUT)]
        self._writing: _Writing | None = None
        self._unheard: list[str] = []
        weakref.finalize(self, _say, self._unheard)

    def save(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | None,
        path: Path,
        **options: Unpack[SaveOptions],
    ) -> None:
        """Copies what is to be saved into memory of the CPU, and begins to write it.

        Waits for the one before it, so that copies of one alone are in memory.

        Args:
            model: The model, or the pipeline stages of this rank.
            optimizer: Its optimizer; None saves the model alone.
            path: The directory to write.
            **options: As in `save`, see `SaveRequest`.

        Raises:
            CkptxError: What went wrong with the one before; or what `save` says before it writes.
        """
        self.wait()
        if not self._groups:
            raise UsageError("Saver: is closed, or lost a rank; make another")
        request = SaveRequest(model, optimizer, path, **options)
        snapshot = take(request, copies=True)
        self._writing = _Writing(snapshot, path, request.overwrite, request.then, self._groups, self._unheard)
        self._writing.start()

    def wait(self) -> None:
        """Waits until nothing is being written.

        Raises:
            Exception: What went wrong, as the thread met it: a CkptxError, where it is not that a rank is gone.
        """
        if self._writing is None:
            return
        self._writing.join()
        error, self._writing = self._writing.error, None
        self._unheard.clear()
        if error is not None:
            try:
                raise error
            finally:
                del error  # which refers to this frame

    def close(self) -> None:
        """Waits, and ends the group and its threads; every rank calls it.

        Raises:
            Exception: As `wait`.
        """
        try:
            self.wait()
            if self._groups:
                all_gather_object(None)  # a group must not end while another rank still listens to it
        finally:
            self._end()

    def _end(self) -> None:
        _end_groups(self._groups)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.close()
            return
        try:  # what is on its way is finished, if the others do so; `error` is what is said
            if self._writing is not None:
                self._writing.join()
        finally:
            self._end()


class _Writing(Thread):
    """The thread that writes one checkpoint.

    Attributes:
        error: What went wrong; once it has ended.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        path: Path,
        overwrite: bool,
        then: Callable[[], object] | None,
        groups: list[dist.ProcessGroup],
        unheard: list[str],
    ) -> None:
        super().__init__(name=f"ckptx saves {path.name}", daemon=False)  # the interpreter waits for it
        self.error: BaseException | None = None
        self._work: tuple[Any, ...] | None = (snapshot, path, overwrite, then)
        self._groups, self._unheard = groups, unheard
        # Each thread has a current device of its own; torch's writer asks for it.
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run(self) -> None:
        """Writes."""
        assert self._work is not None
        snapshot, path, overwrite, then = self._work
        self._work = None
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            publish(snapshot, path, overwrite=overwrite, then=then, group=self._groups[0])
        except BaseException as error:  # raised again by `wait`
            self._unheard.append(f"{path}: was not saved: {type(error).__name__}: {error}")
            self.error = error
            _forget_frames(error)
            if not isinstance(error, CkptxError):
                _end_groups(self._groups)  # the others do not know of it, and shall not wait for this rank


def _forget_frames(error: BaseException) -> None:
    """The frames in which an error came about hold the copies and the group."""
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is not None:
            traceback.clear_frames(each.__traceback__)
            left += [each.__cause__, None if each.__context__ is each.__cause__ else each.__context__]


def _end_groups(groups: list[dist.ProcessGroup]) -> None:
    while groups:
        with suppress(ValueError):  # the world has ended before, and all groups with it
            dist.destroy_process_group(groups.pop())


def _say(unheard: list[str]) -> None:
    """Nobody waited for what failed."""
    for each in unheard:
        print(f"error: {each}", file=sys.stderr)
