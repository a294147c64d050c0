"""How much memory `verify --run` may take, asked before anything has storage.

A process that the kernel ends for want of memory says nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch

from ckptx.options.verify import RunOptions
from ckptx.report.report import human_bytes
from ckptx.runtime.parallel.distributed import RankContext
from ckptx.runtime.parity.side import ModelFacts

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_USED = 0.9  # of what is free: what is not counted needs room, too


class MemoryLimits(NamedTuple):
    """What the reference may take, in bytes, beside what any process takes; None is anything.

    On one rank that is for both sides together.

    Attributes:
        whole: In one piece.
        pieces: In pieces, which run while the checkpoint is there, with its gradients.
    """

    whole: int | None
    pieces: int | None


def memory_limits(seen: ModelFacts, options: RunOptions, process: RankContext) -> MemoryLimits:
    """What the user says, or what is free."""
    if options.reference_bytes is not None:
        return MemoryLimits(options.reference_bytes, options.reference_bytes)
    free = free_bytes(process.device)
    if free is None:
        return MemoryLimits(None, None)
    free = int(free * _USED)
    dims = options.dims
    if dims.world_size == 1:
        return MemoryLimits(free, free)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if process.device.type == "cpu" else 1
    others = needed_bytes(seen.nbytes, backward=options.backward) * here // (dims.tp * dims.pp * dims.dp_shard)
    kept = seen.nbytes if options.backward else 0  # gradients of the whole reference, until they are compared
    return MemoryLimits(free if kept + others <= free else 0, max(0, free - others))


def advice_to_save_memory(seen: ModelFacts, options: RunOptions) -> list[str]:
    """Options with which a run takes less, each with what the reference takes in one piece then."""
    ways = []
    if options.backward:
        ways.append(f"--no-backward ({human_bytes(needed_bytes(seen.nbytes, backward=False))} in one piece)")
    if options.compute_dtype == "fp32" and seen.stored_nbytes < seen.nbytes:
        as_stored = needed_bytes(seen.stored_nbytes, backward=options.backward)
        ways.append(f"--compute-dtype auto, which finds less ({human_bytes(as_stored)} in one piece)")
    return ways


def needed_bytes(weights: int, *, backward: bool) -> int:
    """What a model in one piece holds at once: the weights, and as many gradients."""
    return weights * 2 if backward else weights


def free_bytes(device: torch.device) -> int | None:
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
