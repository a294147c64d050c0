"""Files on a local disk: checked paths, positional reads and writes.

Everything that touches the file system for data goes through here, so that there is one place that checks paths,
translates `ENOSPC`, and can be made to fail by a test.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar, cast

from ckptx.errors import CkptxError, EnvironmentProblem, InputError, OutputError, SpaceError
from ckptx.storage.interface import FileIdentity, Location

_Location = TypeVar("_Location", bound=Location)


def inside(root: _Location, name: str) -> _Location:
    """The path of `name` below `root`.

    Raises:
        InputError: `name` is absolute or climbs out of `root`; a checkpoint must not reach other files.
    """
    pure = PurePosixPath(name)
    if not name or pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name:
        raise InputError(f'{root}: file name "{name}" leads out of the checkpoint directory; refused')
    return cast("_Location", root / str(pure))  # what is joined to a location is one of the same storage


class Identity(NamedTuple):
    """Identity of a state of a file: it differs for another state, and for a file that takes its place.

    `ctime_ns` alone changes with a mode, an owner or a link, and also when the file is rewritten in place and its
    modification time is set back: it says that the contents have to be looked at again, and no more.
    """

    device: int
    inode: int
    nbytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> Identity:
        """That of a file from what `stat` says."""
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    @property
    def version(self) -> tuple[int, int]:
        """Size and modification time, equal on all machines that mount the disk."""
        return self[2:4]

    @property
    def holder(self) -> tuple[int, int]:
        """Device and inode."""
        return self[:2]

    def has_same_contents(self, other: FileIdentity) -> bool:
        """Return True for the same file of the same size and modification time."""
        return isinstance(other, Identity) and self[:4] == other[:4]


def identities(root: Path, names: Iterable[str]) -> dict[str, Identity]:
    """Those of the files that are there. Taken before they are read, they tell afterwards whether it was these."""
    found: dict[str, Identity] = {}
    for name in names:
        with suppress(OSError):  # who reads it says what is wrong with it
            state = os.stat(root / name)
            if stat.S_ISREG(state.st_mode):
                found[name] = Identity.of(state)
    return found


def changed(path: Location) -> InputError:
    """The refusal for a file that is not what it was when the checkpoint was opened."""
    return InputError(f"{path}: changed while it was being read; wait for its writer, then run again")


class FilePool:
    """Read-only file descriptors by name below one root, opened on first use and kept; safe to share by threads."""

    def __init__(self, root: Path, recorded: Mapping[str, FileIdentity] | None = None) -> None:
        """Opens nothing yet.

        Args:
            root: What names are relative to.
            recorded: Identity by name; a file that is another one when it is opened is refused. A change time alone is
                no reason: whoever needs the file to stay as it is looks at its contents again.
        """
        allow_many_files()
        self.root, self._recorded = root, recorded or {}
        self._descriptors: dict[str, int] = {}

    def __enter__(self) -> FilePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes every descriptor."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def fd(self, name: str) -> int:
        """A descriptor for `name`.

        Raises:
            InputError: The file is missing, is a dangling link, or cannot be read.
            EnvironmentProblem: Too many files are open.
        """
        descriptor = self._descriptors.get(name)
        if descriptor is None:
            path = inside(self.root, name)
            descriptor = open_regular(path)
            is_recorded = name in self._recorded
            if is_recorded and not Identity.of(os.fstat(descriptor)).has_same_contents(self._recorded[name]):
                os.close(descriptor)
                raise changed(path)
            descriptor = self._keep(name, descriptor)
        return descriptor

    def _keep(self, name: str, descriptor: int) -> int:
        kept = self._descriptors.setdefault(name, descriptor)
        if kept != descriptor:
            os.close(descriptor)
        return kept

    def size(self, name: str) -> int:
        """Size of `name` in bytes."""
        return os.fstat(self.fd(name)).st_size

    def identity(self, name: str) -> Identity:
        """What tells the file that is open as `name` from any other."""
        return Identity.of(os.fstat(self.fd(name)))

    def expect(self, spans: Iterable[tuple[str, int, int]]) -> None:
        """Ignore the hint: the kernel reads ahead by itself."""

    def read_into(self, name: str, offset: int, views: list[memoryview | bytearray]) -> int:
        """Fills `views` one after the other from `offset` of `name` on; the number of bytes that were there."""
        descriptor = self.fd(name)
        try:
            return os.preadv(descriptor, views, offset)
        except OSError as error:
            raise unreadable(self.root / name, error) from error

    def read_up_to(self, name: str, offset: int, nbytes: int) -> bytes:
        """What there is of `nbytes` bytes of `name` from `offset` on."""
        descriptor = self.fd(name)
        try:
            return os.pread(descriptor, nbytes, offset)
        except OSError as error:
            raise unreadable(self.root / name, error) from error

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Exactly `nbytes` bytes of `name` from `offset` on.

        Raises:
            InputError: The file ends before.
        """
        data = self.read_up_to(name, offset, nbytes)
        while len(data) < nbytes:
            more = self.read_up_to(name, offset + len(data), nbytes - len(data))
            if not more:
                raise InputError(
                    f"{self.root / name}: ends at byte {offset + len(data)}, needed up to {offset + nbytes}; "
                    "the file is truncated, copy or download it again"
                )
            data += more
        return data


def open_regular(path: Path) -> int:
    """A descriptor to read `path`, which must be a regular file or a link to one.

    Raises:
        InputError: It is missing, is a dangling link, a directory, pipe, socket or device, or cannot be read.
        EnvironmentProblem: Too many files are open.
    """
    try:
        # Without blocking: a pipe in the place of a file would otherwise wait for a writer for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:  # a zero byte in a name
        raise InputError(f"{path}: is no name of a file") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InputError(f"{path}: is a directory, pipe or device, needed a regular file")
    return descriptor


def head_of(path: Path, nbytes: int) -> bytes:
    """The first bytes of a file, as far as there are so many.

    Raises:
        InputError: As `open_regular`.
    """
    descriptor = open_regular(path)
    try:
        return os.pread(descriptor, nbytes, 0)
    finally:
        os.close(descriptor)


def read_small(path: Path, limit: int) -> bytes:
    """All bytes of a small file; the one verb for inputs that are read whole.

    Args:
        path: The file; see `open_regular` for what it may be.
        limit: Bytes allowed. The size is looked at first, so that nothing is read of a file that is larger, and held
            again while reading: some files have no size, or grow.

    Raises:
        InputError: As `open_regular`; or the file is larger.
    """
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        parts: list[bytes] = []
        left = limit + 1 if size <= limit else 0
        while left and (part := os.read(descriptor, min(left, max(size + 1, 1 << 16)))):
            parts.append(part)
            left -= len(part)
    except OSError as error:
        raise unreadable(path, error) from error
    finally:
        os.close(descriptor)
    if not left:
        raise _too_large(path, max(size, limit + 1), limit)
    return b"".join(parts)


def refuse_large(path: Path, limit: int) -> None:
    """Refuse what `read_small` would refuse by its kind and size; nothing is read.

    Raises:
        InputError: As `open_regular`; or the file is larger than `limit` bytes.
    """
    descriptor = open_regular(path)
    size = os.fstat(descriptor).st_size
    os.close(descriptor)
    if size > limit:
        raise _too_large(path, size, limit)


def _too_large(path: Path, nbytes: int, limit: int) -> InputError:
    return InputError(f"{path}: {nbytes} bytes, allowed at most {limit}; the file is corrupt")


def size_of(path: Path) -> int:
    """Size of a file in bytes.

    Raises:
        InputError: It is missing or cannot be looked at.
    """
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise unreadable(path, error) from error


def allow_many_files() -> None:
    """Raises the soft limit of open files to the hard one: a run of 2,000 ranks leaves as many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def unreadable(path: Path, error: OSError) -> CkptxError:
    """The refusal for a file that could not be opened, by cause."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return EnvironmentProblem(f"{path}: cannot be opened: {error.strerror}; raise the limit (ulimit -n)")
    # By `os.path`: a `Path` raises for a name that is too long.
    if os.path.islink(path) and not os.path.exists(path):
        return InputError(f"{path}: symbolic link to {os.readlink(path)}, which does not exist; restore the target")
    if isinstance(error, FileNotFoundError):
        return InputError(f"{path}: no such file; the checkpoint is incomplete")
    return InputError(f"{path}: cannot be read: {error.strerror}")


def write_at(descriptor: int, data: memoryview | bytes, offset: int, path: Path) -> None:
    """Writes all of `data` at `offset`; the one verb through which every output byte goes.

    Raises:
        SpaceError: The disk or the quota is full.
        OutputError: Any other failure; `path` is only named.
    """
    view = memoryview(data)
    try:
        while len(view):
            written = os.pwrite(descriptor, view, offset)
            view, offset = view[written:], offset + written
    except OSError as error:
        raise unwritable(path, error) from error


# What file systems without locks answer: Lustre as it is mounted by default, NFS without a lock daemon, FUSE.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}


def take_lock(descriptor: int, path: Path) -> bool | None:
    """Locks a file for this process until it is closed.

    Returns:
        False while another process has it; None where the file system knows no such locks.

    Raises:
        OutputError: It cannot be tried; `path` is only named.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise OutputError(f"{path}: cannot be locked: {error.strerror or error}; look at that file system") from error
    return True


def unwritable(path: Path, error: OSError) -> CkptxError:
    """The refusal for a failed write, by cause."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SpaceError(f"{path}: {error.strerror}; nothing was published, free some space and run again")
    return OutputError(f"{path}: cannot be written: {error.strerror or error}")
