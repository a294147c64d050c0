"""Which rectangles of a whole tensor the local tensor of this rank is made of, and where in it they lie.

(Shard(0) on dp, Shard(0) on tp)          dp cuts first, tp cuts what dp left
(_StridedShard(0) on dp, Shard(0) on tp)  FSDP inside TP: tp cuts first, however torch writes it down
rectangles from the TP layer              [q|k|v]: rows of q, then of k, then of v; FSDP cuts what they make up
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ckptx.catalog.region import Region, Shape, whole
from ckptx.errors import Defect, UnsupportedError
from ckptx.layout.placement import ceil_chunks
from ckptx.runtime.torch_private import dtensor_spec, local_tensor

Spans = list[tuple[int, int]]  # along one dim: where each begins in the whole tensor, how long it is

_TP = "tp"  # the mesh dim that rectangles of the TP layer speak of


class LocalShard(NamedTuple):
    """A rectangle of a whole tensor, and where it lies in the local one."""

    region: Region
    local: Region


class MeshDimSharding(NamedTuple):
    """How one mesh dim cuts a tensor.

    Attributes:
        dim: Of the tensor.
        parts: Ranks along the mesh dim.
        rank: Of this one among them.
        groups: Equal groups that are cut one by one.
    """

    dim: int
    parts: int
    rank: int
    groups: int = 1


def pieces(
    shape: Shape, cuts: Sequence[MeshDimSharding], local_regions: Sequence[Region] = ()
) -> tuple[list[LocalShard], Shape]:
    """What a rank holds, and the shape of its local tensor.

    Args:
        shape: Of the whole tensor.
        cuts: Applied in this order, each in ceil-chunks as `torch.chunk` and DTensor do.
        local_regions: Rectangles to begin with instead of the whole tensor, laid one after another along the dim
            in which they differ.
    """
    spans = _spans_of(list(local_regions) or [whole(shape)], len(shape))
    for dim, parts, rank, groups in cuts:
        spans[dim] = [span for group in range(groups) for span in _take(_take(spans[dim], groups, group), parts, rank)]
    local_shape = tuple(sum(size for _, size in each) for each in spans)
    placed = [_with_local_offsets(each) for each in spans]
    found = [
        LocalShard(
            Region(tuple(begin for begin, _, _ in each), tuple(size for _, size, _ in each)),
            Region(tuple(at for _, _, at in each), tuple(size for _, size, _ in each)),
        )
        for each in product(*placed)
    ]
    return [piece for piece in found if piece.region.numel], local_shape


def _spans_of(local_regions: list[Region], ndim: int) -> list[Spans]:
    spans: list[Spans] = []
    for dim in range(ndim):
        along = [(region.offsets[dim], region.sizes[dim]) for region in local_regions]
        spans.append(along if len(set(along)) > 1 else along[:1])
    if prod(map(len, spans)) != len(local_regions):
        raise Defect(f"rectangles {[str(each) for each in local_regions]} do not lie along one dim; please report this")
    return spans


def _take(spans: Spans, parts: int, index: int) -> Spans:
    """The part of what `spans` make up that is number `index` of `parts`."""
    begin, size = ceil_chunks(sum(size for _, size in spans), parts)[index]
    taken = []
    first = 0
    for start, length in spans:
        low, high = max(begin, first), min(begin + size, first + length)
        if low < high:
            taken.append((start + low - first, high - low))
        first += length
    return taken


def _with_local_offsets(spans: Spans) -> list[tuple[int, int, int]]:
    found, at = [], 0
    for begin, size in spans:
        found.append((begin, size, at))
        at += size
    return found


def pieces_of(name: str, tensor: Tensor, local_regions: Sequence[Region] | None = None) -> list[LocalShard]:
    """What this rank holds of a parameter or buffer.

    Args:
        name: For errors.
        tensor: A DTensor, or a plain tensor that is whole, or what `local_regions` says.
        local_regions: The rectangles of the whole tensor that TP left on this rank, before FSDP; None when nobody says.

    Raises:
        UnsupportedError: A placement other than replicas and shards.
        Defect: The local tensor does not have the shape that its placements say.
    """
    shape = tuple(tensor.shape)
    cuts: list[MeshDimSharding] = []
    local = shape
    if isinstance(tensor, DTensor):
        cuts = _cuts_of(name, tensor, skips_tp=local_regions is not None)
        local = tuple(local_tensor(tensor).shape)
    if local_regions is not None and not local_regions and not prod(local):
        return []
    found, expected = pieces(shape, cuts, local_regions or ())
    if expected != local:
        raise Defect(f"{name}: the local tensor is {list(local)}, its layout says {list(expected)}; please report this")
    return found


def _cuts_of(name: str, tensor: Any, *, skips_tp: bool) -> list[MeshDimSharding]:
    """The cuts of a DTensor in the order in which they were made."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise UnsupportedError(f"{name}: this rank is not in the mesh of the parameter; load on the ranks of the mesh")
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    first: list[MeshDimSharding] = []
    later: list[MeshDimSharding] = []
    for index, placement in enumerate(tensor.placements):
        if placement.is_replicate() or (skips_tp and names[index] == _TP):
            continue
        dim = getattr(placement, "dim", None)
        if placement.is_partial() or dim is None:
            raise UnsupportedError(f"{name}: placement {placement} is neither Shard nor Replicate; cannot be loaded")
        cut = MeshDimSharding(dim % tensor.ndim, mesh.size(index), coordinate[index])
        groups = getattr(placement, "split_factor", 1)
        if groups > 1 and (skips_tp or groups == _shards_behind(tensor, index)):
            later.insert(0, cut)  # FSDP inside TP
        else:
            first.append(cut._replace(groups=groups))
    return first + later


def _shards_behind(tensor: Any, index: int) -> int:
    """Into how many parts the mesh dims behind one cut the same dim of the tensor."""
    dim = tensor.placements[index].dim
    return prod(
        tensor.device_mesh.size(at)
        for at, placement in enumerate(tensor.placements)
        if at > index and getattr(placement, "dim", None) == dim
    )


def narrowed(tensor: Tensor, part: Region) -> Tensor:
    """The rectangle of a tensor, in place."""
    for dim, (begin, size) in enumerate(zip(*part, strict=True)):
        tensor = tensor.narrow(dim, begin, size)
    return tensor


class _Local(torch.autograd.Function):  # type: ignore[misc]  # torch says Any
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


def local_of(tensor: DTensor) -> Tensor:
    """The shard, in the graph; its gradient is cut exactly as the parameter is.

    `DTensor.to_local` computes the strides of the whole gradient from those of one shard, which is wrong for shards of
    unequal size. Gradients whose strides are not the parameter's are copied when they are stored, and torch 2.11
    gathers them for that.
    """
    found: Tensor = _Local.apply(tensor)
    return found
