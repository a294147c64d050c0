"""SIGTERM and SIGHUP are always heard: as an exception where Python can raise one, else by a thread that ends the run.

Python runs a handler between two of its own instructions. One long call (a read from a file system that hangs, a
checksum of gigabytes) keeps it waiting as long as it lasts; the byte that the signal leaves in a pipe does not wait. So
a thread reads that pipe. What is then left behind is what `kill -9` leaves: a staging directory, for `--resume`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

from ckptx.errors import HungUp, Terminated

GRACE = 3.0  # seconds for the handler to run
FAREWELL = 20.0  # seconds for what the exception sets off: threads to end, files to close

_heard = threading.Event()


def listen() -> None:
    """Listens from now on. SIGHUP stays ignored where it is: `nohup` and `setsid` ask for that."""
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        signal.signal(number, _stop)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader, frozenset(numbers)), daemon=True, name="signals").start()


def _stop(number: int, frame: FrameType | None) -> None:
    _heard.set()
    raise HungUp if number == signal.SIGHUP else Terminated


def _watch(reader: int, numbers: frozenset[int]) -> None:
    while arrived := os.read(reader, 16):
        for number in numbers.intersection(arrived):
            if _heard.wait(GRACE):
                time.sleep(FAREWELL)
            os.write(2, b"error: terminated; nothing was published; run again with --resume to continue\n")
            os._exit(128 + number)
