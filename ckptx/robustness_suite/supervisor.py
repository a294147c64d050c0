"""Run one command, wait for it, and end every process that it started. `commands` starts this file as a script.

A process that leaves the session of its parent, or forks twice, is no longer reachable through its process group. This
process asks Linux for the orphans below it (PR_SET_CHILD_SUBREAPER), so that all descendants of the command stay below
this process, and only those are. It is a process of its own because ckptx may have other children.

    stdin     one line of JSON: words, environment, time_limit. End of file: end everything now
    stderr    output of the command
    stdout    one line of JSON: code, seconds, is_late, left, unkillable; or error, if the command cannot be started

It imports the standard library alone: it starts in a few milliseconds, without ckptx.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

_SET_CHILD_SUBREAPER = 36  # of prctl(2)
_TERM_SECONDS = 10.0  # seconds that a command gets to end after SIGTERM: launchers end their ranks meanwhile
_EXIT_SECONDS = 1.0  # seconds in which helpers of a command that has ended end by themselves
_KILL_DELAY_SECONDS = 2.0  # seconds between SIGTERM and SIGKILL for what has not
_KILL_SECONDS = 10.0  # seconds of SIGKILL before this process gives up, as for a process of another user
_POLL_SECONDS = 60.0  # seconds between two looks at the clock
_MAX_LISTINGS = 50  # at /proc, for what runs
_MAX_COMMAND_LENGTH = 200  # characters of a command line


class _Process(NamedTuple):
    """A process below this one.

    Attributes:
        pid: Its number.
        start_time: Start time in clock ticks, which distinguishes it from a later process of the same number.
        state: A letter, Z for a zombie.
    """

    pid: int
    start_time: str
    state: str


class _Supervisor:
    """The command and what it has started.

    Attributes:
        code: Exit code of the command, below zero the signal that ended it; None while it runs.
        is_abandoned: True if ckptx has closed stdin, or is gone.
    """

    def __init__(self, words: list[str], environment: dict[str, str]) -> None:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._wakeup_reader, wakeup_writer = os.pipe()
        os.set_blocking(self._wakeup_reader, False)
        os.set_blocking(wakeup_writer, False)
        signal.set_wakeup_fd(wakeup_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.code: int | None = None
        self.is_abandoned = False
        self._has_children = True
        self._command = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=2, stderr=2, env=environment, start_new_session=True
        )

    def wait(self, seconds: float, condition: Callable[[], bool]) -> bool:
        """Wait until something is so; return False after so many seconds, or once ckptx has given up."""
        end = time.monotonic() + seconds
        while True:
            self._reap()
            remaining = end - time.monotonic()
            if condition():
                return True
            if remaining <= 0:
                return False
            descriptors = [self._wakeup_reader] if self.is_abandoned else [0, self._wakeup_reader]
            ready, _, _ = select.select(descriptors, [], [], min(remaining, _POLL_SECONDS))
            if 0 in ready and not os.read(0, 1 << 12):
                self.is_abandoned = True
                return False
            with suppress(BlockingIOError):
                os.read(self._wakeup_reader, 1 << 12)

    def has_ended(self) -> bool:
        """Return whether the command has ended; what it started may still run."""
        return self.code is not None

    def has_no_children(self) -> bool:
        """Return whether nothing runs below this process."""
        return not self._has_children

    def stop(self) -> None:
        """Ask the command to end, as launchers end their ranks then."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._command.pid, signal.SIGTERM)
        self.wait(_TERM_SECONDS, self.has_ended)

    def end_all(self, sends_sigterm: bool) -> list[str]:
        """End everything below this process, and return the command lines of what could not be ended."""
        if sends_sigterm and not self.has_no_children():
            _send_signal(_descendants(), signal.SIGTERM)
            self.wait(_KILL_DELAY_SECONDS, self.has_no_children)
        deadline = time.monotonic() + _KILL_SECONDS
        while not self.has_no_children() and time.monotonic() < deadline:
            descendants = _descendants()
            _send_signal(descendants, signal.SIGKILL)  # what was forked meanwhile comes next
            if not descendants:  # a system that does not list processes
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._command.pid, signal.SIGKILL)
            self.wait(0.05, self.has_no_children)
        return self.running_commands()

    def running_commands(self) -> list[str]:
        """Return the command lines of what runs; one that forks all the time can be missed by a single look."""
        for _ in range(_MAX_LISTINGS):
            commands = [_command_line(each) for each in _descendants() if each.state != "Z"]
            if commands or self.has_no_children():
                return commands
            self.wait(0.01, self.has_no_children)
        return ["a process that could not be looked at"]

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if pid == self._command.pid:
                    self.code = self._command.returncode = os.waitstatus_to_exitcode(status)
        self._has_children = False


def _send_signal(processes: list[_Process], number: int) -> None:
    for each in processes:
        current = _read_process(each.pid)
        if current is not None and current[0].start_time == each.start_time:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(each.pid, number)


def _descendants() -> list[_Process]:
    """Return all processes below this one, where the system lists them."""
    children: dict[int, list[_Process]] = {}
    for name in _pids():
        process = _read_process(name)
        if process is not None:
            children.setdefault(process[1], []).append(process[0])
    pending, descendants = [os.getpid()], []
    while pending:
        own_children = children.get(pending.pop(), [])
        descendants += own_children
        pending += [each.pid for each in own_children]
    return descendants


def _pids() -> Iterator[int]:
    with suppress(OSError):
        yield from (int(name) for name in os.listdir("/proc") if name.isdecimal())


def _read_process(pid: int) -> tuple[_Process, int] | None:
    """Return a process and the number of its parent, or None if it is gone."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return _Process(pid, fields[19], fields[0]), int(fields[1])
    return None


def _command_line(process: _Process) -> str:
    """Return the command line of a process with its number."""
    line = ""
    with suppress(OSError):
        line = Path(f"/proc/{process.pid}/cmdline").read_text(encoding="utf-8", errors="replace")
        line = " ".join(line.rstrip("\0").split("\0"))
        line = line or Path(f"/proc/{process.pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    return f"{line[:_MAX_COMMAND_LENGTH] or 'a process'} (pid {process.pid})"


def _run(request: dict[str, Any]) -> dict[str, Any]:
    begin = time.monotonic()
    try:
        command = _Supervisor(request["words"], request["environment"])
    except (OSError, ValueError) as error:
        return {"error": str(error)}
    is_timed_out = not command.wait(request["time_limit"], command.has_ended)
    if is_timed_out:
        command.stop()
        remaining = []
    else:
        command.wait(_EXIT_SECONDS, command.has_no_children)
        remaining = command.running_commands()
    seconds = time.monotonic() - begin - (0 if is_timed_out or not remaining else _EXIT_SECONDS)
    unkillable = command.end_all(sends_sigterm=not is_timed_out)
    return {
        "code": command.code, "seconds": seconds, "is_late": is_timed_out, "left": remaining, "unkillable": unkillable,
    }  # fmt: skip


if __name__ == "__main__":
    received = b""
    while not received.endswith(b"\n"):
        more = os.read(0, 1 << 16)
        if not more:
            sys.exit(1)  # ckptx has ended before it said what to run
        received += more
    os.write(1, json.dumps(_run(json.loads(received))).encode() + b"\n")
