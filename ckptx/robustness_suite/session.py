"""What the phases of one run share: the recipe, the ranks, and what earlier phases found, each found once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ckptx.errors import Defect
from ckptx.report.report import Log
from ckptx.robustness_suite.oracles import Verdict, distance, largest
from ckptx.robustness_suite.ranks import LeakedMemory, Ranks
from ckptx.robustness_suite.reference_files import RunFiles, changes, snapshot
from ckptx.robustness_suite.runs import Event, Logits, Run, RunResult, away
from ckptx.runtime.training.recipe import LayoutBlock, Recipe

_logger = logging.getLogger(__name__)

DRAWS = 3  # runs with the embedding moved by one unit in the last place


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """What a fault does, by the run that it does it in; nothing is planted where all of it is empty.

    Attributes:
        events: What is called at moments of a run, on its ranks.
        altered: What makes another run of it.
        published: What is called with its folder, when it is over.
    """

    events: Mapping[str, Mapping[str, Event]] = field(default_factory=dict)
    altered: Mapping[str, Callable[[Run], Run]] = field(default_factory=dict)
    published: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)


@dataclass(slots=True)
class Session:
    """One `ckptx robustness`.

    Attributes:
        recipe: What is trained, its mesh filled in.
        source: The checkpoint it begins with.
        out: Where everything is written.
        ranks: Live over the phases.
        is_exact: Whether two runs alike are expected to have the same bits, as on a CPU.
        devices: How many there are where each rank needs one; None where any number of ranks has room.
        log: What the user should know.
        planted: A fault, or nothing.
        losses: Of each run, by its name.
        kills: A row for each rank that was killed.
        residues: What ranks held after each task since it was last looked at.
        reference: The files that the straight run saved, as they were last seen; None before it ran.
        taken: Bytes of tensors at the peak of a step and after it, on the rank with the most; None before that.
    """

    recipe: Recipe
    source: Path
    out: Path
    ranks: Ranks
    is_exact: bool
    log: Log
    planted: InjectedFault = field(default_factory=InjectedFault)
    losses: dict[str, Mapping[int, float]] = field(default_factory=dict)
    kills: list[dict[str, Any]] = field(default_factory=list)
    residues: list[LeakedMemory] = field(default_factory=list)
    taken: tuple[int, int] | None = None
    devices: int | None = None
    reference: RunFiles | None = None
    _found: dict[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Number of ranks of the recipe's mesh."""
        return self.recipe.layout.dims.world_size

    @property
    def boundary(self) -> int:
        """The step that resumed runs go on from."""
        return self.recipe.training.save_at[0]

    def can_have(self, world_size: int) -> bool:
        """Whether there can be so many ranks: under torchrun as many as it started, else one for each device."""
        return self.ranks.can_have(world_size) and (
            self.ranks.is_launched or self.devices is None or world_size <= self.devices
        )

    def run_task(self, task: str, *args: Any, world_size: int | None = None, ranks: Ranks | None = None) -> Any:
        """What a task found; each rank knows what all of them found."""
        answers = (ranks or self.ranks).run(task, *args, world_size=world_size or self.world_size)
        if ranks is None:
            self.residues += [each.residue for each in answers.values() if each.residue is not None]
        return next(iter(answers.values())).value

    def run_until_killed(self, task: str, *args: Any) -> list[int]:
        """A task in which a rank may be killed; the ranks that a signal ended."""
        answers = self.ranks.run(task, *args, world_size=self.world_size, may_die=True)
        ended = [rank for rank, each in answers.items() if each.died is not None]
        if self.ranks.is_launched:  # each process saw its own
            ended = [rank for each in self.run_task("gathered", ended) for rank in each]
        return ended

    def once(self, function: Callable[..., object], *args: Any) -> Any:
        """Calls what is about files in one process: here, or under torchrun in rank 0, while all others wait for it.

        Conversions need no such thing: under torchrun they are one that all processes have a part in.
        """
        call = partial(function, *args)
        return self.run_task("called", call) if self.ranks.is_launched else call()

    def train(self, name: str, run: Run, ranks: Ranks | None = None) -> RunResult:
        """One run of the trainer, under a name that its losses and its faults go by."""
        run = replace(run, events=self.planted.events.get(name, {}), lines=self.out / f"{name}.jsonl")
        if name in self.planted.altered:
            run = self.planted.altered[name](run)
        layout = run.layout or run.recipe.layout
        outcome = self.run_task("train", run, world_size=layout.dims.world_size, ranks=ranks)
        assert isinstance(outcome, RunResult)
        self.losses[name] = outcome.losses
        for line in outcome.said:
            _logger.info("%s: %s", name, line)
        self.log.note(*outcome.notes)
        self.plant(name, self.folder(name))
        return outcome

    def plant(self, name: str, folder: Path) -> None:
        """What a fault does to the folder of a run that is over."""
        if name in self.planted.published:
            self.once(self.planted.published[name], folder)

    def folder(self, name: str) -> Path:
        """Where a run saves."""
        return self.out / name

    def saved(self, name: str, step: int) -> Path:
        """Where a run saves after a step."""
        return self.folder(name) / f"step-{step}"

    def reference_verdict(self) -> Verdict | None:
        """Return whether what the straight run saved is as it was when this was last asked; None before it ran."""
        if self.reference is None:
            return None
        before = self.reference
        self.reference = self.once(snapshot, self.folder("straight"), (), before)
        return changes(before, self.reference)

    @contextmanager
    def fresh_ranks(self) -> Iterator[Ranks]:
        """Interpreters of their own, which have nothing of the runs before."""
        with self.ranks.fresh() as found:
            yield found

    def checkpoint(self, step: int) -> Path:
        """What the straight run saved after a step; it runs first, if it has not."""
        assert self.straight
        return self.saved("straight", step)

    def run_of(self, **settings: Any) -> Run:
        """A run of the recipe to its end, with some settings."""
        given: dict[str, Any] = {"until": self.recipe.training.steps, **settings}
        return Run(recipe=self.recipe, source=self.source, **given)

    @property
    def stops(self) -> list[int]:
        """Steps after which the straight run saves: as the recipe says, one after the first of these, and the last."""
        training = self.recipe.training
        return sorted({*training.save_at, min(self.boundary + 1, training.steps), training.steps})

    @property
    def straight(self) -> RunResult:
        """The run that does not stop; everything else is held against it."""
        if "straight" not in self._found:
            saves = {step: self.saved("straight", step) for step in self.stops}
            run = self.run_of(saves=saves, looks=self.stops, probes=True)
            self._found["straight"] = self.train("straight", run)
            self.reference = self.once(snapshot, self.folder("straight"))
        found = self._found["straight"]
        assert isinstance(found, RunResult)
        return found

    @property
    def again(self) -> RunResult:
        """The same once more, without saving."""
        if "again" not in self._found:
            self._found["again"] = self.train("again", self.run_of(looks=self.stops, probes=True))
        found = self._found["again"]
        assert isinstance(found, RunResult)
        return found

    @property
    def noise(self) -> Mapping[str, Mapping[str, float]]:
        """What differences mean nothing: of two runs alike, and of runs from an embedding moved a little."""
        if "noise" not in self._found:
            repeated = _differences(self.straight, self.again)
            moved = [
                _differences(self.straight, self.train(f"moved-{draw}", self.run_of(moved=draw, probes=True)))
                for draw in range(DRAWS)
            ]
            self._found["noise"] = {
                kind: {"repeated": repeated[kind], "moved": largest(each[kind] for each in moved)} for kind in repeated
            }
        found: Mapping[str, Mapping[str, float]] = self._found["noise"]
        return found

    @property
    def noise_found(self) -> Mapping[str, Mapping[str, float]]:
        """The noise, if a phase needed it."""
        found: Mapping[str, Mapping[str, float]] = self._found.get("noise", {})
        return found

    def noise_of(self, kind: str) -> float:
        """The larger of the two."""
        return largest(self.noise[kind].values())

    @property
    def reference_logits(self) -> Logits:
        """Of the model as the straight run left it."""
        if self.straight.logits is None:
            raise Defect("robustness: no rank of the straight run had logits, needed those of the last stage")
        return self.straight.logits

    def on(self, layout: LayoutBlock) -> str:
        """A layout in words."""
        sizes = {
            "tp": layout.tp,
            "pp": layout.pp,
            "dp_shard": layout.dp_shard or 1,
            "dp_replicate": layout.dp_replicate,
        }
        return " x ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one rank"


def _differences(reference: RunResult, found: RunResult) -> dict[str, float]:
    losses = [distance(reference.losses[step], found.losses[step]) for step in reference.losses]
    logits = away(reference.logits or (), found.logits or ())
    return {"loss": largest(losses), "logits": logits}


def of_steps(losses: Mapping[int, float], steps: Sequence[int]) -> list[float]:
    """Losses of these steps, NaN where there is none."""
    return [losses.get(step, float("nan")) for step in steps]
