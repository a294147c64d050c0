"""Check of a DCP after writing: compare the staged files, as a reader sees them, with the plan; see `output_check`."""

from __future__ import annotations

from collections.abc import Iterator

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import Chunk, ShardedChunks, TensorEntry
from ckptx.catalog.region import Region
from ckptx.conversion.outputs.dcp_parts import DcpOutput
from ckptx.conversion.steps.output_check import plan_difference_error
from ckptx.formats.dcp.layout import in_torch_elements
from ckptx.formats.dcp.metadata import DcpMetadata, StorageInfo, parse_metadata
from ckptx.formats.dcp.reader import METADATA
from ckptx.formats.torch_archive.archive import archive_frame
from ckptx.storage.interface import Source

# Reading `.metadata` and the frame heads of archives takes about 20 us and 1 KB per block. With so many blocks that
# this would slow down the conversion, only the first and the last block of each file are checked. All blocks are
# checked if there are at most `_ALWAYS_CHECKED_BLOCKS`, or at most `_MAX_CHECKED_BLOCKS` with more than
# `_MIN_MEAN_BLOCK_BYTES` on average.
_ALWAYS_CHECKED_BLOCKS, _MAX_CHECKED_BLOCKS, _MIN_MEAN_BLOCK_BYTES = 1 << 12, 1 << 17, 1 << 20


def check_dcp(tree: Source, output: DcpOutput) -> None:
    """Read the frame heads of archives back, and parse each `.metadata` that is about to be written.

    With very many blocks, only those of the first and the last block of each file are read, and no `.metadata` is
    parsed.

    Raises:
        InternalError: A block differs from the plan.
    """
    catalog = output.catalog
    can_check_all = _can_check_all(catalog)
    with tree.open() as files:
        for entry, chunk in _all_blocks(catalog) if can_check_all else _first_and_last_blocks(catalog):
            frame = archive_frame(entry.dtype, chunk.region.sizes)
            if files.read(chunk.file, chunk.offset, len(frame.head)) != frame.head:
                raise plan_difference_error(
                    chunk.file, f'no archive of "{entry.name}" {chunk.region} at byte {chunk.offset}'
                )
    for marker, data in output.markers if can_check_all else ():
        _check_metadata(parse_metadata(data, marker), marker, output)


def _can_check_all(catalog: Catalog) -> bool:
    blocks = sum(len(entry.chunks) for entry in catalog.tensors.values())
    return blocks <= _ALWAYS_CHECKED_BLOCKS or (
        blocks <= _MAX_CHECKED_BLOCKS and sum(catalog.files.values()) > blocks * _MIN_MEAN_BLOCK_BYTES
    )


def _check_metadata(metadata: DcpMetadata, marker: str, output: DcpOutput) -> None:
    """Compare the names of one part and the recorded positions of their blocks with the plan.

    Args:
        metadata: Contents of the `.metadata` of the part.
        marker: Path of this `.metadata`, which all paths in it are relative to.
        output: Planned DCP.
    """
    catalog, catalog_names = output.catalog, output.catalog_names[marker]
    path_prefix = marker[: -len(METADATA)]
    found = {*metadata.tensors, *metadata.objects}
    if found != catalog_names.keys() or len(metadata.tensors) + len(metadata.objects) != len(found):
        raise plan_difference_error(marker, f'names such as "{next(iter(found ^ catalog_names.keys()), "")}"')
    for fqn, tensor in metadata.tensors.items():
        entry = catalog.tensors[catalog_names[fqn]]
        recorded = {
            (region, path_prefix + location.path, location.offset, location.length)
            for region, location in _chunk_locations(fqn, metadata)
        }
        planned = {(_region_in_torch(entry, chunk.region), *chunk[1:4]) for chunk in entry.chunks}
        size = in_torch_elements(entry.dtype, entry.shape, fqn)
        if (tensor.dtype, tensor.size) != (entry.dtype.torch_name, size) or recorded != planned:
            raise plan_difference_error(marker, f'"{fqn}" {tensor.dtype} {tensor.size} at {recorded!s:.200}')
    for fqn in metadata.objects:
        path, offset, length, _ = metadata.storage[fqn, None]
        if catalog.objects[catalog_names[fqn]][1:] != (path_prefix + path, offset, length):
            raise plan_difference_error(marker, f'object "{fqn}" at byte {offset} of {path}')


def _chunk_locations(fqn: str, metadata: DcpMetadata) -> Iterator[tuple[Region, StorageInfo]]:
    return ((region, metadata.storage[fqn, region.offsets]) for region in metadata.tensors[fqn].chunks)


def _all_blocks(catalog: Catalog) -> Iterator[tuple[TensorEntry, Chunk]]:
    return ((entry, chunk) for entry in catalog.tensors.values() for chunk in entry.chunks)


def _first_and_last_blocks(catalog: Catalog) -> Iterator[tuple[TensorEntry, Chunk]]:
    """Yield the first and the last block of each file; tensors in a file follow the order of the catalog."""
    first_entries: dict[object, TensorEntry] = {}
    last_entries: dict[object, TensorEntry] = {}
    for entry in catalog.tensors.values():
        chunks = entry.chunks
        files = id(chunks.files) if type(chunks) is ShardedChunks else chunks[0].file
        first_entries.setdefault(files, entry)
        last_entries[files] = entry
    first: dict[str, tuple[TensorEntry, Chunk]] = {}
    last: dict[str, tuple[TensorEntry, Chunk]] = {}
    for entry in (*first_entries.values(), *last_entries.values()):
        for chunk in entry.chunks:
            if chunk.file not in first or chunk.offset < first[chunk.file][1].offset:
                first[chunk.file] = entry, chunk
            if chunk.file not in last or chunk.offset > last[chunk.file][1].offset:
                last[chunk.file] = entry, chunk
    yield from first.values()
    yield from last.values()


def _region_in_torch(entry: TensorEntry, region: Region) -> Region:
    dtype, name = entry.dtype, entry.name
    return Region(in_torch_elements(dtype, region.offsets, name), in_torch_elements(dtype, region.sizes, name))
