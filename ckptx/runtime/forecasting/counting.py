"""Count floating-point operations and communicated bytes of a step, operation by operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ckptx.runtime.memory.shape_tensors import tensors_in
from ckptx.runtime.memory.storage_ledger import StepPhase
from ckptx.runtime.torch_private import packet_of, schema_of

_COLLECTIVES = {
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
class Tally:
    """Floating-point operations and communication of a part of a step.

    Attributes:
        flops: Floating-point operations of all passes; a multiply-add counts as two.
        recomputed: Those of `flops` that activation checkpointing recomputes.
        sent: Bytes by kind of collective, for this rank's share: the input of a reduction, the output of a gather, the
            payload sent to the next stage.
    """

    flops: int = 0
    recomputed: int = 0
    sent: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally, times: int = 1) -> None:
        """Add another tally, `times` times."""
        self.flops += times * other.flops
        self.recomputed += times * other.recomputed
        for kind, nbytes in other.sent.items():
            self.sent[kind] += times * nbytes


def sum_of(tallies: Iterable[Tally]) -> Tally:
    """Return the sum of tallies."""
    found = Tally()
    for each in tallies:
        found.add(each)
    return found


class Counts:
    """Counters of floating-point operations and communicated bytes.

    Attributes:
        by_turn: Tally of each pass, by part of the step and number of the pass.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Reset all counters."""
        self.by_turn: dict[tuple[str, int], Tally] = {}

    def record_operation(
        self, moment: Callable[[], StepPhase], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> None:
        """Count an operation that `ShapeTensors` reports."""
        flops = _flops(func, args, kwargs, out)
        if flops:
            now = moment()
            tally = self._at(now)
            tally.flops += flops
            tally.recomputed += flops if now.is_again else 0
        elif func.namespace in ("c10d", "_c10d_functional"):
            kind = _kind_of(schema_of(func).name.partition("::")[2])
            if kind is not None:
                given = sum(each.nbytes for each in tensors_in(args, kwargs))
                got = sum(each.nbytes for each in tensors_in((out,), {}))
                nbytes = max(given, got) if func.namespace == "_c10d_functional" else given
                self._at(moment()).sent[kind] += nbytes

    def _at(self, moment: StepPhase) -> Tally:
        return self.by_turn.setdefault((moment.part, moment.turn), Tally())


def _kind_of(name: str) -> str | None:
    bare = name.lstrip("_")
    return next((kind for begin, kind in _COLLECTIVES.items() if bare.startswith(begin)), None)


def _flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    count = flop_registry.get(packet_of(func))
    if count is not None:
        return int(count(*args, **kwargs, out_val=out))
    name = schema_of(func).name
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
