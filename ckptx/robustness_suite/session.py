"""State that the phases of one run share: recipe, ranks, and cached results of earlier phases."""

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
from ckptx.robustness_suite.runs import Event, Logits, Run, RunResult, max_difference
from ckptx.runtime.training.recipe import LayoutBlock, Recipe

_logger = logging.getLogger(__name__)

DRAWS = 3  # runs with the embedding moved by one unit in the last place


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """Functions of an injected fault, by name of the run; all empty for no fault.

    Attributes:
        events: Run -> event -> function that is called with the trainer at that event, on all ranks.
        altered: Run -> function that returns a changed `Run` before it starts.
        published: Run -> function that is called with the folder of the run when it has ended.
    """

    events: Mapping[str, Mapping[str, Event]] = field(default_factory=dict)
    altered: Mapping[str, Callable[[Run], Run]] = field(default_factory=dict)
    published: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)


@dataclass(slots=True)
class Session:
    """State of one run of `ckptx robustness`.

    Attributes:
        recipe: Recipe, with a complete mesh.
        source: Path of the initial checkpoint.
        out: Output folder.
        ranks: Ranks, which live over all phases.
        is_exact: True if identical runs must be bit-identical, as on a CPU.
        devices: Number of devices if each rank requires its own; None if ranks can share, as on a CPU.
        log: Receives notes for the user.
        planted: Injected fault; empty for none.
        losses: Losses of each run, by name of the run.
        kills: A row for each rank that was killed.
        residues: Memory and threads of ranks after each task of the current phase.
        reference: Last snapshot of the files that the straight run saved; None before it ran.
        taken: Measured bytes of tensors at the peak of a step and after it, maximum over ranks; None before the
            measurement.
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
        """Return the number of ranks of the recipe's mesh."""
        return self.recipe.layout.dims.world_size

    @property
    def boundary(self) -> int:
        """Return the step that resumed runs start from."""
        return self.recipe.training.save_at[0]

    def can_have(self, world_size: int) -> bool:
        """Return True if this number of ranks is possible: that of torchrun, or at most one per device."""
        return self.ranks.can_have(world_size) and (
            self.ranks.is_launched or self.devices is None or world_size <= self.devices
        )

    def run_task(self, task: str, *args: Any, world_size: int | None = None, ranks: Ranks | None = None) -> Any:
        """Run a task on all ranks, and return its result, which is the same on each of them."""
        answers = (ranks or self.ranks).run(task, *args, world_size=world_size or self.world_size)
        if ranks is None:
            self.residues += [each.residue for each in answers.values() if each.residue is not None]
        return next(iter(answers.values())).value

    def run_until_killed(self, task: str, *args: Any) -> list[int]:
        """Run a task in which ranks may be killed, and return the ranks that were."""
        answers = self.ranks.run(task, *args, world_size=self.world_size, may_die=True)
        ended = [rank for rank, each in answers.items() if each.died is not None]
        if self.ranks.is_launched:  # each process saw its own
            ended = [rank for each in self.run_task("gathered", ended) for rank in each]
        return ended

    def once(self, function: Callable[..., object], *args: Any) -> Any:
        """Call a function on files in one process: here, or under torchrun on rank 0 while the others wait.

        Conversions do not need this: under torchrun, all processes take part in them.
        """
        call = partial(function, *args)
        return self.run_task("called", call) if self.ranks.is_launched else call()

    def train(self, name: str, run: Run, ranks: Ranks | None = None) -> RunResult:
        """Run the trainer; `name` identifies the run for its losses and for an injected fault."""
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
        """Apply an injected fault to the folder of a run that has ended."""
        if name in self.planted.published:
            self.once(self.planted.published[name], folder)

    def folder(self, name: str) -> Path:
        """Return the folder of a run's checkpoints."""
        return self.out / name

    def saved(self, name: str, step: int) -> Path:
        """Return the path of a run's checkpoint of a step."""
        return self.folder(name) / f"step-{step}"

    def reference_verdict(self) -> Verdict | None:
        """Compare the files of the straight run with the last snapshot of them; None before it ran."""
        if self.reference is None:
            return None
        before = self.reference
        self.reference = self.once(snapshot, self.folder("straight"), (), before)
        return changes(before, self.reference)

    @contextmanager
    def fresh_ranks(self) -> Iterator[Ranks]:
        """Yield ranks in new interpreters, which share no state with earlier runs."""
        with self.ranks.fresh() as found:
            yield found

    def checkpoint(self, step: int) -> Path:
        """Return the checkpoint of a step of the straight run, which runs first if it has not."""
        assert self.straight
        return self.saved("straight", step)

    def run_of(self, **settings: Any) -> Run:
        """Return a run of the recipe to its end, with these fields of `Run` changed."""
        given: dict[str, Any] = {"until": self.recipe.training.steps, **settings}
        return Run(recipe=self.recipe, source=self.source, **given)

    @property
    def stops(self) -> list[int]:
        """Return the steps that the straight run saves: those of the recipe, the one after the first, and the last."""
        training = self.recipe.training
        return sorted({*training.save_at, min(self.boundary + 1, training.steps), training.steps})

    @property
    def straight(self) -> RunResult:
        """Return the result of the uninterrupted run, the reference of all other runs."""
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
        """Return the result of an identical run without saves."""
        if "again" not in self._found:
            self._found["again"] = self.train("again", self.run_of(looks=self.stops, probes=True))
        found = self._found["again"]
        assert isinstance(found, RunResult)
        return found

    @property
    def noise(self) -> Mapping[str, Mapping[str, float]]:
        """Return the noise: differences of identical runs, and of runs with an embedding perturbed by 1 ULP."""
        if "noise" not in self._found:
            repeated = _differences(self.straight, self.again)
            moved = [
                _differences(self.straight, self.train(f"moved-{draw}", self.run_of(moved=draw, probes=True)))
                for draw in range(DRAWS)
            ]
            self._found["noise"] = {
                kind: {"repeated": repeated[kind], "perturbed": largest(each[kind] for each in moved)}
                for kind in repeated
            }
        found: Mapping[str, Mapping[str, float]] = self._found["noise"]
        return found

    @property
    def noise_found(self) -> Mapping[str, Mapping[str, float]]:
        """Return the noise, empty if no phase has measured it."""
        found: Mapping[str, Mapping[str, float]] = self._found.get("noise", {})
        return found

    def noise_of(self, kind: str) -> float:
        """Return the larger of both measurements of noise, for "loss" or "logits"."""
        return largest(self.noise[kind].values())

    @property
    def reference_logits(self) -> Logits:
        """Return the logits of the model at the end of the straight run."""
        if self.straight.logits is None:
            raise Defect("robustness: no rank of the straight run returned the logits of the last stage")
        return self.straight.logits

    def on(self, layout: LayoutBlock) -> str:
        """Return a layout in words."""
        sizes = {
            "tp": layout.tp,
            "pp": layout.pp,
            "dp_shard": layout.dp_shard or 1,
            "dp_replicate": layout.dp_replicate,
        }
        return " x ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one rank"


def _differences(reference: RunResult, found: RunResult) -> dict[str, float]:
    losses = [distance(reference.losses[step], found.losses[step]) for step in reference.losses]
    logits = max_difference(reference.logits or (), found.logits or ())
    return {"loss": largest(losses), "logits": logits}


def of_steps(losses: Mapping[int, float], steps: Sequence[int]) -> list[float]:
    """Return the losses of these steps, NaN for a step without one."""
    return [losses.get(step, float("nan")) for step in steps]
