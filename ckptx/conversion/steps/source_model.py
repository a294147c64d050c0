"""Model in the source: its names, tied weights and match with its config, and the training state that is dropped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptx.architecture.tied import TieDecision
from ckptx.catalog.entry import BytesEntry
from ckptx.conversion.steps.base_checkpoint import BaseCheckpoint
from ckptx.errors import InputError
from ckptx.mapping.names import is_trainer_state
from ckptx.model_view.config_check import match_config
from ckptx.model_view.config_match import ConfigMatch
from ckptx.model_view.parameter_count import count_with_known_ties, tie_representatives
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
from ckptx.wording import counted


@dataclass(frozen=True, slots=True)
class SourceModel:
    """Model in the source.

    Attributes:
        view: View of the model; every block that will be read is located.
        notes: Notes for the user.
    """

    view: ModelView
    notes: tuple[str, ...] = ()


def find_model(
    base: BaseCheckpoint, files: SourceFiles, options: ConversionOptions, *, with_state: bool
) -> SourceModel:
    """Find the model in the source and locate its bytes.

    Args:
        base: Source checkpoint and its config.
        files: Files of the source.
        options: Name prefix, `trust_remote_code`, and `dry_run`, which locates every archive immediately.
        with_state: True if training state will be read as well.

    Raises:
        InputError: No tensor has the prefix, there are several models, an archive is damaged, or two replicas or two
            names of one tensor differ.
        UnsupportedError: The tensors are an adapter.
    """
    view = view_model(
        base.source,
        config=base.config,
        prefix=options.model_prefix,
        trust_remote_code=options.trust_remote_code,
    )
    lazy = not options.dry_run
    view = locate_archives(view, files, lazy=lazy)
    compare_replicas(view.catalog, files)
    if with_state:
        view = locate_all_archives(view, files, lazy=lazy)
    view = resolve_duplicates(view, files, with_state=with_state)
    notes = view.notes_on_other_models("copied unchanged") if with_state else ()
    return SourceModel(view, (*view.notes, *notes))


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
        InputError: A tensor that the model requires is missing and not declared tied.
    """
    missing: list[str] | None = [] if options.allow_config_mismatch else None
    decisions = decide_ties(view, files, tie_missing=options.tie_missing, accepted_problems=missing)
    representatives = tie_representatives(decisions)
    return Ties(
        decisions,
        {
            view.tensors[name].name: representative
            for name, representative in representatives.items()
            if name in view.tensors
        },
        count_with_known_ties(view, representatives),
        (
            *(missing or ()),
            *(
                f"declared tied, but different: {decision.evidence}; both are kept"
                for decision in decisions
                if decision.declared and decision.action == "keep-both"
            ),
        ),
    )


@dataclass(frozen=True, slots=True)
class ConfigCheck:
    """Comparison of the model with its config.

    Attributes:
        match: Match of names and shapes; None without a config or class.
        notes: Notes for the user.
    """

    match: ConfigMatch | None
    notes: tuple[str, ...] = ()


def check_against_config(view: ModelView, *, allow_config_mismatch: bool) -> ConfigCheck:
    """Compare names and shapes of the tensors with those that the config requires.

    Args:
        view: Model in the source.
        allow_config_mismatch: True to note mismatches instead of raising an error.

    Raises:
        InputError: Names or shapes do not match, and `allow_config_mismatch` is False.
    """
    architecture = view.architecture
    if view.config is None:
        return ConfigCheck(None)
    if architecture is None:
        note = "config.json names no architecture: tied weights are not detected, every tensor is converted unchanged"
        return ConfigCheck(None, (note,))
    match = match_config(view)
    notes = match.extra_notes(architecture.class_name)
    if match.mismatches:
        mismatch = match.summary(str(view.catalog.root))
        if not allow_config_mismatch:
            raise InputError(
                f"{mismatch}; add the missing files, pass --base PATH with the config that it was trained with, or "
                "pass --allow-config-mismatch to convert it anyway"
            )
        notes.append(mismatch)
    return ConfigCheck(match, tuple(notes))


@dataclass(frozen=True, slots=True)
class DroppedState:
    """Training state that is not written.

    Attributes:
        rows: Rows for the ledger: stored name and reason.
        optimizer: Tensors and bytes of optimizer state among them; None if the output keeps training state.
        objects: Number and bytes of pickled objects; None if the output keeps training state.
        notes: Notes for the user.
    """

    rows: tuple[dict[str, str], ...] = ()
    optimizer: dict[str, int] | None = None
    objects: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()


def drop_training_state(view: ModelView, objects: Mapping[str, BytesEntry], reason: str) -> DroppedState:
    """Return everything except the model, by name for the ledger and in numbers for the summary."""
    model_duplicates = view.model_duplicates
    duplicates = {name: kept for name, kept in view.duplicates.items() if name not in model_duplicates}
    optimizer, other = frozenset(view.optimizer), set(view.other)
    optimizer |= {name for name, kept in duplicates.items() if kept in optimizer}
    other |= {name for name, kept in duplicates.items() if kept in other}
    models = {name: f"{each.description}, not converted" for each in view.other_models for name in each.names}
    outside_reason = f'outside the model prefix "{view.prefix}"'
    rows = []
    for name in view.catalog.tensors:
        if name in optimizer:
            rows.append({"name": name, "reason": f"optimizer state {reason}"})
        elif name in other:
            is_state = not view.prefix or is_trainer_state(name)
            rows.append({"name": name, "reason": f"training state {reason}" if is_state else outside_reason})
            rows[-1]["reason"] = models.get(duplicates.get(name, name), rows[-1]["reason"])
    return DroppedState(
        tuple(rows),
        {"tensors": len(optimizer), "bytes": view.nbytes(optimizer)},
        {"count": len(objects), "bytes": sum(entry.nbytes for entry in objects.values())},
        tuple(view.notes_on_other_models("not converted")),
    )


def refuse_without_model(view: ModelView) -> None:
    """Refuse a checkpoint without model tensors.

    Raises:
        InputError: No tensor belongs to a model.
    """
    if not view.tensors:
        root = view.catalog.root
        raise InputError(f"{root}: contains no model tensors; list its names with `ckptx inspect --tensors`")


def wrapper_notes(view: ModelView, *, kept: bool) -> Iterable[str]:
    """Yield a note for each wrapper component that was kept in or removed from names."""
    action = "kept in" if kept else "removed from"
    return (f'wrapper "{wrapper}." {action} {counted(count, "name")}' for wrapper, count in view.wrappers.items())
