"""Teaches torch's planner of saves what a DTensor really holds, and its writer that names may share bytes.

torch takes a DTensor for one rectangle, where its placements put it. Fused groups ([q|k|v]) are several, and if the
groups differ in width the placements do not even say so: stock `dcp.save` would store rows in the wrong order. Here the
rectangles come from `shards.pieces_of`; what is stored is an ordinary DCP.
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

from ckptx.catalog.region import Region, whole
from ckptx.runtime.parallel.shards import LocalShard, narrowed, pieces_of
from ckptx.runtime.torch_private import local_tensor


class DTensorShards:
    """A DTensor as the rectangles that this rank has of it, in the terms of torch's planners."""

    def __init__(self, name: str, tensor: DTensor, local_regions: Sequence[Region] | None) -> None:
        self._size, self._local = tensor.shape, local_tensor(tensor).detach()
        self._pieces = {piece.region.offsets: piece for piece in pieces_of(name, tensor, local_regions)}
        if not tensor.numel():  # no rectangle has an element, but the tensor must be stored all the same
            everything = whole(tuple(tensor.shape))
            self._local = self._local.new_empty(tensor.shape)
            self._pieces = {everything.offsets: LocalShard(everything, everything)}
        self._properties = TensorProperties.create_from_tensor(self._local)

    def copied(self) -> DTensorShards:
        """The same in memory of its own, on the CPU."""
        other = copy(self)
        other._local = self._local.to("cpu", copy=True)
        return other

    def size(self) -> torch.Size:
        """Of the whole tensor."""
        return self._size

    def at(self, index: MetadataIndex) -> Tensor:
        """The memory of the rectangle that begins at an offset."""
        return narrowed(self._local, self._pieces[tuple(index.offset)].local)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        regions = [piece.region for piece in self._pieces.values()]
        return [ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes)) for each in regions]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        """One for each rectangle; of one that several ranks have, torch keeps the first or the least busy rank's."""
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
    """A value that is stored as one object, where torch would store the leaves of a dict one by one."""

    value: Any


class SavePlanner(DefaultSavePlanner):  # type: ignore[misc]  # torch says Any
    """torch's, but that it takes `DTensorShards` in the place of DTensors, and `WholeObject` values."""

    state_dict: dict[str, Any]

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        if isinstance(found, WholeObject):
            return found.value
        return found.at(index) if isinstance(found, DTensorShards) else super().lookup_object(index)


class AliasWriter(FileSystemWriter):  # type: ignore[misc]  # torch says Any
    """torch's, but that the metadata also lists names that share the bytes of others.

    Args:
        path: The directory.
        aliases: Name -> the name whose bytes it shares. One that is stored itself keeps its own.
    """

    def __init__(self, path: Path, aliases: Mapping[str, str]) -> None:
        super().__init__(path)
        self._aliases = aliases

    def storage_meta(self) -> None:
        """Nothing: torch would store the place it was written in, and a random number."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        entries, paths = metadata.state_dict_metadata, metadata.planner_data
        of: dict[str, list[str]] = {}
        for alias, stored in self._aliases.items():
            if alias not in entries:
                entries[alias] = entries[stored]
                paths[alias] = tuple(alias.split(".", 1))
                of.setdefault(stored, []).append(alias)
        shared = [
            dataclasses.replace(each, index=dataclasses.replace(each.index, fqn=alias))
            for written in results
            for each in written
            for alias in of.get(each.index.fqn, ())
        ]
        super().finish(metadata, [*results, shared])
