"""What `robustness` reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ckptx.report.report import OPTIONAL, Report


@dataclass(frozen=True, slots=True, kw_only=True)
class RobustnessReport(Report):
    """Of `robustness`. Numbers that are not finite are texts in it: "nan", "inf".

    Attributes:
        recipe: Its name.
        recipe_file: Where it was read from.
        settings: What `--set` changed: key -> value, as texts.
        injected: The fault that was planted, or None.
        out: The folder with everything that was written; empty where it was a temporary one, and nothing differed.
        world_size: Number of ranks; None where a trainer that is not ours does not say it.
        layout: The mesh.
        trainer: "ckptx", or the command of another.
        phases: A row for each, in order: `number`, `name`, `title` (what it proves, in words), `ok` (None where it did
            not run or nothing was compared, with the reason in `notes`), `seconds`, `oracles`, `notes` (texts),
            `memory` (None where none was taken), and of a trainer that is not ours `cause` (why it failed, or that this
            is unknown). A row of `oracles`: `name` (finite, names, model, moments, ...), `ok` (None where there was
            nothing to compare), `compared` (how many items), `differing` (the names of those that differ, the first of
            them), `count` (how many differ), `value` and `limit` (of a measure, else None), `times_noise` and `noise`
            (whose product the limit is; None where equal bits are required), `widened` (by the recipe).
            `memory`: `tensor_bytes` and `threads` of the rank with the most, after the phase was released,
            and `baseline_tensor_bytes`, `baseline_threads`.
        cause: The first failure: `phase`, `oracle` (None where the phase failed without one), `cause` in words; None
            where nothing failed.
        noise: `loss` and `logits`, each with the largest difference between runs that should not differ (`repeated`)
            and between those whose embedding was moved by one unit in the last place (`moved`); None where there was
            none of them.
        losses: A row for each run: `run`, `steps`, `losses`. The first is the one that did not stop; the others are
            held against it.
        differing: A row for each item that differs: `phase` (its number), `oracle`, `item`, and what else is known
            (`rank`, `reference`, `found`).
        kills: A row for each process that was killed while saving: `at`, `ranks`, `asynchronous`, `latest`, `ok`.
        step_memory: Bytes of tensors of the rank with the most in one step: `forecast_peak`, `forecast_between_steps`,
            `measured_peak`, `measured_between_steps`; empty where nothing was.
        environment: What it ran with: ckptx, python, torch, transformers, device, ... -> version or name.
    """

    commands: ClassVar[Sequence[str]] = ("robustness",)

    recipe: str
    recipe_file: str
    settings: Mapping[str, str] = field(default_factory=dict)
    injected: str | None = None
    out: str
    world_size: int | None
    layout: dict[str, int]
    trainer: str
    phases: Sequence[dict[str, Any]]
    cause: Mapping[str, Any] | None = None
    noise: Mapping[str, Any] = field(default_factory=dict)
    losses: Sequence[dict[str, Any]] = field(default_factory=list)
    differing: Sequence[dict[str, Any]] = field(default_factory=list)
    kills: Sequence[dict[str, Any]] | None = field(default=None, metadata=OPTIONAL)
    step_memory: Mapping[str, int] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultsReport(Report):
    """Of `robustness --inject list`.

    Attributes:
        faults: Name of each fault that can be planted -> what it does.
    """

    commands: ClassVar[Sequence[str]] = ("robustness",)

    faults: Mapping[str, str]
