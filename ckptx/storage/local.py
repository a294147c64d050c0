"""A directory on a local disk as a `Source`."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from ckptx.errors import InputError
from ckptx.storage import files
from ckptx.storage.files import FilePool, read_error, read_status
from ckptx.storage.interface import FileIdentity, Location, local_path
from ckptx.storage.listing import EntryKind, Listing
from ckptx.untrusted.limits import MAX_CACHED_NAMES, MAX_LISTED_NAMES


class LocalSource:
    """A directory on a local disk, or a file that was passed instead of one.

    It implements `Source`, whose docstrings list the errors. Links are followed, as by every loader: the Hub cache
    consists of links.
    """

    def __init__(self, location: str | Path, listings: _ListingCache | None = None) -> None:
        """Store the location without accessing the disk.

        Args:
            location: The directory, or a file.
            listings: Cache of directory listings to share with another source; None for a new one.
        """
        self._path = Path(location)
        self._listings = _ListingCache() if listings is None else listings

    def __reduce__(self) -> tuple[type[LocalSource], tuple[Path]]:
        """Pickle and copy without cached listings."""
        return LocalSource, (self._path,)

    def __repr__(self) -> str:
        return f"LocalSource({str(self._path)!r})"

    @property
    def location(self) -> Path:
        """Path of the directory or file, as it was passed."""
        return self._path

    def with_location(self, location: Location) -> LocalSource:
        """Return the source of another directory, which shares the cached listings."""
        return LocalSource(local_path(location), self._listings)

    def without_cache(self) -> LocalSource:
        """Return the source of the same directory without cached listings."""
        return LocalSource(self._path)

    def absolute_locations(self, name: str = "") -> tuple[Path, ...]:
        """Return the absolute path of a file, or of the directory, and its real path if that differs."""
        path = self._path / name
        return tuple(dict.fromkeys((Path(os.path.abspath(path)), Path(os.path.realpath(path)))))

    def read_kind(self) -> EntryKind | None:
        """Return the kind of the entry at the path, following links; None if nothing exists there.

        Raises:
            InputError: It is not accessible.
        """
        kind = _link_target_kind(self._path)
        return None if kind is EntryKind.BROKEN_LINK and read_status(self._path, follow_links=False) is None else kind

    def listing(self) -> Listing:
        """Return the names in the directory.

        Raises:
            InputError: It cannot be listed, or has too many names.
        """
        return self._listings.get(self._path)

    def open(self, expected: Mapping[str, FileIdentity] | None = None) -> FilePool:
        """Return the files; each is opened when it is first read."""
        return FilePool(self._path, expected)

    def read_identities(self, names: Iterable[str]) -> dict[str, FileIdentity]:
        """Return the identities of the regular files among `names`."""
        return dict(files.read_identities(self._path, names))

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        return files.read_size(self._path / name)

    def read_head(self, name: str, nbytes: int) -> bytes:
        """Return the first bytes of a file."""
        return files.read_head(self._path / name, nbytes)

    def read_small(self, name: str, limit: int) -> bytes:
        """Return all bytes of a file of at most `limit` bytes."""
        return files.read_small(self._path / name, limit)

    def refuse_large(self, name: str, limit: int) -> None:
        """Refuse a file that `read_small` would refuse because of its kind or size."""
        files.refuse_large(self._path / name, limit)


class _ListingCache:
    """Cache of directory listings by path, cleared when they would have more than `MAX_CACHED_NAMES` names together."""

    def __init__(self) -> None:
        self._listings: dict[Path, Listing] = {}
        self._name_count = 0

    def get(self, path: Path) -> Listing:
        """Return the cached listing of a directory, listing it first if required.

        Raises:
            InputError: It cannot be listed, or has too many names.
        """
        listing = self._listings.get(path)
        if listing is None:
            kinds = _list_kinds(path)
            if self._name_count + len(kinds) > MAX_CACHED_NAMES:
                self._listings, self._name_count = {}, 0
            listing = Listing(kinds, lambda name: _link_target_kind(path / name), lambda name: self.get(path / name))
            self._listings[path] = listing
            self._name_count += len(kinds)
        return listing


def _list_kinds(path: Path) -> dict[str, EntryKind]:
    """Return the kind of each name in a directory, sorted; links are not followed."""
    kinds: list[tuple[str, EntryKind]] = []
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if len(kinds) == MAX_LISTED_NAMES:
                    raise InputError(
                        f"{path}: contains more than {MAX_LISTED_NAMES:,} files, the limit; pass the directory of a "
                        "checkpoint"
                    )
                kinds.append((entry.name, _entry_kind(entry)))
    except OSError as error:
        raise read_error(path, error) from error
    kinds.sort(key=lambda item: item[0])
    return dict(kinds)


def _entry_kind(entry: os.DirEntry[str]) -> EntryKind:
    if entry.is_file(follow_symlinks=False):
        return EntryKind.FILE
    if entry.is_dir(follow_symlinks=False):
        return EntryKind.DIRECTORY
    return EntryKind.LINK if entry.is_symlink() else EntryKind.OTHER


def _link_target_kind(path: Path) -> EntryKind:
    status = read_status(path)
    return EntryKind.BROKEN_LINK if status is None else _kind_of_mode(status.st_mode)


def _kind_of_mode(mode: int) -> EntryKind:
    if stat.S_ISREG(mode):
        return EntryKind.FILE
    return EntryKind.DIRECTORY if stat.S_ISDIR(mode) else EntryKind.OTHER
