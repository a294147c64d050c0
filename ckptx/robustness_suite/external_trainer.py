"""Test a custom trainer by its output on disk: its command runs up to five times, without a hook in its code.

    uninterrupted  A    all steps, with a checkpoint at step N
    rerun          A'   the same run a second time: differences from A are noise, and give the noise of the loss
    load and save  Z    resumes from A's checkpoint of N for zero steps, and saves
    resumed        R    resumes from A's checkpoint of N to the end
    altered        X    resumes from a copy of A's checkpoint of N with altered weights: for zero steps, or to the end

Z must contain the state of A at N, item by item: items that differ were not restored. Steps would hide this, as one
step with a fresh optimizer changes every parameter. R must end in the state of A, in the items that A and A' have in
common, and its losses after N must equal those of A within the noise.

With a fixed seed, a trainer that ignores its checkpoint and starts from scratch passes these comparisons. So neither Z
nor R may log a loss of a step up to N, except in a trainer_state.json, which has the losses from before the resume; and
X, which no seed recreates, must not end in the state of Z or R.

No run may change the files of A: they are digested before and after each run, and the items of A are read when A ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from shutil import rmtree
from typing import TypeVar

import ckptx.runtime.training
from ckptx.errors import CkptxError, EnvironmentProblem, InputError, UsageError
from ckptx.report.report import Log
from ckptx.robustness_suite.altered_checkpoint import copy_altered
from ckptx.robustness_suite.causes import UNSAVED_STATE_CAUSES, likely_causes
from ckptx.robustness_suite.command_runs import CommandRun, CommandRuns
from ckptx.robustness_suite.event_files import require_tensorboard
from ckptx.robustness_suite.file_noise import (
    noisy_files,
    not_compared_file_notes,
    not_compared_note,
    step_count_settings,
)
from ckptx.robustness_suite.losses import Losses
from ckptx.robustness_suite.oracles import (
    Difference,
    Items,
    Verdict,
    abs_difference,
    check_finite,
    compare,
    compare_measurements,
    failed_verdicts,
    json_number,
    largest_value,
)
from ckptx.robustness_suite.reference_files import RunFiles, compare_file_snapshots, snapshot_files
from ckptx.robustness_suite.report_builder import Findings, ReportBuilder
from ckptx.robustness_suite.stored_items import detect_sharding, files_not_compared
from ckptx.runtime.training.recipe import ChecksBlock, Recipe, TrainerBlock
from ckptx.untrusted.printable import one_line
from ckptx.wording import counted

_MAX_LISTED_FILES = 4  # files listed in a cause
BUILT_IN_RECIPES = Path(ckptx.runtime.training.__file__).parent / "recipes"
UNINTERRUPTED, RERUN, LOAD_AND_SAVE, RESUMED = "uninterrupted", "rerun", "load and save", "resumed"
ALTERED, _ALTERED_SOURCE = "altered", "altered source"
_TITLES = {
    UNINTERRUPTED: "uninterrupted run: all state in its checkpoints is finite",
    "sharded": "parameters were sharded over ranks",
    RERUN: "the same run a second time: measures numerical noise",
    LOAD_AND_SAVE: "a checkpoint that is loaded and saved keeps all state",
    RESUMED: "resumed run ends in the same state as the uninterrupted run",
    ALTERED: "a run resumed from altered weights keeps the alteration",
}
_UNKNOWN_STATE_CAUSE = (
    "this trainer cannot resume for zero steps, so only final states are compared: a difference is certain, but not "
    "which state was not restored, as one step spreads the difference to every parameter"
)
_NOISY_FILE_REASON = "differ between two runs of the same command, as files that contain times or paths do"
_RESTORED_STATE_CAUSE = (
    "all state in the checkpoint was restored, so other state was not saved, or the checkpoint was saved within a step"
)
_RESUMED_RUN_NAMES = {
    LOAD_AND_SAVE: "run resumed for zero steps",
    RESUMED: "resumed run",
    ALTERED: "run resumed from altered weights",
}
_NOT_RESUMED_CAUSE = (
    "the trainer did not resume: it started from scratch; check that trainer.resume is an option that it reads, and "
    "that it fails if it finds no checkpoint"
)
_MODIFIED_SOURCE_NOTE = (
    "the run resumed from a checkpoint that an earlier run had modified, which may have caused its differences"
)
# Oracles that state the cause themselves.
_ORACLE_CAUSES = {
    "finite": "the state or a loss contains NaN or infinity",
    "sharded": "parameters are not sharded as checks.sharded requires",
}
# State that a difference in weights or moments seldom changes. A scheduler that computes from the current learning rate
# of the optimizer is an exception.
_STEP_INDEPENDENT_ORACLES = (
    "adam step",
    "param groups",
    "scheduler",
    "step",
    "epoch",
    "samples",
    "rng",
    "batch",
    "learning rate",
)


T = TypeVar("T")
OnPhase = Callable[[ReportBuilder], None]


def run_external(
    recipe: Recipe,
    out: Path,
    log: Log | None = None,
    on_phase: OnPhase = lambda builder: None,
    *,
    folder: Path = BUILT_IN_RECIPES,
) -> ReportBuilder:
    """Run the command of a recipe up to five times, and compare its checkpoints and losses.

    Args:
        recipe: Recipe with a `trainer` block.
        out: Parent of the folders of runs, each with the output of its command in output.log; absent or empty.
        log: Receives notes for the user.
        on_phase: Called after each phase with the results so far.
        folder: Folder of the recipe, for `{recipe}`.

    Raises:
        UsageError: The recipe has no command, an unknown placeholder, or no step to save at before the last.
        OutputError: `out` is not empty, or cannot be written.
        EnvironmentProblem: The command cannot be started, or a run without a resume fails, so nothing can be compared.
        InputError: A checkpoint or the losses are missing at the path in the recipe, or damaged.
    """
    phases = _CommandPhases(recipe, out, log or Log(), on_phase, folder)
    phases.check()
    phases.run_uninterrupted()
    phases.check_sharding()
    phases.run_rerun()
    phases.run_load_and_save()
    phases.run_resumed()
    phases.run_altered()
    return phases.report_builder


class _CommandPhases:
    """The runs of a command, A to X in the docstring of this module, and the phase of each."""

    def __init__(self, recipe: Recipe, out: Path, log: Log, on_phase: OnPhase, folder: Path) -> None:
        if recipe.trainer is None:
            raise UsageError(f"{recipe.name}: has no trainer.command, which a custom trainer requires; set it")
        self.block: TrainerBlock = recipe.trainer
        self.checks: ChecksBlock = recipe.checks
        self.training = recipe.training
        self.save_at = min(self.training.save_at, default=0)  # step N; 0 if the recipe has none
        self.report_builder = ReportBuilder(on_phase)
        self._runs = CommandRuns(self.block, self.training, out, folder)
        self._log = log
        self._final_items: tuple[Items, Items] = ({}, {})  # items of A and A' at the last step
        self._saved_items: Items = {}  # items of A at step N
        self._resumed_items: Items = {}  # items of R at the last step
        self._reference_files: RunFiles | None = None  # last snapshot of the files of A
        self._reference_losses: dict[int, float] = {}  # losses of A by step
        self._loss_noise = 0.0
        self._reference_verdict: Verdict | None = None  # verdict on the files of A after the last run; None after A
        self._is_reference_modified = False  # True if any run has modified the files of A

    def check(self) -> None:
        """Check recipe and command before the first run.

        Raises:
            UsageError, OutputError, EnvironmentProblem: See `run_external`.
        """
        steps = self.training.steps
        if not 0 < self.save_at < steps:
            raise UsageError(
                f"training.save_at: {self.save_at} is not before the last step {steps}, so there are no steps after a "
                "resume to compare; set training.steps or training.save_at"
            )
        if self.block.losses_kind == "tensorboard":
            require_tensorboard("trainer.losses_kind tensorboard")
        self._runs.check()

    # ------------------------------------------------------------------------------------------------- the phases

    def run_uninterrupted(self) -> None:
        """Run A, the reference of all other runs."""
        run = self._run_command(UNINTERRUPTED, self.training.steps, None)
        if run.has_failed:
            raise EnvironmentProblem(run.failure)
        self._sharding = detect_sharding(self._runs.require_checkpoint(run, self.save_at))
        self.report_builder.world_size = self._sharding.world_size
        self._saved_items = self._runs.read_items(run, self.save_at)
        final_items = self._runs.read_items(run, self.training.steps)
        losses = self._read_losses(run)
        self._reference_losses = losses.by_step
        self._final_items = (final_items, final_items)
        self._reference_files = self._snapshot()
        notes = [*losses.notes, f"{counted(len(final_items), 'item')} in its last checkpoint"]
        notes += not_compared_file_notes(files_not_compared(self._runs.require_checkpoint(run, self.training.steps)))
        self._add_run(run, [check_finite([final_items], losses.by_step)], notes)

    def check_sharding(self) -> None:
        """Check that parameters were sharded, or not, if the recipe has `checks.sharded`."""
        sharding = self._sharding
        if self.checks.sharded is None:
            return
        is_expected = sharding.is_sharded == self.checks.sharded
        actual, expected = ("sharded" if each else "not sharded" for each in (sharding.is_sharded, self.checks.sharded))
        differences = [] if is_expected else [Difference("sharded", "placement of parameters", None, expected, actual)]
        self._add_phase(
            "sharded", Findings([Verdict("sharded", 1, differences)], [f"{actual}: {sharding.evidence}"]), 0.0
        )

    def run_rerun(self) -> None:
        """Run A', and measure the noise."""
        run = self._run_command(RERUN, self.training.steps, None)
        if run.has_failed:
            raise EnvironmentProblem(run.failure)
        results = self._read_results(
            run, lambda: (self._runs.read_items(run, self.training.steps), self._read_losses(run))
        )
        if results is None:
            return
        reference_items, (repeated_items, losses) = self._final_items[0], results
        self._final_items = (reference_items, repeated_items)
        self._loss_noise = largest_value(
            abs_difference(*pair) for pair in _loss_pairs(self._reference_losses, losses.by_step)
        )
        self.report_builder.noise = {"loss": {"repeated": json_number(self._loss_noise), "perturbed": None}}
        noisy = noisy_files(reference_items, repeated_items, {})
        verdicts = compare([_without_items(reference_items, noisy)], [_without_items(repeated_items, noisy)])
        notes = [*losses.notes, f"noise of the loss: {self._loss_noise:.3g}"]
        if noisy:
            notes.append(not_compared_note(noisy, _NOISY_FILE_REASON))
        failed = [each for each in verdicts if each.differences]
        if failed:
            count = sum(len(each.differences) for each in failed)
            oracles_text = ", ".join(each.oracle for each in failed)
            notes.append(
                f"two runs of the same command end in different states: {counted(count, 'item')} ({oracles_text}); "
                "the end of the resumed run is compared without them; set seeds and deterministic kernels"
            )
            if not self._loss_noise:
                notes.append("losses do not show it: they are logged with too few digits, or before the difference")
        passed = [each for each in verdicts if not each.differences]
        unmatched_steps = sorted(set(self._reference_losses) ^ set(losses.by_step))
        missing = [_missing_loss_difference(step, self._reference_losses, losses.by_step) for step in unmatched_steps]
        loss = compare_measurements(
            "loss", _loss_pairs(self._reference_losses, losses.by_step), self._loss_noise, 1.0, 1.0
        )
        loss = loss._replace(compared=len(self._reference_losses), differences=missing)
        self._add_run(run, [*passed, loss], notes, "two runs of the same command do not log the same losses")

    def run_load_and_save(self) -> None:
        """Run Z, and compare it with A at step N: items that differ were not restored."""
        if not self.block.can_save_without_step:
            self._add_phase(LOAD_AND_SAVE, Findings(skip_reason=_UNKNOWN_STATE_CAUSE), 0.0)
            return
        source, repeated_items = (
            self._runs.checkpoint_path(self._runs.run_folder(UNINTERRUPTED), self.save_at),
            self._runs.read_items_if_saved(RERUN, self.save_at),
        )
        run = self._run_command(LOAD_AND_SAVE, self.save_at, source)
        if run.has_failed:
            self._add_failed_run(run)
            return
        resume_verdicts = self._resume_verdicts(self._losses_if_logged(run))
        step_verdict = self._unexpected_step_verdict(run, self.save_at)
        if step_verdict is not None:
            self._add_run(
                run, [*resume_verdicts, step_verdict], [], f"step count differs: {step_verdict.differences[0].actual}"
            )
            return
        resaved_items = self._read_results(run, lambda: self._runs.read_items(run, self.save_at))
        if resaved_items is None:
            return
        noisy = noisy_files(self._saved_items, repeated_items, resaved_items)
        step_settings = step_count_settings(self._saved_items, resaved_items, self.training.steps, self.save_at)
        ignored = {*noisy, *step_settings}
        source_items, resaved_items = (_without_items(each, ignored) for each in (self._saved_items, resaved_items))
        verdicts = compare([source_items], [resaved_items])
        causes = likely_causes(verdicts, source_items, resaved_items)
        notes = [*causes]
        verdicts = [*resume_verdicts, *verdicts]
        if noisy:
            notes.append(not_compared_note(noisy, _NOISY_FILE_REASON))
        if step_settings:
            notes.append(not_compared_note(step_settings, "are the number of steps given to the command"))
        self._add_run(run, verdicts, notes, "; ".join(causes))

    def run_resumed(self) -> None:
        """Run R, and compare its final state and its losses with those of A."""
        source = self._runs.checkpoint_path(self._runs.run_folder(UNINTERRUPTED), self.save_at)
        run = self._run_command(RESUMED, self.training.steps, source)
        if run.has_failed:
            self._add_failed_run(run)
            return
        results = self._read_results(
            run, lambda: (self._runs.read_items(run, self.training.steps), self._read_losses(run))
        )
        if results is None:
            return
        (resumed_items, losses), (reference_items, repeated_items) = results, self._final_items
        reproducible_keys = {key for key in reference_items if reference_items[key] == repeated_items.get(key)}
        expected = {key: value for key, value in reference_items.items() if key in reproducible_keys}
        known_keys = (
            reference_items.keys() | repeated_items.keys() | noisy_files(reference_items, repeated_items, resumed_items)
        )
        actual = {
            key: value for key, value in resumed_items.items() if key in reproducible_keys or key not in known_keys
        }
        verdicts = compare([expected], [actual])
        verdicts += [self._loss_verdict(losses.by_step)]
        verdicts += self._resume_verdicts(losses.by_step)
        self._resumed_items = resumed_items
        cause_notes = [*self._cause_notes(verdicts)]
        short_cause = (
            _RESTORED_STATE_CAUSE if self.block.can_save_without_step else "one step spreads a fault to every parameter"
        )
        self._add_run(
            run,
            verdicts,
            [*losses.notes, *cause_notes],
            "; ".join(["unknown", short_cause, *cause_notes[1:]]) if cause_notes else "",
        )

    def run_altered(self) -> None:
        """Run X, and check that its state has altered weights, which a run from scratch cannot have."""
        failed_names = [row["name"] for row in self.report_builder.phases if row["ok"] is False]
        if failed_names:
            self._skip_altered(f"the phase {failed_names[0]} failed")
            return
        if not self.block.can_load_altered:
            self._skip_altered("trainer.can_load_altered is false in the recipe")
            return
        can_save = self.block.can_save_without_step
        last_step = self.save_at if can_save else self.training.steps
        original_items = self._saved_items if can_save else self._resumed_items
        source = self._runs.checkpoint_path(self._runs.run_folder(UNINTERRUPTED), self.save_at)
        folder = self._runs.run_folder(_ALTERED_SOURCE)
        copy = self._runs.checkpoint_path(folder, self.save_at)
        try:
            altered = copy_altered(source, copy, self._saved_items)
            reason = altered.reason
            first, second = self._final_items
            keys = [key for key in altered.items if can_save or first.get(key) == second.get(key)]
            if altered.items and not keys:
                reason = "two runs of the same command end in different weights, so an alteration cannot be recognized"
            if reason:
                self._skip_altered(reason)
                return
            run = self._run_command(ALTERED, last_step, copy)
            items = {} if run.has_failed else self._runs.read_items_if_saved(ALTERED, last_step)
        except CkptxError as error:
            self._skip_altered(str(error))
            return
        finally:
            rmtree(folder, ignore_errors=True)
        if not any(key in items for key in keys):
            failure = run.failure if run.has_failed else f"it saved no checkpoint of step {last_step}"
            self._skip_altered(f"the trainer does not run from a copy of its checkpoint: {failure}", run)
            return
        unaltered = [key for key in keys if items.get(key) == original_items.get(key)]
        differences = [
            Difference("resume", name, None, "altered", "as without the alteration") for _, name in unaltered
        ]
        verdict = Verdict("resume", len(keys), differences if len(unaltered) == len(keys) else [])
        self._add_run(run, [verdict], [], f"{_NOT_RESUMED_CAUSE}, or it overwrites the loaded weights")

    def _skip_altered(self, reason: str, run: CommandRun | None = None) -> None:
        """Report that it was not checked whether the trainer loads the weights, and why."""
        seconds = 0.0 if run is None else run.result.seconds
        self._add_phase(ALTERED, Findings(skip_reason=f"not checked with altered weights: {reason}"), seconds)

    def _losses_if_logged(self, run: CommandRun) -> Mapping[int, float]:
        """Return the losses of a run that need not log any."""
        try:
            return self._runs.read_losses(run).by_step
        except InputError:
            return {}

    def _resume_verdicts(self, losses: Mapping[int, float]) -> list[Verdict]:
        """Return the verdict on the steps of which a resumed run logged losses: none if it logged no loss.

        A trainer that numbers steps from 0 may log step N: it is the first step after the resume, or the state at it.
        """
        if self.block.losses_kind == "trainer_state" or not losses:
            return []
        first_step = self.save_at + (1 if min(self._reference_losses, default=1) else 0)
        differences = [
            Difference("resume", f"loss of step {step}", None, "not logged, as the checkpoint has it", repr(loss))
            for step, loss in losses.items()
            if step < first_step
        ]
        return [Verdict("resume", len(losses), differences)]

    def _cause_notes(self, verdicts: Sequence[Verdict]) -> Iterator[str]:
        """Yield notes on the cause of different final states, unless an earlier phase or `resume` shows the cause."""
        failed = [each.oracle for each in failed_verdicts(verdicts)]
        has_named_cause = any(row["name"] == LOAD_AND_SAVE and row["ok"] is False for row in self.report_builder.phases)
        if not failed or has_named_cause or "resume" in failed:
            return
        yield UNSAVED_STATE_CAUSES if self.block.can_save_without_step else _UNKNOWN_STATE_CAUSE
        independent_oracles = [oracle for oracle in _STEP_INDEPENDENT_ORACLES if oracle in failed]
        if independent_oracles:
            names = ", ".join(independent_oracles)
            yield f"check {names} first: differences of weights and moments seldom cause these"

    def _loss_verdict(self, resumed_losses: Mapping[int, float]) -> Verdict:
        reference_losses = {step: loss for step, loss in self._reference_losses.items() if step > self.save_at}
        if not reference_losses:
            raise InputError(
                f"{self._runs.losses_path(self._runs.run_folder(UNINTERRUPTED))}: no loss after step {self.save_at}, "
                "from which the resumed run continues; log every step"
            )
        noise_factor, default_factor = self.checks.loss_noise_factor, ChecksBlock().loss_noise_factor
        verdict = compare_measurements(
            "loss",
            _loss_pairs(reference_losses, resumed_losses),
            self._loss_noise,
            noise_factor,
            default_factor,
        )
        steps = sorted({step for step in {*reference_losses, *resumed_losses} if step > self.save_at})
        missing = [
            _missing_loss_difference(step, reference_losses, resumed_losses)
            for step in steps
            if (step in reference_losses) != (step in resumed_losses)
        ]
        return verdict._replace(compared=len(reference_losses), differences=missing)

    # ---------------------------------------------------------------------------------------------------- the runs

    def _run_command(self, name: str, steps: int, checkpoint: Path | None) -> CommandRun:
        if name != UNINTERRUPTED and self._reference_files is None:
            self._reference_files = self._snapshot()
        run = self._runs.run(name, steps, checkpoint)
        self._check_reference(run)
        return run

    def _snapshot(self) -> RunFiles:
        """Digest the files of the uninterrupted run."""
        out = self._runs.run_folder(UNINTERRUPTED)
        steps = (self.save_at, self.training.steps)
        paths = [self._runs.checkpoint_path(out, step) for step in steps]
        return snapshot_files(out, [*paths, self._runs.losses_path(out)])

    def _check_reference(self, run: CommandRun) -> None:
        """Compare the files of the uninterrupted run with their state before `run`."""
        self._reference_verdict = None
        if self._reference_files is not None:
            current = self._snapshot()
            self._reference_verdict = compare_file_snapshots(self._reference_files, current)
            self._reference_files = current

    def _read_results(self, run: CommandRun, read: Callable[[], T]) -> T | None:
        """Return the results of a run.

        If the run has no results and modified the files of the reference, add a failed phase and return None.

        Raises:
            InputError: The run has no results and did not change the reference, so the recipe is wrong.
        """
        try:
            return read()
        except InputError as error:
            if self._reference_verdict is None or self._reference_verdict.ok is not False:
                raise
            self._add_run(run, [], [str(error)], has_failed=True)
            return None

    def _add_failed_run(self, run: CommandRun) -> None:
        """Report a run of the command that failed."""
        self._add_run(run, [], [run.failure], run.failure, has_failed=True)

    def _unexpected_step_verdict(self, run: CommandRun, step: int) -> Verdict | None:
        """Return a failed verdict if a run saved another step instead of `step`, its last one; otherwise None."""
        saved_step = self._runs.last_unexpected_step(run, step)
        if saved_step is None:
            return None
        description = f"resumed at step {self.save_at} and stopped after step {step}, it saved step {saved_step}"
        item = f"step of the last checkpoint, {self._runs.checkpoint_path(run.out, saved_step).name}"
        return Verdict("step", 1, [Difference("step", item, None, str(step), description)])

    def _read_losses(self, run: CommandRun) -> Losses:
        losses = self._runs.read_losses(run)
        reference = None if run.name == UNINTERRUPTED else UNINTERRUPTED
        self.report_builder.add_losses(run.name, losses.by_step, reference)
        return losses

    # ------------------------------------------------------------------------------------------------- the report

    def _add_run(
        self,
        run: CommandRun,
        verdicts: Sequence[Verdict],
        notes: Sequence[str],
        cause: str = "",
        has_failed: bool = False,
    ) -> None:
        """Add the phase of a run, with the verdict on the files of the reference.

        If the run modified these files, or logged a loss of a step before its checkpoint, that is the cause instead of
        `cause`.
        """
        notes = [*notes, *run.result.notes()]
        resume_steps = [
            each.item.rpartition(" ")[2]
            for verdict in verdicts
            if verdict.oracle == "resume" and run.name != ALTERED
            for each in verdict.differences
        ]
        if resume_steps:
            steps = f"steps {resume_steps[0]} to {resume_steps[-1]}" if resume_steps[1:] else f"step {resume_steps[0]}"
            cause = f"{_NOT_RESUMED_CAUSE}; it logged the loss of {steps}, but resumes after step {self.save_at}"
            notes = [cause, *notes]
        if self._reference_verdict is not None:
            verdicts = [self._reference_verdict, *verdicts]
            if self._reference_verdict.ok is False:
                cause = _modified_cause(run, self._reference_verdict)
                notes = [cause, *notes]
                self._is_reference_modified = True
            elif self._is_reference_modified and run.name in _RESUMED_RUN_NAMES:
                notes = [*notes, _MODIFIED_SOURCE_NOTE]
        self._add_phase(run.name, Findings([*verdicts], [*notes], has_failed=has_failed), run.result.seconds, cause)

    def _add_phase(self, name: str, findings: Findings, seconds: float, cause: str = "") -> None:
        cause = cause or _default_cause([*failed_verdicts(findings.verdicts)])
        row = self.report_builder.add(name, _TITLES[name], findings, seconds, cause=cause)
        if row["ok"] is False:
            self._log.note(*(f"{row['name']}: {note}" for note in row["notes"]))


def _without_items(items: Items, keys: set[tuple[str, str]]) -> Items:
    return {key: value for key, value in items.items() if key not in keys}


def _modified_cause(run: CommandRun, reference_verdict: Verdict) -> str:
    """Return the cause of a failed verdict on the reference files: the files that a run has modified."""
    shown = [f"{each.item} {each.actual}" for each in reference_verdict.differences[:_MAX_LISTED_FILES]]
    more = len(reference_verdict.differences) - len(shown)
    listed = ", ".join(shown) + (f", and {more:,} more" if more else "")
    run_name = _RESUMED_RUN_NAMES.get(run.name, "repeated run")
    return f"reference checkpoint was modified by the {run_name}: {listed}; use a separate output folder for each run"


def _default_cause(failed: Sequence[Verdict]) -> str:
    """Return the cause of a failed phase: that of its first failed oracle if known, else "unknown" and its items."""
    if not failed:
        return "unknown"
    first = failed[0]
    if first.oracle in _ORACLE_CAUSES:
        return _ORACLE_CAUSES[first.oracle]
    count_text = (
        f"{counted(len(first.differences), 'item')} of {first.compared:,}" if first.differences else "a measurement"
    )
    first_item_text = f", the first is {one_line(first.differences[0].item, 200)}" if first.differences else ""
    verb = "differs" if len(first.differences) < 2 else "differ"
    return f"unknown; {count_text} of {first.oracle} {verb}{first_item_text}"


def _loss_pairs(reference: Mapping[int, float], other: Mapping[int, float]) -> Iterator[tuple[float, float]]:
    return ((loss, other[step]) for step, loss in reference.items() if step in other)


def _missing_loss_difference(step: int, reference: Mapping[int, float], other: Mapping[int, float]) -> Difference:
    values = [repr(each[step]) if step in each else None for each in (reference, other)]
    return Difference("loss", f"loss of step {step}", None, *values)
