"""Runs the command line many times from one process that has imported it: each run is a fork, and costs milliseconds.

Requests come as lines of JSON on stdin (`argv`, `cwd`, `out`, `err`, `limit`); the answer is the exit code on a line,
or `null` for a run that did not end in `limit` seconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import ckptx
from ckptx.cli import convert, diff, env, forecast, inspect, main, reshard, robustness, verify
from ckptx.errors import CkptxError

assert all(
    module.__name__ for module in (convert, diff, env, forecast, inspect, reshard, robustness, verify)
)  # imported once, for every run


def serve() -> None:
    """Answers requests until stdin ends."""
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(request)
        print(json.dumps(_outcome(child, request["limit"])), flush=True)


def _become(request: dict[str, Any]) -> None:
    os.setsid()
    os.chdir(request["cwd"])
    streams = (os.open(os.devnull, os.O_RDONLY), *(os.open(request[name], os.O_WRONLY) for name in ("out", "err")))
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.argv = ["ckptx", *request["argv"]]
    sys.modules["__main__"].__package__ = ""  # else click prints the name of this package as that of the program
    code = 70  # what comes out of `run` but its own leave is a crash
    try:
        if request["argv"][:1] == ["-c"]:
            _execute(request["argv"][1])
        main.run()
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else 70
    finally:
        sys.stdout.flush()
        os._exit(code)


def _execute(code: str) -> None:
    """Run Python code in place of the command; an exception of ckptx ends it as it ends the command."""
    try:
        exec(code, {"ckptx": ckptx})
    except CkptxError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from error
    raise SystemExit(0)


def _outcome(child: int, limit: float) -> int | None:
    end = time.monotonic() + limit
    pause = 0.001
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


if __name__ == "__main__":
    serve()
