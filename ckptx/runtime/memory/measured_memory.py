"""Measures the memory of a training step, for comparison with a forecast."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ckptx.runtime.memory.storage_ledger import StorageLedger
from ckptx.runtime.parallel.live_tensors import iter_live_tensors
from ckptx.runtime.torch_private import TorchDispatchMode, hide_dtensor_shape_inference


class MeasuredMemory(NamedTuple):
    """Bytes of tensors on one rank.

    Attributes:
        peak: Peak during the step.
        between_steps: Bytes after the step.
        before_step: Bytes before the step.
    """

    peak: int
    between_steps: int
    before_step: int


def measure_step(step: Callable[[], object], models: Iterable[nn.Module], device: torch.device) -> MeasuredMemory:
    """Run a step and measure its memory, by the CUDA allocator or by every storage on a CPU.

    Args:
        step: Step to run; an equal one has run before.
        models: Models that the step runs.
        device: Device of the models.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return MeasuredMemory(torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device), before)
    ledger = StorageLedger()
    ledger.add_existing(each for each in iter_live_tensors() if each.device == device)
    before = ledger.nbytes
    with ledger.watch(models), hide_dtensor_shape_inference(), _LedgerMode(ledger):
        step()
    return MeasuredMemory(_peak_bytes(ledger), ledger.nbytes, before)


def _peak_bytes(ledger: StorageLedger) -> int:
    current = peak = 0
    for lifetime, is_alloc in ledger.events:
        current += lifetime.nbytes if is_alloc else -lifetime.nbytes
        peak = max(peak, current)
    return peak


class _LedgerMode(TorchDispatchMode):  # type: ignore[misc]  # torch types its base as Any
    """Records every operation in a ledger."""

    def __init__(self, ledger: StorageLedger) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, Tensor) and each not in (Tensor, nn.Parameter) for each in types):
            return NotImplemented  # a DTensor dispatches to plain tensors
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._ledger.record_operation(func, args, kwargs, out)
        return out
