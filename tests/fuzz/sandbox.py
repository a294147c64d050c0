"""Runs a command in a forked child with limits, and says what became of it; and what must be true of any run."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

SECONDS = 10
MEMORY = 1 << 30  # more than that on top of what the parent has
OK, DIFFERENT = 0, 1
REFUSED = frozenset({2, 3, 4, 5, 6, 7})


class Outcome(NamedTuple):
    """What a child did: its exit code, or minus the signal that ended it; seconds; and what it printed."""

    code: int
    seconds: float
    said: str
    printed: str = ""


def run_child(work: Callable[[], int], log: Path) -> Outcome:
    """Runs `work` in a fork with stdout and stderr below `log`; an alarm ends it after `SECONDS`."""
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            for stream, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(log / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), stream)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(SECONDS)
            resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MEMORY,) * 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            code = work()
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException as error:  # a child that is to end with what it says, not as pytest
            os.write(2, f"\n{type(error).__name__}: {error}".encode("utf-8", "replace"))
            code = 98
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    printed, said = ((log / name).read_bytes().decode("utf-8", "replace") for name in ("out", "err"))
    return Outcome(code, time.monotonic() - began, said, printed)


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def command_line(arguments: list[str]) -> Callable[[], int]:
    """`ckptx ARGUMENTS` as work for a child."""

    def work() -> int:
        from ckptx.cli.main import main

        sys.argv = ["ckptx", *arguments]
        try:
            main()
        except SystemExit as left:
            return left.code if isinstance(left.code, int) else 0
        return 0

    return work


def _is_document(printed: str) -> bool:
    try:
        return "exit" in json.loads(printed)
    except ValueError:
        return False


def fault_of(outcome: Outcome, command: str) -> str | None:
    """What is wrong with how a command ended, whatever it was given."""
    code, seconds, said, printed = outcome
    if code == -signal.SIGALRM or seconds > SECONDS:
        return f"hangs ({seconds:.1f} s)"
    if code < 0:
        return f"ended by signal {-code}"
    allowed = {OK, DIFFERENT} if command in ("verify", "diff") else {OK}
    if code not in allowed | REFUSED:
        return f"exit {code}: {said.strip()[-300:]}"
    if "Traceback" in said or "internal error" in said:
        return f"a traceback at exit {code}"
    if code in REFUSED and len(said.strip().splitlines()) != 1:
        return f"exit {code} with {len(said.strip().splitlines())} lines"
    if "out of memory" in said:
        return f"needs more than {MEMORY} bytes"
    if printed.startswith("{") and not _is_document(printed):
        return "a document that is no JSON"
    if any(ord(each) < 32 and each != "\n" for each in said + printed):
        return "a control character printed"
    return None


Snapshot = dict[str, tuple[int, int, int]]


def snapshot(root: Path, but: str) -> Snapshot:
    """Every file below `root` but those below the name `but`, with what would change if it did."""
    found: Snapshot = {}
    for path in root.rglob("*"):
        name = str(path.relative_to(root))
        if name.partition("/")[0] != but:
            status, is_file = path.lstat(), not path.is_dir()
            found[name] = (status.st_ino, status.st_size * is_file, status.st_mtime_ns * is_file)
    return found
