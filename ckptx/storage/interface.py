"""The interface of a storage: what the rest of ckptx asks of a local disk, and will ask of an object store.

    Location                where something is; printed in messages, joined with `/`. A `pathlib.Path` is one.
    Source                  one directory of a storage
      .listing()              -> Listing: names and kinds, each directory asked for once, lower ones when needed
      .open()                 -> SourceFiles: reads by name and position, until it is closed
    OutputTree              the directory of an output while it is written
      .open_output(name, nbytes)    -> OutputFile: reads and writes by position

Names are relative to the location of a source or tree and use `/`. Sizes and offsets are bytes. Errors are those of
`ckptx.errors`: a storage translates its own, so that no caller knows an `OSError` or a status of HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol

from ckptx.errors import UnsupportedError
from ckptx.storage.listing import EntryKind, Listing


class Location(Protocol):
    """The place of a file or directory in a storage; hashable, and equal to another for the same place.

    `pathlib.Path` has this form. Code that needs more than this asks for `local_path`.
    """

    @property
    def name(self) -> str:
        """The last component; empty at the top."""

    @property
    def parent(self) -> Location:
        """The directory above; the location itself at the top."""

    def __truediv__(self, name: str, /) -> Location:
        """Join a relative name."""

    def __str__(self) -> str:
        """Return the location as messages print it."""


def local_path(location: Location) -> Path:
    """Return the path of a location on a local disk, for code that hands it to the system or to another library.

    Raises:
        UnsupportedError: The location is in another storage.
    """
    if isinstance(location, Path):
        return location
    raise UnsupportedError(f"{location}: is not on a local disk; copy it to one and pass that")


def name_below(root: Location, location: Location) -> str | None:
    """Return the name of a location relative to a directory, or None if it does not lie in it."""
    parts: list[str] = []
    while location != root:
        if location.parent == location:
            return None
        parts.append(location.name)
        location = location.parent
    return "/".join(reversed(parts))


class FileIdentity(Protocol):
    """One state of one file. Two identities are equal if and only if they were taken of the same state."""

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""

    @property
    def version(self) -> tuple[int | str, ...]:
        """Size and modification time, or an entity tag: equal on all machines that see these contents."""

    @property
    def holder(self) -> tuple[int | str, ...]:
        """Device and inode, in this order, of the file on this machine; empty where versions are unique."""

    def has_same_contents(self, other: FileIdentity) -> bool:
        """Return False if the contents differ; True if they are equal as far as can be known without reading."""


class SourceFiles(Protocol):
    """The files of a source, opened when first read and closed together; safe to share between threads."""

    @property
    def root(self) -> Location:
        """Location that names are relative to."""

    def __enter__(self) -> SourceFiles:
        """Return the files themselves."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close them."""

    def close(self) -> None:
        """Release what was opened."""

    def size(self, name: str) -> int:
        """Return the size of a file in bytes.

        Raises:
            InputError: There is no regular file of this name, it cannot be read, or it is not the recorded one.
            EnvironmentProblem: Too many files are open.
        """

    def identity(self, name: str) -> FileIdentity:
        """Return the identity of the very file that is read as `name`; raises as `size`."""

    def read_into(self, name: str, offset: int, views: list[memoryview | bytearray]) -> int:
        """Fill buffers one after the other from `offset` on, and return how many bytes the file had for them.

        Fewer bytes than asked for mean "call again", 0 means that the file ends at `offset`. Raises as `size`.
        """

    def read_up_to(self, name: str, offset: int, nbytes: int) -> bytes:
        """Return at most `nbytes` bytes from `offset` on; fewer only where the file ends. Raises as `size`."""

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Return exactly `nbytes` bytes from `offset` on.

        Raises:
            InputError: See `size`; also if the file ends early.
        """

    def expect(self, spans: Iterable[tuple[str, int, int]]) -> None:
        """Take a hint on what one thread is about to read.

        Args:
            spans: Name, offset and number of bytes, in the order of the reads; more may be read, or less. A storage
                that reads ahead iterates over them, from any thread and as far as it likes; a local disk does not,
                and then they are not even computed.
        """


class Source(Protocol):
    """One directory of a storage, to be listed and read; holds nothing open.

    What was listed is remembered and shared with the sources made by `at`, so that detection, sidecars and checks
    see one state of the directory. Reads are never answered from memory.
    """

    @property
    def location(self) -> Location:
        """The directory, or the file that `kind` says is there."""

    def at(self, location: Location) -> Source:
        """Return the source of another location of the same storage."""

    def fresh(self) -> Source:
        """Return the source of the same location, with nothing listed yet."""

    def spellings(self, name: str = "") -> tuple[Location, ...]:
        """Return the absolute location of a file, or of the source, and where its links lead if that is another."""

    def kind(self) -> EntryKind | None:
        """Return what is at the location, links followed; None if nothing is there.

        Raises:
            InputError: It cannot be looked at.
        """

    def listing(self) -> Listing:
        """Return the names at the location.

        Raises:
            InputError: It is no directory, cannot be listed, or has more names than any checkpoint.
        """

    def open(self, recorded: Mapping[str, FileIdentity] | None = None) -> SourceFiles:
        """Return the files, for reading.

        Args:
            recorded: Identity by name; a file whose contents are others when it is first read is refused.
        """

    def identities(self, names: Iterable[str]) -> dict[str, FileIdentity]:
        """Return the present identity of each name that is a regular file; other names are left out."""

    def size(self, name: str) -> int:
        """Return the present size of a file in bytes.

        Raises:
            InputError: It is missing, or cannot be looked at.
        """

    def head(self, name: str, nbytes: int) -> bytes:
        """Return the first bytes of a file, as far as there are so many.

        Raises:
            InputError: There is no regular file of this name, or it cannot be read.
        """

    def read_small(self, name: str, limit: int) -> bytes:
        """Return all bytes of a file.

        Raises:
            InputError: See `head`; also if the file is larger than `limit` bytes, which is checked before reading.
        """

    def refuse_large(self, name: str, limit: int) -> None:
        """Refuse what `read_small` would refuse by its kind and size, without reading it."""


class StoredFile(NamedTuple):
    """One file of a source: what an output copies without looking into it."""

    source: Source
    name: str

    @property
    def location(self) -> Location:
        """Location of the file."""
        return self.source.location / self.name

    @property
    def size(self) -> int:
        """Its present size in bytes."""
        return self.source.size(self.name)


class OutputFile(Protocol):
    """A file of an output; reads and writes by position, by any number of threads.

    The name of the file is in every error.
    """

    @property
    def size(self) -> int:
        """Its size in bytes, as written so far."""

    def cut_to(self, nbytes: int) -> None:
        """Drop what lies behind the first `nbytes` bytes."""

    def read(self, nbytes: int, offset: int) -> bytes:
        """Return what there is of `nbytes` bytes from `offset` on."""

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill a buffer from `offset` on, and return how many bytes were there."""

    def blocks(self, size: int) -> Iterator[bytes]:
        """Return all of the file, `size` bytes at a time."""

    def write(self, data: memoryview | bytes, offset: int) -> None:
        """Write all of `data` at `offset`.

        Raises:
            SpaceError: The storage is full.
            OutputError: Any other failure.
        """

    def close(self) -> None:
        """Release what was opened."""


class ExpectedFile(NamedTuple):
    """The state a file must have when its output is finished.

    Attributes:
        nbytes: Its size in bytes.
        holder: `FileIdentity.holder` of the file that was written; None if another process wrote it.
        reads_as: Reads the file again and returns True if its bytes are right; None if size and holder say enough.
    """

    nbytes: int
    holder: tuple[int | str, ...] | None = None
    reads_as: Callable[[OutputFile], bool] | None = None


class OutputTree(Protocol):
    """The directory of an output while it is written: nobody who looks for a checkpoint finds it yet."""

    @property
    def path(self) -> Location:
        """Location of the directory, for messages."""

    def open_output(self, name: str, nbytes: int | None, *, keep: bool = False) -> OutputFile:
        """Make a file and open it for reading and writing.

        Args:
            name: Relative to the tree; directories on the way are made.
            nbytes: Size that the file will have, if it is known and the file is part of the output; the tree then
                keeps the file open, to know it again. None for a file that the caller closes.
            keep: Open the file that an interrupted run of the same plan left, less what lies behind `nbytes`.

        Raises:
            InputError: The name leads out of the tree.
            OutputError: Something is there that may not be written.
            SpaceError: The storage is full.
        """

    def write(self, name: str, blocks: Iterable[bytes]) -> tuple[int | str, ...]:
        """Make a whole file of blocks, and return its holder. Raises as `open_output`, or what `blocks` raises."""

    def allocated(self) -> int:
        """Return how many bytes of the storage the files take so far."""

    def remove_others(self, names: Collection[str]) -> None:
        """Remove every other file that an interrupted run left."""

    def expect(self, sizes: Mapping[str, int]) -> dict[str, ExpectedFile]:
        """Return what files of these sizes must be; those that this process wrote are known by their holder."""

    def require(self, expected: Mapping[str, ExpectedFile]) -> None:
        """Check files by size and holder; `reads_as` is left to `Publisher.publish`.

        Raises:
            OutputError: A file is missing, is another, or has another size.
        """
