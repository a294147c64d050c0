"""Requests to ranks and their results; this module does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptx.robustness_suite.oracles import Items
from ckptx.runtime.training.recipe import LayoutBlock, Recipe

Event = Callable[[Any], None]  # is given the trainer of its rank
Logits = Sequence[NDArray[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of the trainer, as sent to the ranks.

    Attributes:
        recipe: Recipe of the run.
        source: Path of the initial checkpoint.
        resumed: Path of the checkpoint to resume from; None to start from `source`.
        until: Last step of the run; 0 stops before the first step.
        saves: Step -> path of the checkpoint that is saved after it.
        looks: Steps after which items are collected; the step of `resumed` means before the first step.
        layout: Layout that replaces the recipe's; None for the recipe's.
        moved: Seed of the perturbation of the embedding by 1 ULP; None for no perturbation.
        probes: True to compute the logits of the probe at the end.
        events: Functions that are called at events of the run, see `Trainer`.
        lines: File for a line of JSON per step; None for no file.
        measures: True to measure the tensor memory of the last step.
    """

    recipe: Recipe
    source: Path
    resumed: Path | None = None
    until: int
    saves: Mapping[int, Path] = field(default_factory=dict)
    looks: Sequence[int] = ()
    layout: LayoutBlock | None = None
    moved: int | None = None
    probes: bool = False
    events: Mapping[str, Event] = field(default_factory=dict)
    lines: Path | None = None
    measures: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KillPoint:
    """File operation of a save at which ranks are killed.

    Attributes:
        root: Directory of all steps.
        at: Name of the operation; None records all operations and kills nothing.
        rank: Global rank that is killed.
        everyone: True to kill all ranks.
    """

    root: Path
    at: str | None = None
    rank: int = 0
    everyone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Results of a run on all ranks.

    Attributes:
        losses: Step -> loss.
        said: Log line of each step.
        start: Items of each rank before the first step; empty if they were not requested.
        items: Step -> items of each rank.
        held: Step -> digests of the model's local shards, for each rank.
        logits: Logits of the probe at the end, in float32; None if they were not requested.
        sharded: Number of parameters that are sharded over ranks, and number of all parameters.
        wrapped_layers: Number of layers with activation checkpointing, maximum over ranks.
        notes: Notes for the user.
        taken: Bytes of tensors at the peak of the last step and after it, maximum over ranks; None if not measured.
    """

    losses: Mapping[int, float]
    said: Sequence[str]
    start: Sequence[Items]
    items: Mapping[int, Sequence[Items]]
    held: Mapping[int, Sequence[Mapping[tuple[str, str], str]]]
    logits: Logits | None
    sharded: tuple[int, int]
    wrapped_layers: int
    notes: Sequence[str]
    taken: tuple[int, int] | None = None


def max_difference(reference: Logits, found: Logits) -> float:
    """Return the largest absolute difference of two sets of logits; NaN if one is not finite or shapes differ."""
    distances = [
        float(np.abs(first - second).max()) if first.shape == second.shape else float("nan")
        for first, second in zip(reference, found, strict=True)
    ]
    return float("nan") if any(each != each for each in distances) else max(distances, default=0.0)
