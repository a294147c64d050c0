"""Publishing a directory in one step: stage beside the target, lock, fsync, rename.

    parent/.NAME.ckptx-partial/lock         held by flock while a run works; where there are no locks, signed by it
                               plan         what is being made; a resumed run must be making the same
                               aside        inode of what an overwrite moves to parent/.NAME.ckptx-old
                               journal/     which blocks are done, one file per run of blocks
                               tree/        what becomes parent/NAME by one rename, its commit marker written last

A refused or failed run removes all of it. A killed one leaves it, and the next run resumes it or starts afresh. Nobody
who looks for a checkpoint finds one: the name is hidden, and no loader descends into `tree`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptx.errors import OutputError, SpaceError
from ckptx.publishing.output_place import free_space, refuse_existing
from ckptx.storage.directory_handle import PROBE, DirectoryHandle
from ckptx.storage.files import take_lock, unwritable
from ckptx.storage.interface import ExpectedFile
from ckptx.storage.local import LocalSource
from ckptx.storage.open_file import OpenFile
from ckptx.storage.staged import staged
from ckptx.transfer.digest import file_digest

_RENAME_EXCHANGE = 2
_TRIES = 100  # to claim a directory that another run is just giving up


class Staging:
    """The staging directory of one target; a context manager that cleans up after a failure.

    An ordinary exception removes the directory. KeyboardInterrupt and SystemExit leave it for `--resume`. It is held by
    descriptors from the moment it is claimed: what is put in its place later is neither written to nor published.

    Attributes:
        target: What will be published, without links.
        root: The staging directory.
        tree, journal: Where they are, for those who read.
        output, notes: The same, to write into; there from `begin` on.
        is_locked: False where the file system knows no locks: another run that comes then takes the place over, which
            this one notices before it publishes.
    """

    output: DirectoryHandle
    notes: DirectoryHandle

    def __init__(
        self,
        target: Path,
        *,
        overwrite: bool = False,
        resume: bool = False,
        may_replace: Callable[[Path], None] = lambda target: None,
    ) -> None:
        """Claims the target. With `resume` the target may exist: the caller checks whether it is what is wanted.

        Args:
            target: What to publish.
            overwrite: Replace what is there.
            resume: Continue what an interrupted run has left.
            may_replace: Raises OutputError for a directory that must not be replaced.

        Raises:
            OutputError: The target exists and may not be overwritten, another run is writing it, or the place is
                not writable.
        """
        self.target = Path(os.path.realpath(target))
        self.tree, self.journal = staged(self.target)
        self.root = self.tree.parent
        self._overwrite, self._may_replace = overwrite, may_replace
        self._aside = f".{self.target.name}.ckptx-old"
        self._opened: list[DirectoryHandle] = []
        self._lock, self.is_locked, self._signature = -1, True, b""
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._parent = self._keep(
                DirectoryHandle(self.target.parent, os.open(self.target.parent, os.O_RDONLY | os.O_DIRECTORY))
            )
        except OSError as error:
            raise unwritable(self.root, error) from error
        try:
            self._acquire()
            self._sign()
            self._repair_cut_swap()
            refuse_existing(self.target, overwrite or resume)
        except OSError as error:
            self._leave()
            raise unwritable(self.root, error) from error
        except BaseException:  # what was opened is closed, and it is raised again
            self._remove_if_bare()
            self._leave()
            raise

    def _keep(self, directory: DirectoryHandle) -> DirectoryHandle:
        self._opened.append(directory)
        return directory

    def _leave(self) -> None:
        for directory in self._opened:
            directory.close()
        if self._lock >= 0:
            os.close(self._lock)

    def _acquire(self) -> None:
        """Opens the staging directory, and locks it for this run."""
        for _ in range(_TRIES):
            try:
                root = self._parent.below(self.root.name, make=True)
            except OutputError:
                if self._parent.stat(self.root.name) is not None:
                    raise
                continue  # its owner removed it just now
            try:
                _refuse_foreign(root)
                try:
                    lock = root.create("lock", keep=True)
                except OutputError:
                    if root.is_at(self._parent, self.root.name):
                        raise
                    root.close()
                    continue  # its owner removed the directory just now
                if self._take(root, lock):
                    return
            except BaseException:  # what was opened is closed, and it is raised again
                root.close()
                raise
            root.close()
        raise OutputError(f"{self.root}: cannot be made; is its directory being removed?")

    def _take(self, root: DirectoryHandle, lock: int) -> bool:
        """Locks the directory; False when its owner finished and removed it between our open and our lock."""
        try:
            is_free = take_lock(lock, self.root / "lock")
        except OutputError:  # it could not even be tried, so nobody else can be at work either
            os.close(lock)
            with suppress(OSError):
                if root.names() == ["lock"]:
                    root.remove("lock")
                    os.rmdir(self.root.name, dir_fd=self._parent.descriptor)
            raise
        if is_free is False:
            os.close(lock)
            raise OutputError(
                f"{self.target}: another ckptx is writing it (lock {self.root / 'lock'}); wait for it or stop it"
            )
        found = root.stat("lock")
        if found is None or not os.path.samestat(found, os.fstat(lock)):
            os.close(lock)
            return False
        self._root, self._lock, self.is_locked = self._keep(root), lock, is_free is True
        return True

    def _sign(self) -> None:
        """Without locks, the last who signs has the place."""
        if not self.is_locked:
            signature = os.urandom(16).hex().encode()
            file = OpenFile(self._lock, self.root / "lock")
            file.cut_to(0)
            file.write(signature, 0)
            self._signature = signature

    def _is_ours(self) -> bool:
        """False when another run has taken the place over, as it may where there are no locks."""
        return self.is_locked or self._root.read("lock") == self._signature

    def _repair_cut_swap(self) -> None:
        """A run killed between the two renames of an overwrite left the old directory under another name.

        It is known by the inode that the run wrote down before; whatever else has that name is left alone.
        """
        found = self._parent.stat(self._aside)
        if found is not None:
            if not stat.S_ISDIR(found.st_mode) or self._root.read("aside") != _noted(found):
                raise OutputError(
                    f"{self._parent.path / self._aside}: is in the way, and is not what ckptx put there; move it "
                    "elsewhere and run again"
                )
            if self._parent.stat(self.target.name) is not None:
                self._parent.remove(self._aside)
            else:
                self._rename(self._parent, self._aside, self._parent, self.target.name)
        self._forget("aside")

    def _forget(self, name: str) -> None:
        if self._root.stat(name) is not None:
            self._root.remove(name)

    def _remove_if_bare(self) -> None:
        if self._lock >= 0 and self._root.names() == ["lock"]:
            self.discard()

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self.discard()
        self._leave()

    @property
    def written(self) -> LocalSource:
        """The files of `tree`, for those who read them back."""
        return LocalSource(self.tree)

    @property
    def published(self) -> LocalSource:
        """The files at the target."""
        return LocalSource(self.target)

    def digest_of_published(self, name: str) -> str:
        """Return the digest of a file at the target; a link on the way is refused."""
        with DirectoryHandle.at(self.target) as held, held.reading(name) as file:
            return file_digest(file).hex()

    def refuse_target_unless(self, overwrite: bool) -> None:
        """Refuses a target that exists, for a resumed run whose target turned out not to be what it makes."""
        refuse_existing(self.target, overwrite)

    def begin(self, plan: bytes, resume: bool) -> bool:
        """Prepares `tree` and `journal` for a run that makes `plan`.

        Returns:
            True when an interrupted run of the same plan is continued.
        """
        same = resume and self._root.read("plan", len(plan) + 1) == plan
        try:
            if not same:
                for name in ("plan", "tree", "journal"):
                    self._forget(name)
            self.output = self._keep(self._root.below("tree", make=True))
            self.notes = self._keep(self._root.below("journal", make=True))
            if not same:
                self._root.write("plan", [plan])
        except OSError as error:
            raise unwritable(self.root, error) from error
        return same

    def require_space(self, nbytes: int) -> None:
        """Checks that `nbytes` more fit; a file system may still run out later, which ends as cleanly.

        Raises:
            SpaceError: They do not.
        """
        free = free_space(self.target)
        if free < nbytes:
            raise SpaceError(f"{self.target}: needs {nbytes} bytes, the file system has {free} free; free some space")

    def publish(self, expected: Mapping[str, ExpectedFile] | None = None) -> None:
        """Makes `tree` the target, durably, in one step.

        Args:
            expected: Every file there must be; None takes what there is.

        Raises:
            OutputError: Files are missing or are not those that were written, the staging directory was removed or
                replaced, or somebody created the target meanwhile.
        """
        try:
            self.output.fsync_and_verify(expected)
            self.require_own()
            if self._overwrite and self._parent.stat(self.target.name) is not None:
                self._exchange()
            else:
                self._rename(self._root, "tree", self._parent, self.target.name)
            if not self._is_published():
                self._take_back()
            os.fsync(self._parent.descriptor)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise OutputError(
                    f"{self.target}: was created by somebody else meanwhile; nothing was replaced"
                ) from error
            raise unwritable(self.target, error) from error
        self.discard()

    def require_own(self) -> None:
        """Looks whether everything on the way to the tree is still what was claimed.

        Raises:
            OutputError: It is not.
        """
        if not self._is_ours():
            raise OutputError(
                f"{self.target}: another ckptx began to write it, too, on a file system without locks; nothing was "
                "published, run one after the other"
            )
        for directory, parent, name in (
            (self._root, self._parent, self.root.name),
            (self.output, self._root, "tree"),
        ):
            if not directory.is_at(parent, name):
                raise OutputError(
                    f"{parent.path / name}: was removed or replaced by somebody else; nothing was published, run again"
                )

    def _is_published(self) -> bool:
        """True when what is at the target is the directory that was written."""
        try:
            return os.path.samestat(os.lstat(self.target), os.fstat(self.output.descriptor))
        except FileNotFoundError:
            return False

    def _take_back(self) -> None:
        """Something else came to the target: the directory was replaced, or the one above it moved."""
        with suppress(OSError):
            if self.output.is_at(self._parent, self.target.name) and self._root.stat("tree") is None:
                self._rename(self._parent, self.target.name, self._root, "tree")
        raise OutputError(
            f"{self.target}: is not the directory that was written; somebody else moved or replaced it, look at it and "
            "run again"
        )

    def discard(self) -> None:
        """Removes the staging directory, the lock last: until then nobody else may begin in it.

        What is not as this run left it stays: a directory in the place of the tree may be anybody's.
        """
        if not self._is_ours():
            return
        with suppress(OSError):
            for held, name in ((getattr(self, "output", None), "tree"), (getattr(self, "notes", None), "journal")):
                if held is None or held.is_at(self._root, name):
                    self._forget(name)
        # The next run may claim the directory as soon as the lock is gone, and a failed run has its own error to say.
        with suppress(OSError):
            self._forget("plan")
            if self._parent.stat(self._aside) is None:
                self._forget("aside")
            if self._root.names() == ["lock"]:  # whatever could not be removed is left to the next run, under its lock
                self._forget("lock")
                if self._root.is_at(self._parent, self.root.name):
                    os.rmdir(self.root.name, dir_fd=self._parent.descriptor)

    def _exchange(self) -> None:
        """Swaps the tree for what is at the target, and removes that unless something came into it meanwhile."""
        self._may_replace(self.target)
        old = self._keep(self._parent.below(self.target.name))
        known = {name for name, _ in old.walk()}
        place = (self._root, "tree")
        is_swapped = _exchange_names(self._root.descriptor, "tree", self._parent.descriptor, self.target.name)
        if not is_swapped:
            place = (self._parent, self._aside)
            self._root.write("aside", [_noted(os.fstat(old.descriptor))])
            self._rename(self._parent, self.target.name, *place)
            try:
                self._rename(self._root, "tree", self._parent, self.target.name)
            except OSError:
                self._rename(*place, self._parent, self.target.name)
                raise
        came = sorted({name for name, _ in old.walk()} - known)
        if came or not old.is_at(*place):
            if is_swapped:
                _exchange_names(self._root.descriptor, "tree", self._parent.descriptor, self.target.name)
            else:
                self._rename(self._parent, self.target.name, self._root, "tree")
                self._rename(*place, self._parent, self.target.name)
            raise OutputError(
                f"{self.target}: {came[0] if came else 'it'} changed while it was being replaced; nothing was "
                "replaced, run again"
            )
        with suppress(OSError):  # the new one is in place; what is left of the old is removed by the next run
            place[0].remove(place[1])

    def _rename(self, a: DirectoryHandle, name: str, b: DirectoryHandle, other: str) -> None:
        os.rename(name, other, src_dir_fd=a.descriptor, dst_dir_fd=b.descriptor)


def _noted(found: os.stat_result) -> bytes:
    """How a directory that is moved aside is written down."""
    return f"{found.st_ino}\n".encode()


def _refuse_foreign(root: DirectoryHandle) -> None:
    """A staging directory holds what ckptx puts there and nothing else; another one may be anybody's.

    Raises:
        OutputError: It holds something else, or is another user's.
    """
    names = root.names()
    foreign = [name for name in names if name not in _CONTENTS]
    foreign += [
        name
        for name, is_kind in _CONTENTS.items()
        if (found := root.stat(name)) is not None and not is_kind(found.st_mode)
    ]
    if not foreign and "lock" not in names and set(names) - {PROBE} and root.names():
        raise OutputError(f"{root.path}: is no staging directory of ckptx, it has no lock; move it elsewhere")
    if foreign:
        raise OutputError(f"{root.path}: is no staging directory of ckptx, it holds {foreign[0]!a}; move it elsewhere")
    if not root.is_owned_by_us():
        raise OutputError(f"{root.path}: is the staging directory of another user; remove it, or choose another DST")


_CONTENTS: dict[str, Callable[[int], bool]] = {
    "lock": stat.S_ISREG, "plan": stat.S_ISREG, "aside": stat.S_ISREG, "tree": stat.S_ISDIR, "journal": stat.S_ISDIR,
    PROBE: stat.S_ISREG,
}  # fmt: skip


@contextmanager
def open_staged(target: Path) -> Iterator[tuple[DirectoryHandle, DirectoryHandle]]:
    """Tree and journal of the run that is making `target`, for a process that helps it.

    Raises:
        OutputError: They are not there, or something else is.
    """
    root = Path(os.path.realpath(target)).parent / staged(target)[0].parent.name
    with DirectoryHandle.at(root) as held, held.below("tree") as tree, held.below("journal") as journal:
        yield tree, journal


def _exchange_names(a: int, name: str, b: int, other: str) -> bool:
    """Swaps two names in held directories atomically; False where the kernel or the file system cannot."""
    import ctypes  # only an overwrite needs it

    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    return bool(renameat2(a, os.fsencode(name), b, os.fsencode(other), _RENAME_EXCHANGE) == 0)
