"""Run the command of a custom trainer, and find the checkpoints and losses that each run wrote."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from ckptx.errors import InputError, OutputError, UsageError
from ckptx.robustness_suite.commands import (
    CommandResult,
    check_environment,
    fill_placeholders,
    find_placeholders,
    run_command,
    split_command,
)
from ckptx.robustness_suite.losses import Losses, check_losses, read_losses
from ckptx.robustness_suite.oracles import Items
from ckptx.robustness_suite.stored_items import read_items
from ckptx.runtime.training.recipe import TrainerBlock, TrainingBlock
from ckptx.untrusted.printable import one_line

OUTPUT_FILE = "output.log"


class CommandRun(NamedTuple):
    """One run of the command.

    Attributes:
        name: Name of the phase.
        out: Output folder of the run.
        result: Exit code, time and last lines of output.
    """

    name: str
    out: Path
    result: CommandResult

    @property
    def has_failed(self) -> bool:
        """Return True if the command ended with an error, or did not end in time."""
        return bool(self.result.code) or self.result.is_timed_out

    @property
    def failure(self) -> str:
        """Return the failure in one line, with the last lines of the output."""
        tail = " | ".join(self.result.last_lines)
        ends = f"ends with: {tail}" if tail else "is empty"
        failure, output = self.result.failure_text(), self.out / OUTPUT_FILE
        return f"trainer.command, {self.name}: {failure}; its output {output} {ends}"


class CommandRuns:
    """Runs of the command of a recipe, each in its own folder."""

    def __init__(self, block: TrainerBlock, training: TrainingBlock, out: Path, folder: Path) -> None:
        """Prepare runs; nothing is run or written.

        Args:
            block: Block `trainer` of the recipe: the command, and the paths of its outputs.
            training: Number of steps, and the steps that are saved.
            out: Parent of the folders of all runs.
            folder: Folder of the recipe, for `{recipe}`.
        """
        self.block, self.training = block, training
        self.save_at = min(training.save_at, default=0)  # step to resume from; 0 if the recipe has none
        self._out, self._recipe_folder = out, folder

    def check(self) -> None:
        """Check that the command can start, and that its runs and checkpoints have separate paths.

        Raises:
            UsageError: A check fails; the message names the key of the recipe.
            OutputError: The parent of the folders is not empty.
        """
        block, values = self.block, self._placeholder_values(self._out, 0, None)
        arguments = split_command(block.command, values, "trainer.command")
        fill_placeholders(block.resume, {**values, "checkpoint": ""}, "trainer.resume")
        check_environment(self._environment(self._out, values))
        if any("\0" in argument for argument in arguments):
            raise UsageError("trainer.command: contains a NUL character, which arguments cannot contain; remove it")
        if not block.time_limit > 0:
            raise UsageError(f"trainer.time_limit: {block.time_limit:g} must be more than 0 seconds")
        templates = " ".join((block.command, *map(str, block.environment.values())))
        if not _receives_checkpoint(templates, block.resume):
            raise UsageError(
                "trainer.command: does not receive {checkpoint}, so every run would start from scratch; use {resume}, "
                "and {checkpoint} in trainer.resume"
            )
        for key, text in (("checkpoint", block.checkpoint), ("losses", block.losses)):
            path = fill_placeholders(
                text, dict.fromkeys(("step", "steps", "save_at", "total_steps"), "1"), f"trainer.{key}"
            )
            if path.startswith("/") or ".." in Path(path).parts:
                raise UsageError(
                    f"trainer.{key}: {one_line(text, 200)} must be a path relative to {{out}} and inside it, as each "
                    "run has its own folder"
                )
        if "step" not in find_placeholders(block.checkpoint):
            raise UsageError(
                f"trainer.checkpoint: {one_line(block.checkpoint, 200)} is the same for every step; save each step in "
                "its own folder, with {step} in the path"
            )
        check_losses(block)
        if self._out.exists() and any(self._out.iterdir()):
            raise OutputError(
                f"{self._out}: is not empty, and a trainer may resume from its files; use an empty folder"
            )

    def run_folder(self, name: str) -> Path:
        """Return the folder of the run of a phase."""
        return self._out / name.replace(" ", "-")

    def run(self, name: str, steps: int, checkpoint: Path | None) -> CommandRun:
        """Run the command and wait for its end.

        Args:
            name: Name of the phase.
            steps: Step after which the run stops.
            checkpoint: Checkpoint to resume from; None to start from scratch.

        Raises:
            OutputError: The folder of the run cannot be created.
            EnvironmentProblem: The command cannot be started.
        """
        out = self.run_folder(name)
        try:
            out.mkdir(parents=True)
        except OSError as error:
            raise OutputError(f"{out}: cannot be created: {error.strerror}") from error
        values = self._placeholder_values(out, steps, checkpoint)
        arguments = split_command(self.block.command, values, "trainer.command")
        environment = self._environment(out, values)
        return CommandRun(name, out, run_command(arguments, out / OUTPUT_FILE, environment, self.block.time_limit))

    # ---------------------------------------------------------------------------------------------- results

    def losses_path(self, out: Path) -> Path:
        """Return the path of the losses of a run in this folder."""
        return self._resolve_path(out, self.block.losses)

    def checkpoint_path(self, out: Path, step: int) -> Path:
        """Return the path of the checkpoint of a step of a run in this folder."""
        return self._resolve_path(out, self.block.checkpoint, step)

    def require_checkpoint(self, run: CommandRun, step: int) -> Path:
        """Return the path of the checkpoint of a step.

        Raises:
            InputError: The run did not save it.
        """
        path = self.checkpoint_path(run.out, step)
        if not path.exists():
            raise InputError(f"{path}: the command saved no checkpoint of step {step}; {_folder_text(run.out)}")
        return path

    def read_items(self, run: CommandRun, step: int) -> Items:
        """Return the items of the checkpoint of a step.

        Raises:
            InputError: The run did not save it, or it is damaged.
        """
        return read_items(self.require_checkpoint(run, step), run.out)

    def read_items_if_saved(self, name: str, step: int) -> Items:
        """Return the items of the checkpoint of a step of a phase's run; empty if the run did not save it."""
        out = self.run_folder(name)
        path = self.checkpoint_path(out, step)
        return read_items(path, out) if path.exists() else {}

    def last_unexpected_step(self, run: CommandRun, step: int) -> int | None:
        """Return the last step that a run saved instead of `step`; None if it saved `step` or nothing."""
        if self.checkpoint_path(run.out, step).exists():
            return None
        steps = range(self.training.steps + 2)
        return max((each for each in steps if self.checkpoint_path(run.out, each).exists()), default=None)

    def read_losses(self, run: CommandRun) -> Losses:
        """Read the losses of a run.

        Raises:
            InputError: The run wrote no losses, or they cannot be read.
        """
        path = self.losses_path(run.out)
        if not path.exists():
            raise InputError(f"{path}: the command wrote no losses; {_folder_text(run.out)}")
        return read_losses(path, self.block)

    # -------------------------------------------------------------------------------------------- arguments

    def _placeholder_values(self, out: Path, steps: int, checkpoint: Path | None) -> dict[str, str]:
        total = self.training.total_steps
        values = {
            "steps": str(steps),
            "total_steps": str(self.training.steps if total is None else total),
            "save_at": str(self.save_at),
            "out": str(out.absolute()),
            "python": sys.executable,
            "recipe": str(self._recipe_folder.absolute()),
            "checkpoint": "" if checkpoint is None else str(checkpoint.absolute()),
            "resume": "",
        }
        if checkpoint is not None:
            quoted = {key: quote(value) for key, value in values.items()}
            values["resume"] = fill_placeholders(self.block.resume, quoted, "trainer.resume")
        return values

    def _environment(self, out: Path, values: Mapping[str, str]) -> dict[str, str]:
        templates = self.block.environment
        return {
            key: fill_placeholders(str(value), values, f"trainer.environment.{key}") for key, value in templates.items()
        }

    def _resolve_path(self, out: Path, text: str, step: int = 0) -> Path:
        values = self._placeholder_values(out, self.training.steps, None)
        values["step"] = str(step)
        return out / fill_placeholders(text, values, "trainer.checkpoint")


def _receives_checkpoint(command: str, resume: str) -> bool:
    """Return True if a command line contains `{checkpoint}`, directly or through `{resume}`."""
    names = find_placeholders(command)
    return "checkpoint" in names or ("resume" in names and "checkpoint" in find_placeholders(resume))


def _folder_text(out: Path) -> str:
    names = sorted(str(path.relative_to(out)) for path in out.glob("*")) + sorted(
        str(path.relative_to(out)) for path in out.glob("*/*")
    )
    return f"its folder has {', '.join(names[:12])}{', ...' * (len(names) > 12)}" if names else "its folder is empty"
