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
_GRACE = 10.0  # seconds that a command gets to end after SIGTERM: launchers end their ranks meanwhile
_PATIENCE = 1.0  # seconds in which helpers of a command that has ended end by themselves
_POLITE = 2.0  # seconds between SIGTERM and SIGKILL for what has not
_STUBBORN = 10.0  # seconds of SIGKILL before this process gives up, as for a process of another user
_LOOK = 60.0  # seconds between two looks at the clock
_LOOKS = 50  # at /proc, for what runs
_SHOWN = 200  # characters of a command line


class _Process(NamedTuple):
    """A process below this one.

    Attributes:
        pid: Its number.
        began: Start time in clock ticks, which distinguishes it from a later process of the same number.
        state: A letter, Z for a zombie.
    """

    pid: int
    began: str
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
        self._woken, wakes = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(wakes, False)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.code: int | None = None
        self.is_abandoned = False
        self._has_children = True
        self._command = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=2, stderr=2, env=environment, start_new_session=True
        )

    def wait(self, seconds: float, until: Callable[[], bool]) -> bool:
        """Wait until something is so; return False after so many seconds, or once ckptx has given up."""
        end = time.monotonic() + seconds
        while True:
            self._reap()
            left = end - time.monotonic()
            if until():
                return True
            if left <= 0:
                return False
            heard = [self._woken] if self.is_abandoned else [0, self._woken]
            ready, _, _ = select.select(heard, [], [], min(left, _LOOK))
            if 0 in ready and not os.read(0, 1 << 12):
                self.is_abandoned = True
                return False
            with suppress(BlockingIOError):
                os.read(self._woken, 1 << 12)

    def has_ended(self) -> bool:
        """Return whether the command has ended; what it started may still run."""
        return self.code is not None

    def is_alone(self) -> bool:
        """Return whether nothing runs below this process."""
        return not self._has_children

    def stop(self) -> None:
        """Ask the command to end, as launchers end their ranks then."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._command.pid, signal.SIGTERM)
        self.wait(_GRACE, self.has_ended)

    def end_all(self, is_polite: bool) -> list[str]:
        """End everything below this process, and return the command lines of what could not be ended."""
        if is_polite and not self.is_alone():
            _send(_below(), signal.SIGTERM)
            self.wait(_POLITE, self.is_alone)
        end = time.monotonic() + _STUBBORN
        while not self.is_alone() and time.monotonic() < end:
            below = _below()
            _send(below, signal.SIGKILL)  # what was forked meanwhile comes next
            if not below:  # a system that does not list processes
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._command.pid, signal.SIGKILL)
            self.wait(0.05, self.is_alone)
        return self.described()

    def described(self) -> list[str]:
        """Return the command lines of what runs; one that forks all the time can be missed by a single look."""
        for _ in range(_LOOKS):
            found = [_described(each) for each in _below() if each.state != "Z"]
            if found or self.is_alone():
                return found
            self.wait(0.01, self.is_alone)
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


def _send(processes: list[_Process], number: int) -> None:
    for each in processes:
        now = _process(each.pid)
        if now is not None and now[0].began == each.began:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(each.pid, number)


def _below() -> list[_Process]:
    """Return all processes below this one, where the system lists them."""
    children: dict[int, list[_Process]] = {}
    for name in _numbers():
        found = _process(name)
        if found is not None:
            children.setdefault(found[1], []).append(found[0])
    waiting, below = [os.getpid()], []
    while waiting:
        found_below = children.get(waiting.pop(), [])
        below += found_below
        waiting += [each.pid for each in found_below]
    return below


def _numbers() -> Iterator[int]:
    with suppress(OSError):
        yield from (int(name) for name in os.listdir("/proc") if name.isdecimal())


def _process(pid: int) -> tuple[_Process, int] | None:
    """Return a process and the number of its parent, or None if it is gone."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return _Process(pid, fields[19], fields[0]), int(fields[1])
    return None


def _described(process: _Process) -> str:
    """Return the command line of a process with its number."""
    line = ""
    with suppress(OSError):
        line = Path(f"/proc/{process.pid}/cmdline").read_text(encoding="utf-8", errors="replace")
        line = " ".join(line.rstrip("\0").split("\0"))
        line = line or Path(f"/proc/{process.pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    return f"{line[:_SHOWN] or 'a process'} (pid {process.pid})"


def _run(order: dict[str, Any]) -> dict[str, Any]:
    begin = time.monotonic()
    try:
        command = _Supervisor(order["words"], order["environment"])
    except (OSError, ValueError) as error:
        return {"error": str(error)}
    is_late = not command.wait(order["time_limit"], command.has_ended)
    if is_late:
        command.stop()
        left = []
    else:
        command.wait(_PATIENCE, command.is_alone)
        left = command.described()
    seconds = time.monotonic() - begin - (0 if is_late or not left else _PATIENCE)
    unkillable = command.end_all(is_polite=not is_late)
    return {
        "code": command.code, "seconds": seconds, "is_late": is_late, "left": left, "unkillable": unkillable,
    }  # fmt: skip


if __name__ == "__main__":
    received = b""
    while not received.endswith(b"\n"):
        more = os.read(0, 1 << 16)
        if not more:
            sys.exit(1)  # ckptx has ended before it said what to run
        received += more
    os.write(1, json.dumps(_run(json.loads(received))).encode() + b"\n")
