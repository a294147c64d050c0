"""Allocation of the files of a DCP, in one directory or in the two that a trainer writes side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckptx.catalog.catalog import Catalog, CheckpointPart
from ckptx.catalog.entry import BytesEntry, ShardedChunks
from ckptx.formats.by_stage import ShardedTensor
from ckptx.formats.dcp import layout as dcp_layout
from ckptx.formats.dcp.reader import METADATA
from ckptx.layout.parallel_dims import ParallelDims


@dataclass(frozen=True, slots=True)
class DcpContents:
    """Tensors and objects to write to a DCP.

    Attributes:
        tensors: Tensors with their stage and blocks, in the order to write them.
        objects: Pickled objects by name.
        aliases: Name that shares the bytes of a tensor -> name of that tensor.
        copies: Name in `tensors` with the same bytes as another -> name of the other.
    """

    tensors: list[ShardedTensor]
    objects: Mapping[str, BytesEntry] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DcpOutput:
    """An allocated DCP.

    Attributes:
        catalog: Every tensor and object of the DCP.
        groups: Groups of files that are written together.
        markers: Path and bytes of each `.metadata`.
        ranks: Rank of each file.
        fqns: Path of a `.metadata` -> map from each name in it to the name in `catalog`.
    """

    catalog: Catalog
    groups: list[tuple[str, ...]]
    markers: list[tuple[str, bytes]]
    ranks: dict[str, int]
    fqns: dict[str, dict[str, str]] = field(default_factory=dict)


def allocate_dcp(
    root: Path, contents: DcpContents, dims: ParallelDims, files: int | None, source: Catalog
) -> DcpOutput:
    """Allocate every part of the output; it has the same parts as `source`.

    Raises:
        UnsupportedError: torch cannot represent a tensor.
    """
    output = DcpOutput(Catalog(root, "dcp", {}), [], [], {})
    parts = source.parts
    for part in parts or (None,):
        part_contents = contents if part is None else _contents_of_part(contents, part, parts)
        layout = dcp_layout.allocate_sharded(root, part_contents.tensors, dims, part_contents.objects.values(), files)
        lead = "" if part is None or part.directory == "." else f"{part.directory}/"
        _append(output, layout, lead)
        names = {} if part is None else part.names
        planner_data = source.planner_data if part is None else part.planner_data
        output.fqns[lead + METADATA], data = _metadata(layout.catalog, part_contents, names, planner_data)
        output.markers.append((lead + METADATA, data))
    return output


def _metadata(
    catalog: Catalog, contents: DcpContents, names: Mapping[str, str], planner_data: Mapping[str, Any] | None
) -> tuple[dict[str, str], bytes]:
    """Return the map from names in the `.metadata` of one part to catalog names, and the bytes of the `.metadata`."""
    if not names:
        fqns = {**{name: name for name in (*catalog.tensors, *catalog.objects)}, **contents.aliases}
        return fqns, dcp_layout.metadata_bytes(catalog, contents.aliases, planner_data, contents.copies)

    def stored_name(name: str) -> str:
        """Return a name as the part spells it; a new copy or alias follows the spelling of its twin."""
        if name in names:
            return names[name]
        twin = contents.aliases.get(name) or contents.copies.get(name)
        if twin is not None and twin in names and twin != names[twin] and twin.endswith(names[twin]):
            return name.removeprefix(twin[: len(twin) - len(names[twin])])
        return name

    renamed = replace(
        catalog,
        tensors={stored_name(name): entry for name, entry in catalog.tensors.items()},
        objects={stored_name(name): entry for name, entry in catalog.objects.items()},
    )
    aliases = {stored_name(name): stored_name(stored) for name, stored in contents.aliases.items()}
    twins = {stored_name(name): stored_name(stored) for name, stored in contents.copies.items()}
    fqns = {stored_name(name): name for name in (*catalog.tensors, *catalog.objects)}
    fqns |= {stored_name(name): stored for name, stored in contents.aliases.items()}
    return fqns, dcp_layout.metadata_bytes(renamed, aliases, planner_data, twins)


def _contents_of_part(contents: DcpContents, part: CheckpointPart, parts: tuple[CheckpointPart, ...]) -> DcpContents:
    """Return the contents of one part; a new alias or copy goes to the part of its twin."""
    twins = {**contents.aliases, **contents.copies}
    owner = {name: each.directory for each in parts for name in each.names}

    def is_here(name: str) -> bool:
        return owner.get(name, owner.get(twins.get(name, ""), parts[0].directory)) == part.directory

    return DcpContents(
        [tensor for tensor in contents.tensors if is_here(tensor[0].name)],
        {name: entry for name, entry in contents.objects.items() if is_here(name)},
        {name: stored for name, stored in contents.aliases.items() if is_here(stored)},
        {name: stored for name, stored in contents.copies.items() if is_here(name)},
    )


def _append(output: DcpOutput, layout: dcp_layout.DcpLayout, lead: str) -> None:
    """Add one part to the output, with `lead` in front of its file names."""
    moved: dict[int, tuple[str, ...]] = {}
    for name, entry in layout.catalog.tensors.items():
        chunks = entry.chunks
        if lead:
            assert isinstance(chunks, ShardedChunks)
            files = moved.get(id(chunks.files))
            if files is None:
                files = moved[id(chunks.files)] = tuple(lead + file for file in chunks.files)
            chunks = ShardedChunks(chunks.blocks, files, chunks.lengths, chunks.offsets, chunks.archive)
            entry = entry._replace(chunks=chunks)
        output.catalog.tensors[name] = entry
    for name, pickled in layout.catalog.objects.items():
        output.catalog.objects[name] = pickled._replace(file=lead + pickled.file)
    for file, nbytes in layout.catalog.files.items():
        output.catalog.files[lead + file] = nbytes
        output.ranks[lead + file] = int(file.split("_")[2])
    output.groups.extend(tuple(lead + file for file in group) for group in layout.groups)
