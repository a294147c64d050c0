"""The files an HF checkpoint had before it was converted: remembered through any chain of conversions, given back at
its end."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import TensorEntry
from ckptx.conversion.target import Target
from ckptx.formats import huggingface_layout
from ckptx.view import ModelView, manifest_beside

Origin = dict[str, Any]


def remembered(source: Catalog) -> Origin:
    """What to remember of an HF checkpoint: its files, and for each tensor, in their order, which file holds it."""
    files = {name: index for index, name in enumerate(source.files)}
    origin = huggingface_layout.remember(source)
    origin["tensors"] = {name: files[entry.chunks[0].file] for name, entry in source.tensors.items()}
    return origin


@dataclass(frozen=True, slots=True)
class Memory:
    """The original files of a checkpoint, and where their tensors are now.

    Attributes:
        origin: What `remembered` gave.
        holders: Original name -> name of the tensor that has its bytes today, in the order of the files.
        digests: Recorded when they were written, where the tensor was stored as it is.
        shared: Names of today that only share the bytes of one of them.
    """

    origin: Origin
    holders: dict[str, str]
    digests: dict[str, str]
    shared: set[str]

    def restore(self, root: Path, tensors: Mapping[str, TensorEntry]) -> huggingface_layout.HuggingFaceLayout:
        """The layout of the original files, of `tensors` by original name."""
        placed = {name: (tensors[name], file) for name, file in self.origin["tensors"].items()}
        return huggingface_layout.restore(root, self.origin, placed)


def kept_origin(view: ModelView, notes: list[str]) -> Origin | None:
    """What to remember when this checkpoint is converted: its own files, or those it came from itself.

    Args:
        view: Of the checkpoint.
        notes: Gets what the user should know about its manifest.
    """
    if view.catalog.format == "huggingface":
        return remembered(view.catalog)
    manifest = kept_manifest(view, notes)
    return None if manifest is None else manifest["origin"]


def kept_manifest(view: ModelView, notes: list[str]) -> dict[str, Any] | None:
    """The manifest beside a checkpoint that remembers the files it came from, where it still is what it describes.

    Args:
        view: Of the checkpoint.
        notes: Gets what the user should know about its manifest.
    """
    manifest = manifest_beside(view.catalog, notes)
    if manifest is None or "tensors" not in (manifest["origin"] or {}):
        return None
    rows = manifest["tensors"]
    on_disk = {entry.name: entry for entry in view.tensors.values()}
    return manifest if on_disk.keys() == rows.keys() and _are_as_recorded(on_disk, rows) else None


def names_on_disk(origin: Origin | None) -> list[str] | None:
    """The names that the original files have."""
    return None if origin is None else list(origin["tensors"])


def _are_as_recorded(tensors: Mapping[str, TensorEntry], rows: Mapping[str, Any]) -> bool:
    return all(
        (e.dtype.name, list(e.shape)) == (rows[name]["dtype"], rows[name]["shape"]) for name, e in tensors.items()
    )


def recall(
    manifest: Mapping[str, Any], origin: Origin, target: Target, old: Mapping[str, str], as_written: Collection[str]
) -> Memory | None:
    """The original files, if the tensors of `target`, which has the names on disk, are all there is in them.

    Args:
        manifest: Of the source.
        origin: From it.
        target: No names are shared in it; names tied to one of another file may be there, and are left out.
        old: Name in the target -> name in the manifest.
        as_written: Names in the target whose bytes are those that the manifest digested.
    """
    rows = manifest["tensors"]
    found: dict[str, str] = {}
    for name in origin["tensors"]:
        holder = name if name in target.tensors else rows.get(old.get(name, name), {}).get("tied_to")
        if holder not in target.tensors:
            return None
        found[name] = holder
    shared = {name for name in target.tensors if name not in found}
    if not all("tied_to" in rows.get(old.get(name, name), {}) for name in shared):
        return None
    digests = {
        name: rows[old[name]]["digest"]
        for name, holder in found.items()
        if name == holder and name in as_written and old[name] in rows
    }
    return Memory(origin, found, digests, shared)
