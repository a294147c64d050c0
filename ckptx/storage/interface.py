"""The interface between ckptx and a storage. A local disk is the only storage so far; an object store could be added.

    Location                location of a file or directory, joined with `/`, such as a `pathlib.Path`
    Source                  one directory of a storage
      .listing()              -> Listing: names and kinds; each directory is listed once, subdirectories on demand
      .open()                 -> SourceFiles: reads by name and position, until it is closed
    OutputTree              the directory of an output while it is written
      .open_output(name, nbytes)    -> OutputFile: reads and writes by position

A name is the relative path of a file, from the location of a source or tree, with `/`. Sizes and offsets are in bytes.
A storage translates its errors to those of `ckptx.errors`, so that no caller handles an `OSError` or an HTTP status.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol

from ckptx.errors import UnsupportedError
from ckptx.storage.listing import EntryKind, Listing


class Location(Protocol):
    """Location of a file or directory in a storage; hashable, and equal to another for the same location.

    `pathlib.Path` implements it. Code that requires a path calls `local_path`.
    """

    @property
    def name(self) -> str:
        """The last component; empty at the top."""

    @property
    def parent(self) -> Location:
        """The parent directory; the location itself at the top."""

    def __truediv__(self, name: str, /) -> Location:
        """Join a relative name."""

    def __str__(self) -> str:
        """Return the location as messages print it."""


def local_path(location: Location) -> Path:
    """Return the path of a location on a local disk, for code that passes it to the system or to another library.

    Raises:
        UnsupportedError: The location is in another storage.
    """
    if isinstance(location, Path):
        return location
    raise UnsupportedError(f"{location}: not on a local disk; copy it to one and pass that path")


def relative_name(root: Location, location: Location) -> str | None:
    """Return the name of a location relative to `root`: None if it is not inside, and "" for `root` itself.

    Links are not resolved.
    """
    parts: list[str] = []
    while location != root:
        if location.parent == location:
            return None
        parts.append(location.name)
        location = location.parent
    return "/".join(reversed(parts))


class FileIdentity(Protocol):
    """Identity of a file in one state. Two identities are equal if and only if they are of the same state."""

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""

    @property
    def version(self) -> tuple[int | str, ...]:
        """Size and modification time, or an entity tag; equal on all machines that see the same contents."""

    @property
    def device_and_inode(self) -> tuple[int | str, ...]:
        """Device and inode of the file on this machine, in this order; empty if versions are unique."""

    def has_same_contents(self, other: FileIdentity) -> bool:
        """Return False if the identities show that the contents differ or may differ, True if they do not.

        True is no proof: on a local disk, a file can be rewritten and its modification time set back.
        """


class SourceFiles(Protocol):
    """The files of a source, opened on first read and closed together; thread-safe."""

    @property
    def root(self) -> Location:
        """Location to which names are relative."""

    def __enter__(self) -> SourceFiles:
        """Return the files themselves."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close them."""

    def close(self) -> None:
        """Close all open files."""

    def size(self, name: str) -> int:
        """Return the size of a file in bytes.

        Raises:
            InputError: There is no regular file of this name, it cannot be read, or it differs from the recorded one.
            EnvironmentProblem: Too many files are open.
        """

    def identity(self, name: str) -> FileIdentity:
        """Return the identity of the file that is open as `name`; raises the errors of `size`."""

    def stored_names(self, name: str) -> tuple[str, ...]:
        """Return the names of the files in the storage that the contents of `name` come from.

        Usually it is `name` alone. A file that is computed from others, such as a decoded weight, has others.
        """

    def read_into(self, name: str, offset: int, views: list[memoryview | bytearray]) -> int:
        """Fill buffers in order from `offset`, and return the number of bytes read.

        If it is less than requested, call again; 0 means that the file ends at `offset`. Raises the errors of `size`.
        """

    def read_up_to(self, name: str, offset: int, nbytes: int) -> bytes:
        """Return up to `nbytes` bytes from `offset`; fewer only at the end of the file. Raises the errors of `size`."""

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Return exactly `nbytes` bytes from `offset`.

        Raises:
            InputError: See `size`; also if the file ends early.
        """

    def hint_reads(self, spans: Iterable[tuple[str, int, int]]) -> None:
        """Receive a hint about the next reads of one thread.

        Args:
            spans: Name, offset and number of bytes of each read, in order; the actual reads may differ. A storage that
                reads ahead consumes the iterable, from any thread; a local disk does not, so they are never computed.
        """


class Source(Protocol):
    """One directory of a storage, for listing and reading; keeps no file open.

    Listings are cached and shared with the sources returned by `with_location`, so that detection, sidecars and checks
    see one state of the directory. Reads are not cached.
    """

    @property
    def location(self) -> Location:
        """Location of the directory, or of a file if `read_kind` returns FILE."""

    def with_location(self, location: Location) -> Source:
        """Return the source of another location of the same storage."""

    def without_cache(self) -> Source:
        """Return the source of the same location without cached listings."""

    def absolute_locations(self, name: str = "") -> tuple[Location, ...]:
        """Return the absolute location of a file, and if different the one with links resolved.

        An empty name stands for the location of the source.
        """

    def read_kind(self) -> EntryKind | None:
        """Return the kind of the entry at the location, following links; None if nothing exists there.

        Raises:
            InputError: It is not accessible.
        """

    def listing(self) -> Listing:
        """Return the names in the directory, and their kinds.

        Raises:
            InputError: It is not a directory, cannot be listed, or has more than `MAX_LISTED_NAMES` names.
        """

    def open(self, expected: Mapping[str, FileIdentity] | None = None) -> SourceFiles:
        """Return the files, for reading.

        Args:
            expected: Expected identity by name; a file with other contents is refused when it is first read.
        """

    def read_identities(self, names: Iterable[str]) -> dict[str, FileIdentity]:
        """Return the current identity of each name that is a regular file; other names are omitted."""

    def size(self, name: str) -> int:
        """Return the current size of a file in bytes.

        Raises:
            InputError: It is missing or not accessible.
        """

    def read_head(self, name: str, nbytes: int) -> bytes:
        """Return up to `nbytes` bytes from the beginning of a file.

        Raises:
            InputError: There is no regular file of this name, or it cannot be read.
        """

    def read_small(self, name: str, limit: int) -> bytes:
        """Return all bytes of a file.

        Raises:
            InputError: See `read_head`; also if the file is larger than `limit` bytes, which is checked before reading.
        """

    def refuse_large(self, name: str, limit: int) -> None:
        """Refuse a file that `read_small` would refuse because of its kind or size, without reading it."""


class StoredFile(NamedTuple):
    """A file of a source, by its name there."""

    source: Source
    name: str

    @property
    def location(self) -> Location:
        """Location of the file."""
        return self.source.location / self.name

    @property
    def size(self) -> int:
        """Current size in bytes."""
        return self.source.size(self.name)


class OutputFile(Protocol):
    """A file of an output, with thread-safe reads and writes by position.

    Every error contains the name of the file.
    """

    @property
    def size(self) -> int:
        """Current size in bytes."""

    def truncate(self, nbytes: int) -> None:
        """Truncate the file to `nbytes` bytes if it is longer; a shorter file does not change."""

    def read(self, nbytes: int, offset: int) -> bytes:
        """Return up to `nbytes` bytes from `offset`; empty at the end of the file."""

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill a buffer from `offset`, and return the number of bytes read, which may be less than its length."""

    def blocks(self, size: int) -> Iterator[bytes]:
        """Iterate over the contents of the file, at most `size` bytes at a time."""

    def write(self, data: memoryview | bytes, offset: int) -> None:
        """Write all of `data` at `offset`.

        Raises:
            SpaceError: The storage is full.
            OutputError: Any other failure.
        """

    def close(self) -> None:
        """Close the file."""


class ExpectedFile(NamedTuple):
    """The expected state of a file of a finished output.

    Attributes:
        nbytes: Size in bytes.
        device_and_inode: Device and inode of the file that was written, see `FileIdentity`; None if another process
            wrote it.
        has_expected_bytes: Reads the file again and returns True if its bytes are correct; None to check only size and
            inode.
    """

    nbytes: int
    device_and_inode: tuple[int | str, ...] | None = None
    has_expected_bytes: Callable[[OutputFile], bool] | None = None


class OutputTree(Protocol):
    """The directory of an output while it is written, not yet visible to programs that look for a checkpoint."""

    @property
    def path(self) -> Location:
        """Location of the directory, for messages."""

    def open_output(self, name: str, nbytes: int | None, *, keep: bool = False) -> OutputFile:
        """Create a file and open it for reading and writing.

        Args:
            name: Name relative to the tree; missing directories are created.
            nbytes: Final size of a file that is part of the output; the tree keeps the file open to recognize it
                later. None for a file that the caller closes.
            keep: If an interrupted run of the same plan left the file, open it as it is, but truncated to `nbytes`.

        Raises:
            InputError: The name leads out of the tree.
            OutputError: The file exists and must not be written.
            SpaceError: The storage is full.
        """

    def write(self, name: str, blocks: Iterable[bytes]) -> tuple[int | str, ...]:
        """Write a file from blocks; return its device and inode. Raises the errors of `open_output` and of `blocks`."""

    def allocated_bytes(self) -> int:
        """Return the storage space that the files take so far, in bytes."""

    def remove_others(self, kept_names: Collection[str]) -> None:
        """Remove every file of an interrupted run that is not among `kept_names`."""

    def describe_expected(self, sizes: Mapping[str, int]) -> dict[str, ExpectedFile]:
        """Return the expected state of files, by name, from their sizes in bytes.

        Device and inode are those of the files that this process opened with a final size; None for others.
        """

    def verify_status(self, expected: Mapping[str, ExpectedFile]) -> None:
        """Check size, device and inode of files; `Publisher.publish` checks `has_expected_bytes`.

        Raises:
            OutputError: A file is missing, was replaced, or has another size.
        """
