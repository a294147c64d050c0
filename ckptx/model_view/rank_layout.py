"""Layout of a checkpoint by rank: tensors, bytes and files of each rank, and the shards of each tensor.

File names contain the rank: `__R_I.distcp`, `shard-RRRRR-model-IIIII-of-NNNNN.safetensors` (R counts from 1 there).
Only the manifest records the coordinates of a rank in the mesh; without one, ranks with a layer in common are assumed
to be one pipeline stage. The holder of a shard is its rank; it is its file if some file name has no rank, or if the
mesh has one rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DType
from ckptx.catalog.entry import ShardedChunks, TensorEntry
from ckptx.catalog.manifest import LayoutRecord
from ckptx.catalog.object_ids import ObjectIds
from ckptx.catalog.region import Region, Shape
from ckptx.layout.expert_parallel import find_position
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.mapping.names import pattern_of
from ckptx.untrusted.hash_keys import salted_key
from ckptx.untrusted.limits import MAX_RANKS

LayerRange = tuple[str, int, int]  # path of a list of layers, first index, index after the last
Layer = tuple[str, int]  # path of a list of layers, index

_RANK_FILE = re.compile(r"(?:.*/)?(?:__(\d{1,9})_\d+\.distcp|shard-(\d{5,9})-model-\d+-of-\d+\.safetensors)")
_LAYER = re.compile(r"(.+?)\.([0-9]{1,9})\.")


class Shard(NamedTuple):
    """Region of a tensor on one rank.

    Attributes:
        holder: Index of the rank or file in `Layout.holders`; in a `Sharding`, relative to the first holder.
        region: Region of the tensor, in elements.
        is_replica: True if it replicates the shard of another holder.
    """

    holder: int
    region: Region
    is_replica: bool


class Sharding(NamedTuple):
    """Sharding of a tensor.

    Attributes:
        shape: Shape of the whole tensor, in elements.
        shards: Shards. The holder of each is the index of its rank or file minus the lowest such index of the tensor,
            the first holder, so that equal shardings on different stages compare equal.
        is_expert_parallel: True if expert parallelism distributes the tensor.
    """

    shape: Shape
    shards: tuple[Shard, ...]
    is_expert_parallel: bool = False


@dataclass(slots=True)
class TensorGroup:
    """Tensors whose names differ only in indices and that have the same sharding.

    Attributes:
        pattern: Name with `*` for each index.
        dtype: Dtype of all tensors.
        sharding_index: Index of their sharding in `Layout.shardings`.
        indices_by_holder: First holder (lowest index in `Layout.holders` of a rank or file with a shard) -> one string
            for each tensor with the indices in its name: "3.17" for layer 3, expert 17; "" for a name without indices.
    """

    pattern: str
    dtype: DType
    sharding_index: int
    indices_by_holder: dict[int, list[str]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Return the number of tensors."""
        return sum(map(len, self.indices_by_holder.values()))


@dataclass(slots=True)
class Holder:
    """Rank, or a file if ranks are unknown.

    Attributes:
        label: "rank 3", or the name of the file.
        rank: Global rank; None for a file.
        stage: Pipeline stage; None if unknown.
        dp: Data-parallel coordinate in the mesh; None without a manifest.
        tp: Tensor-parallel coordinate in the mesh; None without a manifest.
        tensor_count: Number of tensors with a shard here.
        nbytes: Bytes of tensor data on this holder; names that share bytes count once.
        files: Names of the files of the holder that have a shard, in order.
        layers: Layers with a tensor here.
        ep: Expert-parallel rank; None without expert parallelism.
    """

    label: str
    rank: int | None = None
    stage: int | None = None
    dp: int | None = None
    tp: int | None = None
    tensor_count: int = 0
    nbytes: int = 0
    files: list[str] = field(default_factory=list)
    layers: set[Layer] = field(default_factory=set)
    ep: int | None = None

    def layer_ranges(self) -> list[LayerRange]:
        """Return the layers as ranges."""
        return layer_ranges(self.layers)


@dataclass(frozen=True, slots=True)
class Layout:
    """Tensors, bytes, layers and files of each rank (or file) of a checkpoint, and the shards of its tensors.

    Attributes:
        holders: Ranks in order, including ranks without a tensor if the mesh is known; or files by name.
        dims: Mesh dimensions; None without a manifest, or for a mesh of one rank.
        shardings: Distinct shardings.
        groups: Tensors by pattern and sharding, in the order of the checkpoint.
        names_outside_layers: Stage -> model names of the tensors outside of layers whose first holder is on it; the
            stage is None if it is unknown.
    """

    holders: list[Holder]
    dims: ParallelDims | None
    shardings: list[Sharding]
    groups: list[TensorGroup]
    names_outside_layers: dict[int | None, list[str]]

    @property
    def has_ranks(self) -> bool:
        """Return True if the holders are ranks, False if they are files."""
        return bool(self.holders) and self.holders[0].rank is not None

    @property
    def sharded_count(self) -> int:
        """Return the number of tensors with more than one shard, not counting replicas."""
        return sum(
            group.count for group in self.groups if len(distinct_regions(self.shardings[group.sharding_index])) > 1
        )

    @property
    def once_stored_count(self) -> int:
        """Return the number of tensors that TP replicates but only one TP rank stores, as in a DCP.

        0 without TP, or if the mesh is unknown.
        """
        storing_ranks = self.storing_tp_ranks()
        return sum(group.count for group in self.groups if group.sharding_index in storing_ranks)

    def storing_tp_ranks(self) -> dict[int, int]:
        """Map the index of each sharding whose shards are all stored by one TP rank to this TP rank.

        TP replicates such a tensor: the other TP ranks read it from the files of this one. Empty without TP, or if the
        mesh is unknown.
        """
        if self.dims is None or self.dims.tp == 1:
            return {}
        tp_ranks: dict[int, set[int | None]] = {}
        for group in self.groups:
            _, shards, is_expert_parallel = self.shardings[group.sharding_index]
            if is_expert_parallel:
                continue
            tp_ranks.setdefault(group.sharding_index, set()).update(
                self.holders[first + shard.holder].tp
                for first in group.indices_by_holder
                for shard in shards
                if shard.region.numel
            )
        found = ((index, next(iter(ranks))) for index, ranks in tp_ranks.items() if len(ranks) == 1)
        return {index: rank for index, rank in found if rank is not None}

    def balance(self) -> dict[str, Any] | None:
        """Return the `balance` of the report; None if no holder has bytes.

        It has the mean, maximum and minimum bytes per holder, the ranks of both extremes (None for files), and the
        ratio of maximum to mean.
        """
        if not any(holder.nbytes for holder in self.holders):
            return None
        mean = sum(holder.nbytes for holder in self.holders) / len(self.holders)
        most = max(self.holders, key=lambda holder: holder.nbytes)
        least = min(self.holders, key=lambda holder: holder.nbytes)
        return {
            "mean": mean,
            "max": most.nbytes,
            "max_rank": most.rank,
            "min": least.nbytes,
            "min_rank": least.rank,
            "max_over_mean": most.nbytes / mean,
        }

    def holders_by_stage(self) -> list[tuple[int | None, list[Holder]]]:
        """Return the holders by stage; those without a stage come last."""
        stages = sorted({holder.stage for holder in self.holders}, key=lambda stage: (stage is None, stage))
        return [(stage, [holder for holder in self.holders if holder.stage == stage]) for stage in stages]


def rank_of(file: str) -> int | None:
    """Return the global rank, from 0, in the name of a DCP or sharded safetensors file; None if it has none."""
    match = _RANK_FILE.fullmatch(file)
    if match is None:
        return None
    return int(match[1]) if match[1] else int(match[2]) - 1


def layer_of(name: str) -> Layer | None:
    """Return the outermost numbered module that holds a tensor; None if there is none.

    Example:
        model.layers.3.mlp.experts.5.up_proj.weight -> ("model.layers", 3)
    """
    match = _LAYER.match(name)
    return None if match is None else (match[1], int(match[2]))


def layer_ranges(layers: Iterable[Layer]) -> list[LayerRange]:
    """Merge layers into ranges, ordered by path."""
    ranges: list[LayerRange] = []
    for path, index in sorted(set(layers)):
        if ranges and ranges[-1][0] == path and ranges[-1][2] == index:
            ranges[-1] = (path, ranges[-1][1], index + 1)
        else:
            ranges.append((path, index, index + 1))
    return ranges


def format_layer_ranges(ranges: Sequence[tuple[str, int, int]]) -> str:
    """Format ranges as `model.layers 0-3, 8-11`; a dash for none."""
    parts = [
        f"{path} {', '.join(str(first) if stop == first + 1 else f'{first}-{stop - 1}' for _, first, stop in of_path)}"
        for path, of_path in groupby(ranges, key=lambda each: each[0])
    ]
    return "; ".join(parts) or "-"


def distinct_regions(sharding: Sharding) -> list[tuple[Region, list[int]]]:
    """Return the nonempty regions of a sharding, each with its holders as in `Sharding`, those of replicas last."""
    holders_by_region: dict[tuple[int, Region], list[int]] = {}
    for shard in sorted(sharding.shards, key=lambda shard: shard.is_replica):
        if shard.region.numel:
            holders_by_region.setdefault(salted_key(shard.region), []).append(shard.holder)
    return [(region, holders) for (_, region), holders in holders_by_region.items()]


def recorded_mesh(layout: LayoutRecord | None, files: Iterable[str]) -> tuple[ParallelDims | None, str | None]:
    """Return the mesh that a manifest records, or the reason why it is ignored; the other is None.

    It is ignored if it has more than `MAX_RANKS` ranks, or if file names have higher ranks. A mesh of one rank is not
    ignored, because nothing is sharded in it, whatever the file names are.

    Args:
        layout: Layout in the manifest; None without a manifest, for which both results are None.
        files: Names of the files of the checkpoint.
    """
    if layout is None:
        return None, None
    world_size = layout.tp * layout.pp * layout.dp_shard
    last = max((rank for rank in map(rank_of, files) if rank is not None), default=0)
    if world_size > MAX_RANKS:
        return None, f"mesh of ckptx.json ignored: it has {world_size:,} ranks, more than the limit of {MAX_RANKS:,}"
    if 1 < world_size <= last:
        return None, f"mesh of ckptx.json ignored: it has {world_size} ranks, but file names go up to rank {last}"
    return ParallelDims(layout.tp, layout.pp, layout.dp_shard, ep=layout.ep), None


def layout_by_rank(catalog: Catalog, names: Mapping[str, str | None], dims: ParallelDims | None) -> Layout:
    """Add up the tensors and bytes of each rank or file.

    Args:
        catalog: Checkpoint.
        names: Tensors to include: stored name -> name in the model, without the prefixes of a trainer, from which the
            layer is read; None for other tensors, such as optimizer state, which are in no layer.
        dims: Mesh of the manifest; None if unknown.
    """
    holders, holder_of = _make_holders(catalog, dims)
    shardings = _ShardingTable(holder_of)
    groups: dict[tuple[str, DType, int], TensorGroup] = {}
    totals: dict[tuple[int, int, DType], _Totals] = {}
    locations: set[object] = set()
    outside: list[tuple[str, int]] = []
    has_experts = dims is not None and dims.ep > 1
    for name, layer_name in names.items():
        entry = catalog.tensors[name]
        is_expert = has_experts and find_position(layer_name or name, entry.shape) is not None
        index, first = shardings.index_of(entry, is_expert_parallel=is_expert)
        pattern, numbers = _split_name(name)
        key = (pattern, entry.dtype, index)
        groups.setdefault(key, TensorGroup(*key)).indices_by_holder.setdefault(first, []).append(numbers)
        total = totals.setdefault((index, first, entry.dtype), _Totals())
        total.tensor_count += 1
        location = entry.position if entry.numel else name
        if location not in locations:  # a name that shares the bytes of another adds none
            locations.add(location)
            total.distinct_count += 1
        if layer_name is None:
            continue
        layer = layer_of(layer_name)
        if layer is not None:
            total.layers.add(layer)
        elif entry.chunks:
            outside.append((layer_name, first))
    for (index, first, dtype), total in totals.items():
        _add_totals(holders, shardings.shardings[index], first, dtype, total)
    _assign_files(catalog, holders, holder_of, shardings.files)
    if dims is None:
        _infer_stages(holders)
    by_stage: dict[int | None, list[str]] = {}
    for layer_name, first in outside:
        by_stage.setdefault(holders[first].stage, []).append(layer_name)
    known = dims if dims is not None and dims.world_size > 1 else None
    return Layout(holders, known, shardings.shardings, list(groups.values()), by_stage)


@dataclass(slots=True)
class _Totals:
    """Totals of the tensors with the same sharding, first holder and dtype.

    Attributes:
        tensor_count: Number of tensors.
        distinct_count: Number of tensors without those that share the bytes of another.
        layers: Layers of the tensors.
    """

    tensor_count: int = 0
    distinct_count: int = 0
    layers: set[Layer] = field(default_factory=set)


def _make_holders(catalog: Catalog, dims: ParallelDims | None) -> tuple[list[Holder], dict[str, int]]:
    """Return the ranks, or files, and the index of the holder of each file."""
    ranks = {file: rank_of(file) for file in catalog.files}
    found = {rank for rank in ranks.values() if rank is not None}
    if not found or None in ranks.values() or (dims is not None and dims.world_size == 1):
        return [Holder(file) for file in catalog.files], {file: index for index, file in enumerate(catalog.files)}
    if dims is not None:
        found = set(range(dims.world_size))
    index_of = {rank: index for index, rank in enumerate(sorted(found))}
    holders = [Holder(f"rank {rank}", rank) for rank in index_of]
    if dims is not None:
        for holder in holders:
            assert holder.rank is not None
            holder.stage, holder.dp, holder.tp = dims.coordinates(holder.rank)
            holder.ep = dims.ep_rank(holder.rank) if dims.ep > 1 else None
    return holders, {file: index_of[rank] for file, rank in ranks.items() if rank is not None}


def _add_totals(holders: list[Holder], sharding: Sharding, first: int, dtype: DType, total: _Totals) -> None:
    """Add the totals of tensors with a sharding to each of their holders.

    Args:
        holders: Holders to update.
        sharding: Sharding of the tensors.
        first: First holder of the tensors, as an index in `holders`.
        dtype: Dtype of the tensors.
        total: Totals of the tensors.
    """
    for index, shards in groupby(
        sorted(sharding.shards, key=lambda shard: shard.holder), key=lambda shard: shard.holder
    ):
        holder = holders[first + index]
        holder.tensor_count += total.tensor_count
        holder.nbytes += total.distinct_count * sum(dtype.nbytes(shard.region.numel) for shard in shards)
        holder.layers |= total.layers


def _assign_files(
    catalog: Catalog, holders: list[Holder], holder_of: Mapping[str, int], files_with_shards: set[str]
) -> None:
    for file in catalog.files:
        if file in files_with_shards:
            holders[holder_of[file]].files.append(file)


def _split_name(name: str) -> tuple[str, str]:
    """Split a name into its pattern and its indices, joined by dots; a name that contains `*` is its own pattern."""
    if "*" in name:
        return name, ""
    pattern = pattern_of(name)
    return pattern, ".".join(a for a, b in zip(name.split("."), pattern.split("."), strict=True) if b == "*")


class _ShardingTable:
    """Table of distinct shardings.

    Attributes:
        shardings: Shardings in the order of their first use.
        files: All files that hold a shard.
    """

    def __init__(self, holder_of: Mapping[str, int]) -> None:
        self.shardings: list[Sharding] = []
        self.files: set[str] = set()
        self._holder_of = holder_of
        self._indices: dict[Sharding, int] = {}
        self._known: dict[object, tuple[int, int]] = {}
        self._ids = ObjectIds()

    def index_of(self, entry: TensorEntry, *, is_expert_parallel: bool = False) -> tuple[int, int]:
        """Return the index of the sharding of a tensor in `shardings`, and the first holder of the tensor."""
        chunks = entry.chunks
        key: object
        if isinstance(chunks, ShardedChunks):
            key = (is_expert_parallel, self._ids(chunks.blocks), self._ids(chunks.files))
        else:
            key = (
                is_expert_parallel,
                entry.shape,
                *[chunk[:2] for chunk in chunks],
                None,
                *[chunk[:2] for chunk in entry.replicas],
            )
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._add_sharding(entry, is_expert_parallel)
        return known

    def _add_sharding(self, entry: TensorEntry, is_expert_parallel: bool) -> tuple[int, int]:
        shards = list(self._shards(entry))
        first = min((shard.holder for shard in shards), default=0)
        relative = tuple(sorted(shard._replace(holder=shard.holder - first) for shard in shards))
        sharding = Sharding(entry.shape, relative, is_expert_parallel)
        index = self._indices.setdefault(sharding, len(self.shardings))
        if index == len(self.shardings):
            self.shardings.append(sharding)
        return index, first

    def _shards(self, entry: TensorEntry) -> Iterator[Shard]:
        chunks, holder_of = entry.chunks, self._holder_of
        if isinstance(chunks, ShardedChunks):
            self.files.update(chunks.files)
            for block, file in zip(chunks.blocks, chunks.files, strict=True):
                yield Shard(holder_of[file], block.region, block.is_replica)
            return
        for is_replica, stored_chunks in ((False, chunks), (True, entry.replicas)):
            for chunk in stored_chunks:
                self.files.add(chunk.file)
                yield Shard(holder_of[chunk.file], chunk.region, is_replica)


def _infer_stages(holders: list[Holder]) -> None:
    """Assign ranks with a layer in common to one stage; stages are numbered in the order of their first ranks."""
    parent = list(range(len(holders)))

    def root(index: int) -> int:
        """Return the first holder of the set that a holder was merged into (union-find with path halving)."""
        while parent[index] != index:
            parent[index] = index = parent[parent[index]]
        return index

    first_holder: dict[Layer, int] = {}
    for index, holder in enumerate(holders):
        if holder.rank is None:
            continue
        for layer in holder.layers:
            own_root, layer_root = root(index), root(first_holder.setdefault(layer, index))
            parent[max(own_root, layer_root)] = min(own_root, layer_root)
    stages: dict[int, int] = {}
    for index, holder in enumerate(holders):
        if holder.rank is not None and holder.layers:
            holder.stage = stages.setdefault(root(index), len(stages))
