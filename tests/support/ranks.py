"""Processes that write one output, started like the ranks of a launcher."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from tests.support.forked_programs import ForkedProgram
from tests.support.transformers_version import without_version_note

_COMMAND = "from ckptx.cli.main import run\nrun()"


def free_port() -> int:
    """Return a port that no process listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _fork(arguments: list[object], code: str, environment: dict[str, str]) -> ForkedProgram:
    return ForkedProgram(code, ["ckptx", "reshard", *map(str, arguments)], environment)


def _execute(arguments: list[object], code: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, "reshard", *map(str, arguments)],
        env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def start_alone(arguments: list[object]) -> subprocess.Popen[str]:
    """Start a process without a launcher."""
    return _execute(arguments, _COMMAND, {})


def start(
    *ranks: list[object],
    codes: Mapping[int, str] | None = None,
    forks: bool = True,
    world_size: int | None = None,
    port: int | None = None,
) -> Sequence[ForkedProgram | subprocess.Popen[str]]:
    """Start one process for each of `ranks`, like a launcher without an agent.

    Args:
        ranks: Command-line arguments of each rank.
        codes: Programs to run instead of the command, by rank.
        forks: Fork from a process that has imported torch; a process that imports torch can configure its logging.
        world_size: WORLD_SIZE; None for the number of processes.
        port: MASTER_PORT; None for a free one.
    """
    size = str(len(ranks) if world_size is None else world_size)
    shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}
    shared["MASTER_PORT"] = str(port or free_port())
    return [
        (_fork if forks else _execute)(arguments, (codes or {}).get(rank, _COMMAND), {**shared, "RANK": str(rank)})
        for rank, arguments in enumerate(ranks)
    ]


def finish(processes: Sequence[ForkedProgram | subprocess.Popen[str]]) -> list[tuple[int | None, str]]:
    """Wait for all ranks; return the exit code and stderr of each."""
    found = []
    for process in processes:
        _, said = process.communicate(timeout=60)
        found.append((process.returncode, without_version_note(said)))
    return found
