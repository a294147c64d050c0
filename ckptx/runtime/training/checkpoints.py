"""The checkpoints of a run in one directory: complete ones, the one to resume from, and those to remove.

    root/step-3/                              complete: metadata is valid, no file that it names is missing or too short
    root/latest                               "step-3": the step to resume from; written after this step is complete
    root/.step-6.ckptx-partial/               a step that is being saved, or whose save was killed
    root/.step-3.removed.ckptx-partial/tree/  a step that is being removed

A step here is the checkpoint of one training step. It is renamed before the first of its files is removed, so that each
`step-N` that ckptx wrote is complete. Directories of other programs and `latest` are verified before use.
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
from ckptx.publishing.overwrite_checks import refuse_unrelated_files
from ckptx.publishing.staging import Staging
from ckptx.storage.directory_handle import DirectoryHandle
from ckptx.storage.files import lock_file, read_small, write_error
from ckptx.storage.local import LocalSource

LATEST = "latest"
_NEW_LATEST = ".latest.ckptx-new"
_LATEST_BYTES = 256  # maximum size of `latest` that is read
_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_STAGING_NAME = re.compile(r"\.(step-(?:0|[1-9][0-9]*)(?:\.removed)?)\.ckptx-partial")


class ResumePoint(NamedTuple):
    """The step to resume from.

    Attributes:
        step: Number of the step; None if no step is complete.
        note: Note for the user if `latest` names no complete step, or not the newest one; empty if it names the newest,
            or if there are neither steps nor `latest`.
    """

    step: int | None
    note: str = ""


class StepDirectories:
    """Checkpoints in one directory. Nothing is cached: every method reads the disk.

    Any rank may read; only rank 0 may call `mark_latest`, `retain` and `clean_up`.

    Attributes:
        root: Directory of the checkpoints; need not exist yet.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, step: int) -> Path:
        """Return the directory of a step, which need not exist."""
        return self.root / f"step-{step}"

    def is_published(self, step: int) -> bool:
        """Return True if the step is complete: a directory with valid metadata and the files that the metadata names.

        The metadata is read, and of other files only names and sizes.
        """
        try:
            if not stat.S_ISDIR(os.lstat(self.path(step)).st_mode):
                return False
            open_dcp(LocalSource(self.path(step)))
        except (CkptxError, OSError):
            return False
        return True

    def published(self) -> list[int]:
        """Return the numbers of the complete steps, in ascending order; empty if there are none."""
        return [step for step in self._list_named_steps() if self.is_published(step)]

    def _list_named_steps(self) -> list[int]:
        """Return the numbers of all entries that are named like a step."""
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return []
        return sorted(int(found[1]) for name in names if (found := _STEP.fullmatch(name)))

    # -------------------------------------------------------------------------------------------------- the latest

    def latest(self) -> int | None:
        """Return the number of the step to resume from; None if no step is complete. See `choose`."""
        return self.choose().step

    def choose(self) -> ResumePoint:
        """Return the step that `latest` names if it is complete, else the newest complete step."""
        named_step, problem = self._read_latest()
        newest_step = next((step for step in reversed(self._list_named_steps()) if self.is_published(step)), None)
        if named_step is not None and self.is_published(named_step):
            note = (
                ""
                if named_step == newest_step
                else f"{self.path(named_step)}: {LATEST} names it; step-{newest_step} is complete, too"
            )
            return ResumePoint(named_step, note)
        if named_step is not None:
            problem = f"names step-{named_step}, which is not complete"
        if newest_step is None:
            return ResumePoint(None, f"{self.root / LATEST}: {problem}; there is no complete step" if problem else "")
        return ResumePoint(
            newest_step,
            f"{self.root / LATEST}: {problem or 'does not exist'}; using step-{newest_step}, the newest complete step",
        )

    def _read_latest(self) -> tuple[int | None, str]:
        """Return the step that `latest` names, and a problem with that file.

        Returns:
            The step and ""; None and the problem; or None and "" if there is no file.
        """
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
        """Make `latest` name a step, durably, in one rename.

        Raises:
            UsageError: The step is not complete.
            OutputError, SpaceError: `latest` cannot be written.
        """
        if not self.is_published(step):
            raise UsageError(f"{self.path(step)}: is not a complete step, and {LATEST} must name one; save it first")
        with DirectoryHandle.open_path(Path(os.path.realpath(self.root))) as root:
            try:
                if root.stat(_NEW_LATEST) is not None:
                    root.remove(_NEW_LATEST)
                with root.create_file(_NEW_LATEST) as file:
                    file.write(f"step-{step}\n".encode(), 0)
                    file.sync()
                os.rename(_NEW_LATEST, LATEST, src_dir_fd=root.descriptor, dst_dir_fd=root.descriptor)
                os.fsync(root.descriptor)
            except OSError as error:
                raise write_error(self.root / LATEST, error) from error

    # -------------------------------------------------------------------------------------------------- removing

    def retain(self, keep: int) -> list[int]:
        """Remove complete steps except the newest `keep` and the one to resume from; finish interrupted removals.

        Incomplete steps, and steps that contain other files, were not written by ckptx alone and are kept.

        Args:
            keep: Number of newest complete steps to keep.

        Returns:
            Numbers of the steps that were removed, in ascending order.

        Raises:
            UsageError: `keep` is less than one.
            OutputError: A step cannot be removed.
        """
        if keep < 1:
            raise UsageError(f"keep is {keep} and must be 1 or more; the newest complete step always stays")
        self.clean_up()
        complete = self.published()
        kept_steps = {*complete[-keep:], self.latest()}
        removed = []
        for step in complete:
            if step not in kept_steps and self._remove(step, complete[-1]):
                removed.append(step)
        return removed

    def _remove(self, step: int, newest: int) -> bool:
        """Rename a step, then remove its files.

        Other files that each save copies into its step (`base` of `SaveRequest`) may have any name. They are recognized
        by the newest step, which has files with the same names.

        Returns:
            False if the step contains files that ckptx did not write; then nothing is removed.
        """
        path = Path(os.path.realpath(self.root)) / f"step-{step}"
        try:
            refuse_unrelated_files(path, backup=path.with_name(f"step-{newest}"))
        except OutputError:
            return False
        with Staging(path.with_name(f"{path.name}.removed")) as removal:
            try:
                os.rename(path, removal.tree_path)
                for each in (path.parent, removal.root):  # before files are removed, or a crash might undo the rename
                    _sync_directory(each)
            except OSError as error:
                raise write_error(path, error) from error
            removal.discard()
        return True

    def clean_up(self) -> list[Path]:
        """Remove the remains of killed saves and interrupted removals that no process works on.

        On a file system without locks it is unknown whether a process works on them, and they are kept.

        Returns:
            Paths of the staging directories that were removed.
        """
        entries = [] if not self.root.is_dir() else [self.root / name for name in sorted(os.listdir(self.root))]
        return [path for path in entries if _STAGING_NAME.fullmatch(path.name) and self._discard(path)]

    def _discard(self, path: Path) -> bool:
        """Remove a staging directory if no process works on it; return True if it no longer exists."""
        found = _STAGING_NAME.fullmatch(path.name)
        assert found is not None
        with suppress(OutputError):
            if _is_unlocked(path):
                with Staging(path.with_name(found[1]), resume=True) as staging:
                    staging.discard()
        return not os.path.lexists(path)


def _is_unlocked(staging: Path) -> bool:
    """Return True if no process holds the lock of a staging directory; False if the file system has no locks.

    A staging directory without a lock file counts as unlocked if it is empty.
    """
    with DirectoryHandle.open_path(staging) as handle:
        if handle.stat("lock") is None:
            return not handle.list_names()
        descriptor = handle.create_descriptor("lock", keep=True)
        try:
            return lock_file(descriptor, staging / "lock") is True
        finally:
            os.close(descriptor)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
