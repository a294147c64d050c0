"""Starts the ranks of a run on this machine, for those who did not start them with torchrun.

Nothing here imports torch: the process that starts the ranks only waits for them.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckptx.errors import EnvironmentProblem
from ckptx.processes.rendezvous import LAUNCHED_BY_US, rank_variables

_GRACE = 20.0  # seconds that the others get to say what they have to say once one has failed
_POLL = 0.05
_LAST_WORDS = 2000  # characters of stderr


def launch(order: str, world_size: int) -> dict[str, Any]:
    """Runs a command on `world_size` processes of this machine; each gets the same options as one document.

    Args:
        order: What `ckptx.options.document.to_json` makes of the options; `ckptx.cli.rank` reads it.
        world_size: Number of processes.

    Returns:
        The report of rank 0, as `--report` writes it; its `exit` and `error` say how it ended.

    Raises:
        EnvironmentProblem: A process died without a word.
    """
    with tempfile.TemporaryDirectory(prefix="ckptx-run-") as directory:
        options, report = Path(directory, "options.json"), Path(directory, "report.json")
        options.write_text(order, encoding="utf-8")
        command = [sys.executable, "-m", "ckptx.cli.rank", str(options), str(report)]
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), LAUNCHED_BY_US: "1"}
        shared["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(max(1, _cores() // world_size))
        processes = []
        words = [Path(directory, f"stderr-{rank}") for rank in range(world_size)]
        for rank, said in enumerate(words):
            environment = os.environ | shared | rank_variables(rank, world_size)
            with said.open("wb") as stderr:
                processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=stderr))
        codes = _wait(processes)
        if report.is_file():
            document: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
            return document
        rank = next((rank for rank, code in enumerate(codes) if code), 0)
        last = words[rank].read_text(errors="replace")[-_LAST_WORDS:].strip()
        raise EnvironmentProblem(
            f"rank {rank} of {world_size} ended with code {codes[rank]}, needed a report; it said: {last or 'nothing'}"
        )


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Their exit codes; when one fails the others have a while, then they are ended."""
    deadline: float | None = None
    try:
        while any(process.poll() is None for process in processes):
            if deadline is None and any(process.poll() for process in processes):
                deadline = time.monotonic() + _GRACE
            if deadline is not None and time.monotonic() > deadline:
                break
            time.sleep(_POLL)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    return [process.returncode for process in processes]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
