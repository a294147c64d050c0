"""A directory on a local disk as a `Source`."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from ckptx.errors import InputError
from ckptx.storage import files
from ckptx.storage.files import FilePool, state_of, unreadable
from ckptx.storage.interface import FileIdentity, Location, local_path
from ckptx.storage.listing import EntryKind, Listing
from ckptx.untrusted.limits import LISTED_NAMES, REMEMBERED_NAMES


class LocalSource:
    """A directory on a local disk, or a file that was passed instead of one.

    Links are followed, as by every loader: the Hub cache consists of links.
    """

    def __init__(self, location: str | Path, listings: _Listings | None = None) -> None:
        """Store the location without accessing the disk.

        Args:
            location: The directory.
            listings: Cached listings of directories; None starts an empty cache.
        """
        self._path = Path(location)
        self._listings = _Listings() if listings is None else listings

    def __reduce__(self) -> tuple[type[LocalSource], tuple[Path]]:
        """Pickle and copy without cached listings."""
        return LocalSource, (self._path,)

    def __repr__(self) -> str:
        return f"LocalSource({str(self._path)!r})"

    @property
    def location(self) -> Path:
        """The directory."""
        return self._path

    def at(self, location: Location) -> LocalSource:
        """Return the source of another directory, which shares the cached listings."""
        return LocalSource(local_path(location), self._listings)

    def fresh(self) -> LocalSource:
        """Return the source of the same directory without cached listings."""
        return LocalSource(self._path)

    def spellings(self, name: str = "") -> tuple[Path, ...]:
        """Return the absolute path of a file, or of the directory, and its real path if that differs."""
        path = self._path / name
        return tuple(dict.fromkeys((Path(os.path.abspath(path)), Path(os.path.realpath(path)))))

    def kind(self) -> EntryKind | None:
        """Return the kind of the entry at the path, following links; None if nothing exists there.

        Raises:
            InputError: It is not accessible.
        """
        kind = _follow(self._path)
        return None if kind is EntryKind.DANGLING and state_of(self._path, follow_links=False) is None else kind

    def listing(self) -> Listing:
        """Return the names in the directory.

        Raises:
            InputError: It cannot be listed, or has too many names.
        """
        return self._listings.of(self._path)

    def open(self, recorded: Mapping[str, FileIdentity] | None = None) -> FilePool:
        """Return the files; each is opened when it is first read."""
        return FilePool(self._path, recorded)

    def identities(self, names: Iterable[str]) -> dict[str, FileIdentity]:
        """Return the identities of the regular files among `names`."""
        return dict(files.identities(self._path, names))

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        return files.size_of(self._path / name)

    def head(self, name: str, nbytes: int) -> bytes:
        """Return the first bytes of a file."""
        return files.head_of(self._path / name, nbytes)

    def read_small(self, name: str, limit: int) -> bytes:
        """Return all bytes of a file of at most `limit` bytes."""
        return files.read_small(self._path / name, limit)

    def refuse_large(self, name: str, limit: int) -> None:
        """Refuse a file that `read_small` would refuse because of its kind or size."""
        files.refuse_large(self._path / name, limit)


class _Listings:
    """Cache of directory listings, cleared when it has too many names."""

    def __init__(self) -> None:
        self._known: dict[Path, Listing] = {}
        self._count = 0

    def of(self, path: Path) -> Listing:
        """Return the cached listing of a directory, listing it first if required.

        Raises:
            InputError: It cannot be listed, or has too many names.
        """
        listing = self._known.get(path)
        if listing is None:
            kinds = _scan(path)
            if self._count + len(kinds) > REMEMBERED_NAMES:
                self._known, self._count = {}, 0
            listing = Listing(kinds, lambda name: _follow(path / name), lambda name: self.of(path / name))
            self._known[path] = listing
            self._count += len(kinds)
        return listing


def _scan(path: Path) -> dict[str, EntryKind]:
    """Return the kind of each name in a directory, sorted; links are not followed."""
    found: list[tuple[str, EntryKind]] = []
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if len(found) == LISTED_NAMES:
                    raise InputError(
                        f"{path}: contains more than {LISTED_NAMES:,} files, the limit; pass the directory of a "
                        "checkpoint"
                    )
                found.append((entry.name, _own_kind(entry)))
    except OSError as error:
        raise unreadable(path, error) from error
    found.sort(key=lambda row: row[0])
    return dict(found)


def _own_kind(entry: os.DirEntry[str]) -> EntryKind:
    if entry.is_file(follow_symlinks=False):
        return EntryKind.FILE
    if entry.is_dir(follow_symlinks=False):
        return EntryKind.DIRECTORY
    return EntryKind.LINK if entry.is_symlink() else EntryKind.OTHER


def _follow(path: Path) -> EntryKind:
    state = state_of(path)
    return EntryKind.DANGLING if state is None else _kind_of_mode(state.st_mode)


def _kind_of_mode(mode: int) -> EntryKind:
    if stat.S_ISREG(mode):
        return EntryKind.FILE
    return EntryKind.DIRECTORY if stat.S_ISDIR(mode) else EntryKind.OTHER
