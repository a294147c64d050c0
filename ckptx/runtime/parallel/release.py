"""Gives back the memory of models that are not needed any more, when they are not, and not some time later."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from contextlib import suppress

from torch import nn

_MMAP_THRESHOLD = -3  # of mallopt, in glibc
_LARGE = 1 << 20  # bytes


def release(model: nn.Module, shared: Iterable[nn.Parameter] = ()) -> None:
    """Takes storage and gradients from a model, which cannot be used then; models are full of cycles, and might stay.

    Args:
        model: Of which nothing is needed any more.
        shared: Parameters that others use, too.
    """
    others = {id(each) for each in shared}
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in others:
            tensor.grad = None
            tensor.data = tensor.new_empty(0)
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def return_memory() -> None:
    """Lets the C library give large tensors back as soon as they are released, rather than keep room for others."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE)
