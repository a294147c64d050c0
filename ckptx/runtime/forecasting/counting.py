"""Count floating-point operations and communicated bytes of a step, operation by operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ckptx.runtime.memory.shape_tensors import iter_tensors
from ckptx.runtime.memory.storage_ledger import StepPhase
from ckptx.runtime.torch_private import get_overload_packet, get_schema

# Prefix of the name of an operation, without underscores -> kind of collective. A receive is counted by its sender.
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


@dataclass(slots=True)
class OpCounts:
    """Floating-point operations and communication of a part of a step.

    Attributes:
        flops: Floating-point operations of all passes; a multiply-add counts as two.
        recomputed_flops: Part of `flops` that activation checkpointing recomputes in the backward pass.
        sent_bytes: Bytes by kind of collective, for this rank's share: the input of a reduction, the output of a
            gather, the payload sent to the next stage.
    """

    flops: int = 0
    recomputed_flops: int = 0
    sent_bytes: Counter[str] = field(default_factory=Counter)

    def add(self, other: OpCounts, times: int = 1) -> None:
        """Add other counts, multiplied by `times`, which may be negative."""
        self.flops += times * other.flops
        self.recomputed_flops += times * other.recomputed_flops
        for kind, nbytes in other.sent_bytes.items():
            self.sent_bytes[kind] += times * nbytes


def sum_op_counts(parts: Iterable[OpCounts]) -> OpCounts:
    """Return the sum of several counts."""
    total = OpCounts()
    for each in parts:
        total.add(each)
    return total


class OpCounter:
    """Counters of floating-point operations and communicated bytes.

    Attributes:
        op_counts_by_pass: (name of the phase, index of the pass) -> counts; see `StepPhase`.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset all counters."""
        self.op_counts_by_pass: dict[tuple[str, int], OpCounts] = {}

    def record_operation(
        self, get_phase: Callable[[], StepPhase], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> None:
        """Count an operation that `ShapeTensors` reports, in the phase that `get_phase` returns.

        `get_phase` is called only for operations that count. The other arguments are those of
        `StorageLedger.record_operation`.
        """
        count_flops, collective = _find_counters(func)
        flops = 0 if count_flops is None else int(count_flops(*args, **kwargs, out_val=out))
        if flops:
            phase = get_phase()
            counts = self._op_counts_in_phase(phase)
            counts.flops += flops
            counts.recomputed_flops += flops if phase.is_recompute else 0
        elif collective is not None:
            # The output may be an argument, too. The larger one is the input of a reduction, or the output of a gather.
            nbytes = max(
                sum(tensor.nbytes for tensor in iter_tensors((value,), {})) for value in (*args, *kwargs.values(), out)
            )
            self._op_counts_in_phase(get_phase()).sent_bytes[collective] += nbytes

    def _op_counts_in_phase(self, phase: StepPhase) -> OpCounts:
        return self.op_counts_by_pass.setdefault((phase.name, phase.pass_index), OpCounts())


@cache
def _find_counters(func: Any) -> tuple[Callable[..., int] | None, str | None]:
    """Return a function that counts the floating-point operations of an operation, and its kind of collective.

    The function gets the arguments of the operation, and its result as `out_val`. Each is None if there is none.
    """
    name = get_schema(func).name
    count = flop_registry.get(get_overload_packet(func), _OTHER_FLOP_COUNTERS.get(name))
    is_collective = func.namespace in ("c10d", "_c10d_functional")
    return count, _collective_name(name.partition("::")[2]) if is_collective else None


def _collective_name(name: str) -> str | None:
    bare = name.lstrip("_")
    return next((kind for begin, kind in _COLLECTIVE_BY_PREFIX.items() if bare.startswith(begin)), None)


def _count_sdpa(query: Tensor, key: Tensor, value: Tensor, *_: Any, **_settings: Any) -> int:
    return _attention_flops(query, key, value)


def _count_sdpa_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **_settings: Any) -> int:
    return 5 * _attention_flops(query, key, value) // 2  # 5 matrix products, one of which recomputes the scores


def _count_grouped_mm(left: Tensor, right: Tensor, *_: Any, **_settings: Any) -> int:
    return 2 * int(left.numel()) * int(right.shape[-1])  # each token is multiplied with one expert


def _attention_flops(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Count the two matrix products of each query head; heads may share keys and values.

    Shapes are (batch size, heads, sequence length, width of a head).
    """
    return 2 * int(query.numel()) * int(key.shape[-2]) + 2 * int(query.numel() // query.shape[-1]) * int(
        key.shape[-2] * value.shape[-1]
    )


_OTHER_FLOP_COUNTERS = {  # of operations that torch does not count
    "aten::_scaled_dot_product_flash_attention_for_cpu": _count_sdpa,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _count_sdpa_backward,
    "aten::_grouped_mm": _count_grouped_mm,
}
