"""A directory opened by descriptor, in which files are created, read and removed without ever following a link.

A user with write access to the parent of an output could place a link where a file is about to be created, so that the
output would overwrite the target of the link. So every name is resolved relative to the descriptor of its directory,
one component at a time: a link, pipe or device in place of a directory or file is refused. If the directory is moved or
replaced, the descriptor still refers to the original one, and `is_at` detects it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from ckptx.errors import CkptxError, InputError, OutputError
from ckptx.storage.files import unwritable
from ckptx.storage.interface import ExpectedFile
from ckptx.storage.open_file import OpenFile
from ckptx.untrusted.file_name import colliding_name, name_fault
from ckptx.untrusted.printable import one_line

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # non-blocking, because opening a pipe waits for its other end
# Errors of opening a name that is not a file or directory as expected.
_UNEXPECTED_KIND = {errno.ELOOP, errno.EMLINK, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.EEXIST}

PROBE = "probe"  # created and removed to find out the owner of our files


def parts_of(name: str) -> tuple[str, ...]:
    """Return the components of the name of an output file, directories first.

    Raises:
        InputError: It is empty or absolute, contains "..", or cannot be encoded. Such a name comes from the input.
    """
    try:
        is_text = b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        is_text = False
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if not parts or not is_text or name[0] == "/" or name[-1] == "/" or ".." in parts:
        raise InputError(f'file name "{one_line(name)}" leads out of the output directory; refused')
    return parts


def refuse_clashes(names: Iterable[str]) -> None:
    """Refuse names that are invalid, duplicates, or both a file and a directory.

    Raises:
        InputError: Two names conflict, or one leads out of the output directory.
    """
    names = list(names)
    for name in names:
        parts_of(name)
        fault = name_fault(name)
        if fault is not None:
            raise InputError(f'file name "{one_line(name)}" is not allowed in an output: {fault}; rename it')
    twice = colliding_name(names)
    if twice is not None:
        raise InputError(
            f'file name "{one_line(twice)}" conflicts with another file of the output; rename one of them in the input'
        )


class DirectoryHandle:
    """A directory and the descriptors of files and directories that were opened in it.

    Attributes:
        path: Path of the directory, for messages and for readers.
        descriptor: File descriptor of the directory.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        """Take ownership of `descriptor`."""
        self.path, self.descriptor = path, descriptor
        self._directories: dict[tuple[str, ...], int] = {}
        self._tracked: dict[str, int] = {}

    @classmethod
    def at(cls, path: Path) -> DirectoryHandle:
        """Open the directory at `path`, whose last component must not be a link.

        Raises:
            OutputError: There is no directory at the path.
        """
        try:
            return cls(path, os.open(path, _DIRECTORY))
        except OSError as error:
            raise refusal(path, error) from error

    def open_directory(self, name: str, *, make: bool = False) -> DirectoryHandle:
        """Open a subdirectory; with `make` it is created if it does not exist.

        Raises:
            OutputError: It cannot be created, or is not a directory.
        """
        path = self.path / name
        try:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=self.descriptor)
            return DirectoryHandle(path, os.open(name, _DIRECTORY, dir_fd=self.descriptor))
        except OSError as error:
            raise refusal(path, error) from error

    def __enter__(self) -> DirectoryHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every descriptor."""
        for descriptor in (*self._tracked.values(), *self._directories.values(), self.descriptor):
            with suppress(OSError):  # such as an exceeded quota, which fsync has reported already
                os.close(descriptor)
        self._tracked, self._directories, self.descriptor = {}, {}, -1

    # ------------------------------------------------------------------------------------------------------- files

    def create(self, name: str, *, keep: bool = False) -> int:
        """Create a file and open it for reading and writing; the caller closes it. The mode follows the umask.

        Args:
            name: Name relative to this directory; missing directories are created.
            keep: Open an existing file instead, if it is a regular file without other hard links.

        Raises:
            InputError: The name leads out of the directory.
            OutputError: The file exists and must not be written.
            SpaceError: The disk is full.
        """
        *above, last = parts_of(name)
        path = self.path / name
        try:
            directory = self._directory(tuple(above))
            try:
                return os.open(last, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE, 0o666, dir_fd=directory)
            except FileExistsError:
                if not keep:
                    raise
            descriptor = os.open(last, os.O_RDWR | _FILE, dir_fd=directory)
        except OSError as error:
            raise refusal(path, error) from error
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            os.close(descriptor)
            what = "has another hard link" if stat.S_ISREG(found.st_mode) else "not a regular file"
            raise OutputError(f"{path}: {what}; ckptx did not write it, remove it and run again")
        return descriptor

    def create_tracked(self, name: str, *, keep: bool = False) -> OpenFile:
        """Create a file and keep its descriptor, so that `fsync_and_verify` can recognize the file; see `create`."""
        descriptor = self.create(name, keep=keep)
        self._tracked[name] = descriptor
        return OpenFile(descriptor, self.path / name)

    def open_output(self, name: str, nbytes: int | None, *, keep: bool = False) -> OpenFile:
        """Create a file of the output, or with `keep` open the file of an interrupted run; see `OutputTree`.

        Args:
            name: Name relative to this directory.
            nbytes: Final size in bytes, to which a longer file is truncated; the descriptor is kept. None for a file
                that the caller closes.
            keep: Open an existing file, see `create`.

        Raises:
            InputError, OutputError, SpaceError: See `create`.
        """
        if nbytes is None:
            return self.make(name, keep=keep)
        file = self.create_tracked(name, keep=keep)
        file.cut_to(nbytes)
        return file

    def make(self, name: str, *, keep: bool = False) -> OpenFile:
        """Create a file as an `OpenFile`, which the caller closes; see `create`."""
        return OpenFile(self.create(name, keep=keep), self.path / name)

    def reading(self, name: str) -> OpenFile:
        """Open a file for reading as an `OpenFile`, which the caller closes; see `open`."""
        return OpenFile(self.open(name), self.path / name)

    def write(self, name: str, blocks: Iterable[bytes]) -> tuple[int, int]:
        """Create a file from `blocks`; return its device and inode.

        Raises:
            OutputError, SpaceError: It cannot be created or written; see `create`.
        """
        at = 0
        with self.make(name) as file:
            for block in blocks:
                file.write(block, at)
                at += len(block)
            return file.identity

    def open(self, name: str, *, write: bool = False) -> int:
        """Open a regular file for reading, and with `write` for writing, too; the caller closes it.

        Raises:
            FileNotFoundError: It does not exist.
            OutputError: It cannot be opened, or is not a regular file.
        """
        *above, last = parts_of(name)
        path = self.path / name
        try:
            descriptor = os.open(
                last, (os.O_RDWR if write else os.O_RDONLY) | _FILE, dir_fd=self._directory(tuple(above), make=False)
            )
        except FileNotFoundError:
            raise
        except OSError as error:
            raise refusal(path, error) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OutputError(f"{path}: not a regular file; ckptx did not write it, remove it and run again")
        return descriptor

    def read(self, name: str, limit: int = 1 << 20) -> bytes | None:
        """Return the first `limit` bytes of a file, or None if it does not exist."""
        try:
            with self.reading(name) as file:
                return file.read(min(limit, file.size), 0)
        except FileNotFoundError:
            return None

    def identity(self, name: str) -> tuple[int, int]:
        """Return device and inode of a file whose descriptor was kept."""
        found = os.fstat(self._tracked[name])
        return found.st_dev, found.st_ino

    def _directory(self, parts: tuple[str, ...], *, make: bool = True) -> int:
        """Return the descriptor of a subdirectory, which stays open."""
        if not parts:
            return self.descriptor
        if parts not in self._directories:
            above = self._directory(parts[:-1], make=make)
            if make:
                with suppress(FileExistsError):
                    os.mkdir(parts[-1], dir_fd=above)
            self._directories[parts] = os.open(parts[-1], _DIRECTORY, dir_fd=above)
        return self._directories[parts]

    # ------------------------------------------------------------------------------------------------------- names

    def is_owned_by_us(self) -> bool:
        """Return True if the owner of the directory is the owner of files that this process creates.

        On a network file system that owner may differ from the user of the process.
        """
        owner = os.fstat(self.descriptor).st_uid
        if owner == os.geteuid():
            return True
        descriptor = self.create(PROBE, keep=True)
        try:
            return os.fstat(descriptor).st_uid == owner
        finally:
            os.close(descriptor)
            with suppress(OSError):
                os.unlink(PROBE, dir_fd=self.descriptor)

    def stat(self, name: str) -> os.stat_result | None:
        """Return the status of a name in this directory without following links, or None if it does not exist."""
        try:
            return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def names(self) -> list[str]:
        """Return the names in this directory, sorted."""
        return sorted(os.listdir(self.descriptor))

    def is_at(self, parent: DirectoryHandle, name: str) -> bool:
        """Return True if `name` in `parent` is the same directory as this one."""
        found = parent.stat(name)
        return found is not None and os.path.samestat(found, os.fstat(self.descriptor))

    def walk(self) -> Iterator[tuple[str, os.stat_result]]:
        """Iterate over everything in the tree but directories, by relative name; links are not followed."""
        return _walk(self.descriptor, "")

    def allocated(self) -> int:
        """Return the disk space of the files in the tree, in bytes."""
        return sum(found.st_blocks * 512 for _, found in self.walk())

    def remove(self, name: str) -> None:
        """Remove a file, a link or a directory tree in this directory; targets of links are never removed.

        Raises:
            OSError: An entry could not be removed.
        """
        _remove(name, self.descriptor)

    def remove_others(self, names: Collection[str]) -> None:
        """Remove every file in the tree whose name is not among `names`."""
        try:
            for name, _ in list(self.walk()):
                if name not in names:
                    *above, last = parts_of(name)
                    os.unlink(last, dir_fd=self._directory(tuple(above)))
        except OSError as error:
            raise unwritable(self.path, error) from error

    # ---------------------------------------------------------------------------------------------------- verification

    def fsync_and_verify(self, expected: Mapping[str, ExpectedFile] | None = None) -> None:
        """Flush all files of the tree to disk, and check them against the expected ones.

        Args:
            expected: Every file that must exist, by name; None accepts any regular files.

        Raises:
            OutputError: A file is missing, unexpected, was replaced, or has another size or other bytes.
            SpaceError: The disk is full.
        """
        missing = {"/".join(parts_of(name)): what for name, what in (expected or {}).items()}
        directories = set()
        for name in [name for name, _ in self.walk()]:
            if expected is not None and name not in missing:
                raise self._changed(name, "was created by another process")
            try:
                descriptor = self.open(name)
            except FileNotFoundError:
                raise self._changed(name, "was removed") from None
            try:
                what = missing.pop(name, None)
                if what is not None:
                    self._check_state(name, os.fstat(descriptor), what)
                    if what.reads_as is not None and not what.reads_as(OpenFile(descriptor, self.path / name)):
                        raise self._changed(name, "has other bytes than were written")
                os.fsync(descriptor)
            except OSError as error:
                raise unwritable(self.path / name, error) from error
            finally:
                os.close(descriptor)
            directories.add(parts_of(name)[:-1])
        if missing:
            raise self._changed(min(missing), "was removed")
        for parts in directories:
            os.fsync(self._directory(parts, make=False))
        os.fsync(self.descriptor)

    def sync_tracked(self) -> None:
        """Flush the files that this process wrote to disk."""
        for name, held in self._tracked.items():
            try:
                os.fsync(held)
            except OSError as error:
                raise unwritable(self.path / name, error) from error

    def expect(self, sizes: Mapping[str, int]) -> dict[str, ExpectedFile]:
        """Return the expected state of files from their sizes, with the inode of those that this process wrote."""
        return {
            name: ExpectedFile(nbytes, self.identity(name) if name in self._tracked else None)
            for name, nbytes in sizes.items()
        }

    def require(self, expected: Mapping[str, ExpectedFile]) -> None:
        """Check the status of files against the expected one.

        Raises:
            OutputError: A file is missing, was replaced, or has another size.
        """
        for name, what in expected.items():
            *above, last = parts_of(name)
            try:
                found = os.stat(last, dir_fd=self._directory(tuple(above), make=False), follow_symlinks=False)
            except OSError:
                raise self._changed(name, "was removed") from None
            if not stat.S_ISREG(found.st_mode):
                raise self._changed(name, "was replaced")
            self._check_state(name, found, what)

    def _check_state(self, name: str, found: os.stat_result, expected: ExpectedFile) -> None:
        if expected.holder is not None and (found.st_dev, found.st_ino) != expected.holder:
            raise self._changed(name, "was replaced")
        if found.st_size != expected.nbytes:
            raise self._changed(name, f"has {found.st_size} bytes, but {expected.nbytes} were written")

    def _changed(self, name: str, how: str) -> OutputError:
        return OutputError(
            f"{self.path}/{one_line(name)}: {how}; another process is using the staging directory, nothing was "
            "published, run again"
        )


def refusal(path: Path, error: OSError) -> CkptxError:
    """Return the error for a file or directory that could not be opened or created in a staging directory."""
    if error.errno in _UNEXPECTED_KIND:
        return OutputError(
            f"{path}: cannot be opened: {error.strerror}; ckptx did not write it, remove it and run again"
        )
    if error.errno == errno.ENOENT:
        return OutputError(
            f"{path}: cannot be opened: {error.strerror}; its directory was removed, nothing was published, run again"
        )
    return unwritable(path, error)


def _walk(descriptor: int, lead: str) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(descriptor) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if not entry.is_dir(follow_symlinks=False):
            yield lead + entry.name, os.stat(entry.name, dir_fd=descriptor, follow_symlinks=False)
            continue
        below = os.open(entry.name, _DIRECTORY, dir_fd=descriptor)
        try:
            yield from _walk(below, f"{lead}{entry.name}/")
        finally:
            os.close(below)


def _remove(name: str, parent: int) -> None:
    found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    if not stat.S_ISDIR(found.st_mode):
        os.unlink(name, dir_fd=parent)
        return
    descriptor = os.open(name, _DIRECTORY, dir_fd=parent)
    try:
        for below in os.listdir(descriptor):
            _remove(below, descriptor)
    finally:
        os.close(descriptor)
    os.rmdir(name, dir_fd=parent)
