"""A storage in memory, behind the same interface as a local disk: it proves the interface, and tests need no files.

`MemoryPath` is a `Location`, with the methods of `pathlib.Path` that tests write files with, and the `Source` of what
lies there: `open_checkpoint(MemoryPath() / "model")`. `MemoryTree` is an `OutputTree` in it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from ckptx.errors import InputError, OutputError, SpaceError
from ckptx.storage.files import changed, inside
from ckptx.storage.interface import FileIdentity, Location
from ckptx.storage.listing import Kind, Listing
from ckptx.untrusted.limits import LISTED_NAMES

_VERSIONS = itertools.count(1)


class MemoryIdentity(NamedTuple):
    """The number of a write: no two states of a file have the same, as no two entity tags of a store."""

    nbytes: int
    number: int

    @property
    def version(self) -> tuple[int | str, ...]:
        """Size and number."""
        return self

    @property
    def holder(self) -> tuple[int | str, ...]:
        """Nothing: a version says all."""
        return ()

    def has_same_contents(self, other: FileIdentity) -> bool:
        """Return True for the same state."""
        return self == other


class Stored(NamedTuple):
    """Bytes and the identity they were written with."""

    data: bytearray
    identity: MemoryIdentity


class Store:
    """The files of a storage by absolute name, and its empty directories.

    Attributes:
        files: Contents by name ("/a/b").
        listed: Every directory that was listed, in order: what a test counts.
        room: Bytes that may still be written, or None for no limit.
    """

    def __init__(self, room: int | None = None) -> None:
        self.files: dict[PurePosixPath, Stored] = {}
        self.directories: set[PurePosixPath] = {PurePosixPath("/")}
        self.listed: list[PurePosixPath] = []
        self.room = room

    def put(self, path: PurePosixPath, data: bytes) -> None:
        """Make or replace a file; directories on the way are made, as in a bucket."""
        self.files[path] = Stored(bytearray(data), MemoryIdentity(len(data), next(_VERSIONS)))
        self.make_directory(path.parent)

    def make_directory(self, path: PurePosixPath) -> None:
        """Make a directory and those above it."""
        self.directories.update((path, *path.parents))

    def kind(self, path: PurePosixPath) -> Kind | None:
        """Return what is at a name."""
        if path in self.files:
            return Kind.FILE
        return Kind.DIRECTORY if path in self.directories else None

    def names(self, path: PurePosixPath) -> list[str]:
        """Return the names in a directory, sorted."""
        self.listed.append(path)
        return sorted(each.name for each in (*self.files, *self.directories) if each.parent == path != each)


class MemoryPath:
    """A place in a store: where it is (`Location`), what lies there (`Source`), and how tests write it."""

    def __init__(
        self,
        path: PurePosixPath | str = "/",
        store: Store | None = None,
        listings: dict[PurePosixPath, Listing] | None = None,
    ) -> None:
        self.path = PurePosixPath(path)
        self.store = Store() if store is None else store
        self._listings = listings  # None remembers nothing, as tests go on writing

    # ------------------------------------------------------------------------------------------------- a location

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def parent(self) -> MemoryPath:
        return MemoryPath(self.path.parent, self.store)

    def __truediv__(self, name: str) -> MemoryPath:
        return MemoryPath(self.path / name, self.store)

    def __str__(self) -> str:
        return f"memory:{self.path}"

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MemoryPath) and (self.path, self.store) == (other.path, other.store)

    def __hash__(self) -> int:
        return hash(self.path)

    # ------------------------------------------------------------------------------------------ as tests write files

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        self.store.make_directory(self.path)

    def write_bytes(self, data: bytes) -> int:
        self.store.put(self.path, bytes(data))
        return len(data)

    def write_text(self, text: str, encoding: str = "utf-8") -> int:
        return self.write_bytes(text.encode(encoding))

    def read_bytes(self) -> bytes:
        return bytes(self.store.files[self.path].data)

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def unlink(self) -> None:
        del self.store.files[self.path]

    def rename(self, target: MemoryPath) -> MemoryPath:
        for path in [path for path in self.store.files if path == self.path or self.path in path.parents]:
            self.store.put(target.path / path.relative_to(self.path), bytes(self.store.files.pop(path).data))
        self.store.directories -= {path for path in self.store.directories if self.path in (path, *path.parents)}
        return target

    def exists(self) -> bool:
        return self.store.kind(self.path) is not None

    def is_file(self) -> bool:
        return self.store.kind(self.path) is Kind.FILE

    def is_dir(self) -> bool:
        return self.store.kind(self.path) is Kind.DIRECTORY

    def iterdir(self) -> Iterator[MemoryPath]:
        return (self / name for name in self.store.names(self.path))

    # -------------------------------------------------------------------------------------------------- a source

    @property
    def location(self) -> MemoryPath:
        return self

    def at(self, location: Location) -> MemoryPath:
        assert isinstance(location, MemoryPath) and location.store is self.store, "a location of another storage"
        return MemoryPath(location.path, self.store, self._listings)

    def fresh(self) -> MemoryPath:
        return MemoryPath(self.path, self.store, {})

    def spellings(self, name: str = "") -> tuple[MemoryPath, ...]:
        return (self / name,)

    def kind(self) -> Kind | None:
        return self.store.kind(self.path)

    def listing(self) -> Listing:
        listing = None if self._listings is None else self._listings.get(self.path)
        if listing is None:
            kind = self.kind()
            if kind is not Kind.DIRECTORY:
                raise _missing(self) if kind is None else InputError(f"{self}: cannot be read: Not a directory")
            names = self.store.names(self.path)
            if len(names) > LISTED_NAMES:
                raise InputError(f"{self}: holds more than {LISTED_NAMES:,} files, allowed at most that")
            kinds = {name: self.store.kind(self.path / name) for name in names}
            below = lambda name: self.at(self / name).listing()  # noqa: E731 (as short as its use)
            listing = Listing(kinds, lambda name: Kind.DANGLING, below)
            if self._listings is not None:
                self._listings[self.path] = listing
        return listing

    def open(self, recorded: Mapping[str, FileIdentity] | None = None) -> MemoryFiles:
        return MemoryFiles(self, recorded)

    def identities(self, names: Iterable[str]) -> dict[str, FileIdentity]:
        files = ((name, self.store.files.get((self / name).path)) for name in names)
        return {name: stored.identity for name, stored in files if stored is not None}

    def size(self, name: str) -> int:
        return self._stored(name).identity.nbytes

    def head(self, name: str, nbytes: int) -> bytes:
        return bytes(self._stored(name).data[:nbytes])

    def read_small(self, name: str, limit: int) -> bytes:
        self.refuse_large(name, limit)
        return bytes(self._stored(name).data)

    def refuse_large(self, name: str, limit: int) -> None:
        nbytes = self.size(name)
        if nbytes > limit:
            raise InputError(f"{self / name}: {nbytes} bytes, allowed at most {limit}; the file is corrupt")

    def _stored(self, name: str) -> Stored:
        place = inside(self, name)
        stored = self.store.files.get(place.path)
        if stored is None:
            if place.kind() is Kind.DIRECTORY:
                raise InputError(f"{place}: is a directory, pipe or device, needed a regular file")
            raise _missing(place)
        return stored


def _missing(place: MemoryPath) -> InputError:
    return InputError(f"{place}: no such file; the checkpoint is incomplete")


class MemoryFiles:
    """The files of a place, opened for reading: a file that is replaced afterwards is still the one that was opened."""

    def __init__(self, root: MemoryPath, recorded: Mapping[str, FileIdentity] | None) -> None:
        self.root, self._recorded = root, recorded or {}
        self._opened: dict[str, Stored] = {}
        self.expected: list[tuple[str, tuple[tuple[int, int], ...]]] = []

    def __enter__(self) -> MemoryFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._opened.clear()

    def _open(self, name: str) -> Stored:
        stored = self._opened.get(name)
        if stored is None:
            stored = self.root._stored(name)
            recorded = self._recorded.get(name)
            if recorded is not None and not stored.identity.has_same_contents(recorded):
                raise changed(self.root / name)
            self._opened[name] = stored
        return stored

    def size(self, name: str) -> int:
        return self._open(name).identity.nbytes

    def identity(self, name: str) -> MemoryIdentity:
        return self._open(name).identity

    def expect(self, name: str, spans: Sequence[tuple[int, int]]) -> None:
        self.expected.append((name, tuple(spans)))

    def read_into(self, name: str, offset: int, views: list[memoryview | bytearray]) -> int:
        data = memoryview(self._open(name).data)[offset:]
        at = 0
        for view in views:
            part = data[at : at + len(view)]
            view[: len(part)] = part
            at += len(part)
        return at

    def read_up_to(self, name: str, offset: int, nbytes: int) -> bytes:
        return bytes(self._open(name).data[offset : offset + nbytes])

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        data = self.read_up_to(name, offset, nbytes)
        if len(data) < nbytes:
            raise InputError(
                f"{self.root / name}: ends at byte {offset + len(data)}, needed up to {offset + nbytes}; "
                "the file is truncated, copy or download it again"
            )
        return data


class MemoryFile:
    """A file of an output in memory."""

    def __init__(self, path: MemoryPath, data: bytearray, lock: threading.Lock) -> None:
        self.path, self._data, self._lock = path, data, lock

    def __enter__(self) -> MemoryFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is open."""

    @property
    def size(self) -> int:
        return len(self._data)

    def cut_to(self, nbytes: int) -> None:
        del self._data[nbytes:]

    def read(self, nbytes: int, offset: int) -> bytes:
        return bytes(self._data[offset : offset + nbytes])

    def read_into(self, view: memoryview, offset: int) -> int:
        part = self._data[offset : offset + len(view)]
        view[: len(part)] = part
        return len(part)

    def write(self, data: memoryview | bytes, offset: int) -> None:
        store = self.path.store
        if store.room is not None:
            if len(data) > store.room:
                raise SpaceError(f"{self.path}: No space left on device; nothing was published, free some space")
            store.room -= len(data)
        with self._lock:  # other threads write other places, and any of them may make it longer
            if len(self._data) < offset:
                self._data.extend(bytes(offset - len(self._data)))
            self._data[offset : offset + len(data)] = data


class MemoryTree:
    """The directory of an output in memory; `finish` turns what was written into files of the store."""

    def __init__(self, path: MemoryPath) -> None:
        self.path = path
        self._files: dict[str, bytearray] = {}
        self._lock = threading.Lock()

    def open_output(self, name: str, nbytes: int | None, *, keep: bool = False) -> MemoryFile:
        inside(self.path, name)
        if name in self._files and not keep:
            raise OutputError(f"{self.path / name}: is in the way; remove it and run again")
        file = MemoryFile(self.path / name, self._files.setdefault(name, bytearray()), self._lock)
        if nbytes is not None:
            file.cut_to(nbytes)
        return file

    def put(self, name: str, data: bytes) -> None:
        self.open_output(name, len(data)).write(data, 0)

    def finish(self) -> MemoryPath:
        for name, data in self._files.items():
            self.path.store.put((self.path / name).path, bytes(data))
        return self.path
