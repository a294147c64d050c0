"""A checkpoint as data: its logical tensors, and the position of each of their chunks in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckptx.catalog.entry import BytesEntry, Sidecar, TensorEntry
from ckptx.catalog.format_traits import BIN, TRAITS_BY_FORMAT, FormatTraits
from ckptx.storage.interface import FileIdentity, Location, Source, local_path
from ckptx.storage.local import LocalSource


class CheckpointPart(NamedTuple):
    """One directory of a DCP that is stored in two (model and optimizer), with what is needed to write it again.

    Attributes:
        directory: Path relative to the root ("model", "optim").
        names: Name in the catalog -> name in the part, for tensors and objects.
        planner_data: `planner_data` of the part; None if it has none.
    """

    directory: str
    names: dict[str, str]
    planner_data: Mapping[str, Any] | None


@dataclass(slots=True)
class Catalog:
    """The contents of one checkpoint. Opening fills it from headers, without reading tensor data.

    Attributes:
        root: The directory to which file names are relative.
        format: Name of its `FormatTraits`.
        tensors: Logical tensors by name, in the order on disk. Names that share bytes (aliases in a DCP, shared
            storages in a `.bin`) have separate entries with equal chunks.
        objects: Pickled objects of a DCP by name; they are never unpickled.
        files: Size in bytes of every file with tensor data, by name.
        identities: Identity of every file that was or will be read, by name, taken before reading; for tensor files,
            that of the open file from which the header was read.
        sidecars: Files that are copied along with the weights.
        training_files: Names of files with training state next to a DCP, from which its trainer resumes; only outputs
            that keep training state have them.
        config: The parsed `config.json`; None if there is none.
        verbatim: Texts of the original files, unchanged, by file name: headers of safetensors, and the index. They are
            needed to write the original files again byte for byte.
        planner_data: `planner_data` of a DCP in one part, carried over unchanged.
        parts: The directories (of model and optimizer) of a DCP in two parts; empty for everything else.
        notes: Messages of the reader for the user ("consolidated.safetensors ignored: not in the index"). A note on
            a file begins with its name and a space, so that the file is not listed again as not copied.
        opened_from: Location that was opened, from which `root` can differ, because subdirectories are searched for a
            checkpoint; None for a catalog that was made in memory.
        opened_file: The weight file or index that was opened, instead of its directory; else None.
        opened_source: Access to the files below `root`; None for a catalog that was made in memory. Use `source`, which
            also works then.
    """

    root: Location
    format: str
    tensors: dict[str, TensorEntry]
    objects: dict[str, BytesEntry] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    identities: dict[str, FileIdentity] = field(default_factory=dict)
    sidecars: tuple[Sidecar, ...] = ()
    training_files: tuple[str, ...] = ()
    config: dict[str, Any] | None = None
    verbatim: dict[str, str] = field(default_factory=dict)
    planner_data: Mapping[str, Any] | None = None
    parts: tuple[CheckpointPart, ...] = ()
    notes: list[str] = field(default_factory=list)
    opened_from: Location | None = None
    opened_file: Location | None = None
    opened_source: Source | None = None

    @property
    def location(self) -> Location:
        """Location of the checkpoint for messages: the file that was opened, or else the directory."""
        return self.root if self.opened_file is None else self.opened_file

    @property
    def source(self) -> Source:
        """Access to the files below `root`."""
        return self.opened_source if self.opened_source is not None else LocalSource(local_path(self.root))

    @property
    def traits(self) -> FormatTraits:
        """Properties of the format."""
        return TRAITS_BY_FORMAT[self.format]

    @property
    def is_published(self) -> bool:
        """True for files in a form in which models are published on the Hub.

        These are safetensors, and `.bin` files with an index or the name `pytorch_model.bin`. A trainer's own `.pt` is
        not published.
        """
        has_index = bool(self.verbatim)  # that of a `.bin`, which has no other verbatim text
        is_named = self.traits is not BIN or has_index or set(self.files) == {"pytorch_model.bin"}
        return self.traits.is_published and is_named

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without replicas and padding. Names that share bytes count once, with the largest size.

        Names share bytes if their first chunks begin at the same position in a file.
        """
        sizes: dict[object, int] = {}
        for entry in self.tensors.values():
            position = entry.position if entry.chunks else entry.name  # equal for names that share bytes
            sizes[position] = max(sizes.get(position, 0), entry.nbytes)
        return sum(sizes.values())
