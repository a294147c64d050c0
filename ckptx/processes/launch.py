"""Starts the ranks of a command on this machine if torchrun did not start them.

    this process      options.json  ->  each rank: `python -m ckptx.cli.rank`, stderr in a file
    rank 0            report.json   ->  this process

A rank is a program and no worker with a pipe, as it is under torchrun: its errors are in the report of rank 0, with
the exit code of the command. The last lines of stderr are shown only for a rank that died before there was a report.
Nothing here imports torch: the process that starts the ranks only waits for them.
"""

from __future__ import annotations

import json
import math
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
    """Run a command on `world_size` processes of this machine; each gets the same options as one document.

    Args:
        order: What `ckptx.options.document.to_json` makes of the options; `ckptx.cli.rank` reads it.
        world_size: Number of processes.

    Returns:
        The report of rank 0, as `--report` writes it; its `exit` and `error` say how it ended.

    Raises:
        EnvironmentProblem: A rank ended, and there is no report.
    """
    with tempfile.TemporaryDirectory(prefix="ckptx-run-") as directory:
        options, report = Path(directory, "options.json"), Path(directory, "report.json")
        options.write_text(order, encoding="utf-8")
        command = [sys.executable, "-m", "ckptx.cli.rank", str(options), str(report)]
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), LAUNCHED_BY_US: "1"}
        cores = max(1, len(os.sched_getaffinity(0)) // world_size)
        shared["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(cores)
        processes = []
        errors = [Path(directory, f"stderr-{rank}") for rank in range(world_size)]
        for rank, file in enumerate(errors):
            environment = os.environ | shared | rank_variables(rank, world_size)
            with file.open("wb") as stderr:
                processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=stderr))
        rank = _wait(processes)
        if report.is_file():
            document: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
            return document
        last = errors[rank].read_text(errors="replace")[-_LAST_WORDS:].strip()
        raise EnvironmentProblem(
            f"rank {rank} of {world_size} ended with code {processes[rank].returncode}, needed a report; "
            f"it said: {last or 'nothing'}"
        )


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all ranks, and return the one that failed first, or 0; the others have a while then, and are ended."""
    first: int | None = None
    deadline = math.inf
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if first is None:
                first = next((rank for rank, process in enumerate(processes) if process.poll()), None)
                deadline = math.inf if first is None else time.monotonic() + _GRACE
            time.sleep(_POLL)
    finally:
        for process in processes:
            process.kill()  # does nothing to one that has ended
            process.wait()
    return first if first is not None else next((rank for rank, each in enumerate(processes) if each.returncode), 0)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port
