"""Extends torch's save planner to the true regions of a DTensor, and its writer to names that share bytes.

torch treats a local shard as one region of the whole tensor, whose offsets follow from the placements. The shard of a
fused tensor ([q|k|v]) has a region for each fused part, and if parts differ in size, no placement describes them: stock
`dcp.save` would store rows in the wrong order. Here the regions come from `shards.find_local_shards`; the result is an
ordinary DCP.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from ckptx.catalog.region import Region, full_region
from ckptx.runtime.parallel.shards import LocalShard, find_local_shards, narrow_to
from ckptx.runtime.torch_private import local_tensor


class DTensorShards:
    """The regions of a DTensor on this rank, for torch's planners."""

    def __init__(self, name: str, tensor: DTensor, local_regions: Sequence[Region] | None) -> None:
        """Locate the regions; see `shards.find_local_shards` for the arguments."""
        self._size, self._local = tensor.shape, local_tensor(tensor).detach()
        self._shards = {shard.region.offsets: shard for shard in find_local_shards(name, tensor, local_regions)}
        if not tensor.numel():  # no region has an element, but the tensor must still be stored
            whole_region = full_region(tuple(tensor.shape))
            self._local = self._local.new_empty(tensor.shape)
            self._shards = {whole_region.offsets: LocalShard(whole_region, whole_region)}
        self._properties = TensorProperties.create_from_tensor(self._local)

    def copy_to_cpu(self) -> DTensorShards:
        """Return a copy in CPU memory of its own."""
        copied = copy(self)
        copied._local = self._local.to("cpu", copy=True)
        return copied

    def size(self) -> torch.Size:
        """Return the shape of the whole tensor."""
        return self._size

    def shard_at(self, index: MetadataIndex) -> Tensor:
        """Return the memory of the region that begins at the offset in `index`."""
        return narrow_to(self._local, self._shards[tuple(index.offset)].local)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        regions = [shard.region for shard in self._shards.values()]
        return [ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes)) for each in regions]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        """Return one item per region.

        If ranks have the same region, torch writes that of one rank: the first, or the one with the fewest bytes.
        """
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, self._properties, self._size),
            )
            for chunk in self.__create_chunk_list__()
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class WholeObject:
    """A value that is stored as one object, although torch would store each leaf of a dict separately."""

    value: Any


class SavePlanner(DefaultSavePlanner):  # type: ignore[misc]  # torch types its base as Any
    """torch's planner, which also accepts `DTensorShards` instead of DTensors, and `WholeObject` values."""

    state_dict: dict[str, Any]

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        if isinstance(value, WholeObject):
            return value.value
        return value.shard_at(index) if isinstance(value, DTensorShards) else super().lookup_object(index)


class AliasWriter(FileSystemWriter):  # type: ignore[misc]  # torch types its base as Any
    """torch's writer, whose metadata also lists names that share the bytes of others.

    Args:
        path: Directory of the checkpoint.
        aliases: Name -> the name whose bytes it shares. A name that is stored itself keeps its own bytes.
    """

    def __init__(self, path: Path, aliases: Mapping[str, str]) -> None:
        super().__init__(path)
        self._aliases = aliases

    def storage_meta(self) -> None:
        """Return None: torch would store the path that it was written to, and a random number."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        entries, paths = metadata.state_dict_metadata, metadata.planner_data
        aliases_by_name: dict[str, list[str]] = {}
        for alias, stored in self._aliases.items():
            if alias not in entries:
                entries[alias] = entries[stored]
                paths[alias] = tuple(alias.split(".", 1))
                aliases_by_name.setdefault(stored, []).append(alias)
        alias_results = [
            dataclasses.replace(each, index=dataclasses.replace(each.index, fqn=alias))
            for rank_results in results
            for each in rank_results
            for alias in aliases_by_name.get(each.index.fqn, ())
        ]
        super().finish(metadata, [*results, alias_results])
