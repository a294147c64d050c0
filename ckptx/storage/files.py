"""Files on a local disk: checked paths, positional reads and writes.

Files of a source are opened and read here, and `write_at` writes every byte of an output, so that paths are checked and
`ENOSPC` is translated in one place, in which tests can inject failures.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar, cast

from ckptx.errors import (
    CkptxError,
    EnvironmentProblem,
    InputError,
    OutputError,
    OutputFailure,
    ReadError,
    SpaceError,
    StorageFailure,
)
from ckptx.storage.interface import FileIdentity, Location

# Errors of `stat` which mean that the name does not exist; a link to such a name is broken.
_MISSING_ERRNOS = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}

_Location = TypeVar("_Location", bound=Location)


def resolve_inside(root: _Location, name: str) -> _Location:
    """Return the path of `name`, which comes from a checkpoint, in `root`; links are not resolved.

    Raises:
        InputError: `name` is empty or absolute, or contains "..", a backslash or a null character; a checkpoint must
            not refer to files outside it.
    """
    pure = PurePosixPath(name)
    fault = None
    if not name:
        fault = "is empty"
    elif "\0" in name:
        fault = "contains a null character"
    elif "\\" in name:
        fault = "contains a backslash"
    elif pure.is_absolute() or ".." in pure.parts:
        fault = "leads out of the checkpoint directory"
    if fault is not None:
        raise InputError(f'{root}: file name "{name}" {fault}; refused')
    return cast("_Location", root / str(pure))  # joining a name keeps the type of the location


class LocalFileIdentity(NamedTuple):
    """Identity of a file in one state: it differs if the file is changed or replaced.

    A difference in `ctime_ns` alone means that mode, owner or links changed, or that the file was rewritten in place
    and its modification time set back: then the contents must be compared. Times are in nanoseconds since the epoch.
    """

    device: int
    inode: int
    nbytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def from_stat(cls, status: os.stat_result) -> LocalFileIdentity:
        """Return the identity from a `stat` result."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    @property
    def version(self) -> tuple[int, int]:
        """Size in bytes and modification time, equal on all machines that mount the disk."""
        return self[2:4]

    @property
    def device_and_inode(self) -> tuple[int, int]:
        """Device and inode."""
        return self[:2]

    def has_same_contents(self, other: FileIdentity) -> bool:
        """Return True for the same file with the same size and modification time."""
        return isinstance(other, LocalFileIdentity) and self[:4] == other[:4]


def read_identities(root: Path, names: Iterable[str]) -> dict[str, LocalFileIdentity]:
    """Return the identity of each name that is a regular file or a link to one; other names are omitted.

    Identities that are taken before a file is read reveal later changes.

    Raises:
        ReadError: A file is not accessible.
    """
    identity_by_name: dict[str, LocalFileIdentity] = {}
    for name in names:
        status = read_status(root / name)
        if status is not None and stat.S_ISREG(status.st_mode):
            identity_by_name[name] = LocalFileIdentity.from_stat(status)
    return identity_by_name


def read_status(path: Path, *, follow_links: bool = True) -> os.stat_result | None:
    """Return the `stat` result of a file or directory, or None if nothing exists there.

    Args:
        path: The path.
        follow_links: True returns that of the target of a link, and None for a broken link; False that of the link.

    Raises:
        ReadError: It is not accessible.
    """
    try:
        return os.stat(path) if follow_links else os.lstat(path)
    except ValueError:  # a null byte in the name
        return None
    except OSError as error:
        if error.errno in _MISSING_ERRNOS:
            return None
        raise read_error(path, error) from error


def is_regular_file(path: Path) -> bool:
    """Return True for a regular file or a link to one, False for anything else and if nothing exists there.

    Raises:
        ReadError: It is not accessible.
    """
    status = read_status(path)
    return status is not None and stat.S_ISREG(status.st_mode)


def changed_error(path: Location) -> InputError:
    """Return the error for a file that changed since the checkpoint was opened."""
    return InputError(f"{path}: changed while it was being read; wait for its writer, then run again")


class FilePool:
    """Read-only file descriptors by name in one directory, opened on first use and kept; thread-safe."""

    def __init__(self, root: Path, expected: Mapping[str, FileIdentity] | None = None) -> None:
        """Store the arguments without opening files.

        Args:
            root: Directory to which names are relative.
            expected: Expected identity by name; a file that differs when it is opened is refused, except if only the
                change time differs: callers that need unchanged files compare contents.
        """
        raise_open_file_limit()
        self.root, self._expected = root, expected or {}
        self._descriptors: dict[str, int] = {}

    def __enter__(self) -> FilePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every descriptor."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def open_descriptor(self, name: str) -> int:
        """Return a descriptor for `name`.

        Raises:
            InputError: The name leads out of the directory, or the file is missing, is a broken link, is no regular
                file, cannot be read, or differs from the expected identity.
            EnvironmentProblem: Too many files are open.
        """
        descriptor = self._descriptors.get(name)
        if descriptor is None:
            path = resolve_inside(self.root, name)
            descriptor, status = open_with_status(path)
            if name in self._expected and not LocalFileIdentity.from_stat(status).has_same_contents(
                self._expected[name]
            ):
                os.close(descriptor)
                raise changed_error(path)
            descriptor = self._store_descriptor(name, descriptor)
        return descriptor

    def _store_descriptor(self, name: str, descriptor: int) -> int:
        """Store a new descriptor, and return it, or the one that another thread stored before."""
        stored = self._descriptors.setdefault(name, descriptor)
        if stored != descriptor:
            os.close(descriptor)
        return stored

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        return self._status(name).st_size

    def identity(self, name: str) -> LocalFileIdentity:
        """Return the identity of the file that is open as `name`."""
        return LocalFileIdentity.from_stat(self._status(name))

    def _status(self, name: str) -> os.stat_result:
        descriptor = self.open_descriptor(name)
        try:
            return os.fstat(descriptor)
        except OSError as error:  # a server of the file system that is gone
            raise read_error(self.root / name, error) from error

    def stored_names(self, name: str) -> tuple[str, ...]:
        """Return the name itself, see `SourceFiles.stored_names`."""
        return (name,)

    def hint_reads(self, spans: Iterable[tuple[str, int, int]]) -> None:
        """Ignore the hint: the kernel reads ahead by itself."""

    def read_into(self, name: str, offset: int, views: list[memoryview | bytearray]) -> int:
        """Fill buffers in order from `offset`, and return the number of bytes read; see `SourceFiles.read_into`."""
        descriptor = self.open_descriptor(name)
        try:
            return os.preadv(descriptor, views, offset)
        except OSError as error:
            raise read_error(self.root / name, error) from error

    def read_up_to(self, name: str, offset: int, nbytes: int) -> bytes:
        """Return up to `nbytes` bytes from `offset`; empty at the end of the file."""
        descriptor = self.open_descriptor(name)
        try:
            return os.pread(descriptor, nbytes, offset)
        except OSError as error:
            raise read_error(self.root / name, error) from error

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Return exactly `nbytes` bytes from `offset`.

        Raises:
            InputError: The file ends early.
        """
        data = self.read_up_to(name, offset, nbytes)
        while len(data) < nbytes:
            more = self.read_up_to(name, offset + len(data), nbytes - len(data))
            if not more:
                raise InputError(
                    f"{self.root / name}: ends at byte {offset + len(data)}, expected at least {offset + nbytes}; "
                    "the file is truncated, copy or download it again"
                )
            data += more
        return data


def open_regular(path: Path) -> int:
    """Open a regular file, or a link to one, for reading, and return its descriptor.

    Raises:
        CkptxError: See `open_with_status`.
    """
    return open_with_status(path)[0]


def open_with_status(path: Path) -> tuple[int, os.stat_result]:
    """Open a regular file, or a link to one, for reading, and return its descriptor and its state.

    Raises:
        InputError: It is missing, is a broken link, a directory, pipe, socket or device, or cannot be read.
        EnvironmentProblem: Too many files are open.
    """
    try:
        # Non-blocking, because opening a pipe would otherwise wait for a writer forever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a device without a driver
            status = read_status(path)
            raise _not_regular_error(path, 0 if status is None else status.st_mode) from error
        raise read_error(path, error) from error
    except ValueError as error:  # a null byte in the name
        raise InputError(f"{path}: not a valid file name: {error}") from error
    try:
        status = os.fstat(descriptor)
    except OSError as error:
        os.close(descriptor)
        raise read_error(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise _not_regular_error(path, status.st_mode)
    return descriptor, status


_KIND_NAMES = ((stat.S_ISDIR, "directory"), (stat.S_ISFIFO, "pipe"), (stat.S_ISSOCK, "socket"))


def _not_regular_error(path: Path, mode: int) -> InputError:
    kind = next((name for is_kind, name in _KIND_NAMES if is_kind(mode)), "device")
    return InputError(
        f"{path}: expected a regular file, found a {kind}; replace it with the file, or pass another path"
    )


def read_head(path: Path, nbytes: int) -> bytes:
    """Return up to `nbytes` bytes from the beginning of a file.

    Raises:
        InputError: See `open_regular`.
    """
    descriptor = open_regular(path)
    try:
        return os.pread(descriptor, nbytes, 0)
    except OSError as error:
        raise read_error(path, error) from error
    finally:
        os.close(descriptor)


def read_small(path: Path, limit: int) -> bytes:
    """Return all bytes of a small file; used for all inputs that are read whole.

    Args:
        path: The file; see `open_regular`.
        limit: Maximum size in bytes. The size is checked before reading, and again while reading, because some files
            have no size or grow.

    Raises:
        InputError: The file is larger than `limit`; see also `open_regular`.
    """
    descriptor, status = open_with_status(path)
    try:
        size = status.st_size
        parts: list[bytes] = []
        remaining = limit + 1 if size <= limit else 0
        while remaining and (part := os.read(descriptor, min(remaining, max(size + 1, 1 << 16)))):
            parts.append(part)
            remaining -= len(part)
    except OSError as error:
        raise read_error(path, error) from error
    finally:
        os.close(descriptor)
    if not remaining:
        raise _too_large_error(path, max(size, limit + 1), limit)
    return b"".join(parts)


def refuse_large(path: Path, limit: int) -> None:
    """Refuse a file that `read_small` would refuse because of its kind or its recorded size, without reading it.

    Raises:
        InputError: The file is larger than `limit` bytes; see also `open_regular`.
    """
    descriptor, status = open_with_status(path)
    os.close(descriptor)
    if status.st_size > limit:
        raise _too_large_error(path, status.st_size, limit)


def _too_large_error(path: Path, nbytes: int, limit: int) -> InputError:
    return InputError(f"{path}: has {nbytes} bytes, the limit is {limit}; restore the file from a copy")


def read_size(path: Path) -> int:
    """Return the size of a file in bytes.

    Raises:
        InputError: It is missing or not accessible.
    """
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise read_error(path, error) from error


def raise_open_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit, because a run for 2,000 ranks has as many files open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def read_error(path: Path, error: OSError) -> CkptxError:
    """Return the error for a file of an input that could not be opened or read."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return EnvironmentProblem(f"{path}: cannot be opened: {error.strerror}; raise the limit (ulimit -n)")
    # With `os.path`, because `Path` raises for a name that is too long.
    if os.path.islink(path) and not os.path.exists(path):
        if error.errno == errno.ELOOP:
            return InputError(f"{path}: symbolic link to {os.readlink(path)}, which leads back to it; replace the link")
        return InputError(f"{path}: symbolic link to {os.readlink(path)}, which does not exist; restore the target")
    if isinstance(error, FileNotFoundError):
        return InputError(f"{path}: no such file; the checkpoint is incomplete")
    kind = ReadError if isinstance(error, PermissionError) else StorageFailure
    return kind(f"{path}: cannot be read: {error.strerror}")


def write_at(descriptor: int, data: memoryview | bytes, offset: int, path: Path) -> None:
    """Write all of `data` at `offset`; every output byte is written by this function.

    Raises:
        SpaceError: The disk or the quota is full.
        OutputError: Any other failure; `path` is used for the message only.
    """
    view = memoryview(data)
    try:
        while len(view):
            written = os.pwrite(descriptor, view, offset)
            view, offset = view[written:], offset + written
    except OSError as error:
        raise write_error(path, error) from error


# Errors of file systems without locks: Lustre with default mount options, NFS without a lock daemon, FUSE.
_NO_LOCK_ERRNOS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}


def lock_file(descriptor: int, path: Path) -> bool | None:
    """Lock a file exclusively, without waiting, until the descriptor is closed.

    Returns:
        True if it is now locked; False if another process has locked it; None if the file system does not support
        locks.

    Raises:
        OutputError: Locking failed for another reason; `path` is used for the message only.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCK_ERRNOS:
            return None
        raise OutputError(f"{path}: cannot be locked: {error.strerror or error}; check that file system") from error
    return True


def write_error(path: Path, error: OSError) -> CkptxError:
    """Return the error for a failed write to an output at `path`."""
    return _output_error(path, error, "written")


@contextmanager
def output_errors(path: Path) -> Iterator[None]:
    """Raise an OSError of the context as the error for an output at `path` that cannot be accessed."""
    try:
        yield
    except OSError as error:
        raise _output_error(path, error, "accessed") from error


@contextmanager
def output_read_failures() -> Iterator[None]:
    """Raise a StorageFailure of the context as OutputFailure: the files that are read are those of an output."""
    try:
        yield
    except StorageFailure as error:
        raise OutputFailure(str(error)) from error


def _output_error(path: Path, error: OSError, verb: str) -> CkptxError:
    """Return the error for a failed access to an output; `verb` is the past participle for the message ("written")."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SpaceError(f"{path}: {error.strerror}; no output was created, free some space and run again")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return EnvironmentProblem(f"{path}: cannot be {verb}: {error.strerror}; raise the limit (ulimit -n)")
    kind = OutputError if isinstance(error, PermissionError) else OutputFailure
    return kind(f"{path}: cannot be {verb}: {error.strerror or error}")
