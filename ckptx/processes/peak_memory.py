"""Peak resident memory of this process and of its children."""

from __future__ import annotations

import resource
from pathlib import Path

_KIB = 1024


def peak_memory(pid: int | None = None) -> int:
    """Return the peak resident set size of a process, in bytes.

    The kernel resets VmHWM when a process executes another program. `ru_maxrss` includes the previous program, so it is
    used only without /proc.

    Args:
        pid: Process id; None for this process.

    Returns:
        Peak in bytes; 0 for another process that has ended, or without /proc.
    """
    try:
        for line in Path("/proc", "self" if pid is None else str(pid), "status").read_bytes().splitlines():
            if line.startswith(b"VmHWM:"):
                return int(line.split()[1]) * _KIB
    except (OSError, ValueError, IndexError):
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB if pid is None else 0


def peak_memory_of_children() -> int:
    """Return the largest peak resident set size of child processes that have ended and were waited for, in bytes."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * _KIB
