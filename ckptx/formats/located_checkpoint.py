"""A checkpoint that was located but not opened yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ckptx.formats.rank_files import ShapeReader
from ckptx.storage.interface import Location, Source


class LocatedCheckpoint(NamedTuple):
    """Directory, format and weight files of a checkpoint that was located but not opened yet.

    Attributes:
        source: The directory.
        kind: Name of its `FormatTraits`, see `Catalog.format`.
        weights: Names of the weight files, or of an index. (".",) for "dcp" and "sharded", which consist of all files
            of the directory; the names of the model and of the optimizer directory for a DCP that is stored in two.
    """

    source: Source
    kind: str
    weights: tuple[str, ...]

    @property
    def root(self) -> Location:
        """Return the location of the directory."""
        return self.source.location


Detect = Callable[[Source, ShapeReader], "LocatedCheckpoint | None"]
"""Function that finds a checkpoint of one format in a directory.

The names in `source.listing()` decide; a header is read only if two formats share these names. The second argument
reads the shapes in a sibling file or directory, to detect that a file is only one rank's part of a checkpoint.

Returns None for a directory without a checkpoint of the format. Raises InputError or UnsupportedError for a directory
with several checkpoints, or with only a part of a checkpoint.
"""
