"""Parse sizes in bytes, and count the threads that a process may use."""

from __future__ import annotations

import os
import re

from ckptx.errors import UsageError
from ckptx.untrusted.limits import MAX_MEMORY_BYTES

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?\s*", re.IGNORECASE)
_UNITS = {"b": 1} | {
    f"{letter}{infix}b": base**power
    for power, letter in enumerate("kmgt", start=1)
    for infix, base in (("", 1000), ("i", 1024))
}


def parse_size(text: str | int, option: str) -> int:
    """Convert `5GB` (1000s, as in transformers), `256MiB` (1024s) or a plain number to bytes.

    Raises:
        UsageError: The string is not a size, or the size is zero or out of range.
    """
    match = _SIZE.fullmatch(str(text))
    amount = float(match[1]) * _UNITS[(match[2] or "B").lower()] if match else 0.0
    if amount > MAX_MEMORY_BYTES:
        raise UsageError(f'{option}: "{text!s:.40}" must be at most {MAX_MEMORY_BYTES >> 40} TiB')
    nbytes = int(amount)
    if nbytes < 1:
        raise UsageError(f'{option}: "{text}" is not a size; write 5GB, 256MiB or a number of bytes')
    return nbytes


def default_workers() -> int:
    """Return the number of cores of this process, at most 16; the local ranks of torchrun share the cores."""
    neighbors = os.environ.get("LOCAL_WORLD_SIZE", "1")
    cores = len(os.sched_getaffinity(0)) // max(1, int(neighbors) if neighbors.isdecimal() else 1)
    return max(1, min(16, cores))
