"""Publishing a directory in one step: stage beside the target, lock, fsync, rename.

    parent/.NAME.ckptx-partial/lock         held by flock while a run works
                               plan         what is being made; a resumed run must be making the same
                               journal/     which blocks are done, one file per run of blocks
                               tree/        what becomes parent/NAME by one rename, its commit marker written last

A refused or failed run removes all of it. A killed one leaves it, and the next run resumes it or starts afresh. Nobody
who looks for a checkpoint finds one: the name is hidden, and no loader descends into `tree`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path

from ckptx.errors import OutputError, SpaceError
from ckptx.storage import unwritable, write_file

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


class Staging:
    """The staging directory of one target; a context manager that cleans up after a failure.

    An ordinary exception removes the directory. KeyboardInterrupt and SystemExit leave it for `--resume`.
    """

    def __init__(self, target: Path, *, overwrite: bool = False, resume: bool = False) -> None:
        """Claims the target. With `resume` the target may exist: the caller checks whether it is what is wanted.

        Raises:
            OutputError: The target exists and may not be overwritten, another run is writing it, or the place is
                not writable.
        """
        self.target = Path(os.path.realpath(target))
        self.tree, self.journal = staged(self.target)
        self.root = self.tree.parent
        self._overwrite = overwrite
        self._set_aside = self.target.parent / f".{self.target.name}.ckptx-old"
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._lock = self._acquire()
        except OSError as error:
            raise unwritable(self.root, error) from error
        try:
            self._repair_cut_swap()
            refuse_existing(self.target, overwrite or resume)
        except BaseException:
            self._remove_if_bare()
            os.close(self._lock)
            raise

    def _acquire(self) -> int:
        while True:
            self.root.mkdir(exist_ok=True)
            try:
                lock = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                continue  # its owner removed the directory just now
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(lock)
                raise OutputError(
                    f"{self.target}: another ckptx is writing it (lock {self.root / 'lock'}); wait for it or stop it"
                ) from error
            try:
                if os.path.samestat(os.fstat(lock), os.stat(self.root / "lock")):
                    return lock
            except FileNotFoundError:
                pass  # its owner finished and removed the directory between our open and our lock
            os.close(lock)

    def _repair_cut_swap(self) -> None:
        """A run killed between the two renames of an overwrite left the old directory under another name."""
        if self._set_aside.exists():
            if self.target.exists():
                shutil.rmtree(self._set_aside)
            else:
                os.rename(self._set_aside, self.target)

    def _remove_if_bare(self) -> None:
        if sorted(entry.name for entry in self.root.iterdir()) == ["lock"]:
            self.discard()

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self.discard()
        os.close(self._lock)

    def refuse_target_unless(self, overwrite: bool) -> None:
        """Refuses a target that exists, for a resumed run whose target turned out not to be what it makes."""
        refuse_existing(self.target, overwrite)

    def begin(self, plan: bytes, resume: bool) -> bool:
        """Prepares `tree` and `journal` for a run that makes `plan`.

        Returns:
            True when an interrupted run of the same plan is continued.
        """
        note = self.root / "plan"
        same = resume and note.exists() and note.read_bytes() == plan
        try:
            if not same:
                note.unlink(missing_ok=True)
                for directory in (self.tree, self.journal):
                    if directory.exists():
                        shutil.rmtree(directory)
            self.tree.mkdir(exist_ok=True)
            self.journal.mkdir(exist_ok=True)
        except OSError as error:
            raise unwritable(self.root, error) from error
        if not same:
            write_file(note, plan)
        return same

    def require_space(self, nbytes: int) -> None:
        """Checks that `nbytes` more fit; a file system may still run out later, which ends as cleanly.

        Raises:
            SpaceError: They do not.
        """
        free = free_space(self.target)
        if free < nbytes:
            raise SpaceError(f"{self.target}: needs {nbytes} bytes, the file system has {free} free; free some space")

    def publish(self) -> None:
        """Makes `tree` the target, durably, in one step.

        Raises:
            OutputError: Somebody created the target meanwhile.
        """
        try:
            for directory, _, names in os.walk(self.tree):
                for name in names:
                    sync(Path(directory, name))
                sync(Path(directory))
            if self._overwrite and self.target.exists():
                self._exchange()
            else:
                os.rename(self.tree, self.target)
            sync(self.target.parent)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise OutputError(
                    f"{self.target}: was created by somebody else meanwhile; nothing was replaced"
                ) from error
            raise unwritable(self.target, error) from error
        shutil.rmtree(self._set_aside, ignore_errors=True)
        self.discard()

    def discard(self) -> None:
        """Removes the staging directory, the lock last: until then nobody else may begin in it."""
        for directory in (self.tree, self.journal):
            shutil.rmtree(directory, ignore_errors=True)
        # The next run may claim the directory as soon as the lock is gone, and a failed run has its own error to say.
        with suppress(OSError):
            for name in ("plan", "lock"):
                (self.root / name).unlink(missing_ok=True)
            self.root.rmdir()

    def _exchange(self) -> None:
        if _rename_exchange(self.tree, self.target):
            return
        os.rename(self.target, self._set_aside)
        try:
            os.rename(self.tree, self.target)
        except OSError:
            os.rename(self._set_aside, self.target)
            raise


def refuse_existing(target: Path, overwrite: bool) -> None:
    """An output directory must be absent or empty.

    Raises:
        OutputError: It is a file, or holds something and `overwrite` is not set.
    """
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise OutputError(f"{target}: is not a directory; choose another DST")
    if not overwrite and any(target.iterdir()):
        raise OutputError(f"{target}: exists and is not empty; choose another DST or pass --overwrite")


def refuse_overlap(source: Path, target: Path) -> None:
    """Source and target must not contain each other.

    Raises:
        OutputError: They do.
    """
    a, b = Path(os.path.realpath(source)), Path(os.path.realpath(target))
    if a == b or a in b.parents or b in a.parents:
        raise OutputError(f"{target}: overlaps the input {source}; choose a DST outside of it")


def free_space(target: Path) -> int:
    """Bytes free where `target` will be."""
    place = Path(os.path.realpath(target)).parent
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def is_being_written(path: Path) -> bool:
    """True for a staging directory, or anything inside one."""
    return any(part.startswith(".") and part.endswith(".ckptx-partial") for part in path.resolve().parts)


def staged(target: Path) -> tuple[Path, Path]:
    """Tree and journal of the run that is making `target`."""
    resolved = Path(os.path.realpath(target))
    root = resolved.parent / f".{resolved.name}.ckptx-partial"
    return root / "tree", root / "journal"


def sync(path: Path) -> None:
    """Waits until a file or directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename_exchange(a: Path, b: Path) -> bool:
    """Swaps two names atomically; False where the kernel or the file system cannot."""
    import ctypes  # only an overwrite needs it

    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    return bool(renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0)
