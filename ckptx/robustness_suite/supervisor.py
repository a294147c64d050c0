"""Run one command, wait for it, and end every process that it started. `commands` starts this file as a script.

A process that starts its own session, or forks twice, cannot be reached through its process group. This process is a
child subreaper (PR_SET_CHILD_SUBREAPER): orphans of the command become its children, so that all of its descendants
belong to the command. It is a separate process because ckptx may have other children.

    stdin     one line of JSON: arguments, environment, time_limit (seconds). End of file: end all processes now
    stderr    output of the command
    stdout    one line of JSON: code (null if the command could not be ended), seconds, is_timed_out (also true if stdin
              was closed), and two lists of command lines: remaining_processes, which ran after the command had ended,
              and unkillable, those of them that SIGKILL did not end; or error, if the command cannot be started

This file imports only the standard library, so that it starts in a few milliseconds.
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

_SET_CHILD_SUBREAPER = 36  # option of prctl(2)
_TERM_SECONDS = 10.0  # for a command to end after SIGTERM, in which launchers end their ranks
_EXIT_SECONDS = 1.0  # for helper processes to end by themselves after the command
_KILL_DELAY_SECONDS = 2.0  # between SIGTERM and SIGKILL for the other processes
_KILL_SECONDS = 10.0  # for processes to end after SIGKILL; those of another user never do
_POLL_SECONDS = 60.0  # longest wait before the time limit is checked
_MAX_LISTINGS = 50  # reads of /proc to find the running processes
_MAX_COMMAND_LENGTH = 200  # characters of a command line


class _Process(NamedTuple):
    """A descendant of this process.

    Attributes:
        pid: Process id.
        start_time: Start time in clock ticks; distinguishes it from a later process with the same id.
        state: State letter of Linux; Z for a zombie.
    """

    pid: int
    start_time: str
    state: str


class _Supervisor:
    """The command and its descendants.

    Attributes:
        code: Exit code of the command; negative for the signal that ended it; None while it runs.
        is_abandoned: True if ckptx has closed stdin, or has ended.
    """

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
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
            arguments, stdin=subprocess.DEVNULL, stdout=2, stderr=2, env=environment, start_new_session=True
        )

    def wait(self, seconds: float, condition: Callable[[], bool]) -> bool:
        """Wait until `condition` returns True; return False when the time is over, or when ckptx has ended."""
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
        """Return True if the command has ended; its descendants may still run."""
        return self.code is not None

    def has_no_children(self) -> bool:
        """Return True if this process has no children, and so no descendants."""
        return not self._has_children

    def stop(self) -> None:
        """Send SIGTERM to the command, as launchers then end their ranks, and wait for its end."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._command.pid, signal.SIGTERM)
        self.wait(_TERM_SECONDS, self.has_ended)

    def end_all(self, sends_sigterm: bool) -> list[str]:
        """End all descendants, and return the command lines of those that could not be ended.

        Args:
            sends_sigterm: True to send SIGTERM first, and SIGKILL after some seconds.
        """
        if sends_sigterm and not self.has_no_children():
            _send_signal(_descendants(), signal.SIGTERM)
            self.wait(_KILL_DELAY_SECONDS, self.has_no_children)
        deadline = time.monotonic() + _KILL_SECONDS
        while not self.has_no_children() and time.monotonic() < deadline:
            descendants = _descendants()
            _send_signal(descendants, signal.SIGKILL)  # processes forked meanwhile are found in the next round
            if not descendants:  # a system that does not list processes
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._command.pid, signal.SIGKILL)
            self.wait(0.05, self.has_no_children)
        return self.running_commands()

    def running_commands(self) -> list[str]:
        """Return the command lines of running descendants; retries, as one that keeps forking can be missed."""
        for _ in range(_MAX_LISTINGS):
            commands = [_command_line(each) for each in _descendants() if each.state != "Z"]
            if commands or self.has_no_children():
                return commands
            self.wait(0.01, self.has_no_children)
        return ["a process whose command line is unknown"]

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
    """Return all descendants of this process; empty if the system has no /proc."""
    children: dict[int, list[_Process]] = {}
    for pid in _pids():
        process = _read_process(pid)
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
    """Return a process and the id of its parent; None if it has ended."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return _Process(pid, fields[19], fields[0]), int(fields[1])
    return None


def _command_line(process: _Process) -> str:
    """Return the command line of a process, with its id."""
    line = ""
    with suppress(OSError):
        line = Path(f"/proc/{process.pid}/cmdline").read_text(encoding="utf-8", errors="replace")
        line = " ".join(line.rstrip("\0").split("\0"))
        line = line or Path(f"/proc/{process.pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    return f"{line[:_MAX_COMMAND_LENGTH] or 'a process'} (pid {process.pid})"


def _run(request: dict[str, Any]) -> dict[str, Any]:
    begin = time.monotonic()
    try:
        command = _Supervisor(request["arguments"], request["environment"])
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
        "code": command.code,
        "seconds": seconds,
        "is_timed_out": is_timed_out,
        "remaining_processes": remaining,
        "unkillable": unkillable,
    }


if __name__ == "__main__":
    received = b""
    while not received.endswith(b"\n"):
        more = os.read(0, 1 << 16)
        if not more:
            sys.exit(1)  # ckptx has ended before it sent the command
        received += more
    os.write(1, json.dumps(_run(json.loads(received))).encode() + b"\n")
