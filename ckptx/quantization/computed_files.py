"""Files whose bytes are computed when they are read, in addition to the files of a checkpoint.

A tensor that is decoded or encoded is an entry of a catalog like any other; its chunk is in a computed file. It is
therefore read like a stored tensor, in any order and sharded in any way, without a copy of it on disk or in memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from types import TracebackType
from typing import Protocol

from ckptx.errors import InputError
from ckptx.storage.interface import FileIdentity, Location, Source, SourceFiles
from ckptx.storage.listing import EntryKind, Listing
from ckptx.transfer.stream import CheckedRecords, TensorReader

_READER_NBYTES = 16 << 20


class ComputedFile(Protocol):
    """A file whose bytes are computed from tensors of a checkpoint."""

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""

    def read(self, reader: TensorReader, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes from `offset`.

        Args:
            reader: Reader of the checkpoint, that of the calling thread.
            offset: First byte.
            view: Bytes to fill; `offset + len(view)` is at most `nbytes`.

        Raises:
            InputError: The checkpoint cannot be read, or its values cannot be converted.
        """

    def stored_files(self) -> set[str]:
        """Return the names of the files of the checkpoint that it is computed from, without files of a base."""

    def stored_spans(self, offset: int, nbytes: int) -> list[tuple[str, int, int]]:
        """Return file, offset and length of the bytes that a range is computed from, for read hints; may be empty."""


@dataclass(frozen=True, slots=True)
class FileOfZeros:
    """A file of zero bytes, for padding and new tensors; see `ComputedFile`.

    Attributes:
        nbytes: Size of the file in bytes.
    """

    nbytes: int

    def read(self, reader: TensorReader, offset: int, view: memoryview) -> None:
        """Fill `view` with zeros."""
        view[:] = bytes(len(view))

    def stored_files(self) -> set[str]:
        """Return an empty set."""
        return set()

    def stored_spans(self, offset: int, nbytes: int) -> list[tuple[str, int, int]]:
        """Return an empty list."""
        return []


@dataclass(frozen=True, slots=True)
class FileOfBytes:
    """A file with given contents, for values that a checkpoint stores in another form; see `ComputedFile`.

    Attributes:
        contents: All bytes of the file.
    """

    contents: bytes

    @property
    def nbytes(self) -> int:
        return len(self.contents)

    def read(self, reader: TensorReader, offset: int, view: memoryview) -> None:
        """Fill `view` from `offset`."""
        view[:] = self.contents[offset : offset + len(view)]

    def stored_files(self) -> set[str]:
        """Return an empty set."""
        return set()

    def stored_spans(self, offset: int, nbytes: int) -> list[tuple[str, int, int]]:
        """Return an empty list."""
        return []


class ComputedFiles:
    """Files of a checkpoint, and files that are computed; see `SourceFiles`.

    Attributes:
        computed_bytes: Number of bytes of computed files that were read.
        stored_bytes: Number of bytes that were read from the checkpoint to compute them.
    """

    def __init__(self, files: SourceFiles, computed_files: Mapping[str, ComputedFile]) -> None:
        """Store the files.

        Args:
            files: Files of the checkpoint; closed with this object.
            computed_files: Computed files by name.
        """
        self._files, self._computed_files = files, computed_files
        self._local = threading.local()
        self._lock = threading.Lock()
        self._checked_records = CheckedRecords()
        self.computed_bytes = self.stored_bytes = 0

    def reset_counts(self) -> None:
        """Set `computed_bytes` and `stored_bytes` to zero."""
        self.computed_bytes = self.stored_bytes = 0

    @property
    def root(self) -> Location:
        return self._files.root

    def __enter__(self) -> ComputedFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._files.close()

    def stored_names(self, name: str) -> tuple[str, ...]:
        computed = self._computed_files.get(name)
        return self._files.stored_names(name) if computed is None else tuple(sorted(computed.stored_files()))

    def size(self, name: str) -> int:
        computed = self._computed_files.get(name)
        return self._files.size(name) if computed is None else computed.nbytes

    def identity(self, name: str) -> FileIdentity:
        return self._files.identity(name)

    def read_into(self, name: str, offset: int, views: list[memoryview | bytearray]) -> int:
        computed = self._computed_files.get(name)
        if computed is None:
            return self._files.read_into(name, offset, views)
        position = offset
        for view in views:
            count = min(len(view), computed.nbytes - position)
            if count <= 0:
                break
            self._compute(computed, position, memoryview(view)[:count])
            position += count
        return position - offset

    def _compute(self, computed: ComputedFile, offset: int, view: memoryview) -> None:
        reader = getattr(self._local, "reader", None)
        if reader is None:
            reader = self._local.reader = TensorReader(self._files, _READER_NBYTES, self._checked_records)
        before = reader.bytes_read
        try:
            computed.read(reader, offset, view)
        except InputError as error:
            raise InputError(str(error) if str(self.root) in str(error) else f"{self.root}: {error}") from error
        with self._lock:
            self.computed_bytes += len(view)
            self.stored_bytes += reader.bytes_read - before

    def read_up_to(self, name: str, offset: int, nbytes: int) -> bytes:
        computed = self._computed_files.get(name)
        if computed is None:
            return self._files.read_up_to(name, offset, nbytes)
        data = bytearray(max(0, min(nbytes, computed.nbytes - offset)))
        self.read_into(name, offset, [memoryview(data)])
        return bytes(data)

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        if name not in self._computed_files:
            return self._files.read(name, offset, nbytes)
        data = self.read_up_to(name, offset, nbytes)
        if len(data) < nbytes:
            raise InputError(f"{self.root / name}: ends at byte {offset + len(data)}, {offset + nbytes} are required")
        return data

    def hint_reads(self, spans: Iterable[tuple[str, int, int]]) -> None:
        """Pass on the hints; for a computed file, those about the bytes that it is computed from."""
        self._files.hint_reads(chain.from_iterable(self._stored_spans(*span) for span in spans))

    def _stored_spans(self, name: str, offset: int, nbytes: int) -> list[tuple[str, int, int]]:
        computed = self._computed_files.get(name)
        if computed is None:
            return [(name, offset, nbytes)]
        return computed.stored_spans(offset, nbytes)


def reset_counts(*opened: SourceFiles) -> None:
    """Set the byte counts of all `ComputedFiles` among open files to zero."""
    for files in opened:
        if isinstance(files, ComputedFiles):
            files.reset_counts()


def stored_bytes_read(nbytes: int, *opened: SourceFiles) -> int:
    """Return the bytes that were read from storage since `reset_counts`.

    Args:
        nbytes: Bytes that readers read from files since then, computed files included.
        opened: All files that they read from; the same files may be given twice.
    """
    computed = {id(files): files for files in opened if isinstance(files, ComputedFiles)}
    return nbytes - sum(files.computed_bytes - files.stored_bytes for files in computed.values())


class ComputedSource:
    """Directory of a checkpoint whose open files include computed ones, which its listing leaves out; see `Source`.

    Computed files belong to this directory: `without_cache` keeps them, but `with_location` returns the source of
    another location, which has stored files only.
    """

    def __init__(self, source: Source, computed_files: Mapping[str, ComputedFile]) -> None:
        self._source, self._computed_files = source, computed_files

    @property
    def location(self) -> Location:
        return self._source.location

    def with_location(self, location: Location) -> Source:
        return self._source.with_location(location)

    def without_cache(self) -> Source:
        return ComputedSource(self._source.without_cache(), self._computed_files)

    def absolute_locations(self, name: str = "") -> tuple[Location, ...]:
        return self._source.absolute_locations(name)

    def read_kind(self) -> EntryKind | None:
        return self._source.read_kind()

    def listing(self) -> Listing:
        return self._source.listing()

    def open(self, expected: Mapping[str, FileIdentity] | None = None) -> ComputedFiles:
        return ComputedFiles(self._source.open(expected), self._computed_files)

    def read_identities(self, names: Iterable[str]) -> dict[str, FileIdentity]:
        return self._source.read_identities(names)

    def size(self, name: str) -> int:
        return self._source.size(name)

    def read_head(self, name: str, nbytes: int) -> bytes:
        return self._source.read_head(name, nbytes)

    def read_small(self, name: str, limit: int) -> bytes:
        return self._source.read_small(name, limit)

    def refuse_large(self, name: str, limit: int) -> None:
        self._source.refuse_large(name, limit)
