"""Read the losses of a run by step, from the file or folder that its trainer wrote.

    jsonl           a file with one JSON object per line
    regex           a text file, such as the output of the command, and an expression with the groups `step` and `loss`
    tensorboard     a folder with event files, at any depth
    trainer_state   a trainer_state.json, whose `log_history` also has what was logged before a resume

A step with two different losses is refused, as it is unknown which is valid. NaN is accepted here; the oracles refuse
it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple

from ckptx.errors import EnvironmentProblem, InputError, UsageError
from ckptx.robustness_suite.event_files import read_scalars
from ckptx.runtime.training.recipe import TrainerBlock
from ckptx.storage.files import read_small
from ckptx.untrusted.json_text import parse_json
from ckptx.untrusted.limits import MAX_INDEX_BYTES
from ckptx.untrusted.printable import one_line

_COLOR_CODE = re.compile(r"\x1b\[[0-9;]*m")
_STEP_BITS = 63  # steps are less than 2**63
_MAX_SHOWN_LENGTH = 80  # characters of a value in a message
_MATCHER_SCRIPT = Path(__file__).with_name("matcher.py")
_MATCH_SECONDS = 10.0  # limit for all lines of a file
_START_SECONDS = 10.0  # for an interpreter to start on a busy machine


class Losses(NamedTuple):
    """Losses of a run.

    Attributes:
        by_step: Step -> loss, sorted by step.
        notes: Notes for the user, such as a truncated file.
    """

    by_step: dict[int, float]
    notes: list[str]


def read_losses(path: Path, block: TrainerBlock) -> Losses:
    """Read the losses of one run.

    Args:
        path: File, or folder of event files.
        block: Block of the recipe with format and keys of the losses.

    Raises:
        InputError: There are none, the file is damaged, or a step has two different losses.
        UsageError: The expression of the recipe is invalid, lacks a group, or takes too long on a line.
        EnvironmentProblem: TensorBoard is not installed, or the process that matches the expression failed.
    """
    notes: list[str] = []
    if block.losses_kind == "tensorboard":
        pairs = _read_tensorboard(path, block, notes)
    elif block.losses_kind == "regex":
        pairs = _read_text(path, block)
    elif block.losses_kind == "trainer_state":
        pairs = _read_trainer_state(path, block)
    else:
        pairs = _read_json_lines(path, block, notes)
    by_step: dict[int, float] = {}
    for step, loss in pairs:
        first_loss = by_step.setdefault(step, loss)
        if first_loss != loss and not (isnan(first_loss) and isnan(loss)):
            raise InputError(
                f"{path}: step {step} has two different losses, {first_loss!r} and {loss!r}; log from one rank only, "
                "and each run into its own folder"
            )
    if not by_step:
        raise InputError(f"{path}: contains no loss, {_searched_text(block)}; correct trainer.losses in the recipe")
    return Losses(dict(sorted(by_step.items())), notes)


def _searched_text(block: TrainerBlock) -> str:
    if block.losses_kind == "regex":
        return f"searched for {one_line(str(block.pattern), _MAX_SHOWN_LENGTH)}"
    if block.losses_kind == "tensorboard":
        return f'searched for the tag "{block.loss_key}"'
    return f'searched for "{block.step_key}" and "{block.loss_key}"'


def _read_json_lines(path: Path, block: TrainerBlock, notes: list[str]) -> Iterator[tuple[int, float]]:
    text = read_small(path, MAX_INDEX_BYTES).decode("utf-8", "replace")
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line, f"{path}, line {number}", "line")
        except InputError:
            if number < len(lines):
                raise
            notes.append(f"{path.name}: the last line is incomplete and was ignored")
            continue
        if isinstance(row, dict):
            yield from _parse_row(row, block, f"{path}, line {number}")


def _parse_row(row: dict[str, Any], block: TrainerBlock, subject: str) -> Iterator[tuple[int, float]]:
    step, loss = _nested_value(row, block.step_key), _nested_value(row, block.loss_key)
    if step is None or loss is None:
        return  # another kind of line, such as an evaluation
    yield _parse_step(step, subject), _parse_loss(loss, subject)


def _nested_value(row: dict[str, Any], key: str) -> Any:
    """Return the value of a key, which may be nested, such as `train.loss`; None if it is missing."""
    value: Any = row
    if key in row:
        return row[key]
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _parse_step(value: Any, subject: str) -> int:
    try:
        step = int(value) if isinstance(value, str) or float(value).is_integer() else None
    except (TypeError, ValueError, OverflowError):
        step = None
    if step is None or isinstance(value, bool) or not 0 <= step < 1 << _STEP_BITS:
        raise InputError(f"{subject}: the step is {one_line(repr(value), _MAX_SHOWN_LENGTH)}; expected an integer")
    return step


def _parse_loss(value: Any, subject: str) -> float:
    try:
        if not isinstance(value, bool):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise InputError(f"{subject}: the loss is {one_line(repr(value), _MAX_SHOWN_LENGTH)}; expected a number")


def check_losses(block: TrainerBlock) -> None:
    """Check the pattern of the losses before the first run; other formats have nothing to check.

    Raises:
        UsageError: See `_compile_pattern`.
    """
    if block.losses_kind == "regex":
        _compile_pattern(block)


def _compile_pattern(block: TrainerBlock) -> re.Pattern[str]:
    """Compile the pattern of the losses.

    Raises:
        UsageError: The pattern is missing, is not a valid regular expression, or lacks a group.
    """
    if block.pattern is None:
        raise UsageError(
            r"trainer.pattern: losses_kind: regex requires a pattern with the groups (?P<step>\d+) and (?P<loss>\S+)"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FutureWarning on syntax whose meaning may change
            pattern = re.compile(block.pattern)
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(
            f"trainer.pattern: {block.pattern!r} is not a valid regular expression: {error}; correct it"
        ) from error
    if not {"step", "loss"} <= set(pattern.groupindex):
        raise UsageError(
            f"trainer.pattern: {block.pattern!r} has no groups named step and loss; "
            r"write (?P<step>\d+) and (?P<loss>\S+)"
        )
    return pattern


def _read_text(path: Path, block: TrainerBlock) -> Iterator[tuple[int, float]]:
    pattern = _compile_pattern(block).pattern
    text = _COLOR_CODE.sub("", read_small(path, MAX_INDEX_BYTES).decode("utf-8", "replace"))
    for number, step, loss in _match_lines(pattern, text.split("\n"), path):
        subject = f"{path}, line {number}"
        yield _parse_step(step, subject), _parse_loss(loss, subject)


def _match_lines(pattern: str, lines: Sequence[str], path: Path) -> Sequence[tuple[int, str, str]]:
    """Return line number, step and loss of each match.

    Raises:
        UsageError: The expression takes too long on a line.
        EnvironmentProblem: The process that matches failed.
    """
    request = json.dumps({"pattern": pattern, "lines": [*lines], "seconds": _MATCH_SECONDS})
    command = [sys.executable, "-IS", "-W", "ignore", str(_MATCHER_SCRIPT)]
    limit = _MATCH_SECONDS * 2 + _START_SECONDS
    try:
        process = subprocess.run(
            command, input=request.encode(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=limit,
            check=False, start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:  # if the engine does not check for signals
        result: dict[str, Any] = {"timeout_line": None}
    else:
        if process.returncode:
            raise EnvironmentProblem(
                f"trainer.pattern: the process that matches it ended with code {process.returncode}; check that the "
                "machine has enough memory"
            )
        result = json.loads(process.stdout)
    if "timeout_line" in result:
        line = f" (stopped at line {result['timeout_line']})" if result["timeout_line"] else ""
        raise UsageError(
            f"trainer.pattern: {one_line(pattern, _MAX_SHOWN_LENGTH)!r} takes more than {_MATCH_SECONDS:g} seconds to "
            f"match {path}{line}; write it without a repetition inside a repetition, such as (a+)+"
        )
    matches: Sequence[tuple[int, str, str]] = result["matches"]
    return matches


def _read_trainer_state(path: Path, block: TrainerBlock) -> Iterator[tuple[int, float]]:
    state = parse_json(read_small(path, MAX_INDEX_BYTES).decode("utf-8", "replace"), path)
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list):
        raise InputError(f'{path}: has no list "log_history"; expected the trainer_state.json of transformers')
    for index, row in enumerate(history):
        if isinstance(row, dict):
            yield from _parse_row(row, block, f"{path}, log_history[{index}]")


def _read_tensorboard(path: Path, block: TrainerBlock, notes: list[str]) -> Iterator[tuple[int, float]]:
    files = sorted(path.rglob("*tfevents*")) if path.is_dir() else [path]
    if not files:
        raise InputError(f"{path}: contains no event files of TensorBoard; set trainer.losses to their folder")
    tags: set[str] = set()
    for file in files:
        for scalar in read_scalars(file, notes):
            tags.add(scalar.tag)
            if scalar.tag == block.loss_key:
                yield scalar.step, scalar.value
    if block.loss_key not in tags:
        listed = ", ".join(json.dumps(one_line(tag, _MAX_SHOWN_LENGTH)) for tag in sorted(tags)[:8]) or "none"
        raise InputError(f'{path}: no scalar "{block.loss_key}" in its event files; their tags are: {listed}')
