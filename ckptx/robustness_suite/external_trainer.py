"""Test a custom trainer by its output on disk: its command runs four times, without a hook in its code.

    uninterrupted  A    all steps, with a checkpoint at step N
    rerun          A'   the same run a second time: differences from A are noise, and give the noise of the loss
    load and save  Z    resumes from A's checkpoint of N for zero steps, and saves
    resumed        R    resumes from A's checkpoint of N to the end

Z must contain the state of A at N, item by item: items that differ were not restored. Steps would hide this, as one
step with a fresh optimizer changes every parameter. R must end in the state of A, in the items that A and A' have in
common, and its losses after N must equal those of A within the noise. Losses up to N are ignored, as some trainers log
them again when they resume.

No run may change the files of A: they are digested before and after each run, and the items of A are read when A ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import ckptx.runtime.training
from ckptx.errors import EnvironmentProblem, InputError, UsageError
from ckptx.report.report import Log
from ckptx.robustness_suite.causes import IN_NO_CHECKPOINT, likely_causes
from ckptx.robustness_suite.command_runs import CommandRun, CommandRuns
from ckptx.robustness_suite.event_files import require_tensorboard
from ckptx.robustness_suite.file_noise import following_steps, lines_on_files, noisy_files, not_compared_line
from ckptx.robustness_suite.judge import Findings, Judge
from ckptx.robustness_suite.losses import Losses
from ckptx.robustness_suite.oracles import (
    Difference,
    Items,
    Verdict,
    all_finite,
    compare,
    distance,
    failing,
    largest,
    measured,
    plain_number,
)
from ckptx.robustness_suite.reference_files import RunFiles, changes, snapshot
from ckptx.robustness_suite.stored_items import not_compared, sharding_of
from ckptx.runtime.training.recipe import ChecksBlock, ExternalBlock, Recipe
from ckptx.untrusted.printable import one_line
from ckptx.wording import counted

_NAMED = 4  # files listed in a cause
SHIPPED = Path(ckptx.runtime.training.__file__).parent / "recipes"
STRAIGHT, AGAIN, SAVED_AGAIN, RESUMED = "uninterrupted", "rerun", "load and save", "resumed"
_TITLES = {
    STRAIGHT: "uninterrupted run: all state in its checkpoints is finite",
    "sharded": "parameters were sharded over ranks",
    AGAIN: "the same run a second time: measures numerical noise",
    SAVED_AGAIN: "a checkpoint that is loaded and saved keeps all state",
    RESUMED: "resumed run ends in the same state as the uninterrupted run",
}
_COULD_NOT_BE_NAMED = (
    "this trainer cannot resume for zero steps, so only final states are compared: a difference is certain, but not "
    "which state was not restored, as one step spreads the difference to every parameter"
)
_TIMES = "differ between two runs of the same command, as files that contain times or paths do"
_AT_THE_END = (
    "all state in the checkpoint was restored, so other state was not saved, or the checkpoint was saved within a step"
)
_RESUMING = {SAVED_AGAIN: "run resumed for zero steps", RESUMED: "resumed run"}
_FROM_MODIFIED = (
    "the run resumed from a checkpoint that an earlier run had modified, which may have caused its differences"
)
# Oracles that state the cause themselves.
_SELF_EVIDENT = {
    "finite": "the state or a loss contains NaN or infinity",
    "sharded": "parameters are not sharded as checks.sharded requires",
}
# State that differs only if it was not restored, as a step does not spread differences to it.
_OF_ITSELF = ("adam step", "group", "scheduler", "step", "epoch", "samples", "rng", "batch", "rate")


T = TypeVar("T")
OnPhase = Callable[[Judge], None]


def run_external(
    recipe: Recipe,
    out: Path,
    log: Log | None = None,
    on_phase: OnPhase = lambda found: None,
    *,
    folder: Path = SHIPPED,
) -> Judge:
    """Run the command of a recipe four times, and compare its checkpoints and losses.

    Args:
        recipe: Recipe with a `train` block.
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
    phases.straight()
    phases.sharded()
    phases.again()
    phases.saved_again()
    phases.resumed()
    return phases.judge


class _CommandPhases:
    """The four runs of a command, and the phase of each."""

    def __init__(self, recipe: Recipe, out: Path, log: Log, on_phase: OnPhase, folder: Path) -> None:
        if recipe.train is None:
            raise UsageError(f"{recipe.name}: has no train.command, which a custom trainer requires")
        self.block: ExternalBlock = recipe.train
        self.checks: ChecksBlock = recipe.checks
        self.training = recipe.training
        self.save_at = min(self.training.save_at, default=0)
        self.judge = Judge(on_phase)
        self._runs = CommandRuns(self.block, self.training, out, folder)
        self._log = log
        self._ends: tuple[Items, Items] = ({}, {})
        self._saved: Items = {}
        self._reference: RunFiles | None = None
        self._losses: dict[int, float] = {}
        self._noise = 0.0
        self._changed: Verdict | None = None
        self._is_modified = False

    def check(self) -> None:
        """Check recipe and command before the first run."""
        steps = self.training.steps
        if not 0 < self.save_at < steps:
            raise UsageError(
                f"training.save_at: {self.save_at} is not before the last step {steps}, so there are no steps after a "
                "resume to compare; set training.steps or training.save_at"
            )
        if self.block.losses_kind == "tensorboard":
            require_tensorboard("train.losses_kind tensorboard")
        self._runs.check()

    # ------------------------------------------------------------------------------------------------- the phases

    def straight(self) -> None:
        """Run A, the reference of all other runs."""
        run = self._run(STRAIGHT, self.training.steps, None)
        if run.has_failed:
            raise EnvironmentProblem(run.failure)
        self._sharding = sharding_of(self._runs.checkpoint(run, self.save_at))
        self.judge.world_size = self._sharding.world_size
        self._saved = self._runs.items(run, self.save_at)
        end = self._runs.items(run, self.training.steps)
        losses = self._read_losses(run)
        self._losses = losses.by_step
        self._ends = (end, end)
        self._reference = self._snapshot()
        notes = [*losses.notes, f"{counted(len(end), 'item')} in its last checkpoint"]
        notes += lines_on_files(not_compared(self._runs.checkpoint(run, self.training.steps)))
        self._add_run(run, [all_finite([end], losses.by_step)], notes)

    def sharded(self) -> None:
        """Check that parameters were sharded, or not, if the recipe has `checks.sharded`."""
        found = self._sharding
        if self.checks.sharded is None:
            return
        is_right = found.is_sharded == self.checks.sharded
        got, expected = ("sharded" if each else "not sharded" for each in (found.is_sharded, self.checks.sharded))
        differences = [] if is_right else [Difference("sharded", "placement of parameters", None, expected, got)]
        self._add("sharded", Findings([Verdict("sharded", 1, differences)], [f"{got}: {found.how}"]), 0.0)

    def again(self) -> None:
        """Run A', and measure the noise."""
        run = self._run(AGAIN, self.training.steps, None)
        if run.has_failed:
            raise EnvironmentProblem(run.failure)
        found = self._read(run, lambda: (self._runs.items(run, self.training.steps), self._read_losses(run)))
        if found is None:
            return
        first, (end, losses) = self._ends[0], found
        self._ends = (first, end)
        self._noise = largest(distance(*pair) for pair in _pairs(self._losses, losses.by_step, 0))
        self.judge.noise = {"loss": {"repeated": plain_number(self._noise), "perturbed": None}}
        by_time = noisy_files(first, end, {})
        verdicts = compare([_without(first, by_time)], [_without(end, by_time)])
        notes = [*losses.notes, f"noise of the loss: {self._noise:.3g}"]
        if by_time:
            notes.append(not_compared_line(by_time, _TIMES))
        different = [each for each in verdicts if each.differences]
        if different:
            count = sum(len(each.differences) for each in different)
            where = ", ".join(each.oracle for each in different)
            notes.append(
                f"two runs of the same command end in different states: {counted(count, 'item')} ({where}), which are "
                "not compared at the end of the resumed run; set seeds and deterministic kernels to have them compared"
            )
            if not self._noise:
                notes.append("losses do not show it: they are logged with too few digits, or before the difference")
        same = [each for each in verdicts if not each.differences]
        lacking = sorted(set(self._losses) ^ set(losses.by_step))
        missing = [_missing_loss(step, self._losses, losses.by_step) for step in lacking]
        loss = measured("loss", _pairs(self._losses, losses.by_step, 0), self._noise, 1.0, 1.0)
        loss = loss._replace(compared=len(self._losses), differences=missing)
        self._add_run(run, [*same, loss], notes, "two runs of the same command do not log the same losses")

    def saved_again(self) -> None:
        """Run Z, and compare it with A at step N: items that differ were not restored."""
        if not self.block.zero_steps:
            self._add(SAVED_AGAIN, Findings(skipped=_COULD_NOT_BE_NAMED), 0.0)
            return
        source, repeated = (
            self._runs.checkpoint_path(self._runs.out_of(STRAIGHT), self.save_at),
            self._runs.items_if_saved(AGAIN, self.save_at),
        )
        run = self._run(SAVED_AGAIN, self.save_at, source)
        if run.has_failed:
            self._add_failed_run(run)
            return
        stray = self._stray(run, self.save_at)
        if stray is not None:
            self._add_run(run, [stray], [], f"step count differs: {stray.differences[0].found}")
            return
        after = self._read(run, lambda: self._runs.items(run, self.save_at))
        if after is None:
            return
        noisy = noisy_files(self._saved, repeated, after)
        follows = following_steps(self._saved, after, self.training.steps, self.save_at)
        left_out = {*noisy, *follows}
        before, after = (_without(each, left_out) for each in (self._saved, after))
        verdicts = compare([before], [after])
        causes = likely_causes(verdicts, before, after)
        notes = [*causes]
        if noisy:
            notes.append(not_compared_line(noisy, _TIMES))
        if follows:
            notes.append(not_compared_line(follows, "are the number of steps given to the command"))
        self._add_run(run, verdicts, notes, "; ".join(causes))

    def resumed(self) -> None:
        """Run R, and compare its final state and its losses with those of A."""
        source = self._runs.checkpoint_path(self._runs.out_of(STRAIGHT), self.save_at)
        run = self._run(RESUMED, self.training.steps, source)
        if run.has_failed:
            self._add_failed_run(run)
            return
        read = self._read(run, lambda: (self._runs.items(run, self.training.steps), self._read_losses(run)))
        if read is None:
            return
        (found, losses), (first, second) = read, self._ends
        shared = {key for key in first if first[key] == second.get(key)}
        reference = {key: value for key, value in first.items() if key in shared}
        known = first.keys() | second.keys() | noisy_files(first, second, found)
        compared = {key: value for key, value in found.items() if key in shared or key not in known}
        verdicts = compare([reference], [compared])
        verdicts += [self._of_losses(losses.by_step)]
        why = [*self._cause_notes(verdicts)]
        short = _AT_THE_END if self.block.zero_steps else "one step spreads a fault to every parameter"
        self._add_run(run, verdicts, [*losses.notes, *why], "; ".join(["unknown", short, *why[1:]]) if why else "")

    def _cause_notes(self, verdicts: Sequence[Verdict]) -> Iterator[str]:
        """Yield notes on the cause of different final states, if the run for zero steps has none."""
        failed = [each.oracle for each in failing(verdicts)]
        was_named = any(row["name"] == SAVED_AGAIN and row["ok"] is False for row in self.judge.phases)
        if not failed or was_named:
            return
        yield IN_NO_CHECKPOINT if self.block.zero_steps else _COULD_NOT_BE_NAMED
        first = [oracle for oracle in _OF_ITSELF if oracle in failed]
        if first:
            yield f"check {', '.join(first)} first: it differs only if it was not restored"

    def _of_losses(self, found: Mapping[int, float]) -> Verdict:
        after = {step: loss for step, loss in self._losses.items() if step > self.save_at}
        if not after:
            raise InputError(
                f"{self._runs.losses_path(self._runs.out_of(STRAIGHT))}: no loss after step {self.save_at}, from which "
                "the resumed run continues; log every step"
            )
        times, default = self.checks.loss_times_noise, ChecksBlock().loss_times_noise
        verdict = measured("loss", _pairs(after, found, self.save_at), self._noise, times, default)
        steps = sorted({step for step in {*after, *found} if step > self.save_at})
        missing = [_missing_loss(step, after, found) for step in steps if (step in after) != (step in found)]
        return verdict._replace(compared=len(after), differences=missing)

    # ---------------------------------------------------------------------------------------------------- the runs

    def _run(self, name: str, steps: int, checkpoint: Path | None) -> CommandRun:
        if name != STRAIGHT and self._reference is None:
            self._reference = self._snapshot()
        run = self._runs.start(name, steps, checkpoint)
        self._check_reference(run)
        return run

    def _snapshot(self) -> RunFiles:
        """Digest the files of the straight run."""
        out = self._runs.out_of(STRAIGHT)
        steps = (self.save_at, self.training.steps)
        places = [self._runs.checkpoint_path(out, step) for step in steps]
        return snapshot(out, [*places, self._runs.losses_path(out)])

    def _check_reference(self, run: CommandRun) -> None:
        """Compare the files of the straight run with those before another run."""
        self._changed = None
        if self._reference is not None:
            after = self._snapshot()
            self._changed = changes(self._reference, after)
            self._reference = after

    def _read(self, run: CommandRun, read: Callable[[], T]) -> T | None:
        """Return the results of a run; None, with the phase failed, if a run that changed the reference has none.

        Raises:
            InputError: The run has no results and did not change the reference, so the recipe is wrong.
        """
        try:
            return read()
        except InputError as error:
            if self._changed is None or self._changed.ok is not False:
                raise
            self._add_run(run, [], [str(error)], failed=True)
            return None

    def _add_failed_run(self, run: CommandRun) -> None:
        """Report a run of the command that failed."""
        self._add_run(run, [], [run.failure], run.failure, failed=True)

    def _stray(self, run: CommandRun, step: int) -> Verdict | None:
        """Return a failed verdict if a run saved another step than the one where it had to stop, else None."""
        other = self._runs.last_other_step(run, step)
        if other is None:
            return None
        found = f"resumed at step {self.save_at} and stopped after step {step}, it saved step {other}"
        item = f"step of the last checkpoint, {self._runs.checkpoint_path(run.out, other).name}"
        return Verdict("step", 1, [Difference("step", item, None, str(step), found)])

    def _read_losses(self, run: CommandRun) -> Losses:
        losses = self._runs.losses(run)
        self.judge.add_losses(run.name, losses.by_step)
        return losses

    # ------------------------------------------------------------------------------------------------- the report

    def _add_run(
        self, run: CommandRun, verdicts: Sequence[Verdict], notes: Sequence[str], cause: str = "", failed: bool = False
    ) -> None:
        notes = [*notes, *run.ended.notes()]
        if self._changed is not None:
            verdicts = [self._changed, *verdicts]
            if self._changed.ok is False:
                cause = _modified_cause(run, self._changed)
                notes = [cause, *notes]
                self._is_modified = True
            elif self._is_modified and run.name in _RESUMING:
                notes = [*notes, _FROM_MODIFIED]
        self._add(run.name, Findings([*verdicts], [*notes], has_failed=failed), run.ended.seconds, cause)

    def _add(self, name: str, found: Findings, seconds: float, cause: str = "") -> None:
        cause = cause or _unknown_cause([*failing(found.verdicts)])
        row = self.judge.add(name, _TITLES[name], found, seconds, cause=cause)
        if row["ok"] is False:
            self._log.note(*(f"{row['name']}: {note}" for note in row["notes"]))


def _without(items: Items, keys: set[tuple[str, str]]) -> Items:
    return {key: value for key, value in items.items() if key not in keys}


def _modified_cause(run: CommandRun, changed: Verdict) -> str:
    """Return the cause of a failed `reference` verdict: the files that a run has modified."""
    shown = [f"{each.item} {each.found}" for each in changed.differences[:_NAMED]]
    more = len(changed.differences) - len(shown)
    listed = ", ".join(shown) + (f", and {more:,} more" if more else "")
    who = _RESUMING.get(run.name, "repeated run")
    return f"reference checkpoint was modified by the {who}: {listed}; use a separate output folder for each run"


def _unknown_cause(bad: Sequence[Verdict]) -> str:
    """Return the cause of a failed phase: the first oracle, and that its cause is unknown."""
    if not bad:
        return "unknown"
    first = bad[0]
    if first.oracle in _SELF_EVIDENT:
        return _SELF_EVIDENT[first.oracle]
    found = f"{counted(len(first.differences), 'item')} of {first.compared:,}" if first.differences else "a measurement"
    named = f", the first is {one_line(first.differences[0].item, 200)}" if first.differences else ""
    return f"unknown; {found} of {first.oracle} {'differs' if len(first.differences) < 2 else 'differ'}{named}"


def _pairs(reference: Mapping[int, float], found: Mapping[int, float], after: int) -> Iterator[tuple[float, float]]:
    return ((loss, found[step]) for step, loss in reference.items() if step > after and step in found)


def _missing_loss(step: int, reference: Mapping[int, float], found: Mapping[int, float]) -> Difference:
    said = [repr(each[step]) if step in each else None for each in (reference, found)]
    return Difference("loss", f"loss of step {step}", None, *said)
