"""Frees the memory of models as soon as they are no longer needed."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from contextlib import suppress

from torch import nn

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of mallopt in glibc
_LARGE_BYTES = 1 << 20  # bytes


def free_storage(model: nn.Module, shared: Iterable[nn.Parameter] = ()) -> None:
    """Free the storage and gradients of a model, which cannot be used afterwards; reference cycles might keep them.

    Args:
        model: Model that is no longer needed.
        shared: Parameters that are still used elsewhere.
    """
    shared_ids = {id(each) for each in shared}
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in shared_ids:
            tensor.grad = None
            tensor.data = tensor.new_empty(0)
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def release_freed_memory() -> None:
    """Make the C library return large freed tensors to the system immediately instead of keeping them for reuse."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
