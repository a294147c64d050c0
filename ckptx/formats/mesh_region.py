"""The region of a tensor that one rank of a device mesh holds, from the placements of a DTensor."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from ckptx.catalog.region import Region, Shape
from ckptx.errors import UnsupportedError
from ckptx.layout.placement import ceil_chunks


class MeshPlacement(NamedTuple):
    """Placement of a tensor along one mesh dim.

    Attributes:
        dim: Tensor dim that is sharded; None if the tensor is replicated.
        split_factor: Split factor of a `_StridedShard`; None for other placements.
    """

    dim: int | None = None
    split_factor: int | None = None


def coordinate_of(flat_index: int, sizes: Shape) -> Shape:
    """Return the coordinate in a mesh with these sizes of the rank at `flat_index` in the row-major order of ranks."""
    coordinate = []
    for size in reversed(sizes):
        flat_index, index = divmod(flat_index, size)
        coordinate.append(index)
    return tuple(reversed(coordinate))


def local_region(
    shape: Shape, sizes: Shape, coordinate: Shape, placements: Sequence[MeshPlacement], where: str
) -> Region:
    """Return the region at a mesh coordinate: each placement shards the result of those before it.

    Placements are applied from left to right, except that a strided shard is applied after those to its right.

    Args:
        shape: Shape of the whole tensor.
        sizes: Size of each mesh dim.
        coordinate: Index of the rank in each mesh dim.
        placements: Placement for each mesh dim; their dims were checked against the shape.
        where: Subject of error messages.

    Raises:
        UnsupportedError: The split factor of a `_StridedShard` is not that of FSDP on top of TP.
    """
    offsets, lengths = [0] * len(shape), list(shape)
    shards_by_dim: dict[int, list[tuple[int, int | None]]] = {}
    for mesh_dim, placement in enumerate(placements):
        if placement.dim is not None:
            shards_by_dim.setdefault(placement.dim, []).append((mesh_dim, placement.split_factor))
    for dim, shards in shards_by_dim.items():
        for mesh_dim in _sharding_order(shards, sizes, where):
            begin, length = ceil_chunks(lengths[dim], sizes[mesh_dim])[coordinate[mesh_dim]]
            offsets[dim], lengths[dim] = offsets[dim] + begin, length
    return Region(tuple(offsets), tuple(lengths))


def _sharding_order(shards: list[tuple[int, int | None]], sizes: Shape, where: str) -> list[int]:
    """Return the mesh dims that shard one tensor dim, in the order in which they shard it.

    A strided shard is applied after the mesh dims to its right that shard the same tensor dim, as with FSDP on top of
    TP; its split factor must be the product of their sizes.

    Args:
        shards: (mesh dim, split factor or None) of each placement that shards the tensor dim, by ascending mesh dim.
        sizes: Size of each mesh dim.
        where: Subject of error messages.

    Raises:
        UnsupportedError: A split factor is another number.
    """
    order: list[int] = []
    for mesh_dim, split_factor in reversed(shards):
        if split_factor is None:
            order.insert(0, mesh_dim)
            continue
        if split_factor != prod(sizes[other] for other in order):
            raise UnsupportedError(
                f"{where}: the split factor {split_factor!s:.20} of a _StridedShard is not the product of the mesh "
                "dims to its right; save it as a DCP"
            )
        order.append(mesh_dim)
    return order
