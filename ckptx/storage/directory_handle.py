"""A directory held by a descriptor, in which files are made, read and removed without ever following a link.

Whoever may write beside an output could put a link where a file is about to be made, and the output would end in the
file that the link names. Every name is therefore looked up from the descriptor of its own directory, one component at
a time: a link, a pipe or a device in the place of a directory or file is refused. A directory that is moved or replaced
meanwhile stays the one that is held, and `is_at` tells.
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
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # without blocking: a pipe would wait for its other end
# What opening says when something else is in the place of a file or directory.
_IN_THE_WAY = {errno.ELOOP, errno.EMLINK, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.EEXIST}

PROBE = "probe"  # made and removed to see whose files ours are


def parts_of(name: str) -> tuple[str, ...]:
    """The components of the name of an output file, directories first.

    Raises:
        InputError: It is empty or absolute, climbs, or is no text that a file system takes. Such a name can only come
            from the input.
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
    """No output file may be written twice, or be a directory of another one.

    Raises:
        InputError: Two names clash, or one leads out of the output directory.
    """
    names = list(names)
    for name in names:
        parts_of(name)
        fault = name_fault(name)
        if fault is not None:
            raise InputError(f'file name "{one_line(name)}" has no place in an output: {fault}; rename it')
    twice = colliding_name(names)
    if twice is not None:
        raise InputError(
            f'file name "{one_line(twice)}" is taken by another file of the output; the input names it twice'
        )


class DirectoryHandle:
    """One directory and the descriptors of what was opened in it.

    Attributes:
        path: For messages, and for those who only read.
        descriptor: Of the directory.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        """Takes over `descriptor`."""
        self.path, self.descriptor = path, descriptor
        self._directories: dict[tuple[str, ...], int] = {}
        self._held: dict[str, int] = {}

    @classmethod
    def at(cls, path: Path) -> DirectoryHandle:
        """The directory at `path`, whose last component is no link.

        Raises:
            OutputError: There is none, or something else is there.
        """
        try:
            return cls(path, os.open(path, _DIRECTORY))
        except OSError as error:
            raise refusal(path, error) from error

    def below(self, name: str, *, make: bool = False) -> DirectoryHandle:
        """A directory in this one; with `make` it is created unless it is there.

        Raises:
            OutputError: Something else is there.
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
        """Closes every descriptor."""
        for descriptor in (*self._held.values(), *self._directories.values(), self.descriptor):
            with suppress(OSError):  # e.g. a quota that is found exceeded late; fsync has said so
                os.close(descriptor)
        self._held, self._directories, self.descriptor = {}, {}, -1

    # ------------------------------------------------------------------------------------------------------- files

    def create(self, name: str, *, keep: bool = False) -> int:
        """Makes a file and opens it for reading and writing; the caller closes it. The mode follows the umask.

        Args:
            name: Relative to this directory; directories on the way are made.
            keep: Open the file that is there already, if it is an ordinary one with no second name.

        Raises:
            InputError: The name leads out of the directory.
            OutputError: Something is there that may not be written.
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
            what = "has a second name elsewhere" if stat.S_ISREG(found.st_mode) else "is no regular file"
            raise OutputError(f"{path}: {what}; not written by ckptx, remove it and run again")
        return descriptor

    def create_tracked(self, name: str, *, keep: bool = False) -> OpenFile:
        """As `create`, and keeps the descriptor, so that `settle` knows the file again."""
        descriptor = self.create(name, keep=keep)
        self._held[name] = descriptor
        return OpenFile(descriptor, self.path / name)

    def open_output(self, name: str, nbytes: int | None, *, keep: bool = False) -> OpenFile:
        """Make a file of the output, or with `keep` open what an interrupted run left of it; see `OutputTree`.

        Args:
            name: Relative to this directory.
            nbytes: Size it will have; what lies behind is cut off, and the descriptor is kept. None for a file that
                the caller closes.
            keep: As in `create`.

        Raises:
            InputError, OutputError, SpaceError: See `create`.
        """
        if nbytes is None:
            return self.make(name, keep=keep)
        file = self.create_tracked(name, keep=keep)
        file.cut_to(nbytes)
        return file

    def make(self, name: str, *, keep: bool = False) -> OpenFile:
        """As `create`; the caller closes it."""
        return OpenFile(self.create(name, keep=keep), self.path / name)

    def reading(self, name: str) -> OpenFile:
        """As `open`; the caller closes it."""
        return OpenFile(self.open(name), self.path / name)

    def write(self, name: str, blocks: Iterable[bytes]) -> tuple[int, int]:
        """Makes a file of `blocks`; gives its device and inode.

        Raises:
            OutputError, SpaceError: As `create`, or it cannot be written.
        """
        at = 0
        with self.make(name) as file:
            for block in blocks:
                file.write(block, at)
                at += len(block)
            return file.identity

    def open(self, name: str, *, write: bool = False) -> int:
        """Opens a regular file for reading, and with `write` for writing, too; the caller closes it.

        Raises:
            FileNotFoundError: There is none.
            OutputError: Something else is there.
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
            raise OutputError(f"{path}: is no regular file; not written by ckptx, remove it and run again")
        return descriptor

    def read(self, name: str, limit: int = 1 << 20) -> bytes | None:
        """The first `limit` bytes of a file, or None when there is none."""
        try:
            with self.reading(name) as file:
                return file.read(min(limit, file.size), 0)
        except FileNotFoundError:
            return None

    def identity(self, name: str) -> tuple[int, int]:
        """Device and inode of a file that is held."""
        found = os.fstat(self._held[name])
        return found.st_dev, found.st_ino

    def _directory(self, parts: tuple[str, ...], *, make: bool = True) -> int:
        """The descriptor of a directory below, which stays open."""
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
        """True when the directory belongs to the user whose files this process makes, which a server may decide."""
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
        """What is at a name in this directory, not followed when it is a link; None when nothing is."""
        try:
            return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def names(self) -> list[str]:
        """What is in this directory, sorted."""
        return sorted(os.listdir(self.descriptor))

    def is_at(self, parent: DirectoryHandle, name: str) -> bool:
        """True when `name` in `parent` is this very directory."""
        found = parent.stat(name)
        return found is not None and os.path.samestat(found, os.fstat(self.descriptor))

    def walk(self) -> Iterator[tuple[str, os.stat_result]]:
        """Everything below that is no directory, by relative name; links are not followed."""
        return _walk(self.descriptor, "")

    def allocated(self) -> int:
        """Bytes of disk that the files below take."""
        return sum(found.st_blocks * 512 for _, found in self.walk())

    def remove(self, name: str) -> None:
        """Removes a file or a link in this directory, or a directory and all that is in it; never what a link names.

        Raises:
            OSError: Something could not be removed.
        """
        _remove(name, self.descriptor)

    def remove_others(self, names: Collection[str]) -> None:
        """Removes every file below that is not among `names`."""
        try:
            for name, _ in list(self.walk()):
                if name not in names:
                    *above, last = parts_of(name)
                    os.unlink(last, dir_fd=self._directory(tuple(above)))
        except OSError as error:
            raise unwritable(self.path, error) from error

    # ------------------------------------------------------------------------------------------------------- the end

    def fsync_and_verify(self, expected: Mapping[str, ExpectedFile] | None = None) -> None:
        """Brings all that is below to the disk, and holds it against what it must be.

        Args:
            expected: By name, every file there must be; None takes any regular files.

        Raises:
            OutputError: A file is missing, is another or of another size than was written, or nobody wrote it.
            SpaceError: The disk turned out to be full.
        """
        left = {"/".join(parts_of(name)): what for name, what in (expected or {}).items()}
        directories = set()
        for name in [name for name, _ in self.walk()]:
            if expected is not None and name not in left:
                raise self._changed(name, "appeared, and is no part of the output")
            try:
                descriptor = self.open(name)
            except FileNotFoundError:
                raise self._changed(name, "was removed") from None
            try:
                what = left.pop(name, None)
                if what is not None:
                    self._hold_against(name, os.fstat(descriptor), what)
                    if what.reads_as is not None and not what.reads_as(OpenFile(descriptor, self.path / name)):
                        raise self._changed(name, "holds other bytes than were written")
                os.fsync(descriptor)
            except OSError as error:
                raise unwritable(self.path / name, error) from error
            finally:
                os.close(descriptor)
            directories.add(parts_of(name)[:-1])
        if left:
            raise self._changed(min(left), "was removed")
        for parts in directories:
            os.fsync(self._directory(parts, make=False))
        os.fsync(self.descriptor)

    def sync_held(self) -> None:
        """Brings the files that this process wrote to the disk."""
        for name, held in self._held.items():
            try:
                os.fsync(held)
            except OSError as error:
                raise unwritable(self.path / name, error) from error

    def expect(self, sizes: Mapping[str, int]) -> dict[str, ExpectedFile]:
        """What the files of these names and sizes must be: those that this process wrote are known by their inode."""
        return {
            name: ExpectedFile(nbytes, self.identity(name) if name in self._held else None)
            for name, nbytes in sizes.items()
        }

    def require(self, expected: Mapping[str, ExpectedFile]) -> None:
        """Holds files against what they must be, by a look at their names.

        Raises:
            OutputError: One of them is missing, is another or of another size than was written.
        """
        for name, what in expected.items():
            *above, last = parts_of(name)
            try:
                found = os.stat(last, dir_fd=self._directory(tuple(above), make=False), follow_symlinks=False)
            except OSError:
                raise self._changed(name, "was removed") from None
            if not stat.S_ISREG(found.st_mode):
                raise self._changed(name, "was replaced")
            self._hold_against(name, found, what)

    def _hold_against(self, name: str, found: os.stat_result, expected: ExpectedFile) -> None:
        if expected.holder is not None and (found.st_dev, found.st_ino) != expected.holder:
            raise self._changed(name, "was replaced")
        if found.st_size != expected.nbytes:
            raise self._changed(name, f"has {found.st_size} bytes, {expected.nbytes} were written")

    def _changed(self, name: str, how: str) -> OutputError:
        return OutputError(
            f"{self.path}/{one_line(name)}: {how}; somebody else works in the staging directory, nothing was "
            "published, run again"
        )


def refusal(path: Path, error: OSError) -> CkptxError:
    """The error for something that could not be opened or made in a staging directory."""
    if error.errno in _IN_THE_WAY:
        return OutputError(
            f"{path}: a link, or something else that ckptx did not write, is in the way; remove it and run again"
        )
    if error.errno == errno.ENOENT:
        return OutputError(f"{path}: its directory was removed by somebody else; nothing was published, run again")
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
