"""One rank of a world whose other ranks are not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ckptx.errors import Defect
from ckptx.runtime.parallel.distributed import RankContext, end_groups

_DEVICE = torch.device("cpu")  # fake tensors of CUDA need a torch that was built with it


@contextmanager
def fake_world(rank: int, world_size: int, device: torch.device = _DEVICE) -> Iterator[RankContext]:
    """This process as a rank of a world of any size; what it sends goes nowhere, and what it receives has a shape.

    Objects that ranks tell each other, to agree on something, are those of this rank.

    Args:
        rank: Which.
        world_size: Of how many.
        device: What it computes on.

    Raises:
        Defect: The process is in a group already.
    """
    # its import registers the backend, and is all that torch has of it
    from ckptx.runtime.torch_private import FakeStore

    if dist.is_initialized():
        raise Defect("a forecast needs a process of its own, found one in a process group; please report this")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    gather = dist.all_gather_object
    dist.all_gather_object = _gather_own
    try:
        yield RankContext(rank, world_size, device)
    finally:
        dist.all_gather_object = gather
        end_groups()


def _gather_own(found: list[Any], own: Any, group: dist.ProcessGroup | None = None) -> None:
    found[:] = [own] * len(found)
