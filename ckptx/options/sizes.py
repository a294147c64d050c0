"""Parse sizes in bytes, and count the threads that a process may use."""

from __future__ import annotations

import os
import re

from ckptx.errors import UsageError
from ckptx.untrusted.limits import MAX_MEMORY_BYTES

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?\s*", re.IGNORECASE)
# Unit in lower case -> bytes.
_UNITS = {"b": 1} | {
    f"{letter}{infix}b": base**power
    for power, letter in enumerate("kmgt", start=1)
    for infix, base in (("", 1000), ("i", 1024))
}
_MIN_GPU_BYTES = 1 << 30  # a smaller number without a unit is rejected, as the unit was probably forgotten
# GPU -> memory in GiB, slightly less than `torch.cuda.get_device_properties(0).total_memory` on such a GPU.
GPU_GIB = {
    "h100": 79.1,
    "h200": 139.7,
    "b200": 178.3,
    "a100-80gb": 79.1,
    "a100-40gb": 39.3,
    "l40s": 44.3,
    "l4": 21.9,
    "a10g": 21.9,
    "v100-32gb": 31.7,
    "t4": 14.5,
    "rtx4090": 23.5,
    "mi300x": 191.9,
}


def parse_size(text: str | int, subject: str) -> int:
    """Convert `5GB` (powers of 1000, as in transformers), `256MiB` (powers of 1024) or a plain number to bytes.

    Args:
        text: Size.
        subject: Subject of the error messages: the flag, or a key of a file.

    Raises:
        UsageError: The string is not a size, or the size is zero or out of range.
    """
    match = _SIZE.fullmatch(str(text))
    amount = float(match[1]) * _UNITS[(match[2] or "B").lower()] if match else 0.0
    if amount > MAX_MEMORY_BYTES:
        raise UsageError(f'{subject}: "{text!s:.40}" must be at most {MAX_MEMORY_BYTES >> 40} TiB')
    nbytes = int(amount)
    if nbytes < 1:
        raise UsageError(f'{subject}: "{text}" is not a size; write 5GB, 256MiB or a number of bytes')
    return nbytes


def parse_gpu_memory(text: str | int, subject: str) -> int:
    """Convert the memory of a GPU to bytes; `80GB` is 80 GiB, as GPU vendors count, and the same as `80GiB`.

    Args:
        text: Size.
        subject: Subject of the error messages: the flag, or a key of a file.

    Raises:
        UsageError: The string is not a size, the unit is missing, or the size is zero or out of range.
    """
    string = str(text)
    if string.strip().isdecimal() and int(string) < _MIN_GPU_BYTES:
        raise UsageError(f'{subject}: "{text}" has no unit; write {string.strip()}GB')
    return parse_size(re.sub(r"(?i)\b(\d+(?:\.\d+)?\s*[KMGT])B", r"\1iB", string), subject)


def default_workers() -> int:
    """Return the default number of threads: the cores of this process, at most 16.

    Under torchrun, the cores are divided by the number of ranks on this machine.
    """
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    cores = len(os.sched_getaffinity(0)) // max(1, int(local_ranks) if local_ranks.isdecimal() else 1)
    return max(1, min(16, cores))
