"""Run Python scripts as commands in processes forked from one that has imported torch, in under a second each."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptx.processes.fork import hide_main_module
from ckptx.robustness_suite.commands import CommandResult, _last_lines
from ckptx.robustness_suite.short_sockets import shorten_socket_paths


def run_warm(words: Sequence[str], log: Path, environment: Mapping[str, str], time_limit: float) -> CommandResult:
    """Do what `run_command` does for `python SCRIPT ...`, but do not end processes that the script leaves running."""
    assert words[0] == sys.executable
    shorten_socket_paths()
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ckptx.robustness_suite.preload"])
    begin = time.monotonic()
    with hide_main_module():
        process = context.Process(target=_script, args=(words[1:], str(log), dict(environment)))
        process.start()
    process.join(time_limit)
    is_late = process.is_alive()
    if is_late:
        process.kill()
        process.join()
    return CommandResult(process.exitcode, time.monotonic() - begin, _last_lines(log), is_late)


def _script(words: Sequence[str], log: str, environment: Mapping[str, str]) -> None:
    import traceback

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    sys.argv = [*words]
    sys.path.insert(0, str(Path(words[0]).parent))
    try:
        runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
