"""The files an HF checkpoint had before it was converted: remembered through any chain of conversions, written again at
its end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptx.architecture.tied import TieDecision
from ckptx.catalog.entry import TensorEntry
from ckptx.catalog.manifest import Manifest, OriginalFiles, TensorRecord
from ckptx.conversion.steps.naming import NamedTarget, rename
from ckptx.conversion.steps.target import TargetTensors
from ckptx.errors import InputError
from ckptx.formats.hf.layout import HuggingFaceLayout
from ckptx.formats.hf.original_files import remember as remember_files
from ckptx.formats.hf.original_files import restore
from ckptx.formats.sidecars import MANIFEST
from ckptx.model_view.view import ModelView, manifest_beside, rules_of, trainer_rules


@dataclass(frozen=True, slots=True)
class OriginalFilesRecord:
    """What an output notes of the files that its source began as.

    Attributes:
        original: The files; None where there is nothing to remember.
        notes: What the user should know about the manifest of the source.
    """

    original: OriginalFiles | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RestoredFiles:
    """The original files of a checkpoint, which the output gets again.

    Attributes:
        named: The tensors in them, in the names they had.
        original: The files.
        where: The manifest that remembers them.
        digests: Recorded when they were written, where the tensor was stored as it is.
        reordered: Name in the source -> digest recorded there, of each tensor that holds the same elements in another
            order, or those of several tensors.
        view: The source.
    """

    named: NamedTarget
    original: OriginalFiles
    where: str
    digests: Mapping[str, str]
    reordered: Mapping[str, str]
    view: ModelView

    def stored_again(self, tensors: Mapping[str, TensorEntry]) -> Mapping[str, TensorEntry]:
        """Put the original tensors together as the source has them.

        Args:
            tensors: The original tensors, wherever they lie.

        Raises:
            InputError, UnsupportedError: There is no way back.
        """
        if self.view.trainer_naming:
            return trainer_rules(self.view.trainer_naming).to_disk(tensors, list(self.view.tensors)).tensors
        rules = rules_of(self.view)
        return tensors if rules is None else rules.to_model(tensors).tensors

    def layout(self, root: Path) -> HuggingFaceLayout:
        """Where every tensor lay, and lies again.

        Raises:
            InputError: A header or the index that is remembered as text says something else.
        """
        return restore(root, self.original, self.named.target.tensors, self.where)


@dataclass(frozen=True, slots=True)
class Restoration:
    """Whether the original files are written again.

    Attributes:
        found: They, if they are.
        notes: Why not, where a manifest speaks of some.
    """

    files: RestoredFiles | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorSelection:
    """The tensors that a target holds.

    Attributes:
        named: They, in the names of the model, of the published checkpoint, or as they were.
        restored: The files that the source began as, if these are what is written.
        original: The files to remember, if the target still is all there is in them.
        notes: What the user should know.
    """

    named: NamedTarget
    restored: RestoredFiles | None = None
    original: OriginalFiles | None = None
    notes: tuple[str, ...] = ()


def remember(view: ModelView) -> OriginalFilesRecord:
    """What to remember when this checkpoint is converted: its own files, or those it came from itself."""
    notes: list[str] = []
    if view.catalog.form.can_be_restored:
        return OriginalFilesRecord(remember_files(view.catalog, notes), tuple(notes))
    manifest = kept_manifest(view, notes)
    return OriginalFilesRecord(None if manifest is None else manifest.original, tuple(notes))


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


def _are_as_recorded(tensors: Mapping[str, TensorEntry], rows: Mapping[str, TensorRecord]) -> bool:
    return all((e.dtype, e.shape) == (rows[name].dtype, rows[name].shape) for name, e in tensors.items())


def restore_original(view: ModelView, decisions: Sequence[TieDecision], names: str | None) -> Restoration:
    """The original files, if the model in the source is all there is in them.

    Args:
        view: Of the source.
        decisions: On its ties.
        names: `--names`, "disk" or None.

    Raises:
        InputError: The manifest calls tensors tied that hold different bytes.
        UnsupportedError: Names are asked for, and those of the class are unknown.
    """
    notes: list[str] = []
    manifest = kept_manifest(view, notes)
    if manifest is None or manifest.original is None:
        return Restoration(None, tuple(notes))
    original = manifest.original
    named = rename(
        view,
        TargetTensors.of(view.catalog, view.tensors),
        asked=names,
        by_default="disk",
        original=list(original.tensors),
    )
    old = {new: name for name, new in named.naming.renamed(view).items()}
    shared = _left_out(manifest, original, named.target, old, decisions)
    if shared is None:
        return Restoration(None, (*notes, f"{MANIFEST} remembers files of other tensors; they are laid out anew"))
    target, rows = named.target, manifest.tensors
    digests = {
        name: rows[old[name]].digest
        for name in original.tensors
        # A digest is that of the bytes in the order they were written: those of other rows are other bytes.
        if old.get(name) in rows and target.tensors[name].chunks is view.tensors[old[name]].chunks
    }
    as_stored = {old[name] for name in digests}
    reordered = {
        name: rows[entry.name].digest
        for name, entry in view.tensors.items()
        if name not in as_stored and name not in shared and entry.name in rows
    }
    on_disk = frozenset(view.tensors[name].name for name in shared if name in view.tensors)
    kept = replace(target.only(original.tensors), shared=on_disk)
    notes += named.notes
    return Restoration(
        RestoredFiles(replace(named, target=kept), original, manifest.where, digests, reordered, view), tuple(notes)
    )


def _left_out(
    manifest: Manifest,
    original: OriginalFiles,
    target: TargetTensors,
    old: Mapping[str, str],
    decisions: Sequence[TieDecision],
) -> set[str] | None:
    """Names of the source that the original files lack; None when these are the files of other tensors.

    A tensor is left out only where the config ties it to one that is there and both were found to hold the same
    bytes, never because the manifest says so.

    Args:
        manifest: Of the source.
        original: The files that it remembers.
        target: In the names that they had; no names share bytes in it.
        old: Name in the target -> name in the source, which is also that in the manifest.
        decisions: On the ties of the source, by its names.

    Raises:
        InputError: The manifest calls tensors tied that hold different bytes.
    """
    if not target.tensors.keys() >= original.tensors.keys():
        return None
    rows = manifest.tensors
    kept = {old.get(name, name) for name in original.tensors}
    shared = {old.get(name, name) for name in target.tensors.keys() - original.tensors.keys()}
    families = _families(decisions)
    for name in sorted(shared):
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
    return shared


def _families(decisions: Sequence[TieDecision]) -> dict[str, str]:
    """Name -> one name for all that the config ties to it and that hold the same bytes."""
    found: dict[str, str] = {}
    for each in decisions:
        if each.declared and each.case == "equal":
            first, second = found.setdefault(each.source, each.source), found.setdefault(each.target, each.target)
            found.update((name, first) for name, family in list(found.items()) if family == second)
    return found
