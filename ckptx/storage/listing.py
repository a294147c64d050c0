"""Cached names and kinds of the entries of a directory.

A listing also accepts paths in subdirectories (`is_file("model/.metadata")`), and lists a subdirectory only if it has
to: a checkpoint next to a million other files or above a deep tree costs the listing of one directory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, KeysView, Mapping
from enum import Enum

from ckptx.errors import CkptxError, StorageFailure


class EntryKind(Enum):
    """Kind of a directory entry."""

    FILE = "regular file"
    DIRECTORY = "directory"
    OTHER = "pipe, socket or device"
    LINK = "link that was not followed yet"
    BROKEN_LINK = "link to nothing"


class Listing:
    """The names in one directory."""

    def __init__(
        self,
        kinds: Mapping[str, EntryKind],
        resolve_link: Callable[[str], EntryKind],
        list_directory: Callable[[str], Listing],
    ) -> None:
        """Store the entries of a directory.

        Args:
            kinds: Kind of each name, sorted by name; links are not followed (LINK).
            resolve_link: Returns the kind of the target of a link in the directory, given its name; BROKEN_LINK if the
                target does not exist.
            list_directory: Lists a subdirectory, given its name.
        """
        self._kinds, self._resolve_link, self._list_directory = kinds, resolve_link, list_directory
        self._target_kinds: dict[str, EntryKind] = {}

    def __len__(self) -> int:
        return len(self._kinds)

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    @property
    def names(self) -> KeysView[str]:
        """The names in this directory, sorted."""
        return self._kinds.keys()

    def kind(self, name: str) -> EntryKind | None:
        """Return the kind of an entry, following links, so that it is never LINK; None if it does not exist.

        Args:
            name: A name in this directory, or a relative path. A subdirectory that cannot be listed counts as empty.

        Raises:
            StorageFailure: The storage failed.
        """
        first, _, rest = name.partition("/")
        kind = self._kinds.get(first)
        if kind is EntryKind.LINK:
            kind = self._target_kinds.get(first)
            if kind is None:
                kind = self._target_kinds[first] = self._resolve_link(first)
        if not rest:
            return kind
        if kind is not EntryKind.DIRECTORY:
            return None
        try:
            return self._list_directory(first).kind(rest)
        except StorageFailure:
            raise
        except CkptxError:
            return None

    def has(self, name: str) -> bool:
        """Return True if there is an entry with this name, even a broken link."""
        return self.kind(name) is not None if "/" in name else name in self._kinds

    def is_file(self, name: str) -> bool:
        """Return True for a regular file, or a link to one."""
        return self.kind(name) is EntryKind.FILE

    def is_directory(self, name: str) -> bool:
        """Return True for a directory, or a link to one."""
        return self.kind(name) is EntryKind.DIRECTORY

    def is_link(self, name: str) -> bool:
        """Return True for a link in this directory, even a broken one."""
        return self._kinds.get(name) in (EntryKind.LINK, EntryKind.BROKEN_LINK)

    def files(self) -> list[str]:
        """Return the regular files in this directory and the links to regular files, sorted."""
        return [name for name in self._kinds if self.is_file(name)]

    def directories(self) -> list[str]:
        """Return the subdirectories and the links to directories, sorted."""
        return [name for name in self._kinds if self.is_directory(name)]

    def subdirectory(self, name: str) -> Listing:
        """Return the listing of a subdirectory, given by its relative path.

        Raises:
            InputError: The subdirectory does not exist or cannot be listed.
        """
        listing = self
        for part in name.split("/"):
            listing = listing._list_directory(part)
        return listing
