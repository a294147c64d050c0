"""The files an HF checkpoint had before it was converted: remembered through any chain of conversions, given back at
its end."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptx.architecture.tied import TieDecision
from ckptx.catalog.entry import TensorEntry
from ckptx.catalog.manifest import Manifest, OriginalFiles, TensorRecord
from ckptx.conversion.target import Target
from ckptx.errors import InputError
from ckptx.formats.hf.layout import HuggingFaceLayout
from ckptx.formats.hf.original_files import remember, restore
from ckptx.formats.sidecars import MANIFEST
from ckptx.view import ModelView, manifest_beside


@dataclass(frozen=True, slots=True)
class Memory:
    """The original files of a checkpoint, and what is known of their tensors.

    Attributes:
        original: The files.
        where: The manifest that remembers them.
        digests: Recorded when they were written, where the tensor was stored as it is.
        shared: Names of today that only share the bytes of one of them.
    """

    original: OriginalFiles
    where: str
    digests: dict[str, str]
    shared: set[str]

    def restore(self, root: Path, tensors: Mapping[str, TensorEntry]) -> HuggingFaceLayout:
        """The layout of the original files, of `tensors` by original name.

        Raises:
            InputError: A header or the index that is remembered as text says something else.
        """
        return restore(root, self.original, tensors, self.where)


def kept_original(view: ModelView, notes: list[str]) -> OriginalFiles | None:
    """What to remember when this checkpoint is converted: its own files, or those it came from itself.

    Args:
        view: Of the checkpoint.
        notes: Gets what the user should know about its manifest.
    """
    if view.catalog.format == "huggingface":
        return remember(view.catalog, notes)
    manifest = kept_manifest(view, notes)
    return None if manifest is None else manifest.original


def kept_manifest(view: ModelView, notes: list[str]) -> Manifest | None:
    """The manifest beside a checkpoint that remembers the files it came from, where it still is what it describes.

    Args:
        view: Of the checkpoint.
        notes: Gets what the user should know about its manifest.
    """
    manifest = manifest_beside(view.catalog, notes)
    if manifest is None or manifest.original is None:
        return None
    on_disk = {entry.name: entry for entry in view.tensors.values()}
    if on_disk.keys() != manifest.tensors.keys() or not _are_as_recorded(on_disk, manifest.tensors):
        notes.append(f"{MANIFEST} describes other tensors; the files it remembers are not given back")
        return None
    return manifest


def names_on_disk(original: OriginalFiles | None) -> list[str] | None:
    """The names that the original files have."""
    return None if original is None else list(original.tensors)


def _are_as_recorded(tensors: Mapping[str, TensorEntry], rows: Mapping[str, TensorRecord]) -> bool:
    return all((e.dtype, e.shape) == (rows[name].dtype, rows[name].shape) for name, e in tensors.items())


def recall(
    manifest: Manifest,
    target: Target,
    old: Mapping[str, str],
    as_written: Collection[str],
    decisions: Sequence[TieDecision],
) -> Memory | None:
    """The original files, if the tensors of `target`, which has the names on disk, are all there is in them.

    A tensor is left out only where the config ties it to one that is there and both were found to hold the same
    bytes, never because the manifest says so.

    Args:
        manifest: Of the source; it remembers files.
        target: No names are shared in it; names tied to one of another file may be there, and are left out.
        old: Name in the target -> name in the source, which is also that in the manifest.
        as_written: Names in the target whose bytes are those that the manifest digested.
        decisions: On the ties of the source, by its names.

    Raises:
        InputError: The manifest calls tensors tied that hold different bytes.
    """
    rows, original = manifest.tensors, manifest.original
    assert original is not None
    if not target.tensors.keys() >= original.tensors.keys():
        return None
    kept = {old.get(name, name) for name in original.tensors}
    shared = target.tensors.keys() - original.tensors.keys()
    families = _families(decisions)
    for name in sorted(old.get(name, name) for name in shared):
        row = rows.get(name)
        if row is None or row.tied_to is None:
            return None
        if families.get(name, name) != families.get(row.tied_to):
            if any({each.target, each.source} == {name, row.tied_to} and each.declared for each in decisions):
                raise InputError(
                    f'{manifest.where}: tensors[{json.dumps(name)}].tied_to: says "{row.tied_to}", which holds other '
                    "bytes; remove it, no loader needs it, and both tensors are converted"
                )
            return None
        if not any(families.get(each) == families[name] for each in kept):
            return None
    digests = {name: rows[old[name]].digest for name in original.tensors if name in as_written and old[name] in rows}
    return Memory(original, manifest.where, digests, set(shared))


def _families(decisions: Sequence[TieDecision]) -> dict[str, str]:
    """Name -> one name for all that the config ties to it and that hold the same bytes."""
    found: dict[str, str] = {}
    for each in decisions:
        if each.declared and each.case == "equal":
            first, second = found.setdefault(each.source, each.source), found.setdefault(each.target, each.target)
            found.update((name, first) for name, family in list(found.items()) if family == second)
    return found
