"""Allocation of the files of a DCP, in one directory or in several parts.

A part is one directory of a DCP that a trainer writes as two, such as model and optimizer; each has its own
`.metadata`, with names that may lack a prefix which they have in the catalog of the whole DCP.
"""

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
        file_groups: Groups of files that are written together.
        markers: Path and bytes of each `.metadata`, which are written last.
        ranks: File name -> rank; empty if tensors are whole.
        catalog_names: Path of a `.metadata` -> map from each name in it to the name in `catalog`.
    """

    catalog: Catalog
    file_groups: list[tuple[str, ...]]
    markers: list[tuple[str, bytes]]
    ranks: dict[str, int]
    catalog_names: dict[str, dict[str, str]] = field(default_factory=dict)


def allocate_dcp(
    root: Path, contents: DcpContents, dims: ParallelDims, files: int | None, source: Catalog
) -> DcpOutput:
    """Allocate every part of the output; it has the same parts as `source`.

    Args:
        root: Directory of the output.
        contents: Tensors and objects of all parts.
        dims: Mesh whose ranks the blocks are for.
        files: Number of files if tensors are whole; None chooses it by size. Unused for sharded tensors.
        source: Catalog of the source, with its parts.

    Raises:
        UnsupportedError: torch cannot represent a tensor.
    """
    output = DcpOutput(Catalog(root, "dcp", {}), [], [], {})
    parts = source.parts
    for part in parts or (None,):
        part_contents = contents if part is None else _contents_of_part(contents, part, parts)
        layout = dcp_layout.allocate_sharded(root, part_contents.tensors, dims, part_contents.objects.values(), files)
        path_prefix = "" if part is None or part.directory == "." else f"{part.directory}/"
        append_part(output, layout, path_prefix)
        names = {} if part is None else part.names
        planner_data = source.planner_data if part is None else part.planner_data
        output.catalog_names[path_prefix + METADATA], data = _part_metadata(
            layout.catalog, part_contents, names, planner_data
        )
        output.markers.append((path_prefix + METADATA, data))
    return output


def _part_metadata(
    catalog: Catalog, contents: DcpContents, names: Mapping[str, str], planner_data: Mapping[str, Any] | None
) -> tuple[dict[str, str], bytes]:
    """Return the map from names in the `.metadata` of one part to catalog names, and the bytes of the `.metadata`.

    Args:
        catalog: Allocated tensors and objects of the part, under catalog names.
        contents: Contents of the part.
        names: Catalog name -> name in the part of the source; empty if both are equal.
        planner_data: `planner_data` of the `.metadata` of the source; None if it has none.
    """
    if not names:
        catalog_names = {**{name: name for name in (*catalog.tensors, *catalog.objects)}, **contents.aliases}
        return catalog_names, dcp_layout.metadata_bytes(catalog, contents.aliases, planner_data, contents.copies)

    def stored_name(name: str) -> str:
        """Return the name in the part of a catalog name, which may have one more prefix.

        A new copy or alias, which the source does not have, loses the prefix that its counterpart loses.
        """
        if name in names:
            return names[name]
        counterpart = contents.aliases.get(name) or contents.copies.get(name)
        if (
            counterpart is not None
            and counterpart in names
            and counterpart != names[counterpart]
            and counterpart.endswith(names[counterpart])
        ):
            return name.removeprefix(counterpart[: len(counterpart) - len(names[counterpart])])
        return name

    renamed = replace(
        catalog,
        tensors={stored_name(name): entry for name, entry in catalog.tensors.items()},
        objects={stored_name(name): entry for name, entry in catalog.objects.items()},
    )
    aliases = {stored_name(name): stored_name(stored) for name, stored in contents.aliases.items()}
    copies = {stored_name(name): stored_name(stored) for name, stored in contents.copies.items()}
    catalog_names = {stored_name(name): name for name in (*catalog.tensors, *catalog.objects)}
    catalog_names |= {stored_name(name): stored for name, stored in contents.aliases.items()}
    return catalog_names, dcp_layout.metadata_bytes(renamed, aliases, planner_data, copies)


def _contents_of_part(contents: DcpContents, part: CheckpointPart, parts: tuple[CheckpointPart, ...]) -> DcpContents:
    """Return the contents of one part; a new alias or copy goes to the part of its counterpart."""
    counterparts = {**contents.aliases, **contents.copies}
    directory_of_name = {name: each.directory for each in parts for name in each.names}

    def is_in_part(name: str) -> bool:
        return (
            directory_of_name.get(name, directory_of_name.get(counterparts.get(name, ""), parts[0].directory))
            == part.directory
        )

    return DcpContents(
        [tensor for tensor in contents.tensors if is_in_part(tensor[0].name)],
        {name: entry for name, entry in contents.objects.items() if is_in_part(name)},
        {name: stored for name, stored in contents.aliases.items() if is_in_part(stored)},
        {name: stored for name, stored in contents.copies.items() if is_in_part(name)},
    )


def append_part(output: DcpOutput, layout: dcp_layout.DcpLayout, path_prefix: str) -> None:
    """Add one part to the output, with `path_prefix` in front of its file names.

    Args:
        output: Output to extend, in place.
        layout: Allocated files of the part.
        path_prefix: Directory with a slash at the end; empty for the root.
    """
    prefixed_files: dict[int, tuple[str, ...]] = {}
    for name, entry in layout.catalog.tensors.items():
        chunks = entry.chunks
        if path_prefix:
            assert isinstance(chunks, ShardedChunks)
            files = prefixed_files.get(id(chunks.files))
            if files is None:
                files = prefixed_files[id(chunks.files)] = tuple(path_prefix + file for file in chunks.files)
            chunks = ShardedChunks(chunks.blocks, files, chunks.offsets, chunks.lengths, chunks.are_archives)
            entry = entry._replace(chunks=chunks)
        output.catalog.tensors[name] = entry
    for name, pickled in layout.catalog.objects.items():
        output.catalog.objects[name] = pickled._replace(file=path_prefix + pickled.file)
    for file, nbytes in layout.catalog.files.items():
        output.catalog.files[path_prefix + file] = nbytes
        output.ranks[path_prefix + file] = int(file.split("_")[2])  # `__RANK_NUMBER.distcp`
    output.file_groups.extend(tuple(path_prefix + file for file in group) for group in layout.file_groups)
