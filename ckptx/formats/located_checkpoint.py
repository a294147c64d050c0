"""A checkpoint that was found and not opened yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ckptx.formats.rank_files import ShapesIn
from ckptx.storage.interface import Location, Source


class LocatedCheckpoint(NamedTuple):
    """A checkpoint found: its directory, its kind, and what names its weights there.

    Attributes:
        source: The directory.
        kind: Name of its `Form`, as `Catalog.format`.
        weights: Weight files or an index, by name; for "dcp" and "sharded" the directories with the parts.
    """

    source: Source
    kind: str
    weights: tuple[str, ...]

    @property
    def root(self) -> Location:
        """The location of the directory."""
        return self.source.location


Detect = Callable[[Source, ShapesIn], "LocatedCheckpoint | None"]
"""Finds a checkpoint of one format in a directory.

The names in `source.listing()` decide; only where two formats share them is a header read. The second argument opens
what lies beside, for a directory that may be one part of several.

Returns None for a directory that holds no checkpoint of the format, and raises InputError or UnsupportedError for one
that holds several, or a part.
"""
