"""The peak resident memory of this process, and of the processes that it started."""

from __future__ import annotations

import resource
from pathlib import Path

_KIB = 1024


def peak_memory(pid: int | None = None) -> int:
    """Return the peak resident set size of a program, in bytes.

    The kernel's VmHWM begins anew when a process becomes another program; `ru_maxrss` keeps what the one before took,
    so it is asked only where there is no /proc.

    Args:
        pid: Process id; this process when left out.

    Returns:
        0 for another process that is gone, or that there is no /proc for.
    """
    try:
        for line in Path("/proc", "self" if pid is None else str(pid), "status").read_bytes().splitlines():
            if line.startswith(b"VmHWM:"):
                return int(line.split()[1]) * _KIB
    except (OSError, ValueError, IndexError):
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB if pid is None else 0


def peak_of_children() -> int:
    """Return the largest peak of the processes that ended below this one and were waited for, in bytes."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * _KIB
