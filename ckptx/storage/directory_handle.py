"""A directory opened by descriptor, in which files are created, read and removed without ever following a link.

A user with write access to the parent of an output could place a link where a file is about to be created, so that the
output would overwrite the target of the link. So every name is resolved relative to the descriptor of its directory,
one component at a time: a link, pipe or device in place of a directory or file is refused. If the directory is moved or
replaced, the descriptor still refers to the original one, and `is_entry_of` detects the replacement. A failed access
raises an error of `ckptx.errors` with the path: OutputError or SpaceError if nothing else is stated.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from ckptx.errors import CkptxError, InputError, OutputError
from ckptx.storage.files import output_errors, write_error
from ckptx.storage.interface import ExpectedFile
from ckptx.storage.open_file import OpenFile
from ckptx.untrusted.file_name import find_conflicting_name, find_name_fault
from ckptx.untrusted.printable import one_line

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Non-blocking, because opening a pipe waits for its other end.
_FILE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# Errors of opening a name that is not a file or directory as expected.
_UNEXPECTED_KIND_ERRNOS = {errno.ELOOP, errno.EMLINK, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.EEXIST}

PROBE_NAME = "probe"  # file that is created and removed to find out the owner of new files


def split_name(name: str) -> tuple[str, ...]:
    """Return the components of the name of an output file, directories first.

    Raises:
        InputError: It is empty or absolute, ends with "/", contains ".." or a null byte, or cannot be encoded. Such a
            name comes from the input.
    """
    try:
        is_valid = b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        is_valid = False
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if name[:1] == "/" or ".." in parts:
        raise InputError(f'file name "{one_line(name)}" leads out of the output directory; refused')
    if not parts or not is_valid or name[-1] == "/":
        raise InputError(f'file name "{one_line(name)}" is not a valid name for an output file; refused')
    return parts


def refuse_conflicting_names(names: Iterable[str]) -> None:
    """Refuse names of output files that are invalid, duplicates, or both a file and a directory.

    Raises:
        InputError: Two names conflict, or one is invalid, see `split_name` and `find_name_fault`.
    """
    names = list(names)
    for name in names:
        fault = find_name_fault(name)
        if fault is not None:
            raise InputError(f'file name "{one_line(name)}" is not allowed in an output: {fault}; rename it')
        split_name(name)
    conflict = find_conflicting_name(names)
    if conflict is not None:
        raise InputError(
            f'file name "{one_line(conflict)}" conflicts with another file of the output; rename one of them in '
            "the input"
        )


class DirectoryHandle:
    """An open directory, with descriptors of its subdirectories and of files that `create_tracked` created in it.

    Attributes:
        path: Path of the directory, for messages and for readers.
        descriptor: File descriptor of the directory; -1 once it is closed.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        """Take ownership of `descriptor`."""
        self.path, self.descriptor = path, descriptor
        self._directories: dict[tuple[str, ...], int] = {}
        self._tracked: dict[str, int] = {}

    @classmethod
    def open_path(cls, path: Path) -> DirectoryHandle:
        """Open the directory at `path`, whose last component must not be a link.

        Raises:
            OutputError: There is no directory at the path, or it cannot be opened.
        """
        try:
            return cls(path, os.open(path, _DIRECTORY_FLAGS))
        except OSError as error:
            raise open_error(path, error) from error

    def open_directory(self, name: str, *, create: bool = False) -> DirectoryHandle:
        """Open a subdirectory; with `create`, create it if it does not exist. The caller closes it.

        Raises:
            OutputError: It cannot be created or opened, or is not a directory.
        """
        path = self.path / name
        try:
            if create:
                self._create_directory(name)
            return DirectoryHandle(path, os.open(name, _DIRECTORY_FLAGS, dir_fd=self.descriptor))
        except OSError as error:
            raise open_error(path, error) from error

    def _create_directory(self, name: str) -> None:
        try:
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=self.descriptor)
        except (PermissionError, FileNotFoundError) as error:
            # In /proc, where nobody can create a directory, the system reports a missing directory.
            if isinstance(error, FileNotFoundError) and not self._is_at_path():
                raise
            raise OutputError(f"{self.path / name}: cannot be created: {error.strerror}; choose another DST") from error

    def _is_at_path(self) -> bool:
        """Return True unless the directory was removed or replaced since it was opened."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.descriptor))
        except OSError:
            return False

    def __enter__(self) -> DirectoryHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor of the directory, and those of its subdirectories and tracked files."""
        for descriptor in (*self._tracked.values(), *self._directories.values(), self.descriptor):
            with suppress(OSError):  # such as an exceeded quota, which fsync has reported already
                os.close(descriptor)
        self._tracked, self._directories, self.descriptor = {}, {}, -1

    # ------------------------------------------------------------------------------------------------------- files

    def create_descriptor(self, name: str, *, keep: bool = False) -> int:
        """Create a file and open it for reading and writing; the caller closes it. The mode follows the umask.

        Args:
            name: Name relative to this directory; missing directories are created.
            keep: Open a file that exists, with its contents, if it is a regular file without other hard links. False
                refuses every existing file.

        Raises:
            InputError: The name leads out of the directory.
            OutputError: The file exists and must not be written, or cannot be created.
            SpaceError: The disk is full.
        """
        *parents, last = split_name(name)
        path = self.path / name
        try:
            directory = self._open_subdirectory(tuple(parents))
            try:
                return os.open(last, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE_FLAGS, 0o666, dir_fd=directory)
            except FileExistsError:
                if not keep:
                    raise
            descriptor = os.open(last, os.O_RDWR | _FILE_FLAGS, dir_fd=directory)
        except OSError as error:
            raise open_error(path, error) from error
        status = self._status_or_close(descriptor, path)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            os.close(descriptor)
            problem = "has another hard link" if stat.S_ISREG(status.st_mode) else "not a regular file"
            raise OutputError(f"{path}: {problem}; ckptx did not write it, remove it and run again")
        return descriptor

    def create_tracked(self, name: str, *, keep: bool = False) -> OpenFile:
        """Create a file, or with `keep` open it, and keep its descriptor until this handle is closed.

        So `describe_expected` knows the inode of the file, by which `fsync_and_verify` notices a replacement.
        """
        descriptor = self.create_descriptor(name, keep=keep)
        self._tracked[name] = descriptor
        return OpenFile(descriptor, self.path / name)

    def open_output(self, name: str, nbytes: int | None, *, keep: bool = False) -> OpenFile:
        """Create a file of the output, or with `keep` open the file of an interrupted run; see `OutputTree`.

        Args:
            name: Name relative to this directory.
            nbytes: Final size in bytes, to which a longer file is truncated; the file is tracked, see `create_tracked`.
                None for a file that the caller closes.
            keep: Open an existing file, see `create_descriptor`.

        Raises:
            InputError, OutputError, SpaceError: See `create_descriptor`.
        """
        if nbytes is None:
            return self.create_file(name, keep=keep)
        file = self.create_tracked(name, keep=keep)
        file.truncate(nbytes)
        return file

    def create_file(self, name: str, *, keep: bool = False) -> OpenFile:
        """Create a file as an `OpenFile`, which the caller closes; see `create_descriptor`."""
        return OpenFile(self.create_descriptor(name, keep=keep), self.path / name)

    def open_file(self, name: str) -> OpenFile:
        """Open a file for reading as an `OpenFile`, which the caller closes; see `open_descriptor`."""
        return OpenFile(self.open_descriptor(name), self.path / name)

    def write(self, name: str, blocks: Iterable[bytes]) -> tuple[int, int]:
        """Create a file from `blocks`; return its device and inode, in this order.

        Raises:
            OutputError, SpaceError: It cannot be created or written; see `create_descriptor`.
        """
        offset = 0
        with self.create_file(name) as file:
            for block in blocks:
                file.write(block, offset)
                offset += len(block)
            return file.device_and_inode

    def open_descriptor(self, name: str, *, write: bool = False) -> int:
        """Open a regular file for reading, and with `write` also for writing; the caller closes it.

        Raises:
            FileNotFoundError: It does not exist.
            OutputError: It cannot be opened, or is not a regular file.
        """
        *parents, last = split_name(name)
        path = self.path / name
        try:
            descriptor = os.open(
                last,
                (os.O_RDWR if write else os.O_RDONLY) | _FILE_FLAGS,
                dir_fd=self._open_subdirectory(tuple(parents), create=False),
            )
        except FileNotFoundError:
            raise
        except OSError as error:
            raise open_error(path, error) from error
        if not stat.S_ISREG(self._status_or_close(descriptor, path).st_mode):
            os.close(descriptor)
            raise OutputError(f"{path}: not a regular file; ckptx did not write it, remove it and run again")
        return descriptor

    @staticmethod
    def _status_or_close(descriptor: int, path: Path) -> os.stat_result:
        """Return the status of an open file; close it if that fails."""
        try:
            with output_errors(path):
                return os.fstat(descriptor)
        except CkptxError:
            os.close(descriptor)
            raise

    def read(self, name: str, limit: int = 1 << 20) -> bytes | None:
        """Return the first `limit` bytes of a file, or None if it does not exist.

        Raises:
            OutputError: It cannot be read, or is not a regular file.
        """
        try:
            with self.open_file(name) as file:
                return file.read(min(limit, file.size), 0)
        except FileNotFoundError:
            return None

    def device_and_inode(self, name: str) -> tuple[int, int]:
        """Return device and inode of a file that `create_tracked` created."""
        with output_errors(self.path / name):
            status = os.fstat(self._tracked[name])
        return status.st_dev, status.st_ino

    def _open_subdirectory(self, parts: tuple[str, ...], *, create: bool = True) -> int:
        """Return the descriptor of a subdirectory, which stays open until this handle is closed.

        Args:
            parts: Components of its relative path; () for this directory.
            create: Create missing directories.

        Raises:
            OSError: It cannot be created or opened.
        """
        if not parts:
            return self.descriptor
        if parts not in self._directories:
            parent = self._open_subdirectory(parts[:-1], create=create)
            if create:
                with suppress(FileExistsError):
                    os.mkdir(parts[-1], dir_fd=parent)
            self._directories[parts] = os.open(parts[-1], _DIRECTORY_FLAGS, dir_fd=parent)
        return self._directories[parts]

    # ------------------------------------------------------------------------------------------------------- names

    def is_owned_by_us(self) -> bool:
        """Return True if the owner of the directory is the owner of files that this process creates.

        On a network file system that owner may differ from the user of the process.
        """
        with output_errors(self.path):
            owner = os.fstat(self.descriptor).st_uid
        if owner == os.geteuid():
            return True
        descriptor = self.create_descriptor(PROBE_NAME, keep=True)
        try:
            with output_errors(self.path / PROBE_NAME):
                return os.fstat(descriptor).st_uid == owner
        finally:
            os.close(descriptor)
            with suppress(OSError):
                os.unlink(PROBE_NAME, dir_fd=self.descriptor)

    def stat(self, name: str) -> os.stat_result | None:
        """Return the status of an entry of this directory without following links, or None if it does not exist."""
        with output_errors(self.path / name):
            try:
                return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
            except FileNotFoundError:
                return None

    def list_names(self) -> list[str]:
        """Return the names in this directory, sorted."""
        with output_errors(self.path):
            return sorted(os.listdir(self.descriptor))

    def is_entry_of(self, parent: DirectoryHandle, name: str) -> bool:
        """Return True if the entry `name` of `parent` is this directory."""
        status = parent.stat(name)
        with output_errors(self.path):
            return status is not None and os.path.samestat(status, os.fstat(self.descriptor))

    def walk(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield name and status of everything below this directory but directories, sorted by name in each directory.

        Names are relative to this directory. Links are not followed.
        """
        with output_errors(self.path):
            yield from _walk(self.descriptor, "")

    def allocated_bytes(self) -> int:
        """Return the disk space of the files below this directory, in bytes."""
        return sum(status.st_blocks * 512 for _, status in self.walk())

    def remove(self, name: str) -> None:
        """Remove a file, a link or a directory tree in this directory; targets of links are never removed.

        Raises:
            OutputError: An entry could not be removed.
        """
        with output_errors(self.path / name):
            _remove(name, self.descriptor)

    def remove_others(self, kept_names: Collection[str]) -> None:
        """Remove every file below this directory whose relative name is not in `kept_names`; directories stay."""
        for name, _ in list(self.walk()):
            if name not in kept_names:
                *parents, last = split_name(name)
                with output_errors(self.path / name):
                    os.unlink(last, dir_fd=self._open_subdirectory(tuple(parents)))

    # ---------------------------------------------------------------------------------------------------- verification

    def fsync_and_verify(self, expected: Mapping[str, ExpectedFile] | None = None) -> None:
        """Flush all files and directories of the tree to disk, and check the files against the expected ones.

        Args:
            expected: Every file that must exist, by name; None accepts any regular files.

        Raises:
            OutputError: A file is missing, unexpected, not a regular file, was replaced, or has another size or other
                bytes.
            SpaceError: The disk is full.
        """
        missing = {"/".join(split_name(name)): expected_file for name, expected_file in (expected or {}).items()}
        directories = set()
        for name in [name for name, _ in self.walk()]:
            if expected is not None and name not in missing:
                raise self._changed_error(name, "was created by another process")
            try:
                descriptor = self.open_descriptor(name)
            except FileNotFoundError:
                raise self._changed_error(name, "was removed") from None
            try:
                expected_file = missing.pop(name, None)
                if expected_file is not None:
                    self._check_status(name, os.fstat(descriptor), expected_file)
                    if expected_file.has_expected_bytes is not None and not expected_file.has_expected_bytes(
                        OpenFile(descriptor, self.path / name)
                    ):
                        raise self._changed_error(name, "has other bytes than were written")
                os.fsync(descriptor)
            except OSError as error:
                raise write_error(self.path / name, error) from error
            finally:
                os.close(descriptor)
            directories.add(split_name(name)[:-1])
        if missing:
            raise self._changed_error(min(missing), "was removed")
        with output_errors(self.path):
            for parts in directories:
                os.fsync(self._open_subdirectory(parts, create=False))
            os.fsync(self.descriptor)

    def fsync_tracked(self) -> None:
        """Flush the files that `create_tracked` created to disk."""
        for name, descriptor in self._tracked.items():
            try:
                os.fsync(descriptor)
            except OSError as error:
                raise write_error(self.path / name, error) from error

    def describe_expected(self, sizes: Mapping[str, int]) -> dict[str, ExpectedFile]:
        """Return the expected state of files from their sizes in bytes, with the inode of those that are tracked.

        `has_expected_bytes` is None for all of them.
        """
        return {
            name: ExpectedFile(nbytes, self.device_and_inode(name) if name in self._tracked else None)
            for name, nbytes in sizes.items()
        }

    def verify_status(self, expected: Mapping[str, ExpectedFile]) -> None:
        """Check size, device and inode of files against the expected ones; their bytes are not read.

        Raises:
            OutputError: A file is missing, was replaced, or has another size.
        """
        for name, expected_file in expected.items():
            *parents, last = split_name(name)
            try:
                status = os.stat(
                    last, dir_fd=self._open_subdirectory(tuple(parents), create=False), follow_symlinks=False
                )
            except (FileNotFoundError, NotADirectoryError):
                raise self._changed_error(name, "was removed") from None
            except OSError as error:
                raise open_error(self.path / name, error) from error
            if not stat.S_ISREG(status.st_mode):
                raise self._changed_error(name, "was replaced")
            self._check_status(name, status, expected_file)

    def _check_status(self, name: str, status: os.stat_result, expected: ExpectedFile) -> None:
        if expected.device_and_inode is not None and (status.st_dev, status.st_ino) != expected.device_and_inode:
            raise self._changed_error(name, "was replaced")
        if status.st_size != expected.nbytes:
            raise self._changed_error(name, f"has {status.st_size} bytes, but {expected.nbytes} were written")

    def _changed_error(self, name: str, problem: str) -> OutputError:
        return OutputError(
            f"{self.path}/{one_line(name)}: {problem}; another process is using the staging directory, no output was "
            "created, run again"
        )


def open_error(path: Path, error: OSError) -> CkptxError:
    """Return the error for a file or directory that could not be opened or created in an output."""
    if error.errno in _UNEXPECTED_KIND_ERRNOS:
        return OutputError(
            f"{path}: cannot be opened: {error.strerror}; ckptx did not write it, remove it and run again"
        )
    if error.errno == errno.ENOENT:
        return OutputError(
            f"{path}: cannot be opened: {error.strerror}; its directory was removed, no output was created, run again"
        )
    return write_error(path, error)


def _walk(descriptor: int, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(descriptor) as entries:
        sorted_entries = sorted(entries, key=lambda entry: entry.name)
    for entry in sorted_entries:
        if not entry.is_dir(follow_symlinks=False):
            yield prefix + entry.name, os.stat(entry.name, dir_fd=descriptor, follow_symlinks=False)
            continue
        child = os.open(entry.name, _DIRECTORY_FLAGS, dir_fd=descriptor)
        try:
            yield from _walk(child, f"{prefix}{entry.name}/")
        finally:
            os.close(child)


def _remove(name: str, parent: int) -> None:
    status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode):
        os.unlink(name, dir_fd=parent)
        return
    descriptor = os.open(name, _DIRECTORY_FLAGS, dir_fd=parent)
    try:
        for child in os.listdir(descriptor):
            _remove(child, descriptor)
    finally:
        os.close(descriptor)
    os.rmdir(name, dir_fd=parent)
