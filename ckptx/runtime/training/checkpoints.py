"""The checkpoints of a run, in one directory: which are complete, which is the one to go on from, which may go.

    root/step-3/                              published: its metadata is there, and every file that it names, in full
    root/latest                               "step-3": where a run goes on; moved after the step is published
    root/.step-6.ckptx-partial/               a step that is being saved, or whose save was killed
    root/.step-3.removed.ckptx-partial/tree/  a step on its way out

A step leaves its name in one rename, before the first of its files goes. So whatever is called `step-N` here and is
ours was published in full; nothing else is believed, and `latest` is not either.
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ckptx.errors import CkptxError, OutputError, UsageError
from ckptx.formats.dcp.reader import open_dcp
from ckptx.publishing.replacing import refuse_foreign
from ckptx.publishing.staging import Staging
from ckptx.storage.directory_handle import DirectoryHandle
from ckptx.storage.files import read_small, take_lock, unwritable
from ckptx.storage.local import LocalSource

LATEST = "latest"
_NEW = ".latest.ckptx-new"
_LATEST_BYTES = 256
_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_LEFT = re.compile(r"\.(step-(?:0|[1-9][0-9]*)(?:\.removed)?)\.ckptx-partial")


class ResumePoint(NamedTuple):
    """Where to go on.

    Attributes:
        step: None where there is no complete step.
        note: Why it is not simply what `latest` says; empty where it is.
    """

    step: int | None
    note: str = ""


class StepDirectories:
    """The steps below one directory. It remembers nothing: each question looks at the disk.

    Any rank may ask; one alone, rank 0, marks and removes.

    Attributes:
        root: The directory; it need not exist yet.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, step: int) -> Path:
        """Where a step is, or will be."""
        return self.root / f"step-{step}"

    def is_published(self, step: int) -> bool:
        """True when the step is a directory whose metadata can be read, and whose files are there in full.

        It is seen from the metadata and from names and sizes of files; no payload is read.
        """
        try:
            if not stat.S_ISDIR(os.lstat(self.path(step)).st_mode):
                return False
            open_dcp(LocalSource(self.path(step)))
        except (CkptxError, OSError):
            return False
        return True

    def published(self) -> list[int]:
        """Every step that is complete, ascending."""
        return [step for step in self._named() if self.is_published(step)]

    def _named(self) -> list[int]:
        """The numbers of whatever is called as a step is."""
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return []
        return sorted(int(found[1]) for name in names if (found := _STEP.fullmatch(name)))

    # -------------------------------------------------------------------------------------------------- the latest

    def latest(self) -> int | None:
        """The step to go on from; see `choose`."""
        return self.choose().step

    def choose(self) -> ResumePoint:
        """What `latest` says if that step is complete, else the newest that is."""
        said, doubt = self._said()
        newest = next((step for step in reversed(self._named()) if self.is_published(step)), None)
        if said is not None and self.is_published(said):
            note = "" if said == newest else f"{self.path(said)}: {LATEST} names it; step-{newest} is complete, too"
            return ResumePoint(said, note)
        if said is not None:
            doubt = f"names step-{said}, which is not complete"
        if newest is None:
            return ResumePoint(None, f"{self.root / LATEST}: {doubt}; there is no complete step" if doubt else "")
        return ResumePoint(
            newest, f"{self.root / LATEST}: {doubt or 'is not there'}; step-{newest} is the newest complete"
        )

    def _said(self) -> tuple[int | None, str]:
        """The step that `latest` names, or what is wrong with it; neither where there is none."""
        path = self.root / LATEST
        if not os.path.lexists(path):
            return None, ""
        try:
            text = read_small(path, _LATEST_BYTES).decode(errors="replace").strip()
        except CkptxError:
            return None, "cannot be read"
        found = _STEP.fullmatch(text)
        return (int(found[1]), "") if found else (None, "names no step")

    def mark_latest(self, step: int) -> None:
        """Has `latest` name a step, in one rename, durably.

        Raises:
            UsageError: The step is not published.
            OutputError, SpaceError: It cannot be written.
        """
        if not self.is_published(step):
            raise UsageError(f"{self.path(step)}: is no complete step, and {LATEST} must name one; save it first")
        with DirectoryHandle.at(Path(os.path.realpath(self.root))) as root:
            try:
                if root.stat(_NEW) is not None:
                    root.remove(_NEW)
                with root.make(_NEW) as file:
                    file.write(f"step-{step}\n".encode(), 0)
                    file.sync()
                os.rename(_NEW, LATEST, src_dir_fd=root.descriptor, dst_dir_fd=root.descriptor)
                os.fsync(root.descriptor)
            except OSError as error:
                raise unwritable(self.root / LATEST, error) from error

    # -------------------------------------------------------------------------------------------------- removing

    def retain(self, keep: int) -> list[int]:
        """Removes all but the newest complete steps, and but what `latest` names. Finishes what was cut before.

        What is incomplete, or holds something that is no part of a checkpoint, is not ours and stays.

        Args:
            keep: How many of the newest complete steps stay.

        Returns:
            The steps that are gone.

        Raises:
            UsageError: `keep` is less than one.
            OutputError: A step cannot be removed.
        """
        if keep < 1:
            raise UsageError(f"keep: found {keep}, needed at least 1; the newest complete step always stays")
        self.clean_up()
        complete = self.published()
        kept = {*complete[-keep:], self.latest()}
        removed = []
        for step in complete:
            if step not in kept and self._remove(step, complete[-1]):
                removed.append(step)
        return removed

    def _remove(self, step: int, newest: int) -> bool:
        """Takes a step out of its name, then its files; False where it is not for us to remove.

        What was carried along into every step, whatever it is called, is in the newest as well.
        """
        path = Path(os.path.realpath(self.root)) / f"step-{step}"
        try:
            refuse_foreign(path, kept_in=path.with_name(f"step-{newest}"))
        except OutputError:
            return False
        with Staging(path.with_name(f"{path.name}.removed")) as leaving:
            try:
                os.rename(path, leaving.tree)
                for each in (path.parent, leaving.root):  # before the first file goes, or a crash might undo this
                    _sync(each)
            except OSError as error:
                raise unwritable(path, error) from error
            leaving.discard()
        return True

    def clean_up(self) -> list[Path]:
        """Removes what killed saves and cut removals left, if nobody is at work in it.

        Where the file system knows no locks nobody can say, and it stays.

        Returns:
            What is gone.
        """
        left = [] if not self.root.is_dir() else [self.root / name for name in sorted(os.listdir(self.root))]
        return [path for path in left if _LEFT.fullmatch(path.name) and self._discard(path)]

    def _discard(self, path: Path) -> bool:
        found = _LEFT.fullmatch(path.name)
        assert found is not None
        with suppress(OutputError):
            if _is_unlocked(path):
                with Staging(path.with_name(found[1]), resume=True) as staging:
                    staging.discard()
        return not os.path.lexists(path)


def _is_unlocked(staging: Path) -> bool:
    """True when nobody works in a staging directory, as its lock says."""
    with DirectoryHandle.at(staging) as held:
        if held.stat("lock") is None:
            return not held.names()
        descriptor = held.create("lock", keep=True)
        try:
            return take_lock(descriptor, staging / "lock") is True
        finally:
            os.close(descriptor)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
