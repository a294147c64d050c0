"""State that the phases of one run share: recipe, ranks, and cached results of earlier phases."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ckptx.errors import InternalError
from ckptx.report.report import Log
from ckptx.robustness_suite.oracles import Verdict, abs_difference, largest_value
from ckptx.robustness_suite.ranks import Ranks, RetainedMemory
from ckptx.robustness_suite.reference_files import RunFiles, compare_file_snapshots, snapshot_files
from ckptx.robustness_suite.run_requests import EventHandler, Logits, RunRequest, RunResult, max_difference
from ckptx.runtime.training.recipe import LayoutBlock, Recipe

_logger = logging.getLogger(__name__)

PERTURBED_RUNS = 3  # number of runs with an embedding perturbed by 1 ULP


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """Functions of an injected fault, by name of the run; all empty for no fault.

    Attributes:
        events: Run -> event of `Trainer` -> function that is called with the trainer at that event, on all ranks.
        request_changes: Run -> function that gets its `RunRequest` before it starts, and returns the one to use.
        file_changes: Run -> function that is called with the folder of the run when it has ended.
    """

    events: Mapping[str, Mapping[str, EventHandler]] = field(default_factory=dict)
    request_changes: Mapping[str, Callable[[RunRequest], RunRequest]] = field(default_factory=dict)
    file_changes: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """A training run, for the report.

    Attributes:
        losses: Step -> loss.
        compared_with: Name of the run whose losses are its reference; None for a run that is compared with no other.
        mesh: Mesh as text.
    """

    losses: Mapping[int, float]
    compared_with: str | None
    mesh: str


@dataclass(slots=True)
class Session:
    """State of one run of `ckptx robustness`.

    Attributes:
        recipe: Recipe, with a complete mesh.
        source: Path of the initial checkpoint.
        out: Output folder.
        ranks: Rank processes, which live over all phases.
        is_exact: True if identical runs must be bit-identical, as on a CPU.
        devices: Number of devices if each rank requires its own; None if ranks can share, as on a CPU.
        log: Receives notes for the user.
        injection: Injected fault; empty for none.
        runs: Training runs by name.
        kills: A row of the report for each killed save.
        memory_samples: Memory and threads of ranks after each task of the current phase.
        reference_files: Last snapshot of the files that the uninterrupted run saved; None before that run.
        measured_memory: Measured bytes of tensors at the peak of a step and between steps, maximum over ranks; None
            before the measurement.
    """

    recipe: Recipe
    source: Path
    out: Path
    ranks: Ranks
    is_exact: bool
    log: Log
    injection: InjectedFault = field(default_factory=InjectedFault)
    runs: dict[str, TrainedRun] = field(default_factory=dict)
    kills: list[dict[str, Any]] = field(default_factory=list)
    memory_samples: list[RetainedMemory] = field(default_factory=list)
    measured_memory: tuple[int, int] | None = None
    devices: int | None = None
    reference_files: RunFiles | None = None
    _cache: dict[str, Any] = field(default_factory=dict)  # "uninterrupted", "rerun" or "noise" -> its cached result
    _layouts_by_note: dict[str, list[str]] = field(default_factory=dict)  # note -> meshes of the runs that had it

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the recipe's mesh."""
        return self.recipe.layout.dims.world_size

    @property
    def resume_step(self) -> int:
        """Return the first saved step, from which the runs of phases 3, 5 and 7 and the first one of phase 6 resume."""
        return self.recipe.training.save_at[0]

    def supports_world_size(self, world_size: int) -> bool:
        """Return True if this number of ranks is possible: that of torchrun, or at most one per device."""
        return self.ranks.supports_world_size(world_size) and (
            self.ranks.is_launched or self.devices is None or world_size <= self.devices
        )

    def run_task(self, task: str, *args: Any, world_size: int | None = None, ranks: Ranks | None = None) -> Any:
        """Run a function of `tasks` on all ranks, and return its result, which is the same on each of them.

        Args:
            task: Name of the function.
            args: Picklable arguments after the rank context.
            world_size: Number of ranks; None for that of the recipe.
            ranks: Ranks to use; None for those of the session, whose memory is then added to `memory_samples`.
        """
        results = (ranks or self.ranks).run(task, *args, world_size=world_size or self.world_size)
        if ranks is None:
            self.memory_samples += [each.memory for each in results.values() if each.memory is not None]
        return next(iter(results.values())).value

    def run_until_killed(self, task: str, *args: Any) -> list[int]:
        """Run a task in which ranks may be killed, and return the killed ranks."""
        results = self.ranks.run(task, *args, world_size=self.world_size, may_die=True)
        killed = [rank for rank, each in results.items() if each.end_signal is not None]
        if self.ranks.is_launched:  # each process has the result of its own rank only
            killed = [rank for each in self.run_task("all_gather", killed) for rank in each]
        return killed

    def run_once(self, function: Callable[..., object], *args: Any) -> Any:
        """Call a function on files in one process: here, or under torchrun on rank 0 while the others wait.

        Conversions do not need this: under torchrun, all processes take part in them.
        """
        call = partial(function, *args)
        return self.run_task("call_on_rank_0", call) if self.ranks.is_launched else call()

    def train(
        self,
        name: str,
        request: RunRequest,
        ranks: Ranks | None = None,
        *,
        compared_with: str | None = "uninterrupted",
    ) -> RunResult:
        """Run the trainer, and return the results of all ranks.

        Args:
            name: Name of the run, for its folder, its losses and injected faults.
            request: Request to send to the ranks, without events and log file.
            ranks: Ranks to use; None for those of the session.
            compared_with: Name of the run whose losses are the reference; None for none.
        """
        request = replace(request, events=self.injection.events.get(name, {}), log_file=self.out / f"{name}.jsonl")
        if name in self.injection.request_changes:
            request = self.injection.request_changes[name](request)
        layout = request.layout or request.recipe.layout
        result = self.run_task("train", request, world_size=layout.dims.world_size, ranks=ranks)
        assert isinstance(result, RunResult)
        self.runs[name] = TrainedRun(result.losses, compared_with, self.layout_text(layout))
        for line in result.log_lines:
            _logger.info("%s: %s", name, line)
        for note in result.notes:
            self._note_run(self.layout_text(layout), note)
        self.apply_file_fault(name, self.folder(name))
        return result

    def _note_run(self, layout_text: str, note: str) -> None:
        """Add a note on a run, or its mesh to the same note on earlier runs."""
        layouts = self._layouts_by_note.setdefault(note, [])
        if layout_text in layouts:
            return
        previous = _run_note(layouts, note)
        layouts.append(layout_text)
        text = _run_note(layouts, note)
        if previous in self.log.notes:
            self.log.notes[self.log.notes.index(previous)] = text
        else:
            self.log.note(text)

    def apply_file_fault(self, name: str, folder: Path) -> None:
        """Apply an injected fault to the folder of a run that has ended."""
        if name in self.injection.file_changes:
            self.run_once(self.injection.file_changes[name], folder)

    def folder(self, name: str) -> Path:
        """Return the folder of a run's checkpoints."""
        return self.out / name

    def checkpoint_path(self, name: str, step: int) -> Path:
        """Return the path of a run's checkpoint of a step."""
        return self.folder(name) / f"step-{step}"

    def reference_verdict(self) -> Verdict | None:
        """Compare the files of the uninterrupted run with their last snapshot; return None before that run."""
        if self.reference_files is None:
            return None
        previous = self.reference_files
        self.reference_files = self.run_once(snapshot_files, self.folder("uninterrupted"), (), previous)
        return compare_file_snapshots(previous, self.reference_files)

    @contextmanager
    def fresh_ranks(self) -> Iterator[Ranks]:
        """Yield ranks in new interpreters, which share no state with earlier runs."""
        with self.ranks.with_new_interpreters() as ranks:
            yield ranks

    def uninterrupted_checkpoint(self, step: int) -> Path:
        """Return the checkpoint of a step of the uninterrupted run, which runs first if it has not."""
        assert self.uninterrupted_result
        return self.checkpoint_path("uninterrupted", step)

    def make_request(self, **settings: Any) -> RunRequest:
        """Return a request for a run of the recipe to its end, with these fields of `RunRequest` changed."""
        fields: dict[str, Any] = {"last_step": self.recipe.training.steps, **settings}
        return RunRequest(recipe=self.recipe, source=self.source, **fields)

    @property
    def saved_steps(self) -> list[int]:
        """Return the steps that the uninterrupted run saves: those of `save_at`, `resume_step + 1`, and the last."""
        training = self.recipe.training
        return sorted({*training.save_at, min(self.resume_step + 1, training.steps), training.steps})

    @property
    def uninterrupted_result(self) -> RunResult:
        """Return the result of the uninterrupted run, the reference of all other runs; the first access runs it."""
        if "uninterrupted" not in self._cache:
            saves = {step: self.checkpoint_path("uninterrupted", step) for step in self.saved_steps}
            request = self.make_request(saves=saves, snapshot_steps=self.saved_steps, computes_logits=True)
            self._cache["uninterrupted"] = self.train("uninterrupted", request, compared_with=None)
            self.reference_files = self.run_once(snapshot_files, self.folder("uninterrupted"))
        result = self._cache["uninterrupted"]
        assert isinstance(result, RunResult)
        return result

    @property
    def repeated_result(self) -> RunResult:
        """Return the result of an identical run without saves; the first access runs it."""
        if "rerun" not in self._cache:
            self._cache["rerun"] = self.train(
                "rerun", self.make_request(snapshot_steps=self.saved_steps, computes_logits=True)
            )
        result = self._cache["rerun"]
        assert isinstance(result, RunResult)
        return result

    @property
    def noise(self) -> Mapping[str, Mapping[str, float]]:
        """Return the noise of "loss" and "logits": the largest absolute differences from the uninterrupted run.

        Each has two values: "repeated", the difference of an identical run, and "perturbed", the largest difference of
        the runs whose embedding is perturbed by 1 ULP. The first access trains these runs.
        """
        if "noise" not in self._cache:
            repeated = _max_differences(self.uninterrupted_result, self.repeated_result)
            perturbed = [
                _max_differences(
                    self.uninterrupted_result,
                    self.train(f"perturbed-{seed}", self.make_request(perturbation_seed=seed, computes_logits=True)),
                )
                for seed in range(PERTURBED_RUNS)
            ]
            self._cache["noise"] = {
                kind: {"repeated": repeated[kind], "perturbed": largest_value(each[kind] for each in perturbed)}
                for kind in repeated
            }
        noise: Mapping[str, Mapping[str, float]] = self._cache["noise"]
        return noise

    @property
    def measured_noise(self) -> Mapping[str, Mapping[str, float]]:
        """Return `noise`, or an empty mapping if no phase has measured it."""
        noise: Mapping[str, Mapping[str, float]] = self._cache.get("noise", {})
        return noise

    def max_noise(self, kind: str) -> float:
        """Return the larger of both measurements of noise, for "loss" or "logits"."""
        return largest_value(self.noise[kind].values())

    @property
    def reference_logits(self) -> Logits:
        """Return the logits of the model at the end of the uninterrupted run."""
        if self.uninterrupted_result.logits is None:
            raise InternalError("robustness: no rank of the uninterrupted run returned the logits of the last stage")
        return self.uninterrupted_result.logits

    def layout_text(self, layout: LayoutBlock) -> str:
        """Return a layout as text: `tp 2 x dp_shard 4`, or `one rank`."""
        sizes = {
            "tp": layout.tp,
            "pp": layout.pp,
            "dp_shard": layout.dp_shard or 1,
            "dp_replicate": layout.dp_replicate,
        }
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"


def _run_note(layouts: Sequence[str], note: str) -> str:
    """Return a note with the meshes of its runs: `run on tp 2: ...`, or `runs on 2 meshes (tp 2, one rank): ...`."""
    if len(layouts) == 1:
        return f"run on {layouts[0]}: {note}"
    return f"runs on {len(layouts)} meshes ({', '.join(layouts)}): {note}"


def _max_differences(reference: RunResult, actual: RunResult) -> dict[str, float]:
    """Return the largest absolute differences of "loss" and "logits"."""
    losses = [abs_difference(reference.losses[step], actual.losses[step]) for step in reference.losses]
    logits = max_difference(reference.logits or (), actual.logits or ())
    return {"loss": largest_value(losses), "logits": logits}


def losses_of_steps(losses: Mapping[int, float], steps: Sequence[int]) -> list[float]:
    """Return the losses of these steps, NaN for a step without one."""
    return [losses.get(step, float("nan")) for step in steps]
