"""What the ranks are told to do, and what they answer: nothing here needs torch."""

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
    """One run of the trainer, as it is told to the ranks.

    Attributes:
        recipe: What is trained.
        source: The checkpoint it begins with.
        resumed: The checkpoint it goes on from; None begins.
        until: The step it stops after; 0 stops before the first.
        saves: Step -> where it saves after it.
        looks: Steps after which its items are taken; that of `resumed` is before the first step.
        layout: The mesh, in place of the recipe's.
        moved: Which draw of the embedding moved by one unit in the last place; None moves nothing.
        probes: Whether logits are taken at the end.
        events: Called at moments of the run, see `Trainer`.
        lines: A file for a line of JSON of each step, or None.
        measures: Whether the bytes of the last step are counted.
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
    """What is done about the operations on files of a save.

    Attributes:
        root: The directory of all steps.
        at: The operation at which a rank ends; None notes all of them.
        rank: Which one.
        everyone: Whether all others end with it.
    """

    root: Path
    at: str | None = None
    rank: int = 0
    everyone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What all ranks found in a run.

    Attributes:
        losses: Step -> loss.
        said: A line for each step.
        start: The items of each rank before the first step; empty where none were asked for.
        items: Step -> the items of each rank.
        held: Step -> what each rank holds of the model.
        logits: At the end, of the probe, in float32; None where they were not taken.
        sharded: How many parameters of the model are cut over ranks, of how many.
        wrapped_layers: Layers that recompute their activations, on the rank with the most.
        notes: What the user should know.
        taken: Bytes of tensors at the peak of the last step, and after it, of the rank with the most; None where they
            were not counted.
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


def away(reference: Logits, found: Logits) -> float:
    """The largest distance of two sets of logits; NaN where one is not finite, or of another shape."""
    distances = [
        float(np.abs(first - second).max()) if first.shape == second.shape else float("nan")
        for first, second in zip(reference, found, strict=True)
    ]
    return float("nan") if any(each != each for each in distances) else max(distances, default=0.0)
