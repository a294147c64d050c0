"""SIGTERM and SIGHUP: heard at once between two steps, and in the end also within one that does not return."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

_CHILD = """
import os, sys, threading, time
from ckptx.cli import signals
from ckptx.errors import exit_code_of
signals.HANDLER_SECONDS = signals.CLEANUP_SECONDS = 0.3
signals.install_handlers()
kind = sys.argv[1]
print("ready", flush=True)
try:
    if kind == "a loop":
        while True:
            pass
    elif kind == "a lock":
        threading.Lock().acquire() and threading.Event().wait()
    elif kind == "cleaning up":
        try:
            time.sleep(1000)
        finally:
            threading.Event().wait()
except BaseException as stopped:
    sys.stdout.flush()
    os._exit(exit_code_of(stopped))
"""


def exit_after(kind: str, number: signal.Signals, *, ignored: bool = False) -> int:
    def ignore() -> None:
        signal.signal(number, signal.SIG_IGN)

    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, kind],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=ignore if ignored else None,
    )
    assert child.stdout is not None
    with child:
        assert child.stdout.readline() == b"ready\n"
        time.sleep(0.1)
        child.send_signal(number)
        try:
            return child.wait(timeout=1 if ignored else 10)
        except subprocess.TimeoutExpired:
            child.kill()
            return 0 if ignored else -1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("kind", ["a loop", "a lock", "cleaning up"])
def test_a_signal_ends_whatever_runs(kind: str, number: signal.Signals, code: int) -> None:
    assert exit_after(kind, number) == code


_HELD = """
import ctypes, sys
from ckptx.cli import signals
signals.HANDLER_SECONDS = signals.CLEANUP_SECONDS = 0.3
libc = ctypes.CDLL(None)
signals.set_advice(lambda: sys.argv[1])
signals.install_handlers()
print("ready", flush=True)
libc.pthread_mutex_lock.argtypes = [ctypes.c_void_p]
mutex = ctypes.create_string_buffer(256)
libc.pthread_mutex_lock(mutex)
libc.pthread_mutex_lock(mutex)  # of a mutex that is never free: no signal interrupts it
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_call_that_never_returns_is_ended_too(number: signal.Signals, code: int) -> None:
    advice = "; run again" if number == signal.SIGTERM else ""
    child = subprocess.Popen([sys.executable, "-c", _HELD, advice], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None and child.stderr is not None
    with child:
        assert child.stdout.readline() == b"ready\n"
        time.sleep(0.2)
        child.send_signal(number)
        try:
            assert child.wait(timeout=10) == code
        finally:
            child.kill()
        assert child.stderr.read() == f"error: interrupted{advice}\n".encode()


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    assert exit_after("a loop", signal.SIGHUP, ignored=True) == 0


def test_the_command_says_that_it_was_hung_up(tmp_path: Path) -> None:
    code = (
        "import os, signal\n"
        "from ckptx.cli import main\n"
        "from ckptx.api import inspect as command\n"
        "command.inspect = lambda *a, **k: os.kill(os.getpid(), signal.SIGHUP) or __import__('time').sleep(9)\n"
        f"import sys; sys.argv = ['ckptx', 'inspect', {str(tmp_path)!r}]\n"
        "main.run()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 129
    assert done.stderr.splitlines() == ["error: interrupted"]  # it publishes nothing, and cannot be resumed
