"""What `robustness` reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptx.report.report import OPTIONAL, Report


@dataclass(frozen=True, slots=True, kw_only=True)
class RobustnessReport(Report):
    """Of `robustness`. Numbers that are not finite are texts in it: "nan", "inf".

    Attributes:
        recipe: Its name.
        recipe_file: Where it was read from.
        settings: What `--set` changed: key -> value, as texts.
        injected: The fault that was planted, or None.
        out: The folder with everything that was written.
        world_size: Number of ranks.
        layout: The mesh.
        trainer: "ckptx", or the command of another.
        phases: A row for each, in order: `name`, `title` (what it proves, in words), `ok` (None where it did not run,
            with the reason in `notes`), `seconds`, `oracles`, `notes`, `memory`. A row of `oracles`: `name` (finite,
            names, model, moments, ...), `ok`, `compared` (how many items), `differing` (the names of those that differ,
            the first of them), `count` (how many differ), `value` and `limit` (of a measure, else None), `times_noise`
            (of how many times the noise the limit is), `widened` (by the recipe). `memory`: `tensor_bytes` and
            `threads` of the rank with the most, after the phase was released, and `baseline_tensor_bytes`,
            `baseline_threads`.
        noise: The largest differences between runs that should not differ, or by one unit in the last place: `loss`,
            `logits`; `repeated` (of two runs alike) and `moved` (of those with a moved embedding) for each.
        losses: A row for each run: `run` (straight, again, resumed, ...), `steps`, `losses`.
        differing: A row for each item that differs: `phase`, `oracle`, `item`, and what else is known (`rank`,
            `reference`, `found`).
        kills: A row for each process that was killed while saving: `at`, `ranks`, `asynchronous`, `latest`, `ok`.
    """

    recipe: str
    recipe_file: str
    settings: Mapping[str, str] = field(default_factory=dict)
    injected: str | None = None
    out: str
    world_size: int
    layout: dict[str, int]
    trainer: str
    phases: Sequence[dict[str, Any]]
    noise: Mapping[str, Any] = field(default_factory=dict)
    losses: Sequence[dict[str, Any]] = field(default_factory=list)
    differing: Sequence[dict[str, Any]] = field(default_factory=list)
    kills: Sequence[dict[str, Any]] | None = field(default=None, metadata=OPTIONAL)
