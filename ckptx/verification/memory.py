"""How much memory `verify --run` takes at least, asked before anything has storage.

A process that the kernel ends for want of memory says nothing. So what certainly does not fit is refused with numbers.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ckptx.errors import EnvironmentProblem
from ckptx.report.report import human_bytes
from ckptx.runtime.distributed import Process
from ckptx.verification.side import RunOptions, Seen

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def check(seen: Seen, options: RunOptions, process: Process) -> None:
    """Refuses to run what the memory of rank 0 cannot hold; other ranks ask nothing.

    Raises:
        EnvironmentProblem: The weights of the reference and their gradients take more than there is.
    """
    free = _free(process.device) if process.rank == 0 else None
    needed = needed_bytes(seen.nbytes, backward=options.backward)
    if free is None or needed <= free:
        return
    ways = []
    if options.backward:
        ways.append(f"--no-backward ({human_bytes(needed_bytes(seen.nbytes, backward=False))})")
    if options.dtype == "fp32" and seen.stored_nbytes < seen.nbytes:
        as_stored = needed_bytes(seen.stored_nbytes, backward=options.backward)
        ways.append(f"--compute-dtype auto, which finds less ({human_bytes(as_stored)})")
    raise EnvironmentProblem(
        f"{seen.config['architectures'][0]}: rank 0 computes the reference in one piece, which takes at least "
        f"{human_bytes(needed)} for weights{' and gradients' if options.backward else ''}, and "
        f"{human_bytes(free)} are free on {process.device}; use {', '.join([*ways, 'a machine with more'])}, or "
        "compare the bytes without --run"
    )


def needed_bytes(weights: int, *, backward: bool) -> int:
    """What rank 0 holds at once: the weights, and as many gradients."""
    return weights * 2 if backward else weights


def _free(device: torch.device) -> int | None:
    """Bytes that can still be had, or None where nobody says."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        free = sum(int(lines[key].split()[0]) << 10 for key in ("MemAvailable", "SwapFree"))
    except (OSError, KeyError, ValueError):
        return None
    limit = _within_group()
    return free if limit is None else min(free, limit)


def _within_group() -> int | None:
    """What the control group of this process still allows."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        reclaimable = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return None if limit == "max" else int(limit) - used + int(reclaimable.get("inactive_file", 0))
    except (OSError, ValueError):
        return None
