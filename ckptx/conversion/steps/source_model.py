"""Model in the source: its names, tied weights and match with its config, and what else is not written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptx.architecture.configs import remote_reference
from ckptx.architecture.tied import TieDecision
from ckptx.catalog.entry import BytesEntry
from ckptx.conversion.steps.base_checkpoint import BaseCheckpoint
from ckptx.errors import InputError
from ckptx.mapping.names import is_trainer_state
from ckptx.model_view.config_check import match_config
from ckptx.model_view.config_match import ConfigMatch
from ckptx.model_view.master_weights import use_master_weights
from ckptx.model_view.parameter_count import (
    count_parameters,
    count_with_known_ties,
    has_known_ties,
    tie_representatives,
)
from ckptx.model_view.recorded_ties import recorded_ties
from ckptx.model_view.unknown_class import code_advice, shared_prefix_of_unknown_class, unknown_class_note
from ckptx.model_view.view import (
    ModelView,
    compare_replicas,
    decide_ties,
    locate_all_archives,
    locate_archives,
    resolve_duplicates,
    view_model,
)  # fmt: skip
from ckptx.options.conversion import ConversionOptions
from ckptx.storage.interface import SourceFiles
from ckptx.wording import counted, first_of


@dataclass(frozen=True, slots=True)
class SourceModel:
    """Model in the source.

    Attributes:
        view: View of the model. Chunks that will be read are located: they give file, offset and size of the elements
            themselves, not only those of the torch archive around them. `LazyChunks` parse it when they are accessed.
        notes: Notes for the user.
        masters: Stored name of each weight that is converted from its fp32 master -> stored name of the master.
    """

    view: ModelView
    notes: tuple[str, ...] = ()
    masters: Mapping[str, str] = field(default_factory=dict)

    @property
    def dropped(self) -> list[dict[str, str]]:
        """Stored `name` and `reason` of each weight that its master replaces."""
        return [{"name": name, "reason": "replaced by fp32 master weights"} for name in self.masters]

    def stored_names(self, names: Iterable[str]) -> set[str]:
        """Return the stored names of the tensors that are read for tensors of the view.

        Args:
            names: Stored names, `TensorEntry.name`; a weight that its master replaces keeps its own there, and the name
                of the master is returned.
        """
        return {self.masters.get(name, name) for name in names}


def find_model(
    base: BaseCheckpoint, files: SourceFiles, options: ConversionOptions, *, with_state: bool
) -> SourceModel:
    """Find the model in the source and locate its bytes.

    Args:
        base: Source and base, see `BaseCheckpoint`.
        files: Files of the source.
        options: Name prefix, `weights`, `tie_missing`, `trust_remote_code`, and `dry_run`, with which every archive is
            parsed immediately.
        with_state: True if training state will be read as well.

    Raises:
        InputError: No tensor has the prefix; a training checkpoint has several complete models, and `options` has no
            prefix to choose one (any other model is only named in a note, here or by `drop_training_state`); an archive
            is damaged; or two replicas or two names of one tensor differ.
        UnsupportedError: The tensors are an adapter.
    """
    view = _view_source(base, options, options.source_prefix_or_none)
    base_names = () if base.catalog is None else base.catalog.tensors.keys()
    shared_prefix = (
        None if options.source_prefix_or_none is not None else shared_prefix_of_unknown_class(view, base_names)
    )
    prefix_notes: list[str] = []
    if shared_prefix is not None and shared_prefix.is_absent_in_base:
        view = _view_source(base, options, shared_prefix.prefix)
    elif shared_prefix is not None:
        prefix_notes.append(
            f'all names of the model begin with "{shared_prefix.prefix}", which was not removed because the class is '
            f'unknown; if it is not part of the names of the class, pass --source-prefix "{shared_prefix.prefix}"'
        )
    masters: Mapping[str, str] = {}
    if options.weights == "masters":
        found = use_master_weights(view, files, tie_missing=options.tie_missing)
        view, masters = found.view, found.masters
    lazy = not options.dry_run
    view = locate_archives(view, files, lazy=lazy)
    compare_replicas(view.catalog, files)
    if with_state:
        view = locate_all_archives(view, files, lazy=lazy)
    view = resolve_duplicates(view, files, with_state=with_state)
    notes = view.notes_on_other_models("copied unchanged") if with_state else ()
    return SourceModel(view, (*view.notes, *prefix_notes, *notes), masters)


def _view_source(base: BaseCheckpoint, options: ConversionOptions, prefix: str | None) -> ModelView:
    return view_model(
        base.source,
        config=base.config,
        prefix=prefix,
        trust_remote_code=options.trust_remote_code,
        code_checkpoint=base.sidecar_source,
    )


@dataclass(frozen=True, slots=True)
class Ties:
    """Tied weights of the model.

    Attributes:
        decisions: Decision on each pair that the class declares or that was detected.
        representatives: Stored name -> representative name, equal for all names of one tensor.
        parameters: Number of parameters, each tensor counted once.
        notes: Notes for the user.
    """

    decisions: list[TieDecision]
    representatives: Mapping[str, str]
    parameters: int
    notes: tuple[str, ...] = ()


def resolve_ties(view: ModelView, files: SourceFiles, options: ConversionOptions) -> Ties:
    """Decide for every pair whether it is tied; bytes are read only if both names are stored.

    Args:
        view: Model in the source.
        files: Files of the source.
        options: `tie_missing` and `allow_config_mismatch`.

    Raises:
        InputError: A tensor that the class requires is missing: both names of a pair, or one name of a pair that the
            config does not tie. `tie_missing` ties the second case, `allow_config_mismatch` makes both a note. Or a tie
            flag in the config is not a boolean.
    """
    problems: list[str] | None = [] if options.allow_config_mismatch else None
    decisions = decide_ties(view, files, tie_missing=options.tie_missing, accepted_problems=problems)
    representatives = tie_representatives(decisions)
    return Ties(
        decisions,
        {
            view.tensors[name].name: representative
            for name, representative in representatives.items()
            if name in view.tensors
        },
        count_with_known_ties(view, representatives) if has_known_ties(view) else count_parameters(view, files).count,
        (
            *(problems or ()),
            *(
                f"the config ties two tensors that differ: {decision.evidence}; both are kept"
                for decision in decisions
                if decision.declared and decision.action == "keep-both"
            ),
            *(_guess_note(view, decision) for decision in decisions if decision.stored == "guessed"),
            *_notes_on_unknown_ties(view, decisions, tie_missing=options.tie_missing),
        ),
    )


def _guess_note(view: ModelView, decision: TieDecision) -> str:
    """Return the note on a tied weight of an unknown class of which only one of the two names is known."""
    names = (decision.source, decision.target)
    present, guess = names if decision.source in view.tensors else names[::-1]
    return (
        f"config.json ties the output head to the input embedding, but the other name of {present} is unknown, so no "
        f"alias is written; pass --tie-missing if it is {guess}"
    )


def _notes_on_unknown_ties(view: ModelView, decisions: Iterable[TieDecision], *, tie_missing: bool) -> Iterable[str]:
    """Yield a note if both names of a tie are unknown, and one if `--tie-missing` ties nothing."""
    architecture, config = view.disk_architecture, view.config
    decisions = list(decisions)
    is_unknown_class = architecture is not None and architecture.is_unknown_class
    advice = ""
    if is_unknown_class and architecture is not None and config is not None:
        advice = f"; {code_advice(remote_reference(config, architecture.class_name))}"
    has_unknown_names = is_unknown_class and any(each.declared and each.stored == "missing" for each in decisions)
    if has_unknown_names and not recorded_ties(view):
        yield (
            "config.json ties the output head to the input embedding, but neither of their names is known, so no alias "
            f"is written; dcp.load into a model with tied weights requires both names{advice}"
        )
    if tie_missing and not any(each.action == "alias" and each.stored != "equal" for each in decisions):
        reason = "the names of tied weights are unknown" if is_unknown_class else "no name of a tied weight is missing"
        yield f"--tie-missing has no effect: {reason}{advice}"


@dataclass(frozen=True, slots=True)
class ConfigCheck:
    """Comparison of the model with its config.

    Attributes:
        match: Match of names and shapes; None without a config or class.
        notes: Notes for the user.
    """

    match: ConfigMatch | None
    notes: tuple[str, ...] = ()

    @property
    def edits(self) -> tuple[dict[str, Any], ...]:
        """Return the changes to config.json after which loaders accept a padded vocabulary; empty without one."""
        vocabulary = None if self.match is None else self.match.padded_vocabulary
        return () if vocabulary is None else vocabulary.edits()


def check_against_config(view: ModelView, base: BaseCheckpoint, *, allow_config_mismatch: bool) -> ConfigCheck:
    """Compare names and shapes of the tensors with those that the config requires.

    Args:
        view: Model in the source.
        base: Source and base, see `BaseCheckpoint`.
        allow_config_mismatch: True to note mismatches instead of raising an error.

    Raises:
        InputError: Names or shapes do not match, and `allow_config_mismatch` is False.
    """
    architecture = view.architecture
    if view.config is None:
        return ConfigCheck(None)
    if architecture is None:
        note = "config.json names no architecture: tied weights are not detected, no tensor is renamed or fused"
        return ConfigCheck(None, (note,))
    match = match_config(view)
    notes = match.extra_notes(architecture.class_name, are_written=True)
    unknown_note = unknown_class_note(view, base.sidecar_source)
    if unknown_note is not None:
        notes.append(unknown_note)
    if match.mismatches:
        mismatch = match.summary(str(view.catalog.location))
        vocabulary = match.padded_vocabulary
        if vocabulary is not None and not allow_config_mismatch:
            raise InputError(
                f"{mismatch}; pass --allow-config-mismatch to write vocab_size {vocabulary.rows} into the config of "
                "the output, or pass --base PATH with the config that it was trained with"
            )
        if not allow_config_mismatch:
            add_files = "add the missing files, " if any(each.is_missing for each in match.mismatches) else ""
            raise InputError(
                f"{mismatch}; {add_files}pass --base PATH with the config that it was trained with, or pass "
                "--allow-config-mismatch to convert it anyway"
            )
        consequence = "" if vocabulary is not None else "; loaders that use this config may reject the output"
        notes.append(f"{mismatch}{consequence}")
    return ConfigCheck(match, tuple(notes))


@dataclass(frozen=True, slots=True)
class DroppedState:
    """Tensors and pickled objects outside the model, which are not written.

    They are training state, other models, tensors outside the prefix of the model, and buffers of the trainer that the
    class does not have.

    Attributes:
        tensors: Stored `name` and `reason` of each of these tensors.
        optimizer: `tensors` (number) and `bytes` of optimizer state among them; None if the output keeps training
            state, or the source is no training checkpoint.
        objects: `count` and `bytes` of pickled objects; None as for `optimizer`.
        notes: Notes for the user.
    """

    tensors: tuple[dict[str, str], ...] = ()
    optimizer: dict[str, int] | None = None
    objects: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()


def drop_training_state(view: ModelView, objects: Mapping[str, BytesEntry], reason: str) -> DroppedState:
    """Return everything in the source except the model, by name for the ledger and in numbers for the summary.

    Args:
        view: Model in the source.
        objects: Pickled objects of the source, none of which is written.
        reason: End of the reason for each tensor, after "optimizer state" or "training state".
    """
    model_duplicates = view.model_duplicates
    duplicates = {name: kept for name, kept in view.duplicates.items() if name not in model_duplicates}
    optimizer, other = frozenset(view.optimizer), set(view.other)
    optimizer |= {name for name, kept in duplicates.items() if kept in optimizer}
    other |= {name for name, kept in duplicates.items() if kept in other}
    models = {name: f"{each.description}, not converted" for each in view.other_models for name in each.names}
    buffers = frozenset(view.trainer_buffers)
    class_name = view.disk_architecture.class_name if view.disk_architecture is not None else ""
    outside_reason = f'outside the model prefix "{view.prefix}"'
    tensors = []
    for name in view.catalog.tensors:
        if name in optimizer:
            tensors.append({"name": name, "reason": f"optimizer state {reason}"})
        elif name in buffers:
            tensors.append({"name": name, "reason": f"{class_name} has no bias for balancing the load of its experts"})
        elif name in other:
            is_state = not view.prefix or is_trainer_state(name)
            own_reason = f"training state {reason}" if is_state else outside_reason
            tensors.append({"name": name, "reason": models.get(duplicates.get(name, name), own_reason)})
    return DroppedState(
        tuple(tensors),
        {"tensors": len(optimizer), "bytes": view.nbytes(optimizer)},
        {"count": len(objects), "bytes": sum(entry.nbytes for entry in objects.values())},
        (*view.notes_on_other_models("not converted"), *_buffer_notes(view)),
    )


def _buffer_notes(view: ModelView) -> Iterable[str]:
    """Yield a note if buffers of the trainer's model, which change the choice of experts, are not converted."""
    if view.trainer_buffers:
        yield (
            f"not converted: {first_of(view.trainer_buffers)}; unless these biases are zero, the output chooses other "
            "experts for some tokens than the trained model"
        )


def refuse_without_model(view: ModelView) -> None:
    """Refuse a checkpoint without model tensors.

    Raises:
        InputError: No tensor belongs to a model.
    """
    if not view.tensors:
        root = view.catalog.location
        raise InputError(f"{root}: contains no model tensors; list its names with `ckptx inspect --tensors`")


def wrapper_notes(view: ModelView, *, are_kept: bool) -> Iterable[str]:
    """Return a note for each wrapper component in the source: kept in names if `are_kept`, else removed from them."""
    action = "kept in" if are_kept else "removed from"
    return (f'wrapper "{wrapper}." {action} {counted(count, "name")}' for wrapper, count in view.wrappers.items())
