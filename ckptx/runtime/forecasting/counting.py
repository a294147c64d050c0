"""Count floating-point operations and communicated bytes of a step, operation by operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ckptx.runtime.memory.shape_tensors import iter_tensors
from ckptx.runtime.memory.storage_ledger import StepPhase
from ckptx.runtime.torch_private import get_overload_packet, get_schema

_COLLECTIVE_BY_PREFIX = {
    "all_gather": "all-gather",
    "allgather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "allreduce": "all-reduce",
    "broadcast": "broadcast",
    "all_to_all": "all-to-all",
    "alltoall": "all-to-all",
    "send": "send",
}
_SDPA_CPU = "aten::_scaled_dot_product_flash_attention_for_cpu"


@dataclass(slots=True)
class Work:
    """Floating-point operations and communication of a part of a step.

    Attributes:
        flops: Floating-point operations of all passes; a multiply-add counts as two.
        recomputed_flops: Those of `flops` that activation checkpointing recomputes.
        sent_bytes: Bytes by kind of collective, for this rank's share: the input of a reduction, the output of a
            gather, the payload sent to the next stage.
    """

    flops: int = 0
    recomputed_flops: int = 0
    sent_bytes: Counter[str] = field(default_factory=Counter)

    def add(self, other: Work, times: int = 1) -> None:
        """Add other work, `times` times."""
        self.flops += times * other.flops
        self.recomputed_flops += times * other.recomputed_flops
        for kind, nbytes in other.sent_bytes.items():
            self.sent_bytes[kind] += times * nbytes


def sum_work(parts: Iterable[Work]) -> Work:
    """Return the sum of the work of several parts."""
    total = Work()
    for each in parts:
        total.add(each)
    return total


class WorkCounter:
    """Counters of floating-point operations and communicated bytes.

    Attributes:
        work_by_pass: Work of each pass, by part of the step and number of the pass.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset all counters."""
        self.work_by_pass: dict[tuple[str, int], Work] = {}

    def record_operation(
        self, get_phase: Callable[[], StepPhase], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> None:
        """Count an operation that `ShapeTensors` reports."""
        flops = _count_flops(func, args, kwargs, out)
        if flops:
            phase = get_phase()
            work = self._work_in_phase(phase)
            work.flops += flops
            work.recomputed_flops += flops if phase.is_recompute else 0
        elif func.namespace in ("c10d", "_c10d_functional"):
            kind = _collective_name(get_schema(func).name.partition("::")[2])
            if kind is not None:
                input_bytes = sum(each.nbytes for each in iter_tensors(args, kwargs))
                output_bytes = sum(each.nbytes for each in iter_tensors((out,), {}))
                nbytes = max(input_bytes, output_bytes) if func.namespace == "_c10d_functional" else input_bytes
                self._work_in_phase(get_phase()).sent_bytes[kind] += nbytes

    def _work_in_phase(self, phase: StepPhase) -> Work:
        return self.work_by_pass.setdefault((phase.name, phase.pass_index), Work())


def _collective_name(name: str) -> str | None:
    bare = name.lstrip("_")
    return next((kind for begin, kind in _COLLECTIVE_BY_PREFIX.items() if bare.startswith(begin)), None)


def _count_flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    count = flop_registry.get(get_overload_packet(func))
    if count is not None:
        return int(count(*args, **kwargs, out_val=out))
    name = get_schema(func).name
    if name == _SDPA_CPU:
        return _attention_flops(*args[:3])
    if name == f"{_SDPA_CPU}_backward":
        return 5 * _attention_flops(*args[1:4]) // 2
    if name == "aten::_grouped_mm":  # each token is multiplied with one expert
        left, right = args[0], args[1]
        return 2 * int(left.numel()) * int(right.shape[-1])
    return 0


def _attention_flops(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Count the two matrix products of each query head; heads may share keys and values."""
    return 2 * int(query.numel()) * int(key.shape[-2]) + 2 * int(query.numel() // query.shape[-1]) * int(
        key.shape[-2] * value.shape[-1]
    )
