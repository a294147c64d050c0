"""The source seen as a model: its names, its ties, whether it fits its config, and what lies beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptx.architecture.tied import TieDecision
from ckptx.catalog.entry import BytesEntry
from ckptx.conversion.steps.base import BaseCheckpoint
from ckptx.errors import InputError
from ckptx.mapping.names import is_trainer_state
from ckptx.model_view.config_check import ConfigMatch, match_config
from ckptx.model_view.parameter_count import leaders_of, parameters_decided
from ckptx.model_view.view import (
    ModelView,
    compare_replicas,
    decide_ties,
    locate_all,
    locate_archives,
    resolve_duplicates,
    view_model,
)  # fmt: skip
from ckptx.options.conversion import ConversionOptions
from ckptx.report.report import counted, human_bytes
from ckptx.storage.interface import SourceFiles


@dataclass(frozen=True, slots=True)
class SourceModel:
    """The model in the source.

    Attributes:
        view: Of it; every block that will be read is located.
        notes: What the user should know.
    """

    view: ModelView
    notes: tuple[str, ...] = ()


def find_model(
    base: BaseCheckpoint, files: SourceFiles, options: ConversionOptions, *, with_state: bool
) -> SourceModel:
    """Finds the model, and the places of its bytes.

    Args:
        base: The source, and the config that says what its tensors are.
        files: The files of the source.
        options: The prefix of names, and `trust_remote_code`; a dry run looks into every archive at once.
        with_state: Training state will be read, too.

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
    later = not options.dry_run
    view = locate_archives(view, files, lazy=later)
    compare_replicas(view.catalog, files)
    if with_state:
        view = locate_all(view, files, lazy=later)
    view = resolve_duplicates(view, files, with_state=with_state)
    notes = view.notes_on_others("carried along as it is") if with_state else ()
    return SourceModel(view, (*view.notes, *notes))


@dataclass(frozen=True, slots=True)
class Ties:
    """Which names of the model are one tensor.

    Attributes:
        decisions: On each pair that the class declares or that was found.
        leaders: Name on disk -> a name for the tensor it is, the same for all names that were found to be one.
        parameters: Elements of the model, each tensor once.
        notes: What the user should know.
    """

    decisions: list[TieDecision]
    leaders: Mapping[str, str]
    parameters: int
    notes: tuple[str, ...] = ()


def resolve_ties(view: ModelView, files: SourceFiles, options: ConversionOptions) -> Ties:
    """Decides every tie; bytes are read only of pairs that are both on disk.

    Args:
        view: The model.
        files: The files of the source.
        options: `tie_missing` and `allow_config_mismatch`.

    Raises:
        InputError: A tensor the model needs is missing, and nothing says that it is tied.
    """
    missing: list[str] | None = [] if options.allow_config_mismatch else None
    decisions = decide_ties(view, files, tie_missing=options.tie_missing, accepted=missing)
    leaders = leaders_of(decisions)
    return Ties(
        decisions,
        {view.tensors[name].name: leader for name, leader in leaders.items() if name in view.tensors},
        parameters_decided(view, leaders),
        (
            *(missing or ()),
            *(
                f"declared tied, but not: {decision.evidence}; both are kept"
                for decision in decisions
                if decision.declared and decision.action == "keep-both"
            ),
        ),
    )


@dataclass(frozen=True, slots=True)
class ConfigCheck:
    """What came of holding the model against its config.

    Attributes:
        fit: Names and shapes; None where there is no config or no class.
        notes: What the user should know.
    """

    fit: ConfigMatch | None
    notes: tuple[str, ...] = ()


def check_against_config(view: ModelView, *, allow_config_mismatch: bool) -> ConfigCheck:
    """Compare names and shapes of the tensors with those that the config asks for.

    Args:
        view: The model.
        allow_config_mismatch: True makes a note of a difference.

    Raises:
        InputError: Names or shapes do not fit, and nobody said that they may not.
    """
    architecture = view.architecture
    if view.config is None:
        return ConfigCheck(None)
    if architecture is None:
        note = "config.json names no architecture: ties are unknown, tensors are taken as they are"
        return ConfigCheck(None, (note,))
    fit = match_config(view)
    notes = fit.extra_notes(architecture.class_name)
    if fit.misfits:
        said = fit.summary(str(view.catalog.root))
        if not allow_config_mismatch:
            raise InputError(
                f"{said}; copy what is missing, give the config that it was trained with (--base), or pass "
                "--allow-config-mismatch to take it as it is"
            )
        notes.append(said)
    return ConfigCheck(fit, tuple(notes))


@dataclass(frozen=True, slots=True)
class DroppedState:
    """What is not the model and does not go along.

    Attributes:
        dropped: Rows for the ledger: name on disk, and why.
        optimizer: Tensors and bytes of optimizer state among them; None where nothing was left behind.
        objects: Number and bytes of pickled objects.
        notes: What the user should know.
    """

    dropped: tuple[dict[str, str], ...] = ()
    optimizer: dict[str, int] | None = None
    objects: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()


def drop_training_state(view: ModelView, objects: Mapping[str, BytesEntry], reason: str) -> DroppedState:
    """What is not the model, by name for the ledger and in one line for the summary."""
    settled = view.model_duplicates
    twins = {name: kept for name, kept in view.duplicates.items() if name not in settled}
    optimizer, other = frozenset(view.optimizer), set(view.other)
    optimizer |= {name for name, kept in twins.items() if kept in optimizer}
    other |= {name for name, kept in twins.items() if kept in other}
    models = {name: f"{each.description}, not converted" for each in view.others for name in each.names}
    outside = f'not below the prefix "{view.prefix}" of the model'
    rows = []
    for name in view.catalog.tensors:
        if name in optimizer:
            rows.append({"name": name, "reason": f"optimizer state {reason}"})
        elif name in other:
            is_state = not view.prefix or is_trainer_state(name)
            rows.append({"name": name, "reason": f"training state {reason}" if is_state else outside})
            rows[-1]["reason"] = models.get(twins.get(name, name), rows[-1]["reason"])
    nbytes = view.nbytes(optimizer)
    count = len(other) - len(models.keys() & other)
    note = (
        f"not converted: {counted(len(optimizer), 'optimizer tensor')} ({human_bytes(nbytes)}), "
        f"{counted(count, 'other tensor')}, {counted(len(objects), 'pickled object')}"
    )
    return DroppedState(
        tuple(rows),
        {"tensors": len(optimizer), "bytes": nbytes},
        {"count": len(objects), "bytes": sum(entry.nbytes for entry in objects.values())},
        (*((note,) if optimizer or count or objects else ()), *view.notes_on_others("not converted")),
    )


def refuse_without_model(view: ModelView) -> None:
    """Refuses a checkpoint that holds training state alone.

    Raises:
        InputError: No tensor in it is of a model.
    """
    if not view.tensors:
        root = view.catalog.root
        raise InputError(f"{root}: holds no model tensors; look at its names with `ckptx inspect --tensors`")


def wrapper_notes(view: ModelView, *, kept: bool) -> Iterable[str]:
    """What became of the wrappers in names."""
    done = "kept in" if kept else "removed from"
    return (f'wrapper "{wrapper}." {done} {counted(count, "name")}' for wrapper, count in view.wrappers.items())
