"""The interface for publishing an output: claim the target, write, then publish atomically or discard.

    with claim(target, overwrite=..., resume=..., check_replaceable=...) as publisher:
                                                                 # refused while another run has claimed the target
        resumed = publisher.begin(plan, resume)                  # creates output and journal
        ...                                                      # files are written into publisher.output
        publisher.publish(expected)                              # checked, durable, and visible atomically

A claim makes one run the only one that writes the target. On a local disk it is the lock of a hidden directory, which a
rename publishes (`Staging`), and this is the only implementation. An object store has no rename: there, a claim object
would be the lock, data objects would have their final names, and the marker that loaders look for would be written
last, on the condition that it does not exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol

from ckptx.storage.interface import ExpectedFile, OutputTree, Source


class Publisher(Protocol):
    """The claim on one target; a context manager that discards the files of a failed run.

    An ordinary exception discards them. KeyboardInterrupt and SystemExit keep them for `--resume`.
    """

    @property
    def output(self) -> OutputTree:
        """The files of the output; available after `begin`."""

    @property
    def journal(self) -> OutputTree:
        """Journal of finished tensors, from which a run resumes; not published; available after `begin`."""

    @property
    def staged_source(self) -> Source:
        """The files of the output, for reading them before they are published."""

    @property
    def target_source(self) -> Source:
        """The current files at the target."""

    def digest_target_file(self, name: str) -> str:
        """Return the digest of a file at the target, in hex, without following links.

        Raises:
            CkptxError, OSError: The file cannot be read, or a component of its path is a link.
        """

    @property
    def is_locked(self) -> bool:
        """False if the storage does not support locks: a later run can take over, which `verify_claim` detects."""

    @property
    def leftover(self) -> Any:
        """Location of files that `discard` could not remove; None if there are none."""

    @property
    def replaced_plan(self) -> bytes | None:
        """Plan of the interrupted run that `begin` discarded although `resume` was set; else None."""

    def __enter__(self) -> Publisher:
        """Return the claim itself."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the claim."""

    def begin(self, plan: bytes, resume: bool) -> bool:
        """Prepare `output` and `journal` for a run with this plan.

        Args:
            plan: Bytes that describe all that determines the output; a run resumes another only if they are equal.
            resume: True to resume an interrupted run; False to discard its files.

        Returns:
            True if `resume` is set and an interrupted run of the same plan is resumed.
        """

    def refuse_existing_target(self, overwrite: bool) -> None:
        """Refuse an existing target that is not empty, unless `overwrite` is set.

        Raises:
            OutputError: The target must not be replaced.
        """

    def require_space(self, nbytes: int) -> None:
        """Check that `nbytes` more bytes fit, if the storage reports its free space.

        Raises:
            SpaceError: There is not enough space.
        """

    def verify_claim(self) -> None:
        """Check that the claim is still valid.

        Raises:
            OutputError: Another process removed, replaced or took over the staging directory.
        """

    def publish(self, expected: Mapping[str, ExpectedFile]) -> None:
        """Make the output visible at its target, complete and durable.

        Args:
            expected: Every file that must exist, by name.

        Raises:
            OutputError: A file is not as expected, or another process created the target; nothing is published.
            SpaceError: The storage is full.
        """

    def discard(self) -> None:
        """Remove all files of this run that were not published; see `leftover` for those that cannot be removed."""


class Claim(Protocol):
    """Function that claims a target."""

    def __call__(self, target: Any, /, *, overwrite: bool, resume: bool, check_replaceable: Any) -> Publisher:
        """Claim a target; see `Staging.__init__` for the arguments.

        Raises:
            OutputError: It exists and must not be replaced, another run is writing it, or it is not writable.
        """
