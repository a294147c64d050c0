"""Memory limits of `verify --run`, determined before any model has storage.

A process that the out-of-memory killer ends could not report the reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from ckptx.options.verify import RunOptions
from ckptx.report.report import human_bytes
from ckptx.runtime.parallel.distributed import RankContext, count_local_ranks
from ckptx.runtime.parity.model_loaders import ModelFacts

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_USABLE_FRACTION = 0.9  # fraction of free memory; the rest is for allocations that are not counted


class MemoryLimits(NamedTuple):
    """Memory limits of the reference in bytes, on top of the baseline of a process.

    With one rank, a limit covers both models.

    Attributes:
        whole: Limit if the reference is run as a whole, before the checkpoint is loaded; 0 if its gradients would not
            fit next to the checkpoint afterwards.
        stagewise: Limit if it is run stage by stage, while the checkpoint and its gradients stay in memory.
    """

    whole: int
    stagewise: int


def find_memory_limits(facts: ModelFacts, options: RunOptions, rank_context: RankContext) -> MemoryLimits | None:
    """Return the limits from --reference-memory, or from the free memory; None if that is unknown."""
    if options.reference_bytes is not None:
        return MemoryLimits(options.reference_bytes, options.reference_bytes)
    free = read_free_bytes(rank_context.device)
    if free is None:
        return None
    free = int(free * _USABLE_FRACTION)
    dims = options.dims
    if dims.world_size == 1:
        return MemoryLimits(free, free)
    local_ranks = count_local_ranks() if rank_context.device.type == "cpu" else 1
    checkpoint_bytes = (
        estimate_model_bytes(facts.compute_nbytes, backward=options.backward)
        * local_ranks
        // (dims.tp * dims.pp * dims.dp_shard)
    )
    gradient_bytes = (
        facts.compute_nbytes if options.backward else 0
    )  # gradients of the whole reference, until they are compared
    return MemoryLimits(free if gradient_bytes + checkpoint_bytes <= free else 0, max(0, free - checkpoint_bytes))


def advise_to_save_memory(facts: ModelFacts, options: RunOptions) -> list[str]:
    """Return options that save memory, each with the memory of the whole reference, as phrases for error messages."""
    advice = []
    if options.backward:
        advice.append(
            "--no-backward (whole reference: "
            f"{human_bytes(estimate_model_bytes(facts.compute_nbytes, backward=False))})"
        )
    if options.compute_dtype == "fp32" and facts.stored_nbytes < facts.compute_nbytes:
        stored_need = estimate_model_bytes(facts.stored_nbytes, backward=options.backward)
        advice.append(f"--compute-dtype auto, which detects less (whole reference: {human_bytes(stored_need)})")
    return advice


def estimate_model_bytes(weight_bytes: int, *, backward: bool) -> int:
    """Return the bytes of the weights of a whole model, and of as many gradients with a backward pass."""
    return weight_bytes * 2 if backward else weight_bytes


def read_free_bytes(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated, or None if that is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        free = sum(int(lines[key].split()[0]) << 10 for key in ("MemAvailable", "SwapFree"))
    except (OSError, KeyError, ValueError):
        return None
    limit = _read_cgroup_free_bytes()
    return free if limit is None else min(free, limit)


def _read_cgroup_free_bytes() -> int | None:
    """Return the bytes that the control group (v2) of this process still allows; None if there is no known limit."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        reclaimable = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return None if limit == "max" else int(limit) - used + int(reclaimable.get("inactive_file", 0))
    except (OSError, ValueError):
        return None
