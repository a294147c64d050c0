"""Processes that write one output, started by hand as a launcher starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.installed import without_version_note
from support.pool import fresh

_COMMAND = "from ckptx.cli.main import run\nrun()"
_STREAMS = ("stdout", "stderr")


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Rank:
    """`ckptx reshard` on one rank, forked from a process that has imported torch, with whose help ranks meet."""

    def __init__(self, arguments: list[object], code: str, environment: dict[str, str]) -> None:
        """Starts it; `code` is what runs."""
        self._streams = tempfile.TemporaryDirectory(prefix="rank-")
        words = list(map(str, arguments))
        self._process = fresh().Process(target=_run, args=(self._streams.name, words, code, environment))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """As that of `subprocess.Popen`."""
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """As that of `subprocess.Popen`."""
        self._process.join(timeout)
        if self._process.is_alive():
            self._process.kill()
            raise subprocess.TimeoutExpired(_COMMAND, timeout)
        stdout, stderr = (Path(self._streams.name, name).read_text() for name in _STREAMS)
        self._streams.cleanup()
        return stdout, stderr


def _run(directory: str, words: list[str], code: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    for name in _STREAMS:
        os.dup2(os.open(Path(directory, name), os.O_WRONLY | os.O_CREAT), getattr(sys, name).fileno())
    sys.argv = ["ckptx", "reshard", *words]
    exec(compile(code, "<rank>", "exec"), {"__name__": "__main__"})


def _execute(arguments: list[object], code: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, "reshard", *map(str, arguments)],
        env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def start_alone(arguments: list[object]) -> subprocess.Popen[str]:
    """A process that nobody launched."""
    return _execute(arguments, _COMMAND, {})


def start(
    *ranks: list[object], codes: Mapping[int, str] | None = None, forks: bool = True
) -> Sequence[Rank | subprocess.Popen[str]]:
    """One process for each of `ranks`, as a launcher without an agent starts them.

    Args:
        ranks: The arguments of each.
        codes: What runs in place of the command, by rank.
        forks: False where each has to import torch itself: it settles then what torch logs.
    """
    shared = {"WORLD_SIZE": str(len(ranks)), "LOCAL_WORLD_SIZE": str(len(ranks)), "MASTER_ADDR": "127.0.0.1"}
    shared["MASTER_PORT"] = str(free_port())
    return [
        (Rank if forks else _execute)(arguments, (codes or {}).get(rank, _COMMAND), {**shared, "RANK": str(rank)})
        for rank, arguments in enumerate(ranks)
    ]


def finish(processes: Sequence[Rank | subprocess.Popen[str]]) -> list[tuple[int | None, str]]:
    """Exit code and stderr of each."""
    found = []
    for process in processes:
        _, said = process.communicate(timeout=60)
        found.append((process.returncode, without_version_note(said)))
    return found
