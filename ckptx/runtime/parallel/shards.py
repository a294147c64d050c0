"""Locates the shards of this rank: the regions of a whole tensor that make up its local tensor.

(Shard(0) on dp, Shard(0) on tp)          sharded over dp first, and each dp shard over tp
(_StridedShard(0) on dp, Shard(0) on tp)  FSDP within TP: sharded over tp first, in spite of the order of the mesh dims
regions from `TensorParallelLayout`       [q|k|v]: rows of q, then of k, then of v; FSDP shards their concatenation
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ckptx.catalog.region import Region, Shape, full_region
from ckptx.errors import InternalError, UnsupportedError
from ckptx.layout.placement import ceil_chunks
from ckptx.runtime.torch_private import dtensor_spec, local_tensor

Spans = list[tuple[int, int]]  # (offset in the whole tensor, length) along one dim

_TP = "tp"  # mesh dim whose placement is ignored where regions from `TensorParallelLayout` describe its sharding


class LocalShard(NamedTuple):
    """A region of a whole tensor that this rank holds.

    Attributes:
        region: Rectangle of the whole tensor.
        local: The same elements as a region of the local tensor.
    """

    region: Region
    local: Region


class MeshDimSharding(NamedTuple):
    """The sharding of a tensor over one mesh dim.

    Attributes:
        dim: Sharded dim of the tensor.
        mesh_dim_size: Number of ranks along the mesh dim.
        rank: Rank of this process along the mesh dim.
        groups: Number of ceil-chunks into which the dim is divided first, each of which is sharded separately
            (`split_factor` of `_StridedShard`); 1 for `Shard`.
    """

    dim: int
    mesh_dim_size: int
    rank: int
    groups: int = 1


def compute_local_shards(
    shape: Shape, shardings: Sequence[MeshDimSharding], local_regions: Sequence[Region] = ()
) -> tuple[list[LocalShard], Shape]:
    """Return the shards of the rank that `shardings` name, without empty ones, and the shape of its local tensor.

    Args:
        shape: Shape of the whole tensor.
        shardings: Applied in this order, each in ceil-chunks as `torch.chunk` and DTensor do; empty if nothing is
            sharded except by `local_regions`.
        local_regions: Regions to shard instead of the whole tensor, concatenated along the dim in which they differ;
            empty means the whole tensor.

    Raises:
        InternalError: The regions differ in more than one dim.
    """
    spans = _find_spans(list(local_regions) or [full_region(shape)], len(shape))
    for dim, part_count, rank, groups in shardings:
        spans[dim] = [
            span
            for group in range(groups)
            for span in _select_part(_select_part(spans[dim], groups, group), part_count, rank)
        ]
    local_shape = tuple(sum(size for _, size in each) for each in spans)
    spans_with_offsets = [_with_local_offsets(each) for each in spans]
    shards = [
        LocalShard(
            Region(tuple(begin for begin, _, _ in each), tuple(size for _, size, _ in each)),
            Region(tuple(local_offset for _, _, local_offset in each), tuple(size for _, size, _ in each)),
        )
        for each in product(*spans_with_offsets)
    ]
    return [shard for shard in shards if shard.region.numel], local_shape


def _find_spans(local_regions: list[Region], ndim: int) -> list[Spans]:
    """Return for each dim the spans of the concatenated regions; one span in a dim in which they do not differ."""
    spans: list[Spans] = []
    for dim in range(ndim):
        dim_spans = [(region.offsets[dim], region.sizes[dim]) for region in local_regions]
        spans.append(dim_spans if len(set(dim_spans)) > 1 else dim_spans[:1])
    if prod(map(len, spans)) != len(local_regions):
        raise InternalError(
            f"regions {[str(each) for each in local_regions]} differ in more than one dim; please report this"
        )
    return spans


def _select_part(spans: Spans, part_count: int, index: int) -> Spans:
    """Divide the concatenated spans into `part_count` ceil-chunks, and return the spans of chunk `index`, from 0."""
    begin, size = ceil_chunks(sum(size for _, size in spans), part_count)[index]
    selected_spans = []
    offset = 0  # of the span within the concatenation
    for start, length in spans:
        low, high = max(begin, offset), min(begin + size, offset + length)
        if low < high:
            selected_spans.append((start + low - offset, high - low))
        offset += length
    return selected_spans


def _with_local_offsets(spans: Spans) -> list[tuple[int, int, int]]:
    """Return (offset in the whole tensor, length, offset in the local tensor) for each span."""
    result, local_offset = [], 0
    for begin, size in spans:
        result.append((begin, size, local_offset))
        local_offset += size
    return result


def find_local_shards(name: str, tensor: Tensor, local_regions: Sequence[Region] | None = None) -> list[LocalShard]:
    """Return the shards of a parameter or buffer on this rank.

    Args:
        name: Name of the tensor, for error messages.
        tensor: A DTensor, or a plain tensor that is whole or made of `local_regions`.
        local_regions: Regions of the whole tensor that TP gives to this rank, before FSDP; empty if TP gives it
            nothing, None if the placements of `tensor` describe all of its sharding.

    Returns:
        The shards; empty if this rank has no element of the tensor.

    Raises:
        UnsupportedError: A placement is neither Shard nor Replicate, or this rank is not in the mesh of the tensor.
        InternalError: The shape of the local tensor does not match its placements.
    """
    shape = tuple(tensor.shape)
    shardings: list[MeshDimSharding] = []
    local_shape = shape
    if isinstance(tensor, DTensor):
        shardings = _find_shardings(name, tensor, skips_tp=local_regions is not None)
        local_shape = tuple(local_tensor(tensor).shape)
    if local_regions is not None and not local_regions and not prod(local_shape):
        return []
    shards, expected_shape = compute_local_shards(shape, shardings, local_regions or ())
    if expected_shape != local_shape:
        raise InternalError(
            f"{name}: the local tensor has shape {list(local_shape)}, but its placements give {list(expected_shape)}; "
            "please report this"
        )
    return shards


def _find_shardings(name: str, tensor: Any, *, skips_tp: bool) -> list[MeshDimSharding]:
    """Return the shardings of a DTensor in the order in which they were applied.

    Args:
        name: Name of the tensor, for error messages.
        tensor: The DTensor.
        skips_tp: Leave out the placement on mesh dim "tp".
    """
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise UnsupportedError(f"{name}: this rank is not in the mesh of the tensor; use only the ranks of the mesh")
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    outer: list[MeshDimSharding] = []
    inner: list[MeshDimSharding] = []
    for index, placement in enumerate(tensor.placements):
        if placement.is_replicate() or (skips_tp and names[index] == _TP):
            continue
        dim = getattr(placement, "dim", None)
        if placement.is_partial() or dim is None:
            raise UnsupportedError(
                f"{name}: placement {placement} is neither Shard nor Replicate; redistribute the tensor"
            )
        sharding = MeshDimSharding(dim % tensor.ndim, mesh.size(index), coordinate[index])
        groups = getattr(placement, "split_factor", 1)
        if groups > 1 and (skips_tp or groups == _count_shards_of_later_dims(tensor, index)):
            inner.insert(0, sharding)  # FSDP inside TP: applied after the mesh dims that follow this one
        else:
            outer.append(sharding._replace(groups=groups))
    return outer + inner


def _count_shards_of_later_dims(tensor: Any, index: int) -> int:
    """Return the number of shards into which the mesh dims after `index` split the tensor dim that `index` shards."""
    dim = tensor.placements[index].dim
    return prod(
        tensor.device_mesh.size(later)
        for later, placement in enumerate(tensor.placements)
        if later > index and getattr(placement, "dim", None) == dim
    )


def narrow_to(tensor: Tensor, region: Region) -> Tensor:
    """Return a region of a plain tensor as a view."""
    for dim, (begin, size) in enumerate(zip(*region, strict=True)):
        tensor = tensor.narrow(dim, begin, size)
    return tensor


class _ToLocalShard(torch.autograd.Function):  # type: ignore[misc]  # torch says Any
    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Tensor:
        ctx.spec, local = dtensor_spec(tensor), local_tensor(tensor)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> DTensor:
        spec = ctx.spec
        shape, stride = spec.shape, spec.tensor_meta.stride
        return DTensor.from_local(
            grads[0].contiguous(), spec.mesh, spec.placements, run_check=False, shape=shape, stride=stride
        )


def to_local_shard(tensor: DTensor) -> Tensor:
    """Return the local shard of a parameter, differentiably; the gradient is sharded exactly as the parameter is.

    `DTensor.to_local` computes the strides of the whole gradient from those of one shard, which is wrong for shards of
    unequal size. Gradients whose strides differ from the parameter's are copied when they are stored, and torch 2.11
    gathers them for that.
    """
    local: Tensor = _ToLocalShard.apply(tensor)
    return local
