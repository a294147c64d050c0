"""Requests to ranks and their results; this module does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ckptx.robustness_suite.oracles import Items
from ckptx.runtime.training.recipe import LayoutBlock, Recipe

EventHandler = Callable[[Any], None]  # receives the trainer of the rank
Logits = Sequence[NDArray[np.float32]]  # one array for each probe sample, [1, sequence length, vocabulary size]


class RunSetup(NamedTuple):
    """Initial checkpoint and device of all runs of a recipe.

    Attributes:
        source: Initial checkpoint of the recipe.
        devices: Number of GPUs of this machine; None if the ranks run on the CPU.
        backend: Communication backend, "gloo" or "nccl".
        note: Note for the user about the device; None for none.
    """

    source: Path
    devices: int | None
    backend: str
    note: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """One run of the trainer, as sent to the ranks.

    Attributes:
        recipe: Recipe of the run.
        source: Path of the initial checkpoint.
        resume_from: Path of the checkpoint to resume from; None to start from `source`.
        last_step: Last step of the run; 0 stops before the first step.
        saves: Step -> path of the checkpoint that is saved after it.
        snapshot_steps: Steps after which items are collected; the step of `resume_from` means before the first step.
        layout: Layout that replaces the recipe's; None for the recipe's.
        perturbation_seed: Seed of the perturbation of the embedding by 1 ULP; None for no perturbation.
        computes_logits: True to compute the logits of the probe samples at the end.
        events: Event of the run (see `Trainer`) -> function that is called with the trainer of each rank.
        log_file: File for a line of JSON per step; None for no file.
        measures_memory: True to measure the tensor memory of the last step.
    """

    recipe: Recipe
    source: Path
    resume_from: Path | None = None
    last_step: int
    saves: Mapping[int, Path] = field(default_factory=dict)
    snapshot_steps: Sequence[int] = ()
    layout: LayoutBlock | None = None
    perturbation_seed: int | None = None
    computes_logits: bool = False
    events: Mapping[str, EventHandler] = field(default_factory=dict)
    log_file: Path | None = None
    measures_memory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KillPoint:
    """File operation of a save at which ranks are killed.

    Attributes:
        root: Directory of all steps.
        operation: Name of the operation; None records all operations and kills nothing.
        rank: Global rank that is killed.
        kills_all_ranks: True to kill all ranks.
    """

    root: Path
    operation: str | None = None
    rank: int = 0
    kills_all_ranks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Results of a run on all ranks.

    Attributes:
        losses: Step -> loss.
        log_lines: Log line of each step, in order.
        start_items: Items of each rank before the first step; empty if they were not requested.
        items: Step -> items of each rank.
        shard_digests: Step -> for each rank, (parameter, shard) -> digest of the local bytes.
        logits: Logits of the probe samples at the end, in float32; None if they were not requested.
        sharded_counts: Number of parameters that are sharded over ranks, and number of all parameters.
        notes: Notes for the user.
        measured_memory: Bytes of tensors at the peak of the last step, and between steps, maximum over ranks; None if
            not measured.
    """

    losses: Mapping[int, float]
    log_lines: Sequence[str]
    start_items: Sequence[Items]
    items: Mapping[int, Sequence[Items]]
    shard_digests: Mapping[int, Sequence[Mapping[tuple[str, str], str]]]
    logits: Logits | None
    sharded_counts: tuple[int, int]
    notes: Sequence[str]
    measured_memory: tuple[int, int] | None = None


def max_difference(reference: Logits, actual: Logits) -> float:
    """Return the largest absolute difference of two lists of logits, which have the same length.

    NaN if shapes differ; NaN or infinity if an element is not finite.
    """
    distances = [
        float(np.abs(first - second).max()) if first.shape == second.shape else float("nan")
        for first, second in zip(reference, actual, strict=True)
    ]
    return float("nan") if any(each != each for each in distances) else max(distances, default=0.0)
