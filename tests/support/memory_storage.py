"""A storage in memory with the interface of a local disk, which tests the interface and lets tests run without files.

`MemoryPath` is a `Location` and a `Source`, with the methods of `pathlib.Path` with which tests write files:
`open_checkpoint(MemoryPath() / "model")`. `MemoryTree` is an `OutputTree` in memory. `MemoryPublisher` claims a target
as a bucket does: files have their final names at once, and a claim is an object that only one run can create.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ckptx.errors import InputError, OutputError, SpaceError
from ckptx.storage.directory_handle import DirectoryHandle
from ckptx.storage.files import changed_error, resolve_inside
from ckptx.storage.interface import ExpectedFile, FileIdentity, Location, Source
from ckptx.storage.listing import EntryKind, Listing
from ckptx.storage.local import LocalSource
from ckptx.transfer.digest import bytes_digest_hex
from ckptx.untrusted.limits import MAX_LISTED_NAMES

_VERSIONS = itertools.count(1)


class MemoryIdentity(NamedTuple):
    """Size and write number of a file; each state of a file has a different number, like an entity tag."""

    nbytes: int
    number: int

    @property
    def version(self) -> tuple[int | str, ...]:
        """Size and write number of the file."""
        return self

    @property
    def device_and_inode(self) -> tuple[int | str, ...]:
        """Empty, because the version identifies the state."""
        return ()

    def has_same_contents(self, other: FileIdentity) -> bool:
        """Return True if the other version is the same state."""
        return self == other


class Stored(NamedTuple):
    """The bytes of a file, and the number of the write that created it."""

    data: bytearray
    number: int

    @property
    def identity(self) -> MemoryIdentity:
        return MemoryIdentity(len(self.data), self.number)


class Store:
    """The files of a storage by absolute name, and its empty directories.

    Attributes:
        files: Contents by name ("/a/b").
        listed: Directories that were listed, in order, for tests that count them.
        room: Bytes that may still be written; None for no limit.
    """

    def __init__(self, room: int | None = None) -> None:
        self.files: dict[PurePosixPath, Stored] = {}
        self.directories: set[PurePosixPath] = {PurePosixPath("/")}
        self.listed: list[PurePosixPath] = []
        self.room = room

    def put(self, path: PurePosixPath, data: bytes) -> None:
        """Create or replace a file and its parent directories, as in a bucket."""
        self.files[path] = Stored(bytearray(data), next(_VERSIONS))
        self.make_directory(path.parent)

    def make_directory(self, path: PurePosixPath) -> None:
        """Create a directory and its parents."""
        self.directories.update((path, *path.parents))

    def kind(self, path: PurePosixPath) -> EntryKind | None:
        """Return the entry with a name."""
        if path in self.files:
            return EntryKind.FILE
        return EntryKind.DIRECTORY if path in self.directories else None

    def names(self, path: PurePosixPath) -> list[str]:
        """Return the names in a directory, sorted."""
        self.listed.append(path)
        return sorted(each.name for each in (*self.files, *self.directories) if each.parent == path != each)


class MemoryPath:
    """A path in a store: a `Location`, a `Source`, and methods with which tests write files."""

    def __init__(
        self,
        path: PurePosixPath | str = "/",
        store: Store | None = None,
        listings: dict[PurePosixPath, Listing] | None = None,
    ) -> None:
        self.path = PurePosixPath(path)
        self.store = Store() if store is None else store
        self._listings = listings  # None: do not cache, because tests continue to write

    # ------------------------------------------------------------------------------------------------ `Location`

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

    def __lt__(self, other: MemoryPath) -> bool:
        return self.path < other.path

    # ------------------------------------------------------------------------------------ `pathlib.Path` methods

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

    def remove(self) -> None:
        """Remove a directory and its contents."""
        for place in self.rglob("*"):
            place.unlink()
        self.store.directories -= {path for path in self.store.directories if self.path in (path, *path.parents)}

    def rename(self, target: MemoryPath) -> MemoryPath:
        for path in [path for path in self.store.files if path == self.path or self.path in path.parents]:
            self.store.put(target.path / path.relative_to(self.path), bytes(self.store.files.pop(path).data))
        self.store.directories -= {path for path in self.store.directories if self.path in (path, *path.parents)}
        return target

    def exists(self) -> bool:
        return self.store.kind(self.path) is not None

    def is_file(self) -> bool:
        return self.store.kind(self.path) is EntryKind.FILE

    def is_dir(self) -> bool:
        return self.store.kind(self.path) is EntryKind.DIRECTORY

    def touch(self) -> None:
        self.write_bytes(b"")

    def copy_from(self, directory: Path) -> None:
        """Copy the files of a local directory."""
        for path in directory.rglob("*"):
            if path.is_file():
                (self / str(path.relative_to(directory))).write_bytes(path.read_bytes())

    def rglob(self, pattern: str) -> list[MemoryPath]:
        assert pattern == "*"
        return [MemoryPath(path, self.store) for path in self.store.files if self.path in path.parents]

    def relative_to(self, root: MemoryPath) -> PurePosixPath:
        return self.path.relative_to(root.path)

    def iterdir(self) -> Iterator[MemoryPath]:
        return (self / name for name in self.store.names(self.path))

    # --------------------------------------------------------------------------------------------------- `Source`

    @property
    def location(self) -> MemoryPath:
        return self

    def with_location(self, location: Location) -> MemoryPath:
        assert isinstance(location, MemoryPath) and location.store is self.store, "a location of another storage"
        return MemoryPath(location.path, self.store, self._listings)

    def without_cache(self) -> MemoryPath:
        return MemoryPath(self.path, self.store, {})

    def absolute_locations(self, name: str = "") -> tuple[MemoryPath, ...]:
        return (self / name,)

    def read_kind(self) -> EntryKind | None:
        return self.store.kind(self.path)

    def listing(self) -> Listing:
        listing = None if self._listings is None else self._listings.get(self.path)
        if listing is None:
            kind = self.read_kind()
            if kind is not EntryKind.DIRECTORY:
                raise _missing(self) if kind is None else InputError(f"{self}: cannot be read: Not a directory")
            names = self.store.names(self.path)
            if len(names) > MAX_LISTED_NAMES:
                raise InputError(f"{self}: contains more than {MAX_LISTED_NAMES:,} files, the limit")
            kinds = {name: self.store.kind(self.path / name) for name in names}
            below = lambda name: self.with_location(self / name).listing()  # noqa: E731 (as short as its use)
            listing = Listing(kinds, lambda name: EntryKind.BROKEN_LINK, below)
            if self._listings is not None:
                self._listings[self.path] = listing
        return listing

    def open(self, expected: Mapping[str, FileIdentity] | None = None) -> MemoryFiles:
        return MemoryFiles(self, expected)

    def read_identities(self, names: Iterable[str]) -> dict[str, FileIdentity]:
        files = ((name, self.store.files.get((self / name).path)) for name in names)
        return {name: stored.identity for name, stored in files if stored is not None}

    def size(self, name: str) -> int:
        return self._stored(name).identity.nbytes

    def read_head(self, name: str, nbytes: int) -> bytes:
        return bytes(self._stored(name).data[:nbytes])

    def read_small(self, name: str, limit: int) -> bytes:
        self.refuse_large(name, limit)
        return bytes(self._stored(name).data)

    def refuse_large(self, name: str, limit: int) -> None:
        nbytes = self.size(name)
        if nbytes > limit:
            raise InputError(f"{self / name}: has {nbytes} bytes, the limit is {limit}; restore the file from a copy")

    def _stored(self, name: str) -> Stored:
        place = resolve_inside(self, name)
        stored = self.store.files.get(place.path)
        if stored is None:
            if place.read_kind() is EntryKind.DIRECTORY:
                raise InputError(f"{place}: expected a regular file, found a directory")
            raise _missing(place)
        return stored


def _missing(place: MemoryPath) -> InputError:
    return InputError(f"{place}: no such file; the checkpoint is incomplete")


class MemoryFiles:
    """Files opened for reading; if a file is replaced later, the opened state is still read."""

    def __init__(self, root: MemoryPath, recorded: Mapping[str, FileIdentity] | None) -> None:
        self.root, self._recorded = root, recorded or {}
        self._opened: dict[str, Stored] = {}
        self.expected: list[tuple[str, int, int]] = []
        self.reads: list[tuple[str, int, int]] = []

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
                raise changed_error(self.root / name)
            self._opened[name] = stored
        return stored

    def size(self, name: str) -> int:
        return self._open(name).identity.nbytes

    def identity(self, name: str) -> MemoryIdentity:
        return self._open(name).identity

    def stored_names(self, name: str) -> tuple[str, ...]:
        return (name,)

    def hint_reads(self, spans: Iterable[tuple[str, int, int]]) -> None:
        self.expected.extend(spans)

    def read_into(self, name: str, offset: int, views: list[memoryview | bytearray]) -> int:
        data = memoryview(self._open(name).data)[offset:]
        at = 0
        for view in views:
            part = data[at : at + len(view)]
            view[: len(part)] = part
            at += len(part)
        self.reads.append((name, offset, at))
        return at

    def read_up_to(self, name: str, offset: int, nbytes: int) -> bytes:
        return bytes(self._open(name).data[offset : offset + nbytes])

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        data = self.read_up_to(name, offset, nbytes)
        if len(data) < nbytes:
            raise InputError(
                f"{self.root / name}: ends at byte {offset + len(data)}, expected at least {offset + nbytes}; "
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
        """Do nothing, because no file is open."""

    @property
    def size(self) -> int:
        return len(self._data)

    def truncate(self, nbytes: int) -> None:
        del self._data[nbytes:]

    def read(self, nbytes: int, offset: int) -> bytes:
        return bytes(self._data[offset : offset + nbytes])

    def read_into(self, view: memoryview, offset: int) -> int:
        part = self._data[offset : offset + len(view)]
        view[: len(part)] = part
        return len(part)

    def blocks(self, size: int) -> Iterator[bytes]:
        return (self.read(size, at) for at in range(0, self.size, size))

    def write(self, data: memoryview | bytes, offset: int) -> None:
        store = self.path.store
        if store.room is not None:
            if len(data) > store.room:
                raise SpaceError(f"{self.path}: No space left on device; no output was created, free some space")
            store.room -= len(data)
        with self._lock:  # other threads write at other offsets, and each may extend the file
            if len(self._data) < offset:
                self._data.extend(bytes(offset - len(self._data)))
            self._data[offset : offset + len(data)] = data


class MemoryTree:
    """The directory of an output in memory. The handle of a file is the number of the write that created it."""

    def __init__(self, path: MemoryPath) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._own: dict[str, tuple[int | str, ...]] = {}

    def __enter__(self) -> MemoryTree:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing, because no file is open."""

    def open_output(self, name: str, nbytes: int | None, *, keep: bool = False) -> MemoryFile:
        path = resolve_inside(self.path, name)
        if not (path.is_file() and keep):
            if path.exists():
                raise OutputError(f"{path}: cannot be opened: File exists; ckptx did not write it")
            path.write_bytes(b"")
        stored = self.path.store.files[path.path]
        file = MemoryFile(path, stored.data, self._lock)
        if nbytes is not None:
            file.truncate(nbytes)
            self._own[name] = (stored.number,)
        return file

    def write(self, name: str, blocks: Iterable[bytes]) -> tuple[int | str, ...]:
        file = self.open_output(name, None)
        for block in blocks:
            file.write(block, file.size)
        return (self.path.store.files[file.path.path].number,)

    def _files(self) -> dict[str, Stored]:
        return {str(each.relative_to(self.path)): each.store.files[each.path] for each in self.path.rglob("*")}

    def allocated_bytes(self) -> int:
        return sum(len(stored.data) for stored in self._files().values())

    def remove_others(self, names: Collection[str]) -> None:
        for name in self._files().keys() - set(names):
            (self.path / name).unlink()

    def describe_expected(self, sizes: Mapping[str, int]) -> dict[str, ExpectedFile]:
        return {name: ExpectedFile(nbytes, self._own.get(name)) for name, nbytes in sizes.items()}

    def verify_status(self, expected: Mapping[str, ExpectedFile]) -> None:
        files = self._files()
        for name, wanted in expected.items():
            if name not in files:
                raise OutputError(f"{self.path / name}: was removed; no output was created, run again")
            data, number = files[name]
            if len(data) != wanted.nbytes or wanted.device_and_inode not in (None, (number,)):
                raise OutputError(f"{self.path / name}: was replaced; no output was created, run again")

    def verify_files(self, expected: Mapping[str, ExpectedFile]) -> None:
        """Check that exactly these files exist, and compare the contents of those with a digest."""
        self.verify_status(expected)
        for name in self._files():
            wanted = expected.get(name)
            if wanted is None:
                raise OutputError(f"{self.path / name}: was created by another process")
            if wanted.has_expected_bytes is not None and not wanted.has_expected_bytes(
                self.open_output(name, None, keep=True)
            ):
                raise OutputError(f"{self.path / name}: has other bytes than were written; no output was created")


def source_of(place: Path | MemoryPath) -> Source:
    """Return the source of a path in either storage."""
    return place if isinstance(place, MemoryPath) else LocalSource(place)


def tree_of(place: Path | MemoryPath) -> MemoryTree | DirectoryHandle:
    """Create a directory in either storage, and return its output tree."""
    place.mkdir(parents=True, exist_ok=True)
    return MemoryTree(place) if isinstance(place, MemoryPath) else DirectoryHandle.open_path(place)


class MemoryPublisher:
    """A claim on a target in memory: an object that only one run can create. Outputs are staged next to the target."""

    leftover = None

    def __init__(
        self, target: MemoryPath, *, overwrite: bool, resume: bool, check_replaceable: Callable[[MemoryPath], None]
    ) -> None:
        self.target, self._overwrite, self._may_replace = target, overwrite, check_replaceable
        self._claim, self.staged = target.parent / f".{target.name}.claim", target.parent / f".{target.name}.staged"
        if self._claim.exists():
            raise OutputError(f"{target}: another ckptx is writing it")
        self.refuse_existing_target(overwrite or resume)
        self._claim.write_bytes(b"")
        self._has_claim, self.is_locked = True, True

    @property
    def staged_source(self) -> MemoryPath:
        return self.output.path.without_cache()

    @property
    def target_source(self) -> MemoryPath:
        return self.target.without_cache()

    def digest_target_file(self, name: str) -> str:
        return bytes_digest_hex(self.target.read_small(name, 1 << 30))

    def __enter__(self) -> MemoryPublisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self.discard()
        self._release()

    def _release(self) -> None:
        if self._has_claim:
            self._claim.unlink()
        self._has_claim = False

    def begin(self, plan: bytes, resume: bool) -> bool:
        noted = self.staged / "plan"
        same = resume and noted.is_file() and noted.read_bytes() == plan
        self.replaced_plan = noted.read_bytes() if resume and noted.is_file() and not same else None
        if not same:
            self.staged.remove()
        noted.write_bytes(plan)
        self.output, self.journal = MemoryTree(self.staged / "tree"), MemoryTree(self.staged / "journal")
        return same

    def refuse_existing_target(self, overwrite: bool) -> None:
        if not overwrite and self.target.is_dir() and any(self.target.iterdir()):
            raise OutputError(f"{self.target}: exists and is not empty; choose another DST or pass --overwrite")

    def require_space(self, nbytes: int) -> None:
        room = self.target.store.room
        if room is not None and room < nbytes:
            raise SpaceError(f"{self.target}: requires {nbytes} bytes, but the store has {room} free; free some space")

    def verify_claim(self) -> None:
        if not self._claim.exists():
            raise OutputError(f"{self._claim}: was removed or replaced by another process; no output was created")

    def publish(self, expected: Mapping[str, ExpectedFile]) -> None:
        self.output.verify_files(expected)
        self.verify_claim()
        if self.target.is_dir() and any(self.target.iterdir()):
            assert self._overwrite
            self._may_replace(self.target)
            self.target.remove()
        self.output.path.rename(self.target)
        self.discard()

    def discard(self) -> None:
        self.staged.remove()
        self._release()
