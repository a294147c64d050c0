"""The names in a directory of a source and their kinds, looked up once.

A listing answers questions about lower directories, too (`is_file("model/.metadata")`), and lists one of them only when
the answer is in it: a checkpoint beside a million other files or above a deep tree costs one directory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, KeysView, Mapping
from enum import Enum

from ckptx.errors import CkptxError


class EntryKind(Enum):
    """The kind of thing that a name refers to."""

    FILE = "regular file"
    DIRECTORY = "directory"
    OTHER = "pipe, socket or device"
    LINK = "link that was not followed yet"
    DANGLING = "link to nothing"


class Listing:
    """The names in one directory."""

    def __init__(
        self, kinds: Mapping[str, EntryKind], follow: Callable[[str], EntryKind], below: Callable[[str], Listing]
    ) -> None:
        """Take the names of a directory.

        Args:
            kinds: EntryKind by name, in the order of names.
            follow: Returns the kind of what a link leads to.
            below: Lists a directory in this one.
        """
        self._kinds, self._follow, self._below = kinds, follow, below
        self._followed: dict[str, EntryKind] = {}

    def __len__(self) -> int:
        return len(self._kinds)

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    @property
    def names(self) -> KeysView[str]:
        """The names in this directory, sorted."""
        return self._kinds.keys()

    def kind(self, name: str) -> EntryKind | None:
        """Return what a name stands for, links followed; None if nothing is there.

        Args:
            name: A name in this directory, or a path below it. A directory on the way that cannot be listed counts as
                empty.
        """
        first, _, rest = name.partition("/")
        kind = self._kinds.get(first)
        if kind is EntryKind.LINK:
            kind = self._followed.get(first)
            if kind is None:
                kind = self._followed[first] = self._follow(first)
        if not rest:
            return kind
        if kind is not EntryKind.DIRECTORY:
            return None
        try:
            return self._below(first).kind(rest)
        except CkptxError:
            return None

    def has(self, name: str) -> bool:
        """Return True if anything has this name, be it a link to nothing."""
        return self.kind(name) is not None if "/" in name else name in self._kinds

    def is_file(self, name: str) -> bool:
        """Return True for a regular file, or a link to one."""
        return self.kind(name) is EntryKind.FILE

    def is_directory(self, name: str) -> bool:
        """Return True for a directory, or a link to one."""
        return self.kind(name) is EntryKind.DIRECTORY

    def is_link(self, name: str) -> bool:
        """Return True for a link in this directory, wherever it leads."""
        return self._kinds.get(name) in (EntryKind.LINK, EntryKind.DANGLING)

    def files(self) -> list[str]:
        """Return the regular files in this directory, and the links to some, sorted."""
        return [name for name in self._kinds if self.is_file(name)]

    def directories(self) -> list[str]:
        """Return the directories in this one, and the links to some, sorted."""
        return [name for name in self._kinds if self.is_directory(name)]

    def below(self, name: str) -> Listing:
        """List a directory below.

        Raises:
            InputError: It cannot be listed.
        """
        listing = self
        for part in name.split("/"):
            listing = listing._below(part)
        return listing
