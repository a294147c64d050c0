"""Original files of an HF checkpoint: recorded by any number of conversions in a row, and restored by `to-hf`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptx.architecture.tied import TieDecision
from ckptx.catalog.entry import TensorEntry
from ckptx.catalog.manifest import Manifest, OriginalFiles, TensorRecord
from ckptx.conversion.steps.naming import NamedTarget, rename_tensors
from ckptx.conversion.steps.target_tensors import TargetTensors
from ckptx.errors import InputError
from ckptx.formats.hf.layout import HuggingFaceLayout
from ckptx.formats.hf.original_files import plan_recorded_files, record_files
from ckptx.formats.sidecars import MANIFEST
from ckptx.mapping.rules import TrainerRules
from ckptx.model_view.view import ModelView, read_valid_manifest, rules_of


@dataclass(frozen=True, slots=True)
class RecordingResult:
    """Original files that the manifest of an output records.

    Attributes:
        original: Record of the original files; None if there is nothing to record.
        notes: Notes for the user, such as why files are not recorded.
    """

    original: OriginalFiles | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RestoredFiles:
    """Original files of a checkpoint, which the output restores.

    Attributes:
        named_target: Tensors of the original files under their original names.
        original: Record of the original files.
        manifest_path: Path of the manifest that records them.
        digests: Original name -> recorded digest, for tensors whose elements are in the original order in the source.
        reordered_digests: View name -> recorded digest, for source tensors whose elements are in another order than
            in the original files, or that combine several original tensors.
        view: Model in the source.
    """

    named_target: NamedTarget
    original: OriginalFiles
    manifest_path: str
    digests: Mapping[str, str]
    reordered_digests: Mapping[str, str]
    view: ModelView

    def in_source_form(self, tensors: Mapping[str, TensorEntry]) -> Mapping[str, TensorEntry]:
        """Return the original tensors in the names and order of the source.

        Args:
            tensors: Original tensors, in any files.

        Raises:
            InputError, UnsupportedError: A conversion between disk and model names cannot be reversed.
        """
        if self.view.trainer_conversions:
            return TrainerRules(self.view.trainer_conversions).to_trainer(tensors, list(self.view.tensors)).tensors
        rules = rules_of(self.view)
        return tensors if rules is None else rules.to_model(tensors).tensors

    def layout(self, root: Path) -> HuggingFaceLayout:
        """Return the original position of every tensor.

        Args:
            root: Output directory.

        Raises:
            InputError: A recorded header, or the recorded index, contradicts the tensors.
        """
        return plan_recorded_files(root, self.original, self.named_target.target.tensors, self.manifest_path)


@dataclass(frozen=True, slots=True)
class Restoration:
    """Original files that the output restores, if it does.

    Attributes:
        files: Files to restore; None to write new files.
        notes: Notes for the user, such as reasons why files that a manifest records are not restored.
    """

    files: RestoredFiles | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorSelection:
    """Tensors of the target.

    Attributes:
        named_target: Tensors under their new names.
        restored_files: Original files if they are restored; else None.
        original: Record of the original files for the manifest; None if `select_tensors` decides not to record any.
        notes: Notes for the user.
    """

    named_target: NamedTarget
    restored_files: RestoredFiles | None = None
    original: OriginalFiles | None = None
    notes: tuple[str, ...] = ()


def record_original(view: ModelView) -> RecordingResult:
    """Return the files to record when a checkpoint is converted: its own, or those that its manifest records."""
    notes: list[str] = []
    if view.wrappers and view.catalog.traits.can_be_restored:
        return RecordingResult(None)  # no loader of HF files accepts names with wrappers
    if view.catalog.traits.can_be_restored:
        return RecordingResult(record_files(view.catalog, notes), tuple(notes))
    manifest = usable_manifest(view, notes)
    return RecordingResult(None if manifest is None else manifest.original, tuple(notes))


def usable_manifest(view: ModelView, notes: list[str]) -> Manifest | None:
    """Return the manifest of a checkpoint if it records original files and still describes the tensors.

    Args:
        view: Model in the checkpoint.
        notes: Receives notes for the user.
    """
    manifest = read_valid_manifest(view.catalog, notes)
    if manifest is None or manifest.original is None:
        return None
    stored_tensors = {entry.name: entry for entry in view.tensors.values()}
    stored_tensors |= {name: view.catalog.tensors[name] for name in view.trainer_buffers}
    if stored_tensors.keys() != manifest.tensors.keys() or not _match_records(stored_tensors, manifest.tensors):
        notes.append(
            f"{MANIFEST} does not describe these tensors (names, dtypes or shapes differ), so the original files "
            "cannot be restored from them; nothing to do if the tensors were changed on purpose"
        )
        return None
    return manifest


def _match_records(tensors: Mapping[str, TensorEntry], records: Mapping[str, TensorRecord]) -> bool:
    return all(
        (entry.dtype, entry.shape) == (records[name].dtype, records[name].shape) for name, entry in tensors.items()
    )


def restore_original(view: ModelView, decisions: Sequence[TieDecision], names: str | None) -> Restoration:
    """Return the original files to restore, if the source has their tensors and, except for tied copies, no others.

    Args:
        view: Model in the source.
        decisions: Decisions on its tied weights.
        names: Value of `--names`: "hf", or None if not set.

    Raises:
        InputError: The manifest declares tensors tied whose bytes differ.
        UnsupportedError: `--names` is set, and the naming of the class is unknown.
    """
    notes: list[str] = []
    manifest = usable_manifest(view, notes)
    if manifest is None or manifest.original is None:
        return Restoration(None, tuple(notes))
    original = manifest.original
    named_target = rename_tensors(
        view,
        TargetTensors.from_source(view.catalog, view.tensors),
        names=names,
        default="hf",
        original_tensor_names=list(original.tensors),
    )
    source_names = {new: name for name, new in named_target.naming.target_names(view).items()}
    dropped_names = _dropped_ties(manifest, original, named_target.target, source_names, decisions)
    if dropped_names is None:
        note = f"{MANIFEST} records files with other tensors; writing new files{_advice_on_ties(view, manifest)}"
        return Restoration(None, (*notes, note))
    target, records = named_target.target, manifest.tensors
    digests = {
        name: records[source_names[name]].digest
        for name in original.tensors
        # A digest covers the bytes in their order, so it does not hold for reordered rows. Others keep their chunks.
        if source_names.get(name) in records and target.tensors[name].chunks is view.tensors[source_names[name]].chunks
    }
    unchanged_names = {source_names[name] for name in digests}
    reordered = {
        name: records[entry.name].digest
        for name, entry in view.tensors.items()
        if name not in unchanged_names and name not in dropped_names and entry.name in records
    }
    dropped_stored_names = frozenset(view.tensors[name].name for name in dropped_names if name in view.tensors)
    target_of_files = replace(target.select(original.tensors), tied_stored_names=dropped_stored_names)
    notes += named_target.notes
    return Restoration(
        RestoredFiles(replace(named_target, target=target_of_files), original, manifest.path, digests, reordered, view),
        tuple(notes),
    )


def _advice_on_ties(view: ModelView, manifest: Manifest) -> str:
    """Return the end of the note on files that are not restored: how to restore them if only ties are unknown."""
    architecture, original = view.disk_architecture, manifest.original
    if architecture is None or not architecture.is_unknown_class or original is None:
        return ""
    copies = {name for name, record in manifest.tensors.items() if record.tied_to is not None}
    if manifest.tensors.keys() - copies != original.tensors.keys() or not copies:
        return ""
    (name, *_) = sorted(copies)
    return (
        f", because it is unknown whether {architecture.class_name} ties {name}; to restore the original files, pass "
        "--trust-remote-code, with the code of the class next to config.json"
    )


def _dropped_ties(
    manifest: Manifest,
    original: OriginalFiles,
    target: TargetTensors,
    source_names: Mapping[str, str],
    decisions: Sequence[TieDecision],
) -> set[str] | None:
    """Return the view names of tensors that the original files lack; None if the difference is not only dropped ties.

    A tensor is dropped only if the config ties it to one that is kept and both have the same bytes. That the manifest
    declares them tied is not enough.

    Args:
        manifest: Manifest of the source.
        original: Original files that it records.
        target: Target under original names; no names share bytes in it.
        source_names: Target name -> view name, which is also the name in the manifest.
        decisions: Decisions on the tied weights of the source, by view names.

    Raises:
        InputError: The manifest declares tensors tied whose bytes differ.
    """
    if not target.tensors.keys() >= original.tensors.keys():
        return None
    records = manifest.tensors
    kept_names = {source_names.get(name, name) for name in original.tensors}
    dropped_names = {source_names.get(name, name) for name in target.tensors.keys() - original.tensors.keys()}
    groups = _tie_groups(decisions)
    for name in sorted(dropped_names):
        record = records.get(name)
        if record is None or record.tied_to is None:
            return None
        if groups.get(name, name) != groups.get(record.tied_to):
            if any({each.target, each.source} == {name, record.tied_to} and each.declared for each in decisions):
                raise InputError(
                    f'{manifest.path}: tensors[{json.dumps(name)}].tied_to: is "{record.tied_to}", whose bytes differ; '
                    "remove this key to convert both tensors (no loader requires it)"
                )
            return None
        if not any(groups.get(each) == groups[name] for each in kept_names):
            return None
    return dropped_names


def _tie_groups(decisions: Sequence[TieDecision]) -> dict[str, str]:
    """Return name -> representative, equal for all names that declared ties with equal bytes connect.

    Names that are in no such tie are absent.
    """
    representatives: dict[str, str] = {}
    for each in decisions:
        if each.declared and each.stored == "equal":
            first, second = (
                representatives.setdefault(each.source, each.source),
                representatives.setdefault(each.target, each.target),
            )
            representatives.update(
                (name, first) for name, representative in list(representatives.items()) if representative == second
            )
    return representatives
