"""Measures the memory of a training step, for comparison with a forecast."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ckptx.runtime.memory.storage_ledger import StorageLedger
from ckptx.runtime.parallel.live_tensors import iter_live_tensors
from ckptx.runtime.torch_private import TorchDispatchMode, free_cublas_workspaces, hide_dtensor_shape_inference


class MeasuredMemory(NamedTuple):
    """Bytes of tensors on one rank, on the device of its models.

    Attributes:
        peak: Largest number of bytes at any time during the step, including those from before it.
        between_steps: Bytes after the step.
        before_step: Bytes before the step.
        workspaces: Bytes of cuBLAS workspaces in torch's allocator, which the other three do not include; 0 on a CPU.
    """

    peak: int
    between_steps: int
    before_step: int
    workspaces: int = 0


def measure_step(step: Callable[[], object], models: Iterable[nn.Module], device: torch.device) -> MeasuredMemory:
    """Run a step and measure its memory: with the statistics of the CUDA allocator, or on a CPU storage by storage.

    Args:
        step: Runs one step. If an equal step ran before, the optimizer state and the caches that it created count as
            memory from before this step.
        models: Models that the step runs, so that storages which FSDP2 resizes are measured; unused on CUDA.
        device: Device of the models.
    """
    gc.collect()
    if device.type == "cuda":
        return _measure_on_gpu(step, device)
    ledger = StorageLedger()
    ledger.add_existing(each for each in iter_live_tensors() if each.device == device)
    before = ledger.nbytes
    with ledger.watch(models), hide_dtensor_shape_inference(), _LedgerMode(ledger):
        step()
    return MeasuredMemory(_peak_bytes(ledger), ledger.nbytes, before)


def _measure_on_gpu(step: Callable[[], object], device: torch.device) -> MeasuredMemory:
    """Run a step, and measure it with the statistics of the CUDA allocator, without the workspaces of cuBLAS.

    The first matrix product of the step allocates the workspaces, and they stay allocated. So the peak that torch
    reports includes them, and their size is subtracted from it.
    """
    free_cublas_workspaces()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    peak, after = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    free_cublas_workspaces()
    between_steps = torch.cuda.memory_allocated(device)
    workspaces = after - between_steps
    return MeasuredMemory(peak - workspaces, between_steps, before, workspaces)


def _peak_bytes(ledger: StorageLedger) -> int:
    """Return the largest number of bytes that were alive at any time, from the first event of a ledger on."""
    current = peak = 0
    for lifetime, is_alloc in ledger.events:
        current += lifetime.nbytes if is_alloc else -lifetime.nbytes
        peak = max(peak, current)
    return peak


class _LedgerMode(TorchDispatchMode):  # type: ignore[misc]  # torch types its base as Any
    """Records every operation on plain tensors in a ledger."""

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
