"""Sharding of the experts of a model by expert parallelism (`reshard --ep`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ckptx.catalog.entry import Block, TensorEntry
from ckptx.layout.expert_parallel import InnerSharding, expert_blocks
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.layout.placement import Placement
from ckptx.layout.tensor_parallel_plan import EXPERT_PARALLEL, PlacementDecision
from ckptx.mapping.quantization_scales import possible_parents
from ckptx.model_view.experts import find_experts
from ckptx.wording import counted


class ExpertPlacement(NamedTuple):
    """Blocks of a tensor of experts on the ranks of its stage, and the entry of the report for them."""

    blocks: tuple[Block, ...]
    decision: PlacementDecision


class ExpertSharder:
    """Shards the tensors of experts; all other tensors are left to the tensor-parallel plan."""

    def __init__(
        self,
        tensors: Mapping[str, TensorEntry],
        model_name: Callable[[str], str | None],
        dims: ParallelDims,
        inner: InnerSharding,
        *,
        replicate: bool,
    ) -> None:
        """Find the tensors of experts.

        Args:
            tensors: Tensors by name; only shapes and dtypes matter.
            model_name: Function that returns the name that a tensor is loaded as; None if it is unknown.
            dims: Mesh dimensions.
            inner: Sharding among the ranks with the same EP rank.
            replicate: True to store tensors that this sharding does not divide on all of these ranks.

        Raises:
            UsageError: There is no expert.
            UnsupportedError: Tensors of experts are stored in a form that cannot be divided by expert.
        """
        self._tensors, self._dims, self._inner, self._replicate = tensors, dims, inner, replicate
        self._positions, self._counts = find_experts(tensors, model_name, f"--ep {dims.ep}")
        self._decisions: dict[tuple[int, bool, bool], PlacementDecision] = {}

    def place(self, name: str) -> ExpertPlacement | None:
        """Return the placement of a tensor; None if it belongs to no expert.

        Raises:
            UsageError: Experts, rows or columns cannot be divided equally.
        """
        position = self._positions.get(name)
        if position is None:
            return None
        entry, count = self._tensors[name], self._counts[position.module]
        is_divisible = not self._is_scale(name)
        blocks = expert_blocks(
            name,
            entry.shape,
            position,
            count,
            self._dims,
            self._inner,
            is_divisible=is_divisible,
            replicate=self._replicate,
            pack=entry.dtype.pack,
        )
        decision = self._decide(count, is_single=position.expert is not None, is_divisible=is_divisible)
        return ExpertPlacement(blocks, decision)

    def _is_scale(self, name: str) -> bool:
        """Return True for a tensor that belongs to a weight of the checkpoint, such as a scale, and is no bias."""
        leaf = name.rpartition(".")[2]
        if leaf == "weight" or leaf == "bias" or leaf.endswith("_bias"):
            return False
        return any(parent.weight != name and parent.weight in self._tensors for parent in possible_parents(name))

    def _decide(self, count: int, *, is_single: bool, is_divisible: bool) -> PlacementDecision:
        """Return the decision for tensors of one number of experts; equal ones are one object."""
        key = (count, is_single, is_divisible)
        if key not in self._decisions:
            ep, num_inner_ranks = self._dims.ep, self._dims.tp * self._dims.dp_shard // self._dims.ep
            reason = f"{counted(count, 'expert')} on {counted(ep, 'EP rank')}"
            if num_inner_ranks > 1 and (is_divisible or self._inner == "experts"):
                reason += f", {self._inner} of each divided among {counted(num_inner_ranks, 'rank')}"
            elif num_inner_ranks > 1:
                reason += ", scale not divided further"
            placement = None if is_single else Placement(0, (count,))
            self._decisions[key] = PlacementDecision(placement, EXPERT_PARALLEL, reason, True, is_expert_parallel=True)
        return self._decisions[key]
