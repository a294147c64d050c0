"""What a step really took, to hold a forecast against."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ckptx.runtime.memory.storage_ledger import StorageLedger
from ckptx.runtime.parallel.live_tensors import live_tensors
from ckptx.runtime.torch_private import TorchDispatchMode, unseen_shapes_of_dtensor


class MeasuredMemory(NamedTuple):
    """Bytes of tensors of one rank.

    Attributes:
        peak: When they were most.
        between_steps: After the step.
        before: Before it.
    """

    peak: int
    between_steps: int
    before: int


def measured(step: Callable[[], object], models: Iterable[nn.Module], device: torch.device) -> MeasuredMemory:
    """Runs a step and measures it: as the allocator of CUDA counts, or every storage on a CPU.

    Args:
        step: What is run; one like it ran before.
        models: What it runs.
        device: Where.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return MeasuredMemory(torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device), before)
    ledger = StorageLedger()
    ledger.adopt(each for each in live_tensors() if each.device == device)
    before = ledger.nbytes
    with ledger.watching(models), unseen_shapes_of_dtensor(), _Watching(ledger):
        step()
    return MeasuredMemory(_most(ledger), ledger.nbytes, before)


def _most(ledger: StorageLedger) -> int:
    now = most = 0
    for life, is_birth in ledger.events:
        now += life.nbytes if is_birth else -life.nbytes
        most = max(most, now)
    return most


class _Watching(TorchDispatchMode):  # type: ignore[misc]  # torch says Any
    """Shows a ledger what is computed."""

    def __init__(self, ledger: StorageLedger) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, Tensor) and each not in (Tensor, nn.Parameter) for each in types):
            return NotImplemented  # a DTensor works with plain tensors
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._ledger.record_operation(func, args, kwargs, out)
        return out
