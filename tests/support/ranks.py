"""Processes that write one output, started by hand as a launcher starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping

from support.installed import without_version_note


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start_alone(arguments: list[object]) -> subprocess.Popen[str]:
    """A process that nobody launched."""
    return _start(arguments, None, {})


def start(*ranks: list[object], codes: Mapping[int, str] | None = None) -> list[subprocess.Popen[str]]:
    """One process for each of `ranks`, as a launcher without an agent starts them.

    Args:
        ranks: The arguments of each.
        codes: What runs in place of the command, by rank.
    """
    shared = {"WORLD_SIZE": str(len(ranks)), "LOCAL_WORLD_SIZE": str(len(ranks)), "MASTER_ADDR": "127.0.0.1"}
    shared["MASTER_PORT"] = str(free_port())
    return [
        _start(arguments, (codes or {}).get(rank), {**shared, "RANK": str(rank)})
        for rank, arguments in enumerate(ranks)
    ]


def _start(arguments: list[object], code: str | None, environment: dict[str, str]) -> subprocess.Popen[str]:
    program = ["-m", "ckptx"] if code is None else ["-c", code]
    return subprocess.Popen(
        [sys.executable, *program, "reshard", *map(str, arguments)],
        env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Exit code and stderr of each."""
    found = []
    for process in processes:
        _, said = process.communicate(timeout=60)
        found.append((process.returncode, without_version_note(said)))
    return found
