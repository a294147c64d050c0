"""The tensors that are alive in this process."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ckptx.runtime.torch_private import FakeTensor, local_tensor


def select_tensors(objects: Iterable[object]) -> list[Tensor]:
    """Return the objects that are tensors of any kind."""
    # isinstance would read `__class__` of torch's proxy objects, which then warn
    return [each for each in objects if issubclass(type(each), Tensor)]


def iter_live_tensors(candidates: Iterable[Tensor] | None = None) -> Iterator[Tensor]:
    """Yield the strided tensors that are alive, for a DTensor its local tensor; sparse and fake ones are left out.

    Args:
        candidates: Tensors to filter, from `select_tensors`; None means all tensors that the garbage collector tracks.
    """
    for each in select_tensors(gc.get_objects()) if candidates is None else candidates:
        local = local_tensor(each)
        if isinstance(local, Tensor) and local.layout is torch.strided and not isinstance(local, FakeTensor):
            yield local
