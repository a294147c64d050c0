"""The tensors that are alive in this process."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def living_tensors() -> Iterator[Tensor]:
    """Each that has a storage of its own, of a DTensor its local part; sparse ones and fake ones have none."""
    for each in gc.get_objects():
        if issubclass(type(each), Tensor):  # isinstance would ask a proxy of torch, which warns
            local = getattr(each, "_local_tensor", each)
            if isinstance(local, Tensor) and local.layout is torch.strided and not isinstance(local, FakeTensor):
                yield local
