"""Build the command of a custom trainer from a recipe, run it, and end all processes that it started."""

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
from ckptx.processes.rendezvous import remove_launcher_variables
from ckptx.storage.files import open_regular
from ckptx.untrusted.printable import one_line
from ckptx.wording import counted

_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)([:!.\[][^{}]*)?\}")
# Placeholders that may have a width, as in {step:07d}.
_INTEGER_PLACEHOLDERS = frozenset({"step", "steps", "save_at", "total_steps"})
_FORMAT_WIDTH = re.compile(r":(0?[1-9][0-9]?)?d?")
_SUPERVISOR_SCRIPT = Path(__file__).with_name("supervisor.py")
_SHUTDOWN_SECONDS = 40.0  # for the supervisor to end all processes; longer than the sum of its own limits
_MAX_LISTED_PROCESSES = 6  # processes listed in a note
_MAX_LAST_LINES, _TAIL_BYTES = 6, 1 << 16
_EXCEPTION_LINE = re.compile(r"(\[\w+\]:\s*)?([A-Za-z_][\w.]*(Error|Exception|Interrupt)|AssertionError)\b.*")


class CommandResult(NamedTuple):
    """Result of a command.

    Attributes:
        code: Exit code; negative for the signal that ended the command; None if it could not be ended.
        seconds: Wall-clock time in seconds.
        last_lines: Last lines of the output, preceded by the first exception in its last 64 KiB if that is further up.
        is_timed_out: True if the command exceeded its time limit.
        remaining_processes: Command lines of processes that were still running after the command, and were ended.
        unkillable: Command lines of processes that could not be ended.
    """

    code: int | None
    seconds: float
    last_lines: list[str]
    is_timed_out: bool
    remaining_processes: Sequence[str] = ()
    unkillable: Sequence[str] = ()

    def failure_text(self) -> str:
        """Return the reason of the failure in one line."""
        if self.code is None:
            return f"could not be ended after {self.seconds:.0f} seconds, its time limit"
        if self.is_timed_out:
            return f"was ended after {self.seconds:.0f} seconds, its time limit"
        return f"was ended by signal {-self.code}" if self.code < 0 else f"ended with exit code {self.code}"

    def notes(self) -> Iterator[str]:
        """Yield notes on processes that were still running after the command."""
        if self.remaining_processes:
            count = counted(len(self.remaining_processes), "process")
            yield f"ckptx ended {count} that the command had left running: {_list_processes(self.remaining_processes)}"
        if self.unkillable:
            count = counted(len(self.unkillable), "process")
            pronoun = "it" if len(self.unkillable) == 1 else "them"
            yield (
                f"{count} of the command could not be ended: {_list_processes(self.unkillable)}; end {pronoun} before "
                "the next run"
            )


def _list_processes(command_lines: Sequence[str]) -> str:
    shown = ", ".join(f'"{one_line(each, 120)}"' for each in command_lines[:_MAX_LISTED_PROCESSES])
    more = len(command_lines) - _MAX_LISTED_PROCESSES
    return f"{shown} and {more} more" if more > 0 else shown


def split_command(template: str, values: Mapping[str, str], subject: str) -> list[str]:
    """Split a command into arguments as a shell does, and replace placeholders by values.

    The template is split before placeholders are replaced, so no value can add an argument. The only exception is an
    argument that is exactly `{resume}`, which becomes the arguments of its value, or none if the value is empty.

    Args:
        template: Command with placeholders such as `{out}`.
        values: Values by name of the placeholder; that of `resume` is a string of arguments, quoted as for a shell.
        subject: Key of the recipe, for error messages.

    Raises:
        UsageError: A quote is not closed, a backslash is the last character, a placeholder is unknown, or the command
            is empty.

    Example:
        "run --dir '{out}' {resume}", out "a b", resume "--from x" -> run, --dir, a b, --from, x
    """
    try:
        parts = shlex.split(template)
    except ValueError as error:
        raise UsageError(
            f"{subject}: {one_line(template, 120)!r} is not a valid command: {error}; close the quote, or remove a "
            "backslash at the end"
        ) from error
    arguments: list[str] = []
    for part in parts:
        if part == "{resume}" and "resume" in values:
            arguments += shlex.split(values["resume"])
        else:
            arguments.append(fill_placeholders(part, values, subject))
    if not arguments:
        raise UsageError(f"{subject}: is empty; set it to the command of the trainer")
    return arguments


def fill_placeholders(text: str, values: Mapping[str, str], subject: str) -> str:
    """Replace the placeholders in a string by values.

    A placeholder of an integer (see `_INTEGER_PLACEHOLDERS`) may have a width, with a zero before it for zero padding:
    `{step:07d}`. Other text in braces, such as JSON, is not changed.

    Raises:
        UsageError: A placeholder is unknown (the nearest is suggested), or its format is not a valid width.
    """

    def replacement(match: re.Match[str]) -> str:
        name, format_spec = match[1], match[2] or ""
        if name not in values:
            if format_spec and not (format_spec != ":" and _FORMAT_WIDTH.fullmatch(format_spec)):
                return match[0]
            near = get_close_matches(name, values, 1, 0.5)
            hint = f"did you mean {{{near[0]}}}?" if near else f"use one of {', '.join(map('{{{}}}'.format, values))}"
            raise UsageError(f"{subject}: the placeholder {{{one_line(name, 80)}}} is unknown; {hint}")
        if not format_spec:
            return values[name]
        if name not in _INTEGER_PLACEHOLDERS:
            raise UsageError(
                f"{subject}: the placeholder {one_line(match[0], 80)} has a format, which only "
                f"{', '.join(map('{{{}}}'.format, sorted(_INTEGER_PLACEHOLDERS)))} can have; write {{{name}}}"
            )
        if not _FORMAT_WIDTH.fullmatch(format_spec):
            raise UsageError(
                f"{subject}: the placeholder {one_line(match[0], 80)} has the format {one_line(format_spec, 40)!r}, "
                f"which must be a width below 100, filled with zeros or spaces; write it as {{{name}:07d}}"
            )
        return format(int(values[name]), format_spec[1:])

    return _PLACEHOLDER.sub(replacement, text)


def find_placeholders(text: str) -> set[str]:
    """Return the names of the placeholders in a string, with or without a width."""
    return {match[1] for match in _PLACEHOLDER.finditer(text)}


def check_environment(variables: Mapping[str, str]) -> None:
    """Check that a process can have these environment variables.

    Raises:
        UsageError: A name is empty or contains "=", or a name or value contains NUL.
    """
    for key, value in variables.items():
        if not key or "=" in key or "\0" in key + value:
            raise UsageError(
                f"trainer.environment: {one_line(key, 80)!r} is not a valid variable; the name must not be empty or "
                'contain "=", and neither name nor value may contain NUL'
            )


def run_command(
    arguments: Sequence[str], log: Path, environment: Mapping[str, str], time_limit: float
) -> CommandResult:
    """Run a command to its end, with its output in a file.

    If an exception such as KeyboardInterrupt ends this call early, the command and all its processes are ended.

    Args:
        arguments: Program and its arguments.
        log: File for its output.
        environment: Environment variables in addition to those of this process, without the variables of a launcher
            that make this process a rank.
        time_limit: Time limit in seconds.

    Raises:
        EnvironmentProblem: The command cannot be started.
        OutputError: The file cannot be written.
    """
    variables = {**remove_launcher_variables(os.environ), **environment}
    request = {"arguments": [*arguments], "environment": variables, "time_limit": time_limit}
    try:
        output = log.open("wb")
    except OSError as error:
        raise OutputError(f"{log}: cannot be written: {error.strerror}") from error
    with output:
        try:
            supervisor = subprocess.Popen(
                [sys.executable, "-IS", str(_SUPERVISOR_SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=output, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise EnvironmentProblem(f"{sys.executable}: cannot be started: {error}; check the installation") from error
    report = _exchange_with_supervisor(supervisor, json.dumps(request).encode() + b"\n")
    if "error" in report:
        raise EnvironmentProblem(
            f"trainer.command: {one_line(arguments[0], 120)} cannot be started: {report['error']}; "
            "install it, or write its path"
        )
    return CommandResult(
        report["code"],
        report["seconds"],
        _last_lines(log),
        report["is_timed_out"],
        report["remaining_processes"],
        report["unkillable"],
    )


def _exchange_with_supervisor(supervisor: subprocess.Popen[bytes], request: bytes) -> dict[str, Any]:
    """Send the command to the process that runs `supervisor.py`, and return its report.

    The report has the keys that `supervisor.py` lists: only `error` if the command cannot be started. On an
    interruption, the supervisor ends all processes.

    Raises:
        EnvironmentProblem: The supervisor ended without a report.
    """
    assert supervisor.stdin is not None and supervisor.stdout is not None
    try:
        with suppress(BrokenPipeError):  # it has ended; the missing report is handled below
            supervisor.stdin.write(request)
            supervisor.stdin.flush()
        answer = supervisor.stdout.read()
    finally:
        with suppress(BrokenPipeError):
            supervisor.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            supervisor.wait(_SHUTDOWN_SECONDS)
        supervisor.stdout.close()
    try:
        report: dict[str, Any] = json.loads(answer)
    except ValueError:
        raise EnvironmentProblem(
            f"trainer.command: the process that waits for it ended with code {supervisor.returncode} and no report; "
            "check that the machine has enough memory"
        ) from None
    return report


def _last_lines(log: Path) -> list[str]:
    descriptor = open_regular(log)
    try:
        size = os.fstat(descriptor).st_size
        os.lseek(descriptor, max(0, size - _TAIL_BYTES), os.SEEK_SET)
        text = os.read(descriptor, _TAIL_BYTES).decode("utf-8", "replace")
    finally:
        os.close(descriptor)
    lines = [one_line(line.strip(), 200) for line in text.splitlines() if line.strip()]
    exceptions = [line for line in lines if _EXCEPTION_LINE.fullmatch(line)][:1]
    last = lines[-_MAX_LAST_LINES:]
    return last if not exceptions or exceptions[0] in last else [*exceptions, "...", *last]
