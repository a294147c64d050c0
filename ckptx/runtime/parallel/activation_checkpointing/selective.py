"""Which results a selectively checkpointed layer keeps, and which it computes again in the backward pass.

Kept: attention, every other matrix product, the choice of experts, and what came over the network. Computed again: the
rest, which is cheap arithmetic over large tensors, and all-gathers, whose results are as large as what sharding saves.
The idea, and half of the list, is torchtitan's (`distributed/activation_checkpoint.py`).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy

from ckptx.runtime.torch_private import TorchDispatchMode, compute_intensive_operations, schema_of, tree_map_only

_LOG = logging.getLogger(__name__)
_TRACE_VARIABLE = "CKPTX_SELECTIVE_AC_TRACE"

# Paths below torch.ops. What this torch lacks, or what no imported package has registered, is left out.
_MATMULS = (
    "aten.mm",
    "aten.linear",
    "aten.addmm",  # a linear layer with a bias: no dearer than one without
    # Scores and weighted sum of eager attention, experts as one batch. To keep both of the former would keep two
    # tensors that grow with the square of the sequence, more than no checkpointing does.
    "aten.bmm",
    "aten._grouped_mm",
    "aten._scaled_grouped_mm",
)
# A token must find the same experts again, whatever rounding does to the scores the second time.
_CHOICES = ("aten.topk", "aten.max")
_WRITTEN_INTO = (*_CHOICES, "aten.bmm", "aten._grouped_mm", "aten._scaled_grouped_mm")
_SAVED = (
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "aten._scaled_dot_product_attention_math",
    "aten.scaled_dot_product_attention",
    "aten._flash_attention_forward",
    "aten._efficient_attention_forward",
    "torch_attn._varlen_attn",
    "higher_order.flex_attention",
    "higher_order.inductor_compiled_code",  # a compiled region counts as one operation
    "aten._scaled_mm",
    "aten.convolution",
    *_CHOICES,
    # The functional collectives alone: those of c10d write into their arguments.
    "_c10d_functional.all_reduce",
    "_c10d_functional.all_reduce_coalesced",
    "_c10d_functional.reduce_scatter_tensor",
    "_c10d_functional.reduce_scatter_tensor_coalesced",
    "_c10d_functional.all_to_all_single",
    "deepep.dispatch",
    "deepep.combine",
    "hybridep.dispatch",
    "hybridep.combine",
)
# FSDP2 gathers ahead of time, and names what it does for the profiler: in the second pass there are more or fewer of
# these than in the first, and operations are told apart by their number.
_NOT_COUNTED = (
    "profiler._record_function_enter",
    "profiler._record_function_enter_new",
    "profiler._record_function_exit",
    "fsdp.all_gather_copy_in",
    "fsdp.split_with_sizes_copy",
    "fsdp.chunk_cat",
    "fsdp.copy_",
    "c10d._allgather_base_",
    "c10d.allgather_into_tensor_coalesced_",
    "aten.empty",
    "aten.empty_like",
    "aten.empty_strided",
    "aten.view",
)


class OpSets(NamedTuple):
    """Operations that are treated in their own way.

    Attributes:
        saved: Always kept.
        alternating: The first is kept, the second computed again, and so on.
    """

    saved: frozenset[Any]
    alternating: frozenset[Any]


def op_sets() -> OpSets:
    """The operations that exist here; none that writes into an argument, as every `out=` does."""
    alternating = frozenset(filter(_is_pure, _resolved(_MATMULS)))
    return OpSets(frozenset(filter(_is_pure, [*_resolved(_SAVED), *_compute_intensive()])) - alternating, alternating)


@dataclass(slots=True)
class Trace:
    """Says what was decided for each operation, once."""

    seen: set[str] = field(default_factory=set)

    def say(self, op: Any, decision: str) -> None:
        """Logs a decision unless the operation had one before."""
        if str(op) not in self.seen:
            self.seen.add(str(op))
            _LOG.info("selective activation checkpointing: %s: %s", op, decision)


def trace_from_environment() -> Trace | None:
    """A trace when CKPTX_SELECTIVE_AC_TRACE asks for one; it goes to stderr unless logging is set up."""
    if os.environ.get(_TRACE_VARIABLE, "0") in ("", "0"):
        return None
    _LOG.setLevel(logging.INFO)
    if not _LOG.hasHandlers():
        _LOG.addHandler(logging.StreamHandler(sys.stderr))
    return Trace()


@dataclass(slots=True)
class SelectivePolicy:
    """Decides over each operation of one region in one pass over it and its recomputation.

    Up to torch 2.12 the policy is asked again while recomputing, and what it kept is taken out by these answers; so the
    two passes count by themselves. With one counter, an odd number of products would turn every answer of the second
    pass around. torch 2.13 remembers the answers of the first pass.
    """

    ops: OpSets
    trace: Trace | None = None
    products: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """What to do with the result of `op`, as torch asks it."""
        policy, said = self._decide(bool(context.is_recompute), op, args, kwargs)
        if self.trace is not None and not context.is_recompute:
            self.trace.say(op, said)
        return policy

    def _decide(
        self, is_recompute: bool, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[CheckpointPolicy, str]:
        if op in self.ops.alternating:
            self.products[is_recompute] += 1
            is_odd = self.products[is_recompute] % 2 == 1
            return (
                CheckpointPolicy.MUST_SAVE if is_odd else CheckpointPolicy.PREFER_RECOMPUTE
            ), "every other one saved"
        if op in self.ops.saved or _leaves_device(op, args, kwargs):
            return CheckpointPolicy.MUST_SAVE, "saved"
        return CheckpointPolicy.PREFER_RECOMPUTE, "recomputed"


def context_maker() -> Callable[[], Any]:
    """What makes the two contexts, forward and recompute, of each pass over a region.

    Every region, and every microbatch in it, gets a policy of its own: 1F1B recomputes one while it runs another.
    """
    ops, trace = op_sets(), trace_from_environment()
    do_not_count()

    written = frozenset(_resolved(_WRITTEN_INTO))

    def make() -> Any:
        contexts = torch_checkpoint.create_selective_checkpoint_contexts(SelectivePolicy(ops, trace))
        if torch.compiler.is_compiling():  # takes torch's own two alone; there, no operation writes into a tensor
            return contexts
        return tuple(_Copies(context, written) for context in contexts)

    return make


class _Copies(TorchDispatchMode):  # type: ignore[misc]  # torch says Any
    """A context of torch's around which the results of some operations are handed out as copies.

    Routers scale the weights of the chosen experts in place (Mixtral, Qwen3-MoE), experts add their bias so (gpt-oss).
    What was kept must stay as it was: handed out again, it would be scaled a second time, and torch refuses.
    """

    def __init__(self, inner: TorchDispatchMode, ops: frozenset[Any]) -> None:
        super().__init__()
        self._inner, self._ops = inner, ops

    def __enter__(self) -> Any:
        self._inner.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._inner.__exit__(*raised)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        return tree_map_only(torch.Tensor, torch.clone, result) if op in self._ops else result


def do_not_count() -> None:
    """Adds what FSDP2 and the profiler do to the operations that torch leaves alone, where it can be told so."""
    ignored = getattr(torch_checkpoint, "SAC_IGNORED_OPS", None)
    if isinstance(ignored, set):
        ignored.update(_resolved(_NOT_COUNTED))


def _leaves_device(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the operation copies from a device to the host: again, that would have the device waited for again."""
    if op is not torch.ops.aten._to_copy.default:
        return False
    target = kwargs.get("device")
    return target is not None and torch.device(target).type == "cpu" and args[0].device.type != "cpu"


def _compute_intensive() -> Iterator[Any]:
    """Yield every overload of what torch's own partitioner never recomputes."""
    for packet in compute_intensive_operations():
        yield from _overloads(packet)


def _resolved(paths: tuple[str, ...]) -> Iterator[Any]:
    """The overloads of those operations that exist."""
    for path in paths:
        found: Any = torch.ops
        with suppress(AttributeError):
            for part in path.split("."):
                found = getattr(found, part)
            yield from _overloads(found)


def _is_pure(op: Any) -> bool:
    """Whether an operation leaves its arguments alone; a kept result would leave what it writes into unwritten."""
    schema = schema_of(op)  # a higher-order one has none
    return schema is None or not schema.is_mutable


def _overloads(found: Any) -> list[Any]:
    """All overloads of an operation; a higher-order one has none but itself."""
    return [getattr(found, name) for name in found.overloads()] if hasattr(found, "overloads") else [found]
