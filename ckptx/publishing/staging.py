"""Publish a directory atomically: stage next to the target, lock, fsync, rename.

    parent/.NAME.ckptx-partial/lock         locked by flock during a run; without lock support, has the run's signature
                               plan         plan of the output, which must be equal for a resumed run
                               aside        inode of the directory that an overwrite moves to parent/.NAME.ckptx-old
                               journal/     digests of finished tensors, one file per step range
                               tree/        becomes parent/NAME by one rename; its commit marker is written last

A refused or failed run removes this staging directory. A killed run leaves it, and the next run resumes it or starts
over. Programs that look for checkpoints do not find it: the name is hidden, and no loader descends into `tree`.

An overwrite exchanges `tree` and the old target in one system call. Where this is not supported, it needs two renames:
the old target to parent/.NAME.ckptx-old, then `tree` to parent/NAME. If the run is killed between them, the next run
moves the old target back.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptx.errors import CkptxError, OutputError, SpaceError
from ckptx.publishing.output_checks import free_space, refuse_existing
from ckptx.storage.directory_handle import PROBE_NAME, DirectoryHandle
from ckptx.storage.files import lock_file, output_errors, write_error
from ckptx.storage.interface import ExpectedFile
from ckptx.storage.local import LocalSource
from ckptx.storage.open_file import OpenFile
from ckptx.storage.staging_paths import staging_paths
from ckptx.transfer.digest import file_digest
from ckptx.wording import human_bytes

_RENAME_EXCHANGE = 2  # flag of the system call renameat2
# Number of descriptors that are kept open until the staging directory is removed, so that a run that fails because too
# many files are open can still remove it.
_SPARE_DESCRIPTORS = 8
_MAX_CLAIM_ATTEMPTS = 100  # attempts to claim a directory that another run is about to remove


class Staging:
    """The staging directory of one target; a context manager that cleans up after a failure.

    An ordinary exception removes the directory. KeyboardInterrupt and SystemExit keep it for `--resume`. It is accessed
    by descriptors once it is claimed: a directory that replaces it later is neither written to nor published.

    Attributes:
        target: Path of the output, which `publish` creates or replaces, with links resolved.
        root: Path of the staging directory.
        tree_path, journal_path: Paths of the tree and the journal, for reading.
        output, journal: Handles of the tree and the journal, for writing; available after `begin`.
        is_locked: False if the file system does not support locks: then another run can take over the directory, which
            this one detects before it publishes.
        leftover: Path of the staging directory if `discard` could not remove it; else None.
        replaced_plan: Plan of the interrupted run that `begin` discarded although `resume` was set; else None.
    """

    output: DirectoryHandle
    journal: DirectoryHandle
    leftover: Path | None = None
    replaced_plan: bytes | None = None

    def __init__(
        self,
        target: Path,
        *,
        overwrite: bool = False,
        resume: bool = False,
        check_replaceable: Callable[[Path], None] = lambda target: None,
    ) -> None:
        """Claim the target.

        With `resume`, the target may exist and not be empty: the caller checks whether it is complete already, and
        calls `refuse_existing_target` if it is not.

        Args:
            target: Directory to publish.
            overwrite: Replace an existing target.
            resume: Resume an interrupted run.
            check_replaceable: Raises OutputError for a directory that must not be replaced; called right before an
                overwrite replaces the target.

        Raises:
            OutputError: The target exists and must not be overwritten, another run is writing it, its parent is not
                writable, or there is a directory that ckptx did not create at the path of the staging directory.
            SpaceError: The storage is full.
        """
        self.target = Path(os.path.realpath(target))
        self.tree_path, self.journal_path = staging_paths(self.target)
        self.root = self.tree_path.parent
        self._overwrite, self._check_replaceable = overwrite, check_replaceable
        self._old_name = f".{self.target.name}.ckptx-old"
        self._handles: list[DirectoryHandle] = []
        self._lock, self.is_locked, self._signature = -1, True, b""
        self._spare_descriptors: list[int] = []
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._parent = self._track(
                DirectoryHandle(self.target.parent, os.open(self.target.parent, os.O_RDONLY | os.O_DIRECTORY))
            )
            while len(self._spare_descriptors) < _SPARE_DESCRIPTORS:
                self._spare_descriptors.append(os.dup(self._parent.descriptor))
        except OSError as error:
            self._close()
            if isinstance(error, FileExistsError):  # of `mkdir`, for a parent that is no directory
                raise OutputError(f"{self.target.parent}: not a directory; choose another DST") from error
            raise write_error(self.root, error) from error
        try:
            self._acquire()
            self._sign()
            self._repair_interrupted_overwrite()
            refuse_existing(self.target, overwrite or resume)
        except BaseException as error:  # close all descriptors, and raise it again
            self._discard_if_unused()
            self._close()
            if isinstance(error, OSError):
                raise write_error(self.root, error) from error
            raise

    def _track(self, directory: DirectoryHandle) -> DirectoryHandle:
        self._handles.append(directory)
        return directory

    def _free_spare_descriptors(self) -> None:
        while self._spare_descriptors:
            os.close(self._spare_descriptors.pop())

    def _close(self) -> None:
        self._free_spare_descriptors()
        for directory in self._handles:
            directory.close()
        if self._lock >= 0:
            os.close(self._lock)

    def _acquire(self) -> None:
        """Open the staging directory, creating it if it does not exist, and lock it for this run.

        Raises:
            OutputError: Another run has locked it, ckptx did not create it, or it cannot be created.
        """
        last_error: CkptxError = OutputError(
            f"{self.root}: was removed by another process {_MAX_CLAIM_ATTEMPTS} times; wait for it and run again"
        )
        is_new = self._parent.stat(self.root.name) is None
        for _ in range(_MAX_CLAIM_ATTEMPTS):
            try:
                root = self._parent.open_directory(self.root.name, create=True)
            except CkptxError as error:
                if self._parent.stat(self.root.name) is not None:
                    if is_new:
                        self._discard_unclaimed()
                    raise
                last_error = error  # raised if the directory cannot be created at all
                continue  # another run may have just removed it
            try:
                _refuse_foreign_directory(root)
                try:
                    lock = root.create_descriptor("lock", keep=True)
                except OutputError:
                    if root.is_entry_of(self._parent, self.root.name):
                        raise
                    root.close()
                    continue  # another run has just removed the directory
                if self._try_lock(root, lock):
                    return
            except BaseException:  # close all descriptors, and raise it again
                if is_new:
                    self._discard_unclaimed()
                root.close()
                raise
            root.close()
        raise last_error

    def _discard_unclaimed(self) -> None:
        """Remove a staging directory that this run created and could not claim, unless another run has claimed it."""
        self._free_spare_descriptors()
        with suppress(OSError):
            os.rmdir(self.root.name, dir_fd=self._parent.descriptor)  # works without permission to open it
            return
        with suppress(OSError, CkptxError), self._parent.open_directory(self.root.name) as root:
            if root.list_names() == ["lock"]:
                with root.open_file("lock") as file:
                    if lock_file(file.descriptor, file.path) is not True:
                        return
                    root.remove("lock")
            os.rmdir(self.root.name, dir_fd=self._parent.descriptor)  # fails if another run has created its lock

    def _try_lock(self, root: DirectoryHandle, lock: int) -> bool:
        """Lock the directory; return False if another run removed it after it was opened."""
        try:
            is_free = lock_file(lock, self.root / "lock")
        except OutputError:  # locking is impossible, so no other run can have locked it either
            os.close(lock)
            with suppress(OSError, CkptxError):
                if root.list_names() == ["lock"]:
                    root.remove("lock")
                    os.rmdir(self.root.name, dir_fd=self._parent.descriptor)
            raise
        if is_free is False:
            os.close(lock)
            raise OutputError(
                f"{self.target}: another ckptx is writing it (lock {self.root / 'lock'}); wait for it or stop it"
            )
        try:
            status = root.stat("lock")
            is_current = status is not None and os.path.samestat(status, os.fstat(lock))
        except BaseException:  # unlock it, and raise it again
            os.close(lock)
            raise
        if not is_current:
            os.close(lock)
            return False
        self._root, self._lock, self.is_locked = self._track(root), lock, is_free is True
        return True

    def _sign(self) -> None:
        """Sign the lock file if there are no locks: the last run that signs owns the directory."""
        if not self.is_locked:
            signature = os.urandom(16).hex().encode()
            file = OpenFile(self._lock, self.root / "lock")
            file.truncate(0)
            file.write(signature, 0)
            self._signature = signature

    def _is_claim_valid(self) -> bool:
        """Return False if another run has taken over the directory, which is possible without locks."""
        return self.is_locked or self._root.read("lock") == self._signature

    def _repair_interrupted_overwrite(self) -> None:
        """Restore the old target if a run was killed between the two renames of an overwrite; else remove it.

        The old target is recognized by the inode that the run recorded before in `aside`.

        Raises:
            OutputError: There is anything else at its path, which is not touched.
        """
        status = self._parent.stat(self._old_name)
        if status is not None:
            if not stat.S_ISDIR(status.st_mode) or self._root.read("aside") != _encode_inode(status):
                raise OutputError(
                    f"{self._parent.path / self._old_name}: exists, but is not the directory that ckptx moved there; "
                    "move it elsewhere and run again"
                )
            if self._parent.stat(self.target.name) is not None:
                self._parent.remove(self._old_name)
            else:
                self._rename(self._parent, self._old_name, self._parent, self.target.name)
        self._remove_if_present("aside")

    def _remove_if_present(self, name: str) -> None:
        if self._root.stat(name) is not None:
            self._root.remove(name)

    def _discard_if_unused(self) -> None:
        """Remove the staging directory if this run has locked it and it has no files of an interrupted run."""
        self._free_spare_descriptors()
        with suppress(CkptxError):
            if self._lock >= 0 and self._root.list_names() == ["lock"]:
                self.discard()

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self.discard()
        self._close()

    @property
    def staged_source(self) -> LocalSource:
        """The files of the tree, for reading."""
        return LocalSource(self.tree_path)

    @property
    def target_source(self) -> LocalSource:
        """The current files at the target."""
        return LocalSource(self.target)

    def digest_target_file(self, name: str) -> str:
        """Return the digest of a file at the target, in hex; links are refused."""
        with DirectoryHandle.open_path(self.target) as directory, directory.open_file(name) as file:
            return file_digest(file).hex()

    def refuse_existing_target(self, overwrite: bool) -> None:
        """Refuse an existing target, for a resumed run whose target turned out to be incomplete or different."""
        refuse_existing(self.target, overwrite)

    def begin(self, plan: bytes, resume: bool) -> bool:
        """Prepare the tree and the journal for a run with this plan; see `Publisher.begin`."""
        old_plan = self._root.read("plan", max(len(plan) + 1, 1 << 20)) if resume else None
        is_resumed = old_plan == plan
        if not is_resumed:
            self.replaced_plan = old_plan
            for name in ("plan", "tree", "journal"):
                self._remove_if_present(name)
        self.output = self._track(self._root.open_directory("tree", create=True))
        self.journal = self._track(self._root.open_directory("journal", create=True))
        if not is_resumed:
            self._root.write("plan", [plan])
        return is_resumed

    def require_space(self, nbytes: int) -> None:
        """Check that `nbytes` more bytes fit. If the disk fills up later, the run fails just as cleanly.

        Raises:
            SpaceError: There is not enough space.
        """
        free = free_space(self.target)
        if free < nbytes:
            raise SpaceError(
                f"{self.target}: requires {human_bytes(nbytes)}, but the file system has {human_bytes(free)} free; "
                "free some space"
            )

    def publish(self, expected: Mapping[str, ExpectedFile] | None = None) -> None:
        """Rename the tree to the target, durably and atomically.

        Args:
            expected: Every file that must exist, by name; None accepts any regular files.

        Raises:
            OutputError: Files are missing or were changed, the staging directory was removed or replaced, another
                process created the target, or the old target must not be replaced or got new files.
            SpaceError: The storage is full.
        """
        try:
            self.output.fsync_and_verify(expected)
            self.verify_claim()
            if self._overwrite and self._parent.stat(self.target.name) is not None:
                self._replace_target()
            else:
                self._rename(self._root, "tree", self._parent, self.target.name)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise OutputError(
                    f"{self.target}: was created by another process during the run; nothing was replaced, choose "
                    "another DST or run again"
                ) from error
            raise write_error(self.target, error) from error
        try:
            if not self._is_published():
                self._undo_publish()
            os.fsync(self._parent.descriptor)
        except OSError as error:
            raise OutputError(
                f"{self.target}: is complete, but its directory could not be checked and synced to disk: "
                f"{error.strerror}; check that it still exists after a power failure"
            ) from error
        self.discard()

    def verify_claim(self) -> None:
        """Check that the staging directory and the tree are still those that were claimed.

        Raises:
            OutputError: They were removed, replaced or taken over.
        """
        if not self._is_claim_valid():
            raise OutputError(
                f"{self.target}: another ckptx is writing it, too, on a file system without locks; no output was "
                "created, run one after the other"
            )
        for directory, parent, name in (
            (self._root, self._parent, self.root.name),
            (self.output, self._root, "tree"),
        ):
            if not directory.is_entry_of(parent, name):
                raise OutputError(
                    f"{parent.path / name}: was removed or replaced by another process; no output was created, run "
                    "again"
                )
        with output_errors(self.root):
            try:
                is_moved = not os.path.samestat(os.stat(self.root), os.fstat(self._root.descriptor))
            except (FileNotFoundError, NotADirectoryError):
                is_moved = True
        if is_moved:
            raise OutputError(
                f"{self.target.parent}: was moved or replaced by another process; no output was created, run again"
            )

    def _is_published(self) -> bool:
        """Return True if the target is the directory that was written.

        Raises:
            OSError: It cannot be accessed.
        """
        try:
            return os.path.samestat(os.lstat(self.target), os.fstat(self.output.descriptor))
        except FileNotFoundError:
            return False

    def _undo_publish(self) -> None:
        """Move the tree back if it can be found, and raise an error: the target is not the directory that was written.

        Raises:
            OutputError: Always.
        """
        with suppress(OSError, CkptxError):
            if self.output.is_entry_of(self._parent, self.target.name) and self._root.stat("tree") is None:
                self._rename(self._parent, self.target.name, self._root, "tree")
        raise OutputError(
            f"{self.target}: is not the directory that was written, because another process moved or replaced it; "
            "check it and run again"
        )

    def discard(self) -> None:
        """Remove the staging directory, its lock last, so that no other run can claim it while files are removed.

        Directories that replaced those of this run are kept, because another user may own them. If another run has
        taken over the directory, nothing is removed. Otherwise `leftover` is set if the directory could not be removed.
        """
        self._free_spare_descriptors()
        with suppress(OSError, CkptxError):
            if not self._is_claim_valid():
                return
            for handle, name in ((getattr(self, "output", None), "tree"), (getattr(self, "journal", None), "journal")):
                if handle is None or handle.is_entry_of(self._root, name):
                    self._remove_if_present(name)
        # Errors are ignored: the next run may claim the directory once the lock is removed, and a failed run reports
        # its own error.
        with suppress(OSError, CkptxError):
            self._remove_if_present("plan")
            if self._parent.stat(self._old_name) is None:
                self._remove_if_present("aside")
            # The next run removes, under its lock, files that could not be removed here.
            if self._root.list_names() == ["lock"]:
                self._remove_if_present("lock")
                if self._root.is_entry_of(self._parent, self.root.name):
                    os.rmdir(self.root.name, dir_fd=self._parent.descriptor)

        with suppress(CkptxError):
            if self._parent.stat(self.root.name) is None:
                return
        self.leftover = self.root

    def _replace_target(self) -> None:
        """Exchange the tree and the target, and remove the old target; undo it if the old target got new files.

        Raises:
            OutputError: The old target got new files, was replaced, or is not a directory that may be replaced.
            OSError: A rename failed.
        """
        self._check_replaceable(self.target)
        old_directory = self._track(self._parent.open_directory(self.target.name))
        old_names = {name for name, _ in old_directory.walk()}
        old_entry = (self._root, "tree")
        is_swapped = _exchange_names(self._root.descriptor, "tree", self._parent.descriptor, self.target.name)
        if not is_swapped:
            old_entry = (self._parent, self._old_name)
            self._root.write("aside", [_encode_inode(os.fstat(old_directory.descriptor))])
            self._rename(self._parent, self.target.name, *old_entry)
            try:
                self._rename(self._root, "tree", self._parent, self.target.name)
            except OSError:
                self._rename(*old_entry, self._parent, self.target.name)
                raise
        try:
            added = sorted({name for name, _ in old_directory.walk()} - old_names)
            if added or not old_directory.is_entry_of(*old_entry):
                raise OutputError(
                    f"{self.target}: {added[0] if added else 'it'} changed while it was being replaced; nothing was "
                    "replaced, run again"
                )
        except BaseException:  # put the old directory back, and raise it again
            if is_swapped:
                _exchange_names(self._root.descriptor, "tree", self._parent.descriptor, self.target.name)
            else:
                self._rename(self._parent, self.target.name, self._root, "tree")
                self._rename(*old_entry, self._parent, self.target.name)
            raise
        with suppress(CkptxError):  # the new one is published; the next run removes the rest of the old one
            old_entry[0].remove(old_entry[1])

    def _rename(self, source: DirectoryHandle, name: str, target: DirectoryHandle, new_name: str) -> None:
        os.rename(name, new_name, src_dir_fd=source.descriptor, dst_dir_fd=target.descriptor)


def _encode_inode(status: os.stat_result) -> bytes:
    """Return the contents of the file `aside`, the inode of the directory that an overwrite moves."""
    return f"{status.st_ino}\n".encode()


def _refuse_foreign_directory(root: DirectoryHandle) -> None:
    """Refuse a staging directory that ckptx did not create.

    Raises:
        OutputError: It contains unknown names, or belongs to another user.
    """
    names = root.list_names()
    unknown = [name for name in names if name not in _EXPECTED_KINDS]
    wrong_kind = [
        name
        for name, is_kind in _EXPECTED_KINDS.items()
        if (status := root.stat(name)) is not None and not is_kind(status.st_mode)
    ]
    # An empty directory now means that another run has just removed its contents, the lock last.
    if not (unknown or wrong_kind) and "lock" not in names and set(names) - {PROBE_NAME} and root.list_names():
        raise OutputError(f"{root.path}: not a staging directory of ckptx, it has no lock; move it elsewhere")
    if unknown:
        raise OutputError(
            f"{root.path}: not a staging directory of ckptx, it contains {unknown[0]!a}; move it elsewhere"
        )
    if wrong_kind:
        kind = "directory" if _EXPECTED_KINDS[wrong_kind[0]] is stat.S_ISDIR else "regular file"
        raise OutputError(
            f"{root.path}: not a staging directory of ckptx, its {wrong_kind[0]!a} is not a {kind}; move it elsewhere"
        )
    if not root.is_owned_by_us():
        raise OutputError(f"{root.path}: belongs to another user; remove it, or choose another DST")


_EXPECTED_KINDS: dict[str, Callable[[int], bool]] = {
    "lock": stat.S_ISREG, "plan": stat.S_ISREG, "aside": stat.S_ISREG, "tree": stat.S_ISDIR, "journal": stat.S_ISDIR,
    PROBE_NAME: stat.S_ISREG,
}  # fmt: skip


@contextmanager
def open_staging(target: Path) -> Iterator[tuple[DirectoryHandle, DirectoryHandle]]:
    """Open the tree and the journal of the run that writes `target`, for another process of that run.

    Raises:
        OutputError: They cannot be opened.
    """
    root = Path(os.path.realpath(target)).parent / staging_paths(target)[0].parent.name
    with (
        DirectoryHandle.open_path(root) as directory,
        directory.open_directory("tree") as tree,
        directory.open_directory("journal") as journal,
    ):
        yield tree, journal


def _exchange_names(a: int, name: str, b: int, other: str) -> bool:
    """Exchange two names in open directories atomically; return False if that fails or is not supported."""
    import ctypes  # only an overwrite needs it

    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    return bool(renameat2(a, os.fsencode(name), b, os.fsencode(other), _RENAME_EXCHANGE) == 0)
