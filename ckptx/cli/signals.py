"""Handlers of SIGTERM and SIGHUP, which raise an exception; if Python cannot run them, a thread ends the process.

Python runs a signal handler between two bytecode instructions. One long call (a read from a file system that hangs, a
checksum of gigabytes) delays it for as long as the call takes. The byte that the signal writes to the wakeup pipe is
not delayed, so a thread reads that pipe and ends the process. This leaves the same files as `kill -9`: a staging
directory for `--resume`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from ckptx.errors import HungUp, Terminated
from ckptx.processes.imports import threads_without_forks

HANDLER_SECONDS = 3.0  # from the signal to the start of its handler
CLEANUP_SECONDS = 20.0  # from the start of the handler, for the exception to end threads and close files

_is_handled = threading.Event()  # set when a handler starts
_advice: Callable[[], str] = str  # see `set_advice`; `str` returns ""


def set_advice(advice: Callable[[], str]) -> None:
    """Set the function that returns the end of the error message if Python cannot run the handler."""
    global _advice
    _advice = advice


def install_handlers() -> None:
    """Install the handlers. SIGHUP stays ignored if it is, as under `nohup`."""
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        signal.signal(number, _raise_termination)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=_watch_wakeup_pipe, args=(reader, frozenset(numbers)), daemon=True, name="signals")
    threads_without_forks.add(thread)
    thread.start()


def _raise_termination(number: int, frame: FrameType | None) -> None:
    """Raise the exception for a signal; Python calls this handler in the main thread."""
    _is_handled.set()
    raise HungUp if number == signal.SIGHUP else Terminated


def _watch_wakeup_pipe(reader: int, numbers: frozenset[int]) -> None:
    """End the process if one of the signals arrives and its handler does not end it in time.

    Args:
        reader: Descriptor of the pipe, to which Python writes the number of each signal as one byte.
        numbers: Signals that end the process.
    """
    while received := os.read(reader, 16):
        for number in numbers.intersection(received):
            if _is_handled.wait(HANDLER_SECONDS):
                time.sleep(CLEANUP_SECONDS)
            os.write(2, f"error: interrupted{_advice()}\n".encode())
            os._exit(128 + number)
