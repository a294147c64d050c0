"""Run one rank of a distributed job whose other ranks do not exist."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ckptx.errors import InternalError
from ckptx.runtime.parallel.distributed import RankContext, destroy_process_groups

_DEVICE = torch.device("cpu")  # fake tensors of CUDA need a torch that was built with it


@contextmanager
def fake_process_group(rank: int, world_size: int, device: torch.device = _DEVICE) -> Iterator[RankContext]:
    """Make this process a rank of a world of any size; nothing is sent, and received tensors keep their old values.

    The work of a send keeps its tensor alive, as in a real process group. `all_gather_object` returns the object of
    this rank for every rank.

    Args:
        rank: Global rank of this process.
        world_size: Number of ranks.
        device: Device of the computation.

    Raises:
        InternalError: The process is already in a process group.
    """
    # the import registers the backend
    from ckptx.runtime.torch_private import FakeStore, keep_sent_tensors

    if dist.is_initialized():
        raise InternalError("a forecast requires a process outside of any process group; please report this")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    gather = dist.all_gather_object
    dist.all_gather_object = _gather_own
    try:
        with keep_sent_tensors():
            yield RankContext(rank, world_size, device)
    finally:
        dist.all_gather_object = gather
        destroy_process_groups()


def _gather_own(gathered: list[Any], value: Any, group: dist.ProcessGroup | None = None) -> None:
    gathered[:] = [value] * len(gathered)
