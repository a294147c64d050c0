"""Selective activation checkpointing: saves expensive results of a layer, and recomputes the rest in the backward pass.

Saved: attention, convolutions, `_scaled_mm`, every second of the other matrix products, the choice of experts, copies
to the host, operations that torch's partitioner never recomputes, and results of functional all-reduce, reduce-scatter
and all-to-all, including the dispatch and combine of DeepEP. Recomputed: the rest, which is cheap arithmetic over large
tensors, and all-gathers, whose results are as large as the memory that sharding saves. The idea, and half of the list,
is torchtitan's (`distributed/activation_checkpoint.py`).
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

from ckptx.runtime.torch_private import TorchDispatchMode, get_schema, list_compute_intensive_operations, tree_map_only

_logger = logging.getLogger(__name__)
_TRACE_VARIABLE = "CKPTX_SELECTIVE_AC_TRACE"

# Paths within torch.ops. Operations that this torch lacks, or that no imported package registered, are left out.
_MATMUL_OPS = (
    "aten.mm",
    "aten.linear",
    "aten.addmm",  # a linear layer with a bias, which costs no more than one without
    # Scores and weighted sum of eager attention, batched experts. Always saving them would save all scores, which grow
    # with the square of the sequence length.
    "aten.bmm",
    "aten._grouped_mm",
    "aten._scaled_grouped_mm",
)
# A token must get the same experts again, even if its scores are rounded differently the second time.
_ROUTING_OPS = ("aten.topk", "aten.max")
# Operations whose results models change in place (see `_CopiedResultsMode`).
_MUTATED_RESULT_OPS = (*_ROUTING_OPS, "aten.bmm", "aten._grouped_mm", "aten._scaled_grouped_mm")
_SAVED_OPS = (
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
    "higher_order.inductor_compiled_code",  # a compiled region is one operation
    "aten._scaled_mm",
    "aten.convolution",
    *_ROUTING_OPS,
    # Functional collectives only: those of c10d write into their arguments.
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
# FSDP2 prefetches, and annotates its steps for the profiler: the second pass has more or fewer of these operations
# than the first, and operations are matched by their index.
_UNCOUNTED_OPS = (
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
    """Sets of operations with their own policy.

    Attributes:
        saved: Operations whose results are always saved.
        alternating: Operations whose results are alternately saved and recomputed, beginning with saved.
    """

    saved: frozenset[Any]
    alternating: frozenset[Any]


def find_op_sets() -> OpSets:
    """Return the sets for this torch, without operations that it lacks or that write into an argument, e.g. `out=`."""
    alternating = frozenset(filter(_is_pure, _find_overloads(_MATMUL_OPS)))
    return OpSets(
        frozenset(filter(_is_pure, [*_find_overloads(_SAVED_OPS), *_compute_intensive_overloads()])) - alternating,
        alternating,
    )


@dataclass(slots=True)
class DecisionLog:
    """Logs the decision for each operation once.

    Attributes:
        logged_operations: Names of the operations whose decision was logged, with overload: "aten.mm.default".
    """

    logged_operations: set[str] = field(default_factory=set)

    def log_once(self, op: Any, decision: str) -> None:
        """Log a decision unless the operation was logged before."""
        if str(op) not in self.logged_operations:
            self.logged_operations.add(str(op))
            _logger.info("selective activation checkpointing: %s: %s", op, decision)


def make_log_from_environment() -> DecisionLog | None:
    """Return a log if CKPTX_SELECTIVE_AC_TRACE is set, else None; it goes to stderr unless logging is configured."""
    if os.environ.get(_TRACE_VARIABLE, "0") in ("", "0"):
        return None
    _logger.setLevel(logging.INFO)
    if not _logger.hasHandlers():
        _logger.addHandler(logging.StreamHandler(sys.stderr))
    return DecisionLog()


@dataclass(slots=True)
class SelectivePolicy:
    """Decides which results of a checkpointed region are saved, in one forward pass and its recomputation.

    Up to torch 2.12 the policy is called again while recomputing, and those answers select the saved results; so each
    pass has its own counter. With a shared one, an odd number of products would flip every answer of the second pass.
    torch 2.13 remembers the answers of the first pass.

    Attributes:
        ops: Operations with their own policy.
        decision_log: Log of the decisions of the forward pass; None to log none.
        product_counts: Number of matrix products so far, for the forward pass (False) and its recomputation (True).
    """

    ops: OpSets
    decision_log: DecisionLog | None = None
    product_counts: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Return the policy for the result of `op`; the signature is torch's."""
        policy, decision = self._decide(bool(context.is_recompute), op, args, kwargs)
        if self.decision_log is not None and not context.is_recompute:
            self.decision_log.log_once(op, decision)
        return policy

    def _decide(
        self, is_recompute: bool, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[CheckpointPolicy, str]:
        if op in self.ops.alternating:
            self.product_counts[is_recompute] += 1
            is_odd = self.product_counts[is_recompute] % 2 == 1
            return (
                CheckpointPolicy.MUST_SAVE if is_odd else CheckpointPolicy.PREFER_RECOMPUTE
            ), "every second one saved"
        if op in self.ops.saved or _is_copy_to_host(op, args, kwargs):
            return CheckpointPolicy.MUST_SAVE, "saved"
        return CheckpointPolicy.PREFER_RECOMPUTE, "recomputed"


def make_context_factory() -> Callable[[], Any]:
    """Return a function that makes the two contexts, forward and recompute, for each pass over a region.

    Every microbatch of every region gets its own policy, as 1F1B recomputes one while it runs another.
    """
    ops, decision_log = find_op_sets(), make_log_from_environment()
    ignore_uncounted_ops()

    mutated_result_ops = frozenset(_find_overloads(_MUTATED_RESULT_OPS))

    def make_contexts() -> Any:
        contexts = torch_checkpoint.create_selective_checkpoint_contexts(SelectivePolicy(ops, decision_log))
        if torch.compiler.is_compiling():  # requires torch's own contexts; its graphs do not mutate tensors
            return contexts
        return tuple(_CopiedResultsMode(context, mutated_result_ops) for context in contexts)

    return make_contexts


class _CopiedResultsMode(TorchDispatchMode):  # type: ignore[misc]  # torch says Any
    """Wraps a context of torch, and returns the results of some operations as copies.

    Routers scale the weights of the chosen experts in place (Mixtral, Qwen3-MoE), experts add their bias in place
    (gpt-oss). A saved result must not change: returned again, it would be scaled a second time, and torch refuses that.
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


def ignore_uncounted_ops() -> None:
    """Add operations of FSDP2 and the profiler to those that torch ignores, if this torch has such a list."""
    ignored = getattr(torch_checkpoint, "SAC_IGNORED_OPS", None)
    if isinstance(ignored, set):
        ignored.update(_find_overloads(_UNCOUNTED_OPS))


def _is_copy_to_host(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True for a copy from a device to the host, which must not synchronize a second time."""
    if op is not torch.ops.aten._to_copy.default:
        return False
    target = kwargs.get("device")
    return target is not None and torch.device(target).type == "cpu" and args[0].device.type != "cpu"


def _compute_intensive_overloads() -> Iterator[Any]:
    """Yield every overload of the operations that torch's own partitioner never recomputes."""
    for packet in list_compute_intensive_operations():
        yield from _overloads(packet)


def _find_overloads(paths: tuple[str, ...]) -> Iterator[Any]:
    """Yield the overloads of the operations at paths within torch.ops, without operations that do not exist."""
    for path in paths:
        operation: Any = torch.ops
        with suppress(AttributeError):
            for part in path.split("."):
                operation = getattr(operation, part)
            yield from _overloads(operation)


def _is_pure(op: Any) -> bool:
    """Return True if an operation mutates no argument; a saved result would skip the mutation when recomputing."""
    schema = get_schema(op)  # None for a higher-order operation
    return schema is None or not schema.is_mutable


def _overloads(operation: Any) -> list[Any]:
    """Return all overloads of an operation; a higher-order operation has only itself."""
    return (
        [getattr(operation, name) for name in operation.overloads()] if hasattr(operation, "overloads") else [operation]
    )
