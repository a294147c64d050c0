"""Start the ranks of a command on this machine if torchrun did not start them.

    this process      options.json  ->  each rank: `python -m ckptx.cli.rank`, stderr in a file
    rank 0            report.json   ->  this process

As under torchrun, a rank is a program and not a worker with a pipe: its errors are in the report of rank 0, with the
exit code of the command. The end of stderr is shown only for a rank that died before there was a report. Nothing here
imports torch: the process that starts the ranks only waits for them.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ckptx.errors import EnvironmentProblem
from ckptx.processes.rendezvous import LAUNCHED_VARIABLE, rank_variables

_GRACE_PERIOD = 20.0  # seconds for the other ranks to end after one has failed, rank 0 with a report
_POLL_INTERVAL = 0.05  # seconds between two checks of the ranks
_STDERR_TAIL_LENGTH = 2000  # characters of stderr in an error message


def launch(options_json: str, world_size: int, on_wait: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Run a command in `world_size` processes on this machine, with the same options for each.

    Args:
        options_json: Options as JSON from `ckptx.options.document.to_json`, which `ckptx.cli.rank` reads.
        world_size: Number of processes.
        on_wait: Called twenty times per second while the processes run.

    Returns:
        Report of rank 0, as `--report` writes it; `exit` and `error` are those of the command.

    Raises:
        EnvironmentProblem: There is no report; the message has the stderr of the first rank that failed.
    """
    with tempfile.TemporaryDirectory(prefix="ckptx-run-") as directory:
        options_path, report_path = Path(directory, "options.json"), Path(directory, "report.json")
        options_path.write_text(options_json, encoding="utf-8")
        command = [sys.executable, "-m", "ckptx.cli.rank", str(options_path), str(report_path)]
        shared_variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), LAUNCHED_VARIABLE: "1"}
        cores = max(1, len(os.sched_getaffinity(0)) // world_size)
        shared_variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(cores)
        processes = []
        stderr_files = [Path(directory, f"stderr-{rank}") for rank in range(world_size)]
        for rank, file in enumerate(stderr_files):
            environment = os.environ | shared_variables | rank_variables(rank, world_size)
            with file.open("wb") as stderr:
                processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=stderr))
        blamed_rank = _wait_for_ranks(processes, on_wait)
        if report_path.is_file():
            report: dict[str, Any] = json.loads(report_path.read_text(encoding="utf-8"))
            return report
        stderr_tail = stderr_files[blamed_rank].read_text(errors="replace")[-_STDERR_TAIL_LENGTH:].strip()
        raise EnvironmentProblem(
            f"rank {blamed_rank} of {world_size} ended with code {processes[blamed_rank].returncode} and without a "
            f"report; "
            f"its stderr: {stderr_tail or 'empty'}"
        )


def _wait_for_ranks(processes: Sequence[subprocess.Popen[bytes]], on_wait: Callable[[], None]) -> int:
    """Wait for all ranks; after a failure, kill the others when the grace period is over.

    Returns:
        The first rank that failed; 0 if none did.
    """
    failed_rank: int | None = None
    deadline = math.inf
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if failed_rank is None:
                failed_rank = next((rank for rank, process in enumerate(processes) if process.poll()), None)
                deadline = math.inf if failed_rank is None else time.monotonic() + _GRACE_PERIOD
            on_wait()
            time.sleep(_POLL_INTERVAL)
    finally:
        for process in processes:
            process.kill()  # has no effect on an ended process
            process.wait()
    return (
        failed_rank
        if failed_rank is not None
        else next((rank for rank, each in enumerate(processes) if each.returncode), 0)
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
