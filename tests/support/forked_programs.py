"""Run programs in processes that are forked from one that has imported torch and transformers, but not ckptx.

These imports take longer than most programs of tests.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType
from unittest import mock

_STREAMS = ("stdout", "stderr")


def preloaded_context() -> ForkServerContext:
    """Return a multiprocessing context whose processes have imported torch and transformers, and done nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preload"])
    # The fork server does not get `sys.path` of this process, only `PYTHONPATH` of its environment.
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()
    return context


class ForkedProgram:
    """A running program, with `returncode` and `communicate` as in `subprocess.Popen`."""

    def __init__(self, code: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a program.

        Args:
            code: Source code of the program.
            arguments: `sys.argv` of the program.
            environment: Environment variables in addition to those of the session.
        """
        self._streams = tempfile.TemporaryDirectory(prefix="forked-")
        for name in _STREAMS:
            Path(self._streams.name, name).touch()
        process_arguments = (self._streams.name, code, list(arguments), dict(environment))
        self._process = preloaded_context().Process(target=_run, args=process_arguments)
        with mock.patch.dict(
            sys.modules, {"__main__": ModuleType("__main__")}
        ):  # otherwise the child would import the main module of the tests
            self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the program, and return its stdout and stderr.

        Raises:
            TimeoutExpired: If it does not end within `timeout` seconds; the process is killed.
        """
        with self._streams as directory:
            self._process.join(timeout)
            if self._process.is_alive():
                self._process.kill()
                raise subprocess.TimeoutExpired(directory, timeout)
            stdout, stderr = (Path(directory, name).read_text() for name in _STREAMS)
        return stdout, stderr


def _run(directory: str, code: str, arguments: list[str], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    for name in _STREAMS:
        os.dup2(os.open(Path(directory, name), os.O_WRONLY), getattr(sys, name).fileno())
    sys.argv = arguments
    exec(compile(code, arguments[0], "exec"), {"__name__": "__main__"})
