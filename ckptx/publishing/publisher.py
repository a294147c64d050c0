"""The interface of a place that outputs are published in: claim it, write, publish in one step or discard.

    with CLAIM(target, overwrite=..., resume=...) as publisher:      refused while another run has the place
        resumed = publisher.begin(plan, resume)                      output and notes are there from here on
        ...                                                          files are written into publisher.output
        publisher.publish(expected)                                  checked, durable, and visible at once

On a local disk this is a hidden directory and a rename (`Staging`). A bucket has no rename: there a claim object is the
lock, data objects have their final names, and the marker that loaders look for is written last, on condition that
nobody else wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol

from ckptx.storage.interface import ExpectedFile, OutputTree, Source


class Publisher(Protocol):
    """The claim on one target; as a context manager it discards what a failed run wrote.

    An ordinary exception discards. KeyboardInterrupt and SystemExit leave what was written, for a run that resumes.
    """

    @property
    def output(self) -> OutputTree:
        """The files of the output; there from `begin` on."""

    @property
    def notes(self) -> OutputTree:
        """Notes on finished work for a run that resumes; never published; there from `begin` on."""

    @property
    def written(self) -> Source:
        """The files of the output, to be read back before they are published."""

    @property
    def published(self) -> Source:
        """The files that are at the target now, from an earlier run or from somebody else."""

    def digest_of_published(self, name: str) -> str:
        """Return the digest of a file at the target, without following a link out of it.

        Raises:
            CkptxError, OSError: It cannot be read, or a link is on the way.
        """

    @property
    def is_locked(self) -> bool:
        """False where the storage knows no locks: a later run takes the place over, which `require_own` notices."""

    def __enter__(self) -> Publisher:
        """Return the claim itself."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the claim."""

    def begin(self, plan: bytes, resume: bool) -> bool:
        """Prepare `output` and `notes` for a run that makes `plan`.

        Returns:
            True if `resume` is set and an interrupted run of the same plan is continued.
        """

    def refuse_target_unless(self, overwrite: bool) -> None:
        """Refuse a target that exists and holds something, if it may not be replaced.

        Raises:
            OutputError: It does.
        """

    def require_space(self, nbytes: int) -> None:
        """Check that `nbytes` more fit, where the storage can tell.

        Raises:
            SpaceError: They do not.
        """

    def require_own(self) -> None:
        """Check that the place still is what was claimed.

        Raises:
            OutputError: Somebody else removed, replaced or took it.
        """

    def publish(self, expected: Mapping[str, ExpectedFile]) -> None:
        """Make the output visible at its target, complete and durable.

        Args:
            expected: Every file there must be.

        Raises:
            OutputError: A file is not what it must be, or somebody created the target meanwhile; nothing is published.
            SpaceError: The storage turned out to be full.
        """

    def discard(self) -> None:
        """Remove what was written."""


class Claim(Protocol):
    """Claims a target."""

    def __call__(self, target: Any, /, *, overwrite: bool, resume: bool, may_replace: Any) -> Publisher:
        """Claim a target; see `Staging.__init__` for the arguments.

        Raises:
            OutputError: It exists and may not be replaced, another run writes it, or it is not writable.
        """
