"""A sandbox in which a hostile situation is laid out, one command of ckptx is run, and what became of it is judged.

What holds in every situation, whatever its own expectations: the command ends in time, with an exit code of the
interface and never 70; an error is one line without a traceback; nothing outside DST is created, changed or removed;
a run that failed leaves neither DST nor anything beside it; a run that succeeded wrote what `verify` calls equal.
"""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.checkpoint_writers import LLAMA, llama, write_dcp, write_hf

CHECKOUT = Path(__file__).parents[2]
LIMIT = 60
"""Seconds that a command may take; the slowest takes under one on an idle machine, many times that beside others."""

_STEP = re.compile(r" *\d+\.\d{3} s  ")  # what `-v` says, which differs from run to run


@dataclass(frozen=True, slots=True)
class Box:
    """A directory to lay a situation out in.

    Attributes:
        root: Everything happens below it; it is the working directory of the command.
    """

    root: Path

    @property
    def dst(self) -> Path:
        """Where the command writes, unless the situation says otherwise."""
        return self.root / "out" / "dst"

    def hf(self, name: str = "hf", **settings: Any) -> Path:
        """A sound HF checkpoint of a tiny Llama."""
        return write_hf(self.root / name, llama(), **settings)

    def dcp(self, name: str = "dcp", **settings: Any) -> Path:
        """A sound DCP of a tiny Llama, with a config beside it."""
        return write_dcp(self.root / name, llama(), config=LLAMA, **settings)


class Try(NamedTuple):
    """What to run in a situation that has been laid out.

    Attributes:
        argv: Arguments of `ckptx`.
        env: Added to the environment; None removes a variable.
        before: Called in the process before it becomes ckptx, for limits and descriptors.
        shell: A shell line to run instead, with `ckptx` as `"$@"`.
    """

    argv: tuple[Any, ...]
    env: Mapping[str, str | None] = {}
    before: Callable[[], object] | None = None
    shell: str | None = None


@dataclass(frozen=True, slots=True)
class Situation:
    """One situation.

    Attributes:
        area: What is attacked or spoiled.
        name: What was tried, in words.
        exits: Exit codes that are right.
        said: Pattern that the error (or, for exit 0, either stream) must hold.
        lay: Lays it out and says what to run.
        may_change: Paths below the sandbox that may change besides DST.
    """

    area: str
    name: str
    exits: tuple[int, ...]
    said: str
    lay: Callable[[Box], Try]
    may_change: tuple[str, ...] = ()


class Done(NamedTuple):
    """How a command ended: exit code, or None when it was still running; what it said."""

    exit: int | None
    out: str
    err: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a situation.

    Attributes:
        exit: Exit code.
        line: The error, or the first line of output.
        wrong: What was not as it must be; empty when all was right.
    """

    exit: int | None
    line: str
    wrong: list[str] = field(default_factory=list)


SITUATIONS: list[Situation] = []


def situation(
    area: str, name: str, exits: int | tuple[int, ...], said: str = "", **settings: Any
) -> Callable[[Callable[[Box], Any]], None]:
    """Adds the situation that the decorated function lays out; it gives arguments, or a `Try`."""

    def add(lay: Callable[[Box], Any]) -> None:
        def complete(box: Box) -> Try:
            made = lay(box)
            return made if isinstance(made, Try) else Try(tuple(made))

        codes = (exits,) if isinstance(exits, int) else exits
        SITUATIONS.append(Situation(area, name, codes, said, complete, **settings))

    return add


def play(situation: Situation, root: Path, runner: Runner) -> Outcome:
    """Lays a situation out below an empty directory, runs it, and judges."""
    box = Box(root)
    (root / "out").mkdir()
    (root / "canary.txt").write_text("left alone\n")
    attempt = situation.lay(box)
    before = _state(root, situation.may_change)
    done = runner.run(attempt, root)
    wrong = _judge_words(situation, done)
    after = _state(root, situation.may_change)
    wrong += [f"changed: {name}" for name in sorted(set(before) | set(after)) if before.get(name) != after.get(name)]
    if done.exit != 0:
        wrong += [f"left behind: {name}" for name in sorted(os.listdir(root / "out"))]
    elif box.dst.is_dir() and os.listdir(box.dst):
        wrong += _judge_output(attempt, box, root, runner)
    said = [line for line in done.err.strip().splitlines() if not _STEP.match(line)]
    lines = said or done.out.strip().splitlines()
    return Outcome(done.exit, lines[0] if lines else "", wrong)


class Runner:
    """Runs commands: through one process that forks, or as a process of its own where the situation is about that."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.situations.server"],
            cwd=CHECKOUT,
            env=_environment({}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        """Ends the process."""
        self._server.communicate()

    def run(self, attempt: Try, root: Path) -> Done:
        """Runs a command in `root`."""
        argv = [os.fspath(word) if isinstance(word, os.PathLike) else str(word) for word in attempt.argv]
        if attempt.env or attempt.before or attempt.shell:
            return _as_process(attempt, argv, root)
        assert self._server.stdin is not None and self._server.stdout is not None
        out, err = root.parent / f"{root.name}.out", root.parent / f"{root.name}.err"
        out.touch(), err.touch()
        request = {"argv": argv, "cwd": str(root), "out": str(out), "err": str(err), "limit": LIMIT}
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        code = json.loads(self._server.stdout.readline())
        done = Done(code, _text(out.read_bytes()), _text(err.read_bytes()))
        out.unlink(), err.unlink()
        return done


def _environment(added: Mapping[str, str | None]) -> dict[str, str]:
    env = {**os.environ, "PYTHONPATH": str(CHECKOUT), "HF_HUB_OFFLINE": "1", "CI": "true"} | dict(added)
    return {name: value for name, value in env.items() if value is not None}


def _as_process(attempt: Try, words: list[str], root: Path) -> Done:
    argv = [sys.executable, "-m", "ckptx", *words]
    if attempt.shell is not None:
        argv = ["/bin/bash", "-c", attempt.shell, "ckptx", *argv]
    process = subprocess.Popen(
        argv,
        cwd=root,
        env=_environment(attempt.env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=attempt.before,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        return Done(None, _text(out), _text(err))
    return Done(process.returncode, _text(out), _text(err))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def _judge_words(situation: Situation, done: Done) -> list[str]:
    if done.exit is None:
        return [f"did not end in {LIMIT} s"]
    wrong, both = [], done.err + done.out
    if done.exit not in situation.exits:
        wrong.append(f"exit {done.exit}, needed {' or '.join(map(str, situation.exits))}")
    if "Traceback" in both:
        wrong.append("a traceback")
    errors = sum(line.startswith("error:") for line in done.err.splitlines())
    if done.exit in range(2, 8) and errors != 1 and situation.area != "environment":
        wrong.append(f"{errors} lines of error")
    if situation.said and not re.search(situation.said, both, re.DOTALL):
        wrong.append(f"does not say {situation.said!r}")
    if _UNPRINTABLE.search(both):
        wrong.append("prints control characters")
    return wrong


_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\x85\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def _judge_output(attempt: Try, box: Box, root: Path, runner: Runner) -> list[str]:
    """A published output must be equal to its source as `verify` sees it."""
    words = [str(word) for word in attempt.argv]
    if words[0] not in ("convert", "reshard") or {"--dtype", "--prefix", "--source-prefix"} & set(words):
        return []
    source = words[2] if words[0] == "convert" else words[1]
    done = runner.run(Try(("verify", source, box.dst), attempt.env, None, _beginning(attempt.shell)), root)
    return [] if done.exit == 0 else [f"published, but verify exits {done.exit}: {done.err or done.out}"]


def _beginning(shell: str | None) -> str | None:
    """The shell line again, where it only chooses a directory to run in."""
    return shell if shell is not None and shell.endswith('exec "$@"') else None


def _state(root: Path, but: tuple[str, ...]) -> dict[str, tuple[Any, ...]]:
    """Kind, size, inode and contents of everything below `root` except DST's directory and `but`."""
    found: dict[str, tuple[Any, ...]] = {}
    for directory, names, files in os.walk(root):
        here = os.path.relpath(directory, root)
        names[:] = [name for name in names if os.path.normpath(f"{here}/{name}") not in ("out", *but)]
        for name in (*names, *files):
            path = Path(directory, name)
            status = path.lstat()
            kind, key = stat.S_IFMT(status.st_mode), os.path.normpath(f"{here}/{name}")
            if key in but or "__pycache__" in key:
                continue
            small = kind == stat.S_IFREG and status.st_size < 1 << 22
            found[key] = (kind, status.st_ino, status.st_size if kind == stat.S_IFREG else 0,
                          path.read_bytes() if small else b"")  # fmt: skip
    return found
