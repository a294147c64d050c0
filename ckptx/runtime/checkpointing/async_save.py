"""Saves in the background: `save` returns when all state is copied, and a thread writes it while training continues.

    main thread      copy | the next training steps                       | wait
    writer thread         | write, publish, call on_published             |

Messages of two threads over one group would be confused with each other, so the thread has a gloo group of its own. If
one rank cannot write, all ranks fail, at their next wait or save.
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
from ckptx.processes.threads import thread_errors
from ckptx.runtime.checkpointing.save import publish
from ckptx.runtime.checkpointing.save_request import SaveOptions, SaveRequest
from ckptx.runtime.checkpointing.snapshot import Snapshot, take_snapshot
from ckptx.runtime.parallel.distributed import all_gather_object

if TYPE_CHECKING:  # Python 3.10 has it only there
    from typing_extensions import Unpack

# Maximum time that a rank waits for another one that writes more slowly; a rank that is lost is noticed immediately.
_WRITER_TIMEOUT = timedelta(hours=1)


class Saver:
    """Saves checkpoints one after another, each like `save`, while training continues. Every rank creates one.

    As a context manager it waits for the current write, even if the block fails. The interpreter also waits for it
    before it exits.

    Raises:
        UsageError: There is no process group.
    """

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise UsageError("Saver: requires a process group; use distributed.process_group")
        # The one group of the writer threads. A writer thread may destroy it, and empties this list then.
        self._groups = [dist.new_group(backend="gloo", timeout=_WRITER_TIMEOUT)]
        self._writer: _WriterThread | None = None
        self._unreported_errors: list[str] = []
        weakref.finalize(self, _print_unreported, self._unreported_errors)

    def save(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | None,
        path: Path,
        **options: Unpack[SaveOptions],
    ) -> None:
        """Copy the state to CPU memory, and start to write it.

        The previous save is waited for first, so that at most one copy is in memory.

        Args:
            model: The model, or the pipeline stages of this rank.
            optimizer: Its optimizer; None saves no optimizer state.
            path: Directory to write.
            **options: Options of `save`, see `SaveRequest`.

        Raises:
            CkptxError: This save failed before its thread started, as in `ckptx.runtime.save`, or the saver is closed
                or lost a rank.
            Exception: The previous save failed; see `wait`.
        """
        self.wait()
        if not self._groups:
            raise UsageError("Saver: is closed, or lost a rank; create a new one")
        request = SaveRequest(model, optimizer, path, **options)
        snapshot = take_snapshot(request, copy_tensors=True)
        self._writer = _WriterThread(
            snapshot, path, request.overwrite, request.on_published, self._groups, self._unreported_errors
        )
        with thread_errors():
            self._writer.start()

    def wait(self) -> None:
        """Wait until the current write is done.

        Raises:
            Exception: The error of the write; a CkptxError unless a rank was lost.
        """
        if self._writer is None:
            return
        self._writer.join()
        error, self._writer = self._writer.error, None
        self._unreported_errors.clear()
        if error is not None:
            try:
                raise error
            finally:
                del error  # which refers to this frame

    def close(self) -> None:
        """Wait for the current write, and destroy the group; every rank calls it.

        Raises:
            Exception: See `wait`.
        """
        try:
            self.wait()
            if self._groups:
                all_gather_object(None)  # a group must not end while another rank still uses it
        finally:
            self._destroy_own_groups()

    def _destroy_own_groups(self) -> None:
        _destroy_groups(self._groups)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error_type is None:
            self.close()
            return
        try:  # the current write is finished if the other ranks do so; only `error` is reported
            if self._writer is not None:
                self._writer.join()
        finally:
            self._destroy_own_groups()


class _WriterThread(Thread):
    """The thread that writes one checkpoint.

    Attributes:
        error: Error of the write, set when the thread has ended; None if it succeeded.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        path: Path,
        overwrite: bool,
        on_published: Callable[[], object] | None,
        groups: list[dist.ProcessGroup],
        unreported_errors: list[str],
    ) -> None:
        super().__init__(name=f"ckptx saves {path.name}", daemon=False)  # the interpreter waits for it
        self.error: BaseException | None = None
        self._job: tuple[Any, ...] | None = (snapshot, path, overwrite, on_published)
        self._groups, self._unreported_errors = groups, unreported_errors
        # Each thread has a current device of its own, which torch's writer uses.
        self._cuda_device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run(self) -> None:
        """Write the checkpoint."""
        assert self._job is not None
        snapshot, path, overwrite, on_published = self._job
        self._job = None
        try:
            if self._cuda_device is not None:
                torch.cuda.set_device(self._cuda_device)
            publish(snapshot, path, overwrite=overwrite, on_published=on_published, group=self._groups[0])
        except BaseException as error:  # raised again by `wait`
            self._unreported_errors.append(f"{path}: not saved: {type(error).__name__}: {error}")
            self.error = error
            _clear_frames(error)
            if not isinstance(error, CkptxError):
                # All ranks know of a CkptxError. Other errors are those of a lost connection, or of this rank alone:
                # without the group, the other ranks fail instead of waiting for this one.
                _destroy_groups(self._groups)


def _clear_frames(error: BaseException) -> None:
    """Clear the frames of an error, which keep the copied tensors and the process group alive."""
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is not None:
            traceback.clear_frames(each.__traceback__)
            pending += [each.__cause__, None if each.__context__ is each.__cause__ else each.__context__]


def _destroy_groups(groups: list[dist.ProcessGroup]) -> None:
    while groups:
        with suppress(ValueError):  # the default group has already been destroyed, and all groups with it
            dist.destroy_process_group(groups.pop())


def _print_unreported(errors: list[str]) -> None:
    """Print errors that no call of `wait` raised."""
    for each in errors:
        print(f"error: {each}", file=sys.stderr)
