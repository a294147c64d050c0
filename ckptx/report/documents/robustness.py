"""Reports of `robustness`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ckptx.report.report import OPTIONAL, Report


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RobustnessReport(Report):
    """Report of `robustness`. NaN and infinity are the strings "nan" and "inf".

    Attributes:
        recipe: Name of the recipe.
        recipe_file: Path of the recipe file.
        overrides: Recipe keys that `--set` changed, with their values as strings.
        injected_fault: Name of the injected fault; null for none.
        output_dir: Path of the output folder; empty if it was temporary and was removed, as nothing differed.
        world_size: Number of ranks; null if a custom trainer does not report it.
        layout: Sizes of the mesh only: `tp`, `pp`, `dp_shard`, `dp_replicate`; empty for a custom trainer.
        trainer: "ckptx", or the command of a custom trainer.
        phases: One entry per phase, in order: `number`, `name`, `title` (property that the phase tests), `ok` (null if
            it did not run or compared nothing, with the reason in `notes`), `seconds`, `checks`, `notes` (strings),
            `memory` (null if it was not measured) and, for a custom trainer, `cause` (why it failed, or that the cause
            is unknown). An entry of `checks`: `name` (finite, names, model, moments, ...), `ok` (null if there was
            nothing to compare), `compared` (number of items), `differing` (names of the first items that differ),
            `differing_count`, `value` and `tolerance` (of a measurement, else null), `noise_factor`
            and `noise` (factors of the tolerance; null if equal bits are required), `is_widened` (true if the recipe
            widened the tolerance). `memory`: `tensor_bytes` and `threads` after the phase was released, maximum over
            ranks, and `baseline_tensor_bytes`, `baseline_threads`.
        first_failure: First failure: `phase`, `check` (null if the phase failed without one), `cause` in words; null if
            nothing failed.
        noise: `loss` and `logits`, each with the largest difference between identical runs (`repeated`) and between
            runs whose embedding was perturbed by 1 ULP (`perturbed`), null if there were no such runs; empty if nothing
            was trained, or by a custom trainer that was not run twice.
        losses: One entry per run: `run` (its name), `steps`, `losses`, `compared_with` (name of the run whose losses
            are the reference; null for a run that is compared with no other) and `mesh` (null for a custom trainer).
            The first run is the uninterrupted one.
        differing: One entry per item that differs: `phase` (its number), `check`, `item` and, if known, `rank`,
            `reference` and `actual`.
        kills: One entry per process that was killed while saving: `operation` (file system operation at which it was
            killed), `ranks`, `is_async`, `latest_step` (null if none could be loaded), `ok`. Absent if no save was
            killed.
        step_memory: Bytes of tensors in one step, maximum over ranks: `forecast_peak`, `forecast_between_steps`,
            `measured_peak`, `measured_between_steps`; without the first two if nothing was forecast, without the last
            two if nothing was measured.
        environment: Versions of ckptx, python and the packages that it uses, the platform, the number of cores, and the
            names of device and backend; a custom trainer chooses the last two, which are absent then.
    """

    commands: ClassVar[Sequence[str]] = ("robustness",)

    recipe: str
    recipe_file: str
    overrides: Mapping[str, str] = field(default_factory=dict)
    injected_fault: str | None = None
    output_dir: str
    world_size: int | None
    layout: dict[str, int]
    trainer: str
    phases: Sequence[dict[str, Any]]
    first_failure: Mapping[str, Any] | None = None
    noise: Mapping[str, Any] = field(default_factory=dict)
    losses: Sequence[dict[str, Any]] = field(default_factory=list)
    differing: Sequence[dict[str, Any]] = field(default_factory=list)
    kills: Sequence[dict[str, Any]] | None = field(default=None, metadata=OPTIONAL)
    step_memory: Mapping[str, int] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FaultsReport(Report):
    """Report of `robustness --inject list`.

    Attributes:
        faults: Name of each fault that can be injected -> its description.
    """

    commands: ClassVar[Sequence[str]] = ("robustness",)

    faults: Mapping[str, str]
