"""Read the sharded tensors in a pickled FSDP state dict: the region of the whole tensor that each rank holds.

    DTensor                   its mesh, the coordinate of this rank in it, and a placement for each mesh dim
    ShardedTensor             the offsets of its local shards (FSDP1 without a device mesh)
    Tensor                    the whole tensor: a buffer, or any tensor of a single rank

`InstanceStandIn` stands in for their classes, keeps the pickled fields and runs nothing. Pickles of torch 2.2 to 2.13
are supported; the fields of a pickled mesh changed twice in between.
Source: `torch/distributed/tensor/`, `device_mesh.py`, `_shard/sharded_tensor/api.py`.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from ckptx.catalog.region import Region, Shape, full_region
from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.mesh_region import MeshPlacement, local_region
from ckptx.formats.torch_archive.unpickle import (
    TORCH_GLOBALS,
    Call,
    Globals,
    ReadOnlyClass,
    TensorRef,
    UnsupportedObject,
    is_shape,
    load_torch,
    rebuild_from_type,
)
from ckptx.untrusted.limits import MAX_RANKS, find_shape_fault

_MAX_MESH_DIMS = 8


class InstanceStandIn(metaclass=ReadOnlyClass):
    """Stand-in for an object of a class of torch.distributed.

    Attributes:
        arguments: Pickled arguments of the constructor.
        state: Pickled state; None if there is none.
    """

    __slots__ = ("arguments", "state")
    arguments: tuple[object, ...]
    state: object

    def __new__(cls, *arguments: object) -> InstanceStandIn:
        """Keep the arguments without calling anything."""
        instance = super().__new__(cls)
        instance.arguments, instance.state = arguments, None
        return instance

    def __setstate__(self, state: object) -> None:
        """Keep the state without interpreting it."""
        self.state = state

    def field(self, name: str) -> object:
        """Return an attribute from the state, or None."""
        return _field(self.state, name)


def _field(state: object, name: str) -> object:
    """Return an attribute from a pickled state: a dict, or a tuple of the dicts for `__dict__` and `__slots__`."""
    for part in state if isinstance(state, tuple) and len(state) == 2 else (state,):
        if isinstance(part, dict) and name in part:
            return part[name]
    return None


def _stand_in(name: str) -> ReadOnlyClass:
    return ReadOnlyClass(name, (InstanceStandIn,), {"__slots__": ()})


_DTENSOR, _SHARDED_TENSOR, _LOCAL_SHARD = _stand_in("DTensor"), _stand_in("ShardedTensor"), _stand_in("LocalShard")
_SHARD, _STRIDED = _stand_in("Shard"), _stand_in("_StridedShard")
_REPLICATE, _PARTIAL = _stand_in("Replicate"), _stand_in("Partial")
_OTHER_CLASS = _stand_in("object")  # of all classes whose instances are recognized by the field that holds them
_WRAPPER_SUBCLASS = Call(lambda *_: UnsupportedObject("tensor of a subclass"))


class _DistributedTensor(NamedTuple):
    """A pickled DTensor or ShardedTensor.

    Attributes:
        kind: Stand-in of its class: `_DTENSOR` or `_SHARDED_TENSOR`.
        arguments: Pickled arguments of `_rebuild_wrapper_subclass`: class, dtype, shape of the whole tensor, ...
        state: Pickled state, with the local tensors and their sharding.
    """

    kind: ReadOnlyClass
    arguments: tuple[object, ...]
    state: object


def _rebuild_tensor(function: object, kind: object, arguments: object, state: object) -> object:
    """Replace torch's `_rebuild_from_type_v2`: keep the fields of a distributed tensor, rebuild any other tensor."""
    is_distributed = kind is _DTENSOR or kind is _SHARDED_TENSOR
    if is_distributed and function is _WRAPPER_SUBCLASS and isinstance(arguments, tuple):
        assert isinstance(kind, ReadOnlyClass)
        return _DistributedTensor(kind, arguments, state)
    return rebuild_from_type(function, kind, arguments, state)


def _stand_in_globals(stand_in: object, name: str, *modules: str) -> dict[tuple[str, str], object]:
    """Return the globals for one class that pickles of different torch versions import from different modules."""
    return {(module, name): stand_in for module in modules}


_TENSOR = "torch.distributed.tensor"
_OLD_TENSOR = "torch.distributed._tensor"  # until torch 2.4
_SHARDS = "torch.distributed._shard"
_PLACEMENTS = (f"{_TENSOR}.placement_types", f"{_OLD_TENSOR}.placement_types")

_ALLOWED_GLOBALS: Globals = {
    **TORCH_GLOBALS,
    ("torch._utils", "_rebuild_wrapper_subclass"): _WRAPPER_SUBCLASS,
    ("torch._tensor", "_rebuild_from_type_v2"): Call(_rebuild_tensor),
    **_stand_in_globals(_DTENSOR, "DTensor", _TENSOR, f"{_TENSOR}._api", _OLD_TENSOR, f"{_OLD_TENSOR}.api"),
    **_stand_in_globals(
        _OTHER_CLASS, "DTensorSpec", f"{_TENSOR}._dtensor_spec", f"{_OLD_TENSOR}._dtensor_spec", *_PLACEMENTS
    ),
    **_stand_in_globals(
        _OTHER_CLASS, "TensorMeta", f"{_TENSOR}._dtensor_spec", f"{_OLD_TENSOR}._dtensor_spec", *_PLACEMENTS
    ),
    **_stand_in_globals(_OTHER_CLASS, "ShardOrderEntry", f"{_TENSOR}._dtensor_spec"),
    **_stand_in_globals(_SHARD, "Shard", *_PLACEMENTS),
    **_stand_in_globals(_STRIDED, "_StridedShard", *_PLACEMENTS),
    **_stand_in_globals(_REPLICATE, "Replicate", *_PLACEMENTS),
    **_stand_in_globals(_PARTIAL, "Partial", *_PLACEMENTS),
    **_stand_in_globals(_PARTIAL, "_Partial", *_PLACEMENTS),
    **_stand_in_globals(
        _OTHER_CLASS, "DeviceMesh", "torch.distributed.device_mesh", "torch.distributed._tensor.device_mesh"
    ),
    **_stand_in_globals(_OTHER_CLASS, "_MeshLayout", "torch.distributed._mesh_layout"),
    **_stand_in_globals(_OTHER_CLASS, "_FlatLayout", "torch.distributed._mesh_layout"),
    **_stand_in_globals(_SHARDED_TENSOR, "ShardedTensor", f"{_SHARDS}.sharded_tensor.api"),
    **_stand_in_globals(_LOCAL_SHARD, "Shard", f"{_SHARDS}.sharded_tensor.shard"),
    **_stand_in_globals(_OTHER_CLASS, "ShardMetadata", f"{_SHARDS}.metadata"),
    **_stand_in_globals(_OTHER_CLASS, "ShardedTensorMetadata", f"{_SHARDS}.sharded_tensor.metadata"),
    **_stand_in_globals(_OTHER_CLASS, "TensorProperties", f"{_SHARDS}.sharded_tensor.metadata"),
    **_stand_in_globals(_OTHER_CLASS, "MEM_FORMAT_ENCODING", f"{_SHARDS}.sharded_tensor.metadata"),
    **_stand_in_globals(_OTHER_CLASS, "EnumerableShardingSpec", f"{_SHARDS}.sharding_spec.api"),
    **_stand_in_globals(_OTHER_CLASS, "ChunkShardingSpec", f"{_SHARDS}.sharding_spec.chunk_sharding_spec"),
    **_stand_in_globals(_OTHER_CLASS, "_remote_device", "torch.distributed.remote_device"),
    # ShardedTensor refers to the class of its process group with getattr; any attribute becomes a stand-in class.
    **_stand_in_globals(Call(lambda *_: _OTHER_CLASS), "getattr", "builtins", "__builtin__"),
}


def load_state_dict(data: bytes, where: str) -> Any:
    """Return the pickled state dict of one rank, with stand-ins for tensors; `shards_of_rank` reads them.

    Raises:
        InputError: The pickle is damaged, or refers to a class or function that is not allowed in a state dict.
    """
    return load_torch(data, where, _ALLOWED_GLOBALS)


class RankShards(NamedTuple):
    """The shards of one tensor on one rank.

    Attributes:
        shape: Shape of the whole tensor, in elements.
        local_shards: The local tensors, each with its region of the whole tensor. If the rank has no elements, there
            are none, or one with an empty region.
    """

    shape: Shape
    local_shards: tuple[tuple[TensorRef, Region], ...]


def is_distributed(value: object) -> bool:
    """Return True for a DTensor or ShardedTensor in a state dict that `load_state_dict` returned."""
    return isinstance(value, _DistributedTensor)


def shards_of_rank(value: object, rank: int, where: str) -> RankShards:
    """Return the shards of a tensor on one rank.

    Args:
        value: Value in the state dict that `load_state_dict` returned.
        rank: Global rank that wrote the file.
        where: Subject of error messages.

    Raises:
        InputError: The fields of a DTensor or ShardedTensor contradict each other, or another rank saved it.
        UnsupportedError: It is not a tensor, or of a kind that is not converted.
    """
    if isinstance(value, _DistributedTensor):
        shards = _dtensor_shards(value, rank, where) if value.kind is _DTENSOR else _sharded_tensor_shards(value, where)
        for local, region in shards.local_shards:
            if local.shape != region.sizes:
                raise InputError(
                    f"{where}: local shape is {list(local.shape)}, but the sharding gives rank {rank} "
                    f"{list(region.sizes)} of {list(shards.shape)}; the file is damaged, copy it again"
                )
        return shards
    tensor = _require_tensor(value, where)
    return RankShards(tensor.shape, ((tensor, full_region(tensor.shape)),))


def _require_tensor(value: object, where: str) -> TensorRef:
    if isinstance(value, UnsupportedObject):
        raise UnsupportedError(f"{where}: {value.kind}, which is not converted; save it as a plain dense tensor")
    if not isinstance(value, TensorRef):
        raise UnsupportedError(
            f"{where}: expected a tensor, found a value of type {type(value).__name__}; save model.state_dict()"
        )
    return value


def _require_shape(value: object, where: str) -> Shape:
    sizes = tuple(value) if isinstance(value, list) else value
    if not is_shape(sizes):
        raise _damaged_error(where, "no valid shape")
    fault = find_shape_fault(sizes)
    if fault is not None:
        raise _damaged_error(where, f"a shape of {fault}")
    return sizes


def _damaged_error(where: str, problem: str) -> InputError:
    return InputError(f"{where}: {problem} in its pickled sharding; the file is damaged, copy it again")


# ---------------------------------------------------------------------------------------------------------- DTensor


def _dtensor_shards(value: _DistributedTensor, rank: int, where: str) -> RankShards:
    shape = _require_shape(value.arguments[2] if len(value.arguments) > 2 else None, where)
    spec = _field(value.state, "_spec")
    mesh = spec.field("mesh") if isinstance(spec, InstanceStandIn) else None
    if not isinstance(spec, InstanceStandIn) or not isinstance(mesh, InstanceStandIn):
        raise _damaged_error(where, "no device mesh")
    sizes = _mesh_sizes(mesh, where)
    coordinate = mesh.field("_coordinate_on_dim")
    coordinate = tuple(coordinate) if isinstance(coordinate, list) else coordinate
    if (
        not is_shape(coordinate)
        or len(coordinate) != len(sizes)
        or any(index >= size for index, size in zip(coordinate, sizes, strict=True))
    ):
        raise _damaged_error(where, f"no coordinate in a mesh of {list(sizes)}")
    _check_rank(mesh, sizes, coordinate, rank, where)
    placements = _mesh_placements(spec.field("placements"), len(sizes), len(shape), where)
    region = local_region(shape, sizes, coordinate, placements, where)
    return RankShards(shape, ((_require_tensor(_field(value.state, "_local_tensor"), where), region),))


def _mesh_sizes(mesh: InstanceStandIn, where: str) -> Shape:
    """Return the size of each mesh dim.

    Torch 2.10 and 2.11 pickle a layout with `shape`, 2.13 a layout with an axis for each dim, older versions a tensor
    of ranks.
    """
    tensor, layout = mesh.field("mesh"), mesh.field("_layout")
    sizes: object = tensor.shape if isinstance(tensor, TensorRef) else None
    if isinstance(layout, InstanceStandIn):
        axes = layout.field("axes")
        sizes = layout.field("shape")
        if isinstance(axes, tuple) and all(isinstance(axis, InstanceStandIn) for axis in axes):
            sizes = tuple(_axis_size(axis.field("shape")) for axis in axes)
    if not is_shape(sizes) or not 0 < len(sizes) <= _MAX_MESH_DIMS or not 0 < prod(sizes) <= MAX_RANKS:
        raise _damaged_error(where, "no shape of the device mesh")
    return sizes


def _axis_size(sizes: object) -> int:
    """Return the size of a mesh dim, which is the product of the sizes of its axis; 0 if they are invalid."""
    return prod(sizes) if is_shape(sizes) else 0


def _check_rank(mesh: InstanceStandIn, sizes: Shape, coordinate: Shape, rank: int, where: str) -> None:
    """Check that the rank in the file name saved the mesh, because files may have been renamed or copied.

    A mesh that does not record its rank is not checked.

    Raises:
        InputError: Another rank saved it.
    """
    saving_rank, ranks = mesh.field("_rank"), mesh.field("_flatten_mesh_list")
    if saving_rank is None and isinstance(ranks, tuple) and len(ranks) == prod(sizes):
        index = 0
        for size, index_in_dim in zip(sizes, coordinate, strict=True):
            index = index * size + index_in_dim
        saving_rank = ranks[index]
    if type(saving_rank) is int and saving_rank != rank:
        raise InputError(
            f"{where}: saved by rank {saving_rank}, but the file name is that of rank {rank}; the file was renamed or "
            "copied, restore its name"
        )


def _mesh_placements(placements: object, mesh_dims: int, tensor_dims: int, where: str) -> list[MeshPlacement]:
    """Return the placement for each mesh dim."""
    if not isinstance(placements, tuple) or len(placements) != mesh_dims:
        raise _damaged_error(where, f"no placement for each of {mesh_dims} mesh dims")
    found = []
    for placement in placements:
        if type(placement) is _PARTIAL:
            raise UnsupportedError(
                f"{where}: has a Partial placement, so its values are not reduced yet; redistribute it before saving"
            )
        if type(placement) is _REPLICATE:
            found.append(MeshPlacement())
            continue
        dim = placement.field("dim") if type(placement) in (_SHARD, _STRIDED) else None
        if type(dim) is not int or not 0 <= dim < tensor_dims:
            raise _damaged_error(where, f"no placement of a tensor of {tensor_dims} dims")
        split_factor = placement.field("split_factor") if type(placement) is _STRIDED else None
        if type(placement) is _STRIDED and type(split_factor) is not int:
            raise _damaged_error(where, "no split factor")
        found.append(MeshPlacement(dim, split_factor))
    return found


# ---------------------------------------------------------------------------------------------------- ShardedTensor


def _sharded_tensor_shards(value: _DistributedTensor, where: str) -> RankShards:
    if not (isinstance(value.state, tuple) and len(value.state) >= 2):
        raise _damaged_error(where, "no metadata")
    shards, metadata = value.state[:2]
    if not isinstance(metadata, InstanceStandIn) or not isinstance(shards, list):
        raise _damaged_error(where, "no metadata")
    shape = _require_shape(metadata.field("size"), where)
    return RankShards(shape, tuple(_local_shard(shard, shape, where) for shard in shards))


def _local_shard(shard: object, shape: Shape, where: str) -> tuple[TensorRef, Region]:
    metadata = shard.field("metadata") if isinstance(shard, InstanceStandIn) else None
    if not isinstance(shard, InstanceStandIn) or not isinstance(metadata, InstanceStandIn):
        raise _damaged_error(where, "a local shard without offsets")
    offsets, sizes = (_require_shape(metadata.field(name), where) for name in ("shard_offsets", "shard_sizes"))
    if not len(offsets) == len(sizes) == len(shape):
        raise _damaged_error(where, f"a local shard of {len(sizes)} dims of {len(shape)}")
    return _require_tensor(shard.field("tensor"), where), Region(offsets, sizes)
