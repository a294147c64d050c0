"""Sharding of the experts of a model by expert parallelism (`reshard --ep`).

The experts of a tensor follow from its name and shape: `experts.gate_up_proj` has all experts along dim 0,
`experts.3.up_proj.weight` belongs to one. A tensor whose stored name shows neither (`block_sparse_moe.input_linear` of
Granite) is recognized by the model tensor into which it is loaded. Tensors of experts in any other form are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from ckptx.catalog.entry import Block, TensorEntry
from ckptx.catalog.region import Shape
from ckptx.errors import UnsupportedError, UsageError
from ckptx.layout.expert_parallel import (
    ExpertPosition,
    InnerSharding,
    expert_blocks,
    find_position,
    is_below_experts,
)
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.layout.placement import Placement
from ckptx.layout.tensor_parallel_plan import EXPERT_PARALLEL, PlacementDecision
from ckptx.mapping.quantization_scales import possible_parents


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
        self._positions = dict(self._find_positions(model_name))
        if not self._positions:
            raise UsageError(f"--ep {dims.ep}: the checkpoint has no experts; leave out --ep")
        self._counts = self._count_experts()
        self._refuse_unknown_forms()
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
        return ExpertPlacement(
            blocks, self._decide(count, is_single=position.expert is not None, is_divisible=is_divisible)
        )

    def _find_positions(self, model_name: Callable[[str], str | None]) -> Iterator[tuple[str, ExpertPosition]]:
        """Yield the name and position of each tensor that belongs to experts.

        Raises:
            UnsupportedError: A tensor has another form.
        """
        for name, entry in self._tensors.items():
            position = find_position(name, entry.shape)
            loaded = None if position is not None else model_name(name)
            if loaded is not None and loaded != name:
                position = find_position(loaded, entry.shape)
            if position is not None:
                yield name, position
            elif len(entry.shape) > 1 and (is_below_experts(name) or (loaded is not None and is_below_experts(loaded))):
                raise _unknown_form(name, entry.shape)

    def _count_experts(self) -> dict[str, int]:
        """Return the number of experts by the path of their module.

        Raises:
            UnsupportedError: Tensors of one module have different numbers of experts, or an expert is missing.
        """
        counts: dict[str, int] = {}
        indices: dict[str, set[int]] = {}
        for name, (module, index) in self._positions.items():
            if index is not None:
                indices.setdefault(module, set()).add(index)
                continue
            size = self._tensors[name].shape[0]
            if counts.setdefault(module, size) != size:
                raise UnsupportedError(
                    f'--ep: tensors of "{module}" have different sizes along dim 0, {counts[module]} and {size} '
                    f'("{name}"), which should be the number of experts; leave out --ep'
                )
        for module, found in indices.items():
            count = counts.setdefault(module, len(found))
            if max(found) + 1 != count or len(found) != count:
                missing = min(set(range(max(count, max(found) + 1))) - found, default=count)
                raise UnsupportedError(
                    f'--ep: "{module}" has {count} experts, but no expert {missing}; expert parallelism requires all '
                    "of them; leave out --ep"
                )
        return counts

    def _refuse_unknown_forms(self) -> None:
        """Refuse a tensor outside of known modules whose dim 0 seems to count experts.

        Raises:
            UnsupportedError: There is such a tensor.
        """
        counts = set(self._counts.values())
        for name, entry in self._tensors.items():
            shape = entry.shape
            is_matrix_by_expert = len(shape) == 3 and shape[0] in counts and min(shape) > 1 and "conv" not in name
            if is_matrix_by_expert and name not in self._positions:
                raise _unknown_form(name, shape)

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
            reason = f"{count} experts on {ep} EP ranks"
            if num_inner_ranks > 1 and (is_divisible or self._inner == "experts"):
                reason += f", {self._inner} of each divided among {num_inner_ranks} ranks"
            elif num_inner_ranks > 1:
                reason += ", scale not divided further"
            placement = None if is_single else Placement(0, (count,))
            self._decisions[key] = PlacementDecision(placement, EXPERT_PARALLEL, reason, True, is_expert_parallel=True)
        return self._decisions[key]


def _unknown_form(name: str, shape: Shape) -> UnsupportedError:
    """Return the error for a tensor that may hold experts in an unknown form."""
    return UnsupportedError(
        f'--ep: ckptx does not know where the experts are in "{name}" of shape {list(shape)}; it must be a parameter '
        "of a module `experts` with all experts along dim 0, or of one expert (`experts.3.up_proj.weight`); leave out "
        "--ep"
    )
