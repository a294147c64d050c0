"""The tensors that are alive in this process."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ckptx.runtime.torch_private import FakeTensor, local_tensor


def tensors_among(objects: Iterable[object]) -> list[Tensor]:
    """Those that are tensors, of whatever kind."""
    # isinstance would ask a proxy of torch, which warns
    return [each for each in objects if issubclass(type(each), Tensor)]


def live_tensors(alive: Iterable[Tensor] | None = None) -> Iterator[Tensor]:
    """Each that has a storage of its own, of a DTensor its local part; sparse ones and fake ones have none.

    Args:
        alive: Among which to look, as `tensors_of` finds them; all that the garbage collector knows when left out.
    """
    for each in tensors_among(gc.get_objects()) if alive is None else alive:
        local = local_tensor(each)
        if isinstance(local, Tensor) and local.layout is torch.strided and not isinstance(local, FakeTensor):
            yield local
