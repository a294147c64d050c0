"""Commands of trainers that are not ours: put together from a recipe, run, and ended with everything they started."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from ckptx.errors import EnvironmentProblem, OutputError, UsageError
from ckptx.storage.files import open_regular
from ckptx.untrusted.printable import one_line

_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")
_GRACE = 10.0  # seconds for a launcher to end its ranks
_POLL = 0.05
_LAST_LINES, _TAIL = 6, 1 << 16
_RAISED = re.compile(r"(\[\w+\]:\s*)?([A-Za-z_][\w.]*(Error|Exception|Interrupt)|AssertionError)\b.*")
# What a launcher tells its ranks; a trainer that is started below one would take itself for one of them.
_OF_LAUNCHERS = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.+|TORCH_NCCL_ASYNC_ERROR_HANDLING"
)


class Ended(NamedTuple):
    """How a command ended.

    Attributes:
        code: Its exit code; below zero the signal that ended it.
        seconds: How long it ran.
        last_lines: What it printed last; before it the first exception, which launchers print much after.
        is_late: It was ended because it took too long.
    """

    code: int
    seconds: float
    last_lines: list[str]
    is_late: bool

    def said(self) -> str:
        """Why it did not end well, in a line."""
        if self.is_late:
            return f"was ended after {self.seconds:.0f} seconds, its time limit"
        return f"was ended by signal {-self.code}" if self.code < 0 else f"ended with exit code {self.code}"


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

    Raises:
        UsageError: A placeholder is unknown; the nearest is named.
    """

    def value(found: re.Match[str]) -> str:
        name = found[1]
        if name not in values:
            near = get_close_matches(name, values, 1, 0.5)
            said = (
                f"did you mean {{{near[0]}}}?" if near else f"needed one of {', '.join(map('{{{}}}'.format, values))}"
            )
            raise UsageError(f"{subject}: the placeholder {{{one_line(name, 80)}}} is unknown; {said}")
        return values[name]

    return _PLACEHOLDER.sub(value, text)


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


def run_command(words: Sequence[str], log: Path, environment: Mapping[str, str], time_limit: float) -> Ended:
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
    inherited = {key: value for key, value in os.environ.items() if not _OF_LAUNCHERS.fullmatch(key)}
    try:
        output = log.open("wb")
    except OSError as error:
        raise OutputError(f"{log}: cannot be written: {error.strerror}") from error
    begin = time.monotonic()
    with output:
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env={**inherited, **environment}, start_new_session=True,
            )  # fmt: skip
        except (OSError, ValueError) as error:
            raise EnvironmentProblem(
                f"train.command: {one_line(words[0], 120)} cannot be started: {error}; install it, or write its path"
            ) from error
        is_late = False
        try:
            process.wait(time_limit)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            _end(process)
    return Ended(process.returncode, time.monotonic() - begin, _last_lines(log), is_late)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that still runs and everything below it: politely, as launchers end their ranks then."""
    if process.poll() is None:
        below = {pid: _began(pid) for pid in (process.pid, *_below(process.pid))}
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
        for pid, began in below.items():  # ranks have sessions of their own below torchrun, and may outlive it
            if began is not None and _began(pid) == began:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _below(pid: int) -> Iterator[int]:
    """The processes below one, where the system says them."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    waiting = [pid]
    while waiting:
        found = children.get(waiting.pop(), [])
        yield from found
        waiting += found


def _began(pid: int) -> str | None:
    """When a process began, which tells it from a later one of the same number."""
    with suppress(OSError, IndexError):
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()[19]
    return None


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
