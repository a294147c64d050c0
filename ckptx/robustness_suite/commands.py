"""Commands of trainers that are not ours: put together from a recipe, run, and ended with everything they started."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from ckptx.errors import EnvironmentProblem, OutputError, UsageError
from ckptx.processes.rendezvous import without_launcher
from ckptx.storage.files import open_regular
from ckptx.untrusted.printable import one_line
from ckptx.wording import counted

_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)([:!.\[][^{}]*)?\}")
_NUMBERS = frozenset({"step", "steps", "save_at", "total_steps"})  # which may have a width
_WIDTH = re.compile(r":(0?[1-9][0-9]?)?d?")
_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_FAREWELL = 40.0  # seconds for the supervisor to end everything: its own limits, one after another, are below that
_LISTED = 6  # processes that a note names
_LAST_LINES, _TAIL = 6, 1 << 16
_RAISED = re.compile(r"(\[\w+\]:\s*)?([A-Za-z_][\w.]*(Error|Exception|Interrupt)|AssertionError)\b.*")


class CommandResult(NamedTuple):
    """How a command ended.

    Attributes:
        code: Its exit code; below zero the signal that ended it.
        seconds: How long it ran.
        last_lines: What it printed last; before it the first exception, which launchers print much after.
        is_late: It was ended because it took too long.
        left: Command lines of processes that still ran after it had ended, and were ended then.
        unkillable: Command lines of those that could not be ended.
    """

    code: int
    seconds: float
    last_lines: list[str]
    is_late: bool
    left: Sequence[str] = ()
    unkillable: Sequence[str] = ()

    def failure(self) -> str:
        """Why it did not end well, in a line."""
        if self.is_late:
            return f"was ended after {self.seconds:.0f} seconds, its time limit"
        return f"was ended by signal {-self.code}" if self.code < 0 else f"ended with exit code {self.code}"

    def notes(self) -> Iterator[str]:
        """Say which processes the command left running."""
        for found, fate in ((self.left, "ended by ckptx"), (self.unkillable, "could not be ended")):
            if found:
                shown = "; ".join(one_line(each, 120) for each in found[:_LISTED])
                more = f"; and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
                yield f"{counted(len(found), 'process')} of the command still ran after it: {shown}{more}; {fate}"


def words_of(template: str, values: Mapping[str, str], subject: str) -> list[str]:
    """The words of a command, as a shell takes them apart, with values in the place of placeholders.

    The template is taken apart first, so that a value is never more than a part of a word, whatever is in it. A word
    that is nothing but `{resume}` becomes the words of that value, or none: options are written so.

    Args:
        template: With `{name}` for each value.
        values: By name; that of `resume` is a text of words, quoted as for a shell.
        subject: Key of the recipe, for error messages.

    Raises:
        UsageError: A quote is not closed, a placeholder is unknown, or nothing is left.

    Example:
        "run --dir '{out}' {resume}", out "a b", resume "--from x" -> run, --dir, a b, --from, x
    """
    try:
        parts = shlex.split(template)
    except ValueError as error:
        raise UsageError(f"{subject}: {one_line(template, 120)!r} is no command: {error}; close the quote") from error
    words: list[str] = []
    for part in parts:
        if part == "{resume}" and "resume" in values:
            words += shlex.split(values["resume"])
        else:
            words.append(filled(part, values, subject))
    if not words:
        raise UsageError(f"{subject}: is empty, needed a command")
    return words


def filled(text: str, values: Mapping[str, str], subject: str) -> str:
    """A text with values in the place of placeholders.

    A number of steps may have a width, with a zero before it to fill it up: `{step:07d}`. No other format is known, so
    that braces with anything else in them, as in JSON, stay as they are.

    Raises:
        UsageError: A placeholder is unknown; the nearest is named. Or its format is not a width, or is one of a text.
    """

    def value(found: re.Match[str]) -> str:
        name, form = found[1], found[2] or ""
        if name not in values:
            if form and not (form != ":" and _WIDTH.fullmatch(form)):
                return found[0]
            near = get_close_matches(name, values, 1, 0.5)
            said = (
                f"did you mean {{{near[0]}}}?" if near else f"needed one of {', '.join(map('{{{}}}'.format, values))}"
            )
            raise UsageError(f"{subject}: the placeholder {{{one_line(name, 80)}}} is unknown; {said}")
        if not form:
            return values[name]
        if name not in _NUMBERS:
            raise UsageError(
                f"{subject}: the placeholder {one_line(found[0], 80)} has a format, which only "
                f"{', '.join(map('{{{}}}'.format, sorted(_NUMBERS)))} can have; write {{{name}}}"
            )
        if not _WIDTH.fullmatch(form):
            raise UsageError(
                f"{subject}: the placeholder {one_line(found[0], 80)} has the format {one_line(form, 40)!r}, which "
                f"must be a width below 100, filled with zeros or spaces; write it as {{{name}:07d}}"
            )
        return format(int(values[name]), form[1:])

    return _PLACEHOLDER.sub(value, text)


def placeholders(text: str) -> set[str]:
    """Return the names of the placeholders in a text, with or without a width."""
    return {found[1] for found in _PLACEHOLDER.finditer(text)}


def check_environment(variables: Mapping[str, str]) -> None:
    """Refuses variables that no process can have.

    Raises:
        UsageError: A name is empty or has "=" in it, or something has a NUL.
    """
    for key, value in variables.items():
        if not key or "=" in key or "\0" in key + value:
            raise UsageError(
                f'train.environment: {one_line(key, 80)!r} is no variable, needed a name without "=", and no NUL; '
                "correct it"
            )


def run_command(words: Sequence[str], log: Path, environment: Mapping[str, str], time_limit: float) -> CommandResult:
    """Runs a command to its end, with its output in a file.

    Whatever ends this call, an interruption too, ends the command and all that it started.

    Args:
        words: The command.
        log: Gets what it prints.
        environment: Variables besides those of this process.
        time_limit: Seconds.

    Raises:
        EnvironmentProblem: It cannot be started.
        OutputError: The file cannot be written.
    """
    variables = {**without_launcher(os.environ), **environment}
    order = {"words": [*words], "environment": variables, "time_limit": time_limit}
    try:
        output = log.open("wb")
    except OSError as error:
        raise OutputError(f"{log}: cannot be written: {error.strerror}") from error
    with output:
        try:
            supervisor = subprocess.Popen(
                [sys.executable, "-IS", str(_SUPERVISOR)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise EnvironmentProblem(f"{sys.executable}: cannot be started: {error}; check the installation") from error
    found = _report_of(supervisor, json.dumps(order).encode() + b"\n")
    if "error" in found:
        raise EnvironmentProblem(
            f"train.command: {one_line(words[0], 120)} cannot be started: {found['error']}; "
            "install it, or write its path"
        )
    return CommandResult(
        found["code"], found["seconds"], _last_lines(log), found["is_late"], found["left"], found["unkillable"]
    )


def _report_of(supervisor: subprocess.Popen[bytes], order: bytes) -> dict[str, Any]:
    """Tell the supervisor what to run, and return its report; an interruption makes it end everything.

    Raises:
        EnvironmentProblem: It ended without a report.
    """
    assert supervisor.stdin is not None and supervisor.stdout is not None
    try:
        with suppress(BrokenPipeError):  # it has ended; no report says so below
            supervisor.stdin.write(order)
            supervisor.stdin.flush()
        said = supervisor.stdout.read()
    finally:
        with suppress(BrokenPipeError):
            supervisor.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            supervisor.wait(_FAREWELL)
        supervisor.stdout.close()
    try:
        found: dict[str, Any] = json.loads(said)
    except ValueError:
        raise EnvironmentProblem(
            f"train.command: the process that waits for it ended with code {supervisor.returncode} and no report; "
            "check that the machine has enough memory"
        ) from None
    return found


def _last_lines(log: Path) -> list[str]:
    descriptor = open_regular(log)
    try:
        size = os.fstat(descriptor).st_size
        os.lseek(descriptor, max(0, size - _TAIL), os.SEEK_SET)
        text = os.read(descriptor, _TAIL).decode("utf-8", "replace")
    finally:
        os.close(descriptor)
    found = [one_line(line.strip(), 200) for line in text.splitlines() if line.strip()]
    raised = [line for line in found if _RAISED.fullmatch(line)][:1]
    last = found[-_LAST_LINES:]
    return last if not raised or raised[0] in last else [*raised, "...", *last]
