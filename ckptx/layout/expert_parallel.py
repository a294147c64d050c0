"""Expert parallelism (EP): the experts that each rank of a pipeline stage holds.

Rank r of a stage (r = dp_index * tp + tp_index) has EP rank r % ep, and holds count / ep consecutive experts. TP does
not shard experts. Ranks with the same EP rank divide its experts: by expert, or each expert by rows or columns.

    8 experts, tp=2, dp_shard=2, ep=2     rank 0        rank 1        rank 2        rank 3
    EP rank                               0             1             0             1
    inner sharding "experts"              0:2           4:6           2:4           6:8
    inner sharding "rows"                 0:4, rows     4:8, rows     0:4, rows     4:8, rows
                                          of half 0     of half 0     of half 1     of half 1

torchtitan shards by expert, VeOmni by rows, and NeMo AutoModel by the dim that is the columns of a weight in Hugging
Face checkpoints.
"""

from __future__ import annotations

import re
from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple, get_args

from ckptx.catalog.entry import Block
from ckptx.catalog.region import Region, Shape, full_region
from ckptx.errors import UsageError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.untrusted.limits import MAX_RANKS
from ckptx.wording import counted

InnerSharding = Literal["experts", "rows", "columns"]
INNER_SHARDINGS: tuple[InnerSharding, ...] = get_args(InnerSharding)

# Names of the module that holds the experts: in every class of transformers, and in torchtitan 0.3.
_MODULES = ("experts", "inner_experts")
_INDEXED = re.compile(r"(?:expert_)?(0|[1-9][0-9]{0,8})")  # `experts.3`; `experts.expert_3` in NLLB and Switch


class ExpertPosition(NamedTuple):
    """Place of a tensor among the experts of a layer.

    Attributes:
        module: Path of the module that holds the experts: "model.layers.3.mlp.experts".
        expert: Index of the expert that the tensor belongs to; None if its dim 0 counts the experts.
    """

    module: str
    expert: int | None


def find_position(name: str, shape: Shape) -> ExpertPosition | None:
    """Return the place of a tensor among the experts of a layer, from its name; None if it belongs to no expert.

    A parameter directly in a module `experts` has all experts along dim 0, unless it has fewer than two dims.

    Example:
        model.layers.3.mlp.experts.gate_up_proj [8, 64, 32] -> ("model.layers.3.mlp.experts", None)
        model.layers.3.mlp.experts.5.up_proj.weight         -> ("model.layers.3.mlp.experts", 5)
        model.layers.3.mlp.shared_experts.up_proj.weight    -> None
    """
    components = name.split(".")
    begin = max((i for i, component in enumerate(components[:-1]) if component in _MODULES), default=None)
    if begin is None:
        return None
    module, below = ".".join(components[: begin + 1]), components[begin + 1 :]
    indexed = _INDEXED.fullmatch(below[0])
    if indexed is not None and len(below) > 1:
        return ExpertPosition(module, int(indexed[1]))
    return ExpertPosition(module, None) if len(below) == 1 and len(shape) > 1 else None


def is_below_experts(name: str) -> bool:
    """Return True if a module around the tensor has a name of a module that holds experts."""
    return any(component in _MODULES for component in name.split(".")[:-1])


def expert_blocks(
    name: str,
    shape: Shape,
    position: ExpertPosition,
    count: int,
    dims: ParallelDims,
    inner: InnerSharding,
    *,
    is_divisible: bool = True,
    replicate: bool = False,
    pack: int = 1,
) -> tuple[Block, ...]:
    """Return the blocks of a tensor of experts on the ranks of one pipeline stage.

    Args:
        name: Name of the tensor, for errors.
        shape: Shape of the whole tensor.
        position: Its place among the experts.
        count: Number of experts of the layer.
        dims: Mesh dimensions; `pp` is ignored.
        inner: Sharding among the ranks with the same EP rank.
        is_divisible: False for a tensor that rows and columns do not divide, such as a scale; the first of these ranks
            holds it.
        replicate: True to store an undivided tensor on all of these ranks, all but the first marked as replicas.
        pack: Elements that share a byte along the last dim and stay together; 2 for F4.

    Returns:
        Blocks by rank. Those that are not replicas tile the tensor.

    Raises:
        UsageError: The experts, rows or columns cannot be divided equally.
    """
    ep, num_inner_ranks = dims.ep, dims.tp * dims.dp_shard // dims.ep
    check_expert_count(name, count, ep, f"--ep {ep}")
    experts_per_rank = count // ep
    if inner == "experts" and experts_per_rank % num_inner_ranks:
        raise UsageError(
            f"--ep-inner experts: each EP rank has {experts_per_rank} of the {counted(count, 'expert')} of "
            f'"{position.module}", which {counted(num_inner_ranks, "rank")} (--tp x --dp-shard / --ep) cannot divide '
            "equally; use --ep-inner rows or columns, or a larger --ep"
        )
    if not prod(shape):
        return (Block(0, full_region(shape)),)
    ep_rank = None if position.expert is None else position.expert // experts_per_rank
    if inner == "experts":
        per_inner_rank = experts_per_rank // num_inner_ranks
        owner = None if position.expert is None else position.expert % experts_per_rank // per_inner_rank
        return _blocks_by_expert(shape, ep, num_inner_ranks, ep_rank, owner)
    dim = _inner_dim(shape, inner, has_expert_dim=position.expert is None)
    if not is_divisible or dim is None or num_inner_ranks == 1:
        return _undivided_blocks(shape, ep, num_inner_ranks, ep_rank, replicate)
    granularity = pack if dim == len(shape) - 1 else 1
    if shape[dim] % (num_inner_ranks * granularity):
        raise UsageError(
            f'--ep-inner {inner}: dim {dim} of "{name}" has size {shape[dim]}, which '
            f"{counted(num_inner_ranks, 'rank')} (--tp x --dp-shard / --ep) cannot divide equally; use another "
            "--ep-inner, or a larger --ep"
        )
    return _blocks_by_dim(shape, ep, num_inner_ranks, ep_rank, dim)


def check_expert_count(name: str, count: int, ep: int, option: str) -> None:
    """Check that the number of EP ranks divides the number of experts.

    Args:
        name: Name of a tensor of these experts.
        count: Number of experts of the layer.
        ep: Number of EP ranks.
        option: Option that sets `ep`, with its value.

    Raises:
        UsageError: It does not.
    """
    if count % ep:
        # A damaged checkpoint may claim any number of experts.
        sizes = [str(size) for size in range(1, min(count, MAX_RANKS) + 1) if count % size == 0]
        raise UsageError(
            f'{option}: must divide the number of experts, but "{name}" belongs to a layer with {count}; use one of '
            f"{', '.join(sizes)}"
        )


def _inner_dim(shape: Shape, inner: InnerSharding, *, has_expert_dim: bool) -> int | None:
    """Return the dim that "rows" or "columns" divides; None for a tensor of single values per expert.

    A bias, which has no columns, is divided along its only dim.
    """
    first = 1 if has_expert_dim else 0
    num_dims = len(shape) - first
    if num_dims == 0:
        return None
    return first + (1 if inner == "columns" and num_dims > 1 else 0)


@lru_cache(maxsize=4096)  # layers and experts repeat a few shapes, and share their blocks
def _blocks_by_expert(
    shape: Shape, ep: int, num_inner_ranks: int, ep_rank: int | None, owner: int | None
) -> tuple[Block, ...]:
    """Return the blocks if each rank holds whole experts.

    Args:
        shape: Shape of the whole tensor.
        ep: Number of EP ranks.
        num_inner_ranks: Number of ranks with the same EP rank.
        ep_rank: EP rank of the expert of the tensor; None if dim 0 counts the experts.
        owner: Index among the ranks with this EP rank; None if dim 0 counts the experts.
    """
    if ep_rank is not None and owner is not None:
        return (Block(owner * ep + ep_rank, full_region(shape)),)
    size = shape[0] // (ep * num_inner_ranks)
    return tuple(
        Block(rank, full_region(shape).with_extent(0, (rank % ep * num_inner_ranks + rank // ep) * size, size))
        for rank in range(ep * num_inner_ranks)
    )


@lru_cache(maxsize=4096)
def _blocks_by_dim(shape: Shape, ep: int, num_inner_ranks: int, ep_rank: int | None, dim: int) -> tuple[Block, ...]:
    """Return the blocks if the ranks with the same EP rank divide each expert along `dim`."""
    size = shape[dim] // num_inner_ranks
    return tuple(
        Block(rank, _experts_of(shape, ep, rank % ep, ep_rank).with_extent(dim, rank // ep * size, size))
        for rank in range(ep * num_inner_ranks)
        if ep_rank is None or rank % ep == ep_rank
    )


@lru_cache(maxsize=4096)
def _undivided_blocks(
    shape: Shape, ep: int, num_inner_ranks: int, ep_rank: int | None, replicate: bool
) -> tuple[Block, ...]:
    """Return the blocks if the ranks with the same EP rank do not divide its part of the tensor."""
    return tuple(
        Block(rank, _experts_of(shape, ep, rank % ep, ep_rank), is_replica=rank >= ep)
        for rank in range(ep * num_inner_ranks if replicate else ep)
        if ep_rank is None or rank % ep == ep_rank
    )


def _experts_of(shape: Shape, ep: int, rank: int, ep_rank: int | None) -> Region:
    """Return the region of one EP rank: its experts along dim 0, or the whole tensor of a single expert."""
    if ep_rank is not None:
        return full_region(shape)
    size = shape[0] // ep
    return full_region(shape).with_extent(0, rank * size, size)
