"""Parse `metadata.pkl` of torch_checkpointing, which records how tensors are sharded and in which files they are.

    {"version": "2.0", "world_size": 4, "metadata": {ITEM: {
        "rank_to_layout_info": {RANK: {"file_path": ..., "serialization_format": {"type": ...}} or None},
        "nested_path_to_metadata": {PATH: [{"ranks": (0, 1), "sharding_metadata": {"type": ..., "data": {...}}}, ...]},
    }}}

PATH is a JSON list of the keys from the item to the tensor: `["state", "norm.weight", "exp_avg"]`. A layout of None is
`ITEM_RANK.pt`. The file exists only if an item declares a resharder, and lists only such items. It has plain containers
without any class or function, so its pickle may not refer to one. Version 1.0 lists paths and layouts of all items
together, and has no key "version".
Source: `distributed_metadata.py`, `dtensor_metadata.py` and `default_metadata.py` of torch_checkpointing 0.1.1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple, TypeGuard

from ckptx.catalog.region import Region, Shape
from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.mesh_region import MeshPlacement, coordinate_of, local_region
from ckptx.formats.torch_archive.unpickle import is_shape, load
from ckptx.formats.torch_checkpointing.file_names import METADATA_FILE
from ckptx.storage.interface import Source
from ckptx.untrusted.file_name import find_name_fault
from ckptx.untrusted.limits import MAX_METADATA_BYTES, MAX_RANKS, find_shape_fault

_MAX_MESH_DIMS = 8
_FORMATS = {
    "TorchSerialization": "torch",
    "SafetensorsSerialization": "safetensors",
    "JsonSerialization": "JSON",
    "RawSerialization": "raw bytes",
}

Path = tuple[str, ...]
"""Keys from an item to a tensor in it; indices of lists as decimal numbers."""


class ItemFile(NamedTuple):
    """File of one item on one rank.

    Attributes:
        name: Path relative to the checkpoint.
        kind: "torch", "safetensors", "JSON" or "raw bytes".
    """

    name: str
    kind: str


class LocalBox(NamedTuple):
    """A part of a tensor that a rank holds.

    Attributes:
        region: Position and size of the part in the whole tensor.
        local_offsets: Position of its first element in the local tensor.
    """

    region: Region
    local_offsets: Shape


class LocalShards(NamedTuple):
    """The parts of one tensor that a rank holds, according to the metadata.

    Attributes:
        shape: Shape of the whole tensor.
        dtype: Its torch dtype, such as "torch.bfloat16".
        local_shape: Shape of the local tensor; None if the metadata does not record it.
        boxes: The parts.
    """

    shape: Shape
    dtype: str
    local_shape: Shape | None
    boxes: tuple[LocalBox, ...]


class ItemMetadata:
    """Record of one item: its files, and the sharding of its tensors.

    Attributes:
        files: File of each rank, in the order of ranks.
        where: Subject of error messages.
    """

    def __init__(self, files: tuple[ItemFile, ...], groups_by_path: Mapping[Path, object], where: str) -> None:
        """Store the record without checking the shardings.

        Args:
            files: File of each rank, in the order of ranks.
            groups_by_path: Value of `nested_path_to_metadata`: for each tensor, groups of ranks with one sharding.
            where: Subject of error messages.
        """
        self.files, self.where = files, where
        self._groups_by_path = groups_by_path
        self._records_by_path: dict[Path, dict[int, dict[str, object]]] = {}  # see `_records`

    def paths_of_rank(self, rank: int) -> set[Path]:
        """Return the paths of the tensors that a rank holds; raises InputError if a record is damaged."""
        return {path for path in self._groups_by_path if rank in self._records(path)}

    def shards(self, path: Path, rank: int) -> LocalShards | None:
        """Return the parts of a tensor on one rank; None if the metadata has none.

        Raises:
            InputError: The record is damaged.
            UnsupportedError: The sharding is of a kind that ckptx does not know.
        """
        record = self._records(path).get(rank) if path in self._groups_by_path else None
        if record is None:
            return None
        kind, data = record.get("type"), record.get("data")
        where = self._subject(path)
        if not isinstance(data, dict):
            raise _damaged_error(where, "no sharding")
        if kind == "DTensorShardingMetadata":
            return _mesh_shards(data, rank, where)
        if kind == "default_tensor_v1":
            return _box_shards(data, where)
        raise UnsupportedError(f"{where}: sharding of the type {_text(kind)} is not supported; save DTensors, or a DCP")

    def _records(self, path: Path) -> dict[int, dict[str, object]]:
        """Return rank -> `sharding_metadata`, for each rank that holds the tensor; its groups are parsed only once."""
        records = self._records_by_path.get(path)
        if records is not None:
            return records
        records, groups = {}, self._groups_by_path[path]
        for group in groups if isinstance(groups, list | tuple) else ():
            ranks, record = (
                (group.get("ranks"), group.get("sharding_metadata")) if isinstance(group, dict) else (None, None)
            )
            if not _is_ranks(ranks) or not isinstance(record, dict) or any(rank in records for rank in ranks):
                raise _damaged_error(self._subject(path), "no sharding of each rank")
            records.update(dict.fromkeys(ranks, record))
        self._records_by_path[path] = records
        return records

    def _subject(self, path: Path) -> str:
        return f'{self.where}: tensor "{".".join(path)}"'


class Metadata(NamedTuple):
    """Contents of `metadata.pkl`.

    Attributes:
        world_size: Number of ranks.
        items: Item name -> its record.
    """

    world_size: int
    items: Mapping[str, ItemMetadata]

    @property
    def files(self) -> set[str]:
        """Return the names of all files that it lists."""
        return {file.name for item in self.items.values() for file in item.files}


def default_file(item: str, rank: int) -> str:
    """Return the name of the file of an item without a layout."""
    return f"{item}_{rank}.pt"


def read_metadata(source: Source) -> Metadata | None:
    """Return the contents of `metadata.pkl`; None for a pickle of something else.

    Raises:
        InputError: The pickle is damaged, or refers to a class or function; or its values contradict each other.
        UnsupportedError: It has another version.
    """
    where = f"{source.location / METADATA_FILE}"
    tree = load(source.read_small(METADATA_FILE, MAX_METADATA_BYTES), {}, where)
    if not isinstance(tree, dict) or not {"metadata", "world_size"} <= tree.keys():
        return None
    version, world_size, stored = tree.get("version", "1.0"), tree["world_size"], tree["metadata"]
    if version not in ("1.0", "2.0"):
        raise UnsupportedError(f"{where}: has version {_text(version)}, but this ckptx supports 1.0 and 2.0")
    if type(world_size) is not int or not 0 < world_size <= MAX_RANKS or not isinstance(stored, dict):
        raise _damaged_error(where, f"no world size of 1 to {MAX_RANKS:,}")
    items: dict[str, ItemMetadata] = {}
    used: set[str] = set()
    for item, record in (_from_version_1(tree, where) if version == "1.0" else stored).items():
        layouts, paths = (
            (record.get(key) for key in ("rank_to_layout_info", "nested_path_to_metadata"))
            if isinstance(record, dict)
            else (None, None)
        )
        if type(item) is not str or not isinstance(layouts, dict) or not isinstance(paths, dict):
            raise _damaged_error(where, "an item without files or tensors")
        if set(layouts) != set(range(world_size)):
            raise _damaged_error(where, f'item "{item[:80]}" with files of other ranks than 0 to {world_size - 1}')
        files = tuple(_item_file(item, rank, layouts[rank], where) for rank in range(world_size))
        for file in files:
            if file.name in used:
                raise _damaged_error(where, f'the file "{file.name[:80]}" twice')
            used.add(file.name)
        items[item] = ItemMetadata(files, {_parse_path(path, where): groups for path, groups in paths.items()}, where)
    return Metadata(world_size, items)


def _item_file(item: str, rank: int, layout: object, where: str) -> ItemFile:
    """Return the file of an item on one rank; `layout` is its value in `rank_to_layout_info`."""
    if layout is None:
        layout = {"file_path": default_file(item, rank), "serialization_format": {"type": "TorchSerialization"}}
    name = layout.get("file_path") if isinstance(layout, dict) else None
    stored_format = layout.get("serialization_format") if isinstance(layout, dict) else None
    kind = stored_format.get("type") if isinstance(stored_format, dict) else None
    if type(name) is not str or type(kind) is not str:
        raise _damaged_error(where, f'a file of item "{item[:80]}" without name or format')
    fault = find_name_fault(name)
    if fault is not None:
        raise InputError(f"{where}: the file {name!r:.80} is not valid, because {fault}; copy the checkpoint again")
    if kind not in _FORMATS:
        raise UnsupportedError(
            f"{where}: {name[:80]} has the format {kind[:40]}, which is not supported; save the item with torch or "
            "safetensors"
        )
    return ItemFile(name, _FORMATS[kind])


def _from_version_1(tree: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """Return the `metadata` of version 1.0 in the form of version 2.0."""
    layouts = tree.get("rank_to_layout_info_mappings")
    if not isinstance(layouts, dict) or not all(isinstance(each, dict) for each in layouts.values()):
        raise _damaged_error(where, "no files of ranks")
    items: dict[str, dict[str, Any]] = {}
    for text, groups in tree["metadata"].items():
        item, *path = _parse_path(text, where) or ("",)
        record = items.setdefault(
            item,
            {
                "nested_path_to_metadata": {},
                "rank_to_layout_info": {_parse_rank(rank): each.get(item) for rank, each in layouts.items()},
            },
        )
        record["nested_path_to_metadata"][json.dumps(path)] = groups
    return items


def _is_ranks(value: object) -> TypeGuard[tuple[int, ...]]:
    """Return True for a tuple of ranks."""
    return type(value) is tuple and all(type(rank) is int and 0 <= rank < MAX_RANKS for rank in value)


def _text(value: object) -> str:
    """Return a short string, or the type of another value: printing a nested tuple could take years."""
    return value[:40] if isinstance(value, str) else type(value).__name__


def _parse_rank(rank: object) -> object:
    """Return the rank that a key in decimal digits stands for; any other key is returned unchanged."""
    is_number = isinstance(rank, str) and rank.isascii() and rank.isdecimal() and len(rank) < 8
    return int(rank) if is_number and isinstance(rank, str) else rank


def _parse_path(text: object, where: str) -> Path:
    try:
        keys = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        keys = None
    if not isinstance(keys, list) or not all(type(key) in (str, int) for key in keys):
        raise _damaged_error(where, "a tensor whose path is not a list of keys")
    return tuple(map(str, keys))


def _damaged_error(where: str, problem: str) -> InputError:
    return InputError(f"{where}: has {problem}; the file is damaged, copy it again")


# --------------------------------------------------------------------------------------------------------- shardings


def _require_shape(value: object, where: str) -> Shape:
    sizes = tuple(value) if isinstance(value, list) else value
    if not is_shape(sizes) or find_shape_fault(sizes) is not None:
        raise _damaged_error(where, "no valid shape")
    return sizes


def _require_dtype(data: Mapping[str, object], where: str) -> str:
    dtype = data.get("dtype")
    if type(dtype) is not str:
        raise _damaged_error(where, "no dtype")
    return dtype


def _mesh_shards(data: Mapping[str, object], rank: int, where: str) -> LocalShards:
    """Return the shard of one rank of a DTensor, from its mesh and the placement for each mesh dim."""
    shape, mesh = _require_shape(data.get("global_shape"), where), data.get("mesh_spec")
    sizes, ranks = (mesh.get(key) for key in ("mesh_shape", "mesh_data")) if isinstance(mesh, dict) else (None, None)
    sizes, ranks = (tuple(each) if isinstance(each, list) else each for each in (sizes, ranks))
    if (
        not is_shape(sizes)
        or not 0 < len(sizes) <= _MAX_MESH_DIMS
        or not _is_ranks(ranks)
        or not 0 < prod(sizes) <= MAX_RANKS
        or prod(sizes) != len(ranks)
        or ranks.count(rank) != 1
    ):
        raise _damaged_error(where, f"no mesh that contains rank {rank} once")
    placements = _mesh_placements(data.get("placements"), len(sizes), len(shape), where)
    region = local_region(shape, sizes, coordinate_of(ranks.index(rank), sizes), placements, where)
    return LocalShards(shape, _require_dtype(data, where), region.sizes, (LocalBox(region, (0,) * len(shape)),))


def _mesh_placements(stored: object, mesh_dims: int, tensor_dims: int, where: str) -> list[MeshPlacement]:
    if not isinstance(stored, list | tuple) or len(stored) != mesh_dims:
        raise _damaged_error(where, f"no placement for each of {mesh_dims} mesh dims")
    placements = []
    for each in stored:
        kind, dim = (each.get("type"), each.get("dim")) if isinstance(each, dict) else (None, None)
        if kind == "Replicate":
            placements.append(MeshPlacement())
            continue
        if kind not in ("Shard", "StridedShard"):
            raise UnsupportedError(
                f"{where}: the placement {_text(kind)} is not supported; redistribute the tensor before saving"
            )
        split_factor = each.get("split_factor") if kind == "StridedShard" else None
        if (
            type(dim) is not int
            or not 0 <= dim < tensor_dims
            or (kind == "StridedShard" and type(split_factor) is not int)
        ):
            raise _damaged_error(where, f"no placement of a tensor of {tensor_dims} dims")
        placements.append(MeshPlacement(dim, split_factor))
    return placements


def _box_shards(data: Mapping[str, object], where: str) -> LocalShards:
    """Return the parts of a tensor whose metadata lists the position of each in the whole and in the local tensor."""
    shape = _require_shape(data.get("global_shape"), where)
    columns: list[list[object]] = []
    for key in ("global_offsets", "local_offsets", "local_sizes"):
        column = data.get(key)
        if not isinstance(column, list | tuple) or (columns and len(column) != len(columns[0])):
            raise _damaged_error(where, "no offsets and sizes for each part")
        columns.append(list(column))
    boxes = []
    for row in zip(*columns, strict=True):
        offsets, local_offsets, sizes = (_require_shape(each, where) for each in row)
        if not len(offsets) == len(local_offsets) == len(sizes) == len(shape):
            raise _damaged_error(where, f"a part of another number of dims than {len(shape)}")
        boxes.append(LocalBox(Region(offsets, sizes), local_offsets))
    return LocalShards(shape, _require_dtype(data, where), None, tuple(boxes))
