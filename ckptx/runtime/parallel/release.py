"""Frees the memory of models as soon as they are no longer needed."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from contextlib import suppress

from torch import nn

_M_MMAP_THRESHOLD = -3  # parameter of mallopt in glibc
_MMAP_THRESHOLD_BYTES = 1 << 20  # (1 MiB) memory of an allocation of this size or more returns to the OS when freed


def free_storage(model: nn.Module, shared_parameters: Iterable[nn.Parameter] = ()) -> None:
    """Free the storage and gradients of a model, which cannot be used afterwards.

    Deleting the model alone might not free them, as reference cycles may keep it alive.

    Args:
        model: Model that is no longer needed.
        shared_parameters: Parameters that are still used elsewhere.
    """
    shared_ids = {id(each) for each in shared_parameters}
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in shared_ids:
            tensor.grad = None
            tensor.data = tensor.new_empty(0)
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def return_freed_memory_immediately() -> None:
    """Make the C library return the memory of large tensors to the OS as soon as they are freed, from now on.

    By default glibc raises the size from which it does so, up to 32 MiB. Without glibc nothing is changed.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
