"""The files of a DCP to be: in one directory, or in the two that a trainer keeps side by side."""

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
    """What goes into a DCP.

    Attributes:
        cuts: Tensors with their stage and blocks, in the order to write them.
        objects: Pickled objects by name.
        aliases: Names that share the bytes of a tensor.
        copies: Names in `cuts` that hold the bytes of another.
    """

    cuts: list[ShardedTensor]
    objects: Mapping[str, BytesEntry] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DcpOutput:
    """An allocated DCP.

    Attributes:
        catalog: Every tensor and object of it.
        groups: Files that are written together.
        markers: `.metadata`, by path.
        ranks: Rank of each file.
        fqns: By path of a `.metadata`: name in it -> name in `catalog` of what it names.
    """

    catalog: Catalog
    groups: list[tuple[str, ...]]
    markers: list[tuple[str, bytes]]
    ranks: dict[str, int]
    fqns: dict[str, dict[str, str]] = field(default_factory=dict)


def lay_out(root: Path, contents: DcpContents, dims: ParallelDims, files: int | None, source: Catalog) -> DcpOutput:
    """Allocates every part of the output; it has the parts that `source` has.

    Raises:
        UnsupportedError: torch cannot hold a tensor.
    """
    output = DcpOutput(Catalog(root, "dcp", {}), [], [], {})
    parts = source.parts
    for part in parts or (None,):
        inside = contents if part is None else _of_part(contents, part, parts)
        layout = dcp_layout.allocate_cut(root, inside.cuts, dims, inside.objects.values(), files)
        lead = "" if part is None or part.directory == "." else f"{part.directory}/"
        _append(output, layout, lead)
        names = {} if part is None else part.names
        planner_data = source.planner_data if part is None else part.planner_data
        output.fqns[lead + METADATA], data = _metadata(layout.catalog, inside, names, planner_data)
        output.markers.append((lead + METADATA, data))
    return output


def _metadata(
    catalog: Catalog, contents: DcpContents, names: Mapping[str, str], planner_data: Mapping[str, Any] | None
) -> tuple[dict[str, str], bytes]:
    """Names in the `.metadata` of one part with what each stands for, and the `.metadata` itself."""
    if not names:
        fqns = {**{name: name for name in (*catalog.tensors, *catalog.objects)}, **contents.aliases}
        return fqns, dcp_layout.metadata_bytes(catalog, contents.aliases, planner_data, contents.copies)

    def called(name: str) -> str:
        """A name that came with a copy or an alias is spelled as its twin is."""
        if name in names:
            return names[name]
        twin = contents.aliases.get(name) or contents.copies.get(name)
        if twin is not None and twin in names and twin != names[twin] and twin.endswith(names[twin]):
            return name.removeprefix(twin[: len(twin) - len(names[twin])])
        return name

    renamed = replace(
        catalog,
        tensors={called(name): entry for name, entry in catalog.tensors.items()},
        objects={called(name): entry for name, entry in catalog.objects.items()},
    )
    aliases = {called(name): called(stored) for name, stored in contents.aliases.items()}
    twins = {called(name): called(stored) for name, stored in contents.copies.items()}
    fqns = {called(name): name for name in (*catalog.tensors, *catalog.objects)}
    fqns |= {called(name): stored for name, stored in contents.aliases.items()}
    return fqns, dcp_layout.metadata_bytes(renamed, aliases, planner_data, twins)


def _of_part(contents: DcpContents, part: CheckpointPart, parts: tuple[CheckpointPart, ...]) -> DcpContents:
    """What belongs into one part; names that came with an alias or a copy go where their twin is."""
    twins = {**contents.aliases, **contents.copies}
    owner = {name: each.directory for each in parts for name in each.names}

    def is_here(name: str) -> bool:
        return owner.get(name, owner.get(twins.get(name, ""), parts[0].directory)) == part.directory

    return DcpContents(
        [cut for cut in contents.cuts if is_here(cut[0].name)],
        {name: entry for name, entry in contents.objects.items() if is_here(name)},
        {name: stored for name, stored in contents.aliases.items() if is_here(stored)},
        {name: stored for name, stored in contents.copies.items() if is_here(name)},
    )


def _append(output: DcpOutput, layout: dcp_layout.DcpLayout, lead: str) -> None:
    """Adds one part to the whole, its files below its directory."""
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
