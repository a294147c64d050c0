"""A checkpoint as data: which logical tensors exist, and where each of their blocks lies on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckptx.catalog.entry import BytesEntry, Sidecar, TensorEntry
from ckptx.catalog.form import BIN, FORMS, Form
from ckptx.storage.interface import FileIdentity, Location, Source, local_path
from ckptx.storage.local import LocalSource


class CheckpointPart(NamedTuple):
    """One of two directories that are a checkpoint together: what it takes to write them apart again.

    Attributes:
        directory: Its path below the root ("model", "optim").
        names: Name in the catalog -> name in the part, of tensors and of objects.
        planner_data: `planner_data` of the part.
    """

    directory: str
    names: dict[str, str]
    planner_data: Mapping[str, Any] | None


@dataclass(slots=True)
class Catalog:
    """What one checkpoint holds. Opening fills it from headers; no tensor byte has been read yet.

    Attributes:
        root: The directory every file name is relative to.
        format: Name of its `Form`.
        tensors: Logical tensors by name, in the order they lie on disk. Names that share bytes (aliases in a DCP,
            shared storages in a `.bin`) are entries of their own with equal chunks.
        objects: Pickled objects of a DCP, never opened.
        files: Size in bytes of every file that holds tensor data.
        identities: Identity of every file that was read or will be, as it was before; that of a tensor file comes from
            the open file its header was read from.
        sidecars: Files that travel with the weights.
        config: The parsed `config.json`, or None.
        verbatim: Texts that only their own format understands and a way back may need: safetensors headers and
            the index by file name.
        planner_data: `planner_data` of a DCP in one part, carried over as it is.
        parts: The directories of a DCP in two parts; empty for everything else.
        notes: What the reader wants the user to know ("consolidated.safetensors ignored: not in the index").
        opened_from: Location that was opened; None for a catalog that was not read from a storage.
        storage: Source that it was opened from; None for a catalog that was not. `source` reads either.
    """

    root: Location
    format: str
    tensors: dict[str, TensorEntry]
    objects: dict[str, BytesEntry] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    identities: dict[str, FileIdentity] = field(default_factory=dict)
    sidecars: tuple[Sidecar, ...] = ()
    config: dict[str, Any] | None = None
    verbatim: dict[str, str] = field(default_factory=dict)
    planner_data: Mapping[str, Any] | None = None
    parts: tuple[CheckpointPart, ...] = ()
    notes: list[str] = field(default_factory=list)
    opened_from: Location | None = None
    storage: Source | None = None

    @property
    def source(self) -> Source:
        """The files at `root`."""
        return self.storage if self.storage is not None else LocalSource(local_path(self.root))

    @property
    def form(self) -> Form:
        """What follows from the format."""
        return FORMS[self.format]

    @property
    def is_published(self) -> bool:
        """True for weights as their authors publish them; a state dict of a name of its own is a trainer's."""
        is_named = self.form is not BIN or bool(self.verbatim) or set(self.files) == {"pytorch_model.bin"}
        return self.form.is_published and is_named

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data on disk, names that share bytes counted once."""
        sizes: dict[object, int] = {}
        for entry in self.tensors.values():
            place = entry.place if entry.chunks else entry.name
            sizes[place] = max(sizes.get(place, 0), entry.nbytes)
        return sum(sizes.values())
