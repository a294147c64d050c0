"""The three standard streams, made safe to use whatever the caller left of them."""

from __future__ import annotations

import io
import os
import sys


def settle_streams() -> None:
    """Opens the standard streams that are closed, and lets every name be printed in any locale.

    With a closed stdout (`ckptx ... >&-`) the first file that is opened would get descriptor 1, and a summary would be
    written into it: into the weights. What goes to a closed stream goes nowhere. A name that the encoding of a stream
    lacks is printed with escapes.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, which is this one
    if sys.stdin is None:
        sys.stdin = _text(0, "r")
    if sys.stdout is None:
        sys.stdout = _text(1, "w")
    if sys.stderr is None:
        sys.stderr = _text(2, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _text(descriptor: int, mode: str) -> io.TextIOWrapper:
    binary = io.FileIO(descriptor, mode, closefd=False)
    return io.TextIOWrapper(io.BufferedReader(binary) if mode == "r" else io.BufferedWriter(binary), encoding="utf-8")
