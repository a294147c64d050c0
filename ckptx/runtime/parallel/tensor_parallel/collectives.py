"""The differentiable collectives of tensor parallelism, over one process group.

Activations and gradients are equal on all ranks ("whole"), one slice per rank, or partial: each rank has its own
summand. Forward and backward of each function (Megatron-LM, arXiv 1909.08053 and 2205.05198):

    copy_to_ranks     whole -> whole          backward: sum over ranks
    sum_over_ranks    partial -> whole        backward: identity
    gather            slices -> whole         backward: own slice
    split             whole -> own slice      backward: gather
    gather_partial    slices -> whole         backward: own slice of the sum over ranks
    scatter_sum       partial -> own slice    backward: gather
    gather_parameter  shards -> whole         backward: own shard

Slices are ceil-chunks, as from `torch.chunk`, so the last ones may be shorter or empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ckptx.catalog.region import Region
from ckptx.layout.placement import ceil_chunks
from ckptx.runtime.torch_private import functional_collectives as functional

# torch 2.13 renamed both
_all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_reduce_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


class TpRanks(NamedTuple):
    """The TP ranks of a model.

    Attributes:
        mesh: Mesh with one dim.
        group: Process group of the ranks.
        rank: TP rank of this process.
        size: Number of TP ranks.
    """

    mesh: DeviceMesh
    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> TpRanks:
        """Return the TP ranks of a mesh with one dim."""
        return cls(mesh, mesh.get_group(), mesh.get_local_rank(), mesh.size())


def all_reduce(x: torch.Tensor, op: str, ranks: TpRanks) -> torch.Tensor:
    """Return the reduction over ranks by `op`, "sum" or "max", in a new tensor; no gradient."""
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), op, ranks.group))


def all_gather(x: torch.Tensor, dim: int, total: int, ranks: TpRanks) -> torch.Tensor:
    """Concatenate the ceil-chunks of all ranks along `dim`, which has size `total`; no gradient."""
    chunks = ceil_chunks(total, ranks.size)
    width = chunks[0][1]
    padded = _pad(x.movedim(dim, 0), width)
    gathered = functional.wait_tensor(_all_gather(padded, 0, ranks.group))
    return gathered[:total].movedim(0, dim)  # padding is at the end only: chunks before a short one are full


def reduce_scatter(x: torch.Tensor, dim: int, ranks: TpRanks) -> torch.Tensor:
    """Return this rank's ceil-chunk along `dim` of the sum over ranks; no gradient."""
    chunks = ceil_chunks(x.shape[dim], ranks.size)
    padded = _pad(x.movedim(dim, 0), chunks[0][1] * ranks.size)
    own = functional.wait_tensor(_reduce_scatter(padded, "sum", 0, ranks.group))
    return own[: chunks[ranks.rank][1]].movedim(0, dim)


def own_slice(x: torch.Tensor, dim: int, ranks: TpRanks) -> torch.Tensor:
    """Return this rank's ceil-chunk along `dim`."""
    begin, length = ceil_chunks(x.shape[dim], ranks.size)[ranks.rank]
    return x.narrow(dim, begin, length)


def concat_regions(full: torch.Tensor, dim: int, regions: Sequence[Region]) -> torch.Tensor:
    """Return the shard of one rank: its regions of the whole tensor, concatenated along `dim`.

    The regions span all other dims. Without regions, the result has size 0 along `dim`.
    """
    slices = [full.narrow(dim, region.offsets[dim], region.sizes[dim]) for region in regions]
    return torch.cat(slices, dim) if slices else full.narrow(dim, 0, 0)


def gather_shards(
    local: torch.Tensor, shape: Sequence[int], dim: int, regions: Sequence[Sequence[Region]], ranks: TpRanks
) -> torch.Tensor:
    """Return the whole tensor from the shards of all ranks; no gradient.

    Args:
        local: Shard of this rank.
        shape: Shape of the whole tensor.
        dim: Sharded dim.
        regions: For each rank, its regions in their order.
        ranks: TP ranks.
    """
    widths = [sum(region.sizes[dim] for region in rank_regions) for rank_regions in regions]
    padded = _pad(local.movedim(dim, 0), max(widths))
    gathered = functional.wait_tensor(_all_gather(padded, 0, ranks.group)).movedim(0, dim)
    full = local.new_empty(tuple(shape))
    for rank, rank_regions in enumerate(regions):
        begin = rank * max(widths)
        for region in rank_regions:
            width = region.sizes[dim]
            full.narrow(dim, region.offsets[dim], width).copy_(gathered.narrow(dim, begin, width))
            begin += width
    return full


def _pad(x: torch.Tensor, length: int) -> torch.Tensor:
    """Return a contiguous tensor, padded with zeros at the end of dim 0."""
    if x.shape[0] == length:
        return x.contiguous()
    padded = x.new_zeros((length, *x.shape[1:]))
    padded[: x.shape[0]] = x
    return padded


class _CopyToRanks(torch.autograd.Function):  # type: ignore[misc]  # torch says Any
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: TpRanks) -> torch.Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(grads[0], "sum", ctx.ranks), None


class _SumOverRanks(torch.autograd.Function):  # type: ignore[misc]  # torch says Any
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: TpRanks) -> torch.Tensor:
        return all_reduce(x, "sum", ranks)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):  # type: ignore[misc]  # torch says Any
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dim: int, total: int, has_partial_gradient: bool, ranks: TpRanks
    ) -> torch.Tensor:
        ctx.dim, ctx.has_partial_gradient, ctx.ranks = dim, has_partial_gradient, ranks
        return all_gather(x, dim, total, ranks)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        if ctx.has_partial_gradient:
            return reduce_scatter(grads[0], ctx.dim, ctx.ranks), None, None, None, None
        return own_slice(grads[0], ctx.dim, ctx.ranks), None, None, None, None


class _Split(torch.autograd.Function):  # type: ignore[misc]  # torch says Any
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, is_partial: bool, ranks: TpRanks) -> torch.Tensor:
        ctx.dim, ctx.total, ctx.ranks = dim, x.shape[dim], ranks
        # a copy: a view from a custom function must not be changed in place
        return reduce_scatter(x, dim, ranks) if is_partial else own_slice(x, dim, ranks).clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return all_gather(grads[0], ctx.dim, ctx.total, ctx.ranks), None, None, None


class _GatherShards(torch.autograd.Function):  # type: ignore[misc]  # torch says Any
    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        shape: Sequence[int],
        dim: int,
        regions: Sequence[Sequence[Region]],
        ranks: TpRanks,
    ) -> torch.Tensor:
        ctx.dim, ctx.local_regions = dim, regions[ranks.rank]
        return gather_shards(local, shape, dim, regions, ranks)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return concat_regions(grads[0], ctx.dim, ctx.local_regions), None, None, None, None


def copy_to_ranks(x: torch.Tensor, ranks: TpRanks) -> torch.Tensor:
    """Return a whole tensor as input of computations that differ by rank: its gradients are summed over ranks."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    result: torch.Tensor = _CopyToRanks.apply(x, ranks)
    return result


def sum_over_ranks(x: torch.Tensor, ranks: TpRanks) -> torch.Tensor:
    """Return the sum of the ranks' partial results."""
    result: torch.Tensor = _SumOverRanks.apply(x, ranks)
    return result


def gather(x: torch.Tensor, dim: int, total: int, ranks: TpRanks) -> torch.Tensor:
    """Gather the slices of all ranks along `dim`, of `total` elements, for computations that are equal on all ranks."""
    result: torch.Tensor = _Gather.apply(x, dim, total, False, ranks)
    return result


def gather_partial(x: torch.Tensor, dim: int, total: int, ranks: TpRanks) -> torch.Tensor:
    """Gather the slices of all ranks along `dim`, of `total` elements, for computations that differ by rank."""
    result: torch.Tensor = _Gather.apply(x, dim, total, True, ranks)
    return result


def split(x: torch.Tensor, dim: int, ranks: TpRanks) -> torch.Tensor:
    """Return this rank's slice of a whole tensor along `dim`."""
    result: torch.Tensor = _Split.apply(x, dim, False, ranks)
    return result


def scatter_sum(x: torch.Tensor, dim: int, ranks: TpRanks) -> torch.Tensor:
    """Return this rank's slice along `dim` of the sum of the ranks' partial results."""
    result: torch.Tensor = _Split.apply(x, dim, True, ranks)
    return result


def gather_parameter(
    local: torch.Tensor, shape: Sequence[int], dim: int, regions: Sequence[Sequence[Region]], ranks: TpRanks
) -> torch.Tensor:
    """Return a whole parameter, for computations that are equal on all ranks: its gradient is not summed.

    Arguments are those of `gather_shards`.
    """
    result: torch.Tensor = _GatherShards.apply(local, shape, dim, regions, ranks)
    return result
