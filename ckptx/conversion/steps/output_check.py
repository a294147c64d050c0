"""Check after writing: compare the staged files, as a reader sees them, with the plan.

Headers are parsed again from the files, and markers from the bytes that will be written, by the code that opens
checkpoints: file, offset, dtype and shape of each tensor must be those of the plan. A DCP with very many blocks is
checked in part only, see `check_dcp`. This finds defects of a writer, and of a header that was restored from the record
in `ckptx.json`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import Chunk, ShardedChunks, TensorEntry
from ckptx.catalog.object_ids import ObjectIds
from ckptx.catalog.region import Region, Shape
from ckptx.conversion.outputs.dcp_parts import DcpOutput
from ckptx.errors import InputError, InternalError
from ckptx.formats.dcp.layout import in_torch_elements
from ckptx.formats.dcp.metadata import DcpMetadata, StorageInfo, parse_metadata
from ckptx.formats.dcp.reader import METADATA
from ckptx.formats.hf.layout import HuggingFaceLayout
from ckptx.formats.hf.reader import parse_index, read_header
from ckptx.formats.hf.safetensors import HeaderTensor
from ckptx.formats.sharding_info import contains_shards, read_sharding_info, recorded_offsets
from ckptx.formats.torch_archive.archive import archive_frame
from ckptx.storage.interface import Source
from ckptx.transfer.executor import CopyResult
from ckptx.wording import counted

# Reading `.metadata` and the frame heads of archives takes about 20 us and 1 KB per block. With so many blocks that
# this would slow down the conversion, only the first and the last block of each file are checked. All blocks are
# checked if there are at most `_ALWAYS_CHECKED_BLOCKS`, or at most `_MAX_CHECKED_BLOCKS` with more than
# `_MIN_MEAN_BLOCK_BYTES` on average.
_ALWAYS_CHECKED_BLOCKS, _MAX_CHECKED_BLOCKS, _MIN_MEAN_BLOCK_BYTES = 1 << 12, 1 << 17, 1 << 20


def check_huggingface(tree: Source, layout: HuggingFaceLayout) -> None:
    """Read headers and index back, and compare them with the plan.

    Raises:
        InputError: A header that the manifest records marks whole tensors as parts of larger ones.
        InternalError: Anything else differs from the plan.
    """
    catalog = layout.catalog
    planned = _PlannedBlocks(catalog)
    with tree.open() as files:
        for name in catalog.files:
            header = read_header(files, name)
            if contains_shards(header, name):
                raise InputError(
                    f"{name}: its header, as recorded in ckptx.json, marks whole tensors as parts of larger ones; "
                    "remove ckptx.json and convert again"
                )
            for tensor in header.tensors:
                planned.record_found(tensor, None, name)
    planned.require_all_found()
    files_by_name = {name: entry.chunks[0].file for name, entry in catalog.tensors.items()}
    if layout.index_text is None:
        if len(catalog.files) != 1:
            raise _internal_error(str(tree.location), f"{counted(len(catalog.files), 'file')} and no index")
    elif parse_index(layout.index_text, tree.location / layout.index_name) != files_by_name:
        raise _internal_error(layout.index_name, "an index that does not list the files of the tensors")


def check_sharded(tree: Source, catalog: Catalog) -> None:
    """Read the headers of shards back, and compare them with the plan.

    Raises:
        InternalError: A block differs from the plan.
    """
    planned = _PlannedBlocks(catalog)
    with tree.open() as files:
        for name in catalog.files:
            header = read_header(files, name)
            info = read_sharding_info(header.metadata, name) or {}
            for tensor in header.tensors:
                offsets = recorded_offsets(info.get(tensor.name), tensor.name, tensor.shape, name)
                planned.record_found(tensor, offsets, name)
    planned.require_all_found()


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
                raise _internal_error(chunk.file, f'no archive of "{entry.name}" {chunk.region} at byte {chunk.offset}')
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
        raise _internal_error(marker, f'names such as "{next(iter(found ^ catalog_names.keys()), "")}"')
    for fqn, tensor in metadata.tensors.items():
        entry = catalog.tensors[catalog_names[fqn]]
        recorded = {
            (region, path_prefix + location.path, location.offset, location.length)
            for region, location in _chunk_locations(fqn, metadata)
        }
        planned = {(_region_in_torch(entry, chunk.region), *chunk[1:4]) for chunk in entry.chunks}
        size = in_torch_elements(entry.dtype, entry.shape, fqn)
        if (tensor.dtype, tensor.size) != (entry.dtype.torch_name, size) or recorded != planned:
            raise _internal_error(marker, f'"{fqn}" {tensor.dtype} {tensor.size} at {recorded!s:.200}')
    for fqn in metadata.objects:
        path, offset, length, _ = metadata.storage[fqn, None]
        if catalog.objects[catalog_names[fqn]][1:] != (path_prefix + path, offset, length):
            raise _internal_error(marker, f'object "{fqn}" at byte {offset} of {path}')


def _chunk_locations(fqn: str, metadata: DcpMetadata) -> Iterator[tuple[Region, StorageInfo]]:
    return ((region, metadata.storage[fqn, region.offsets]) for region in metadata.tensors[fqn].chunks)


def check_digests(outcome: CopyResult, recorded: Mapping[str, str]) -> None:
    """Compare the digests of the copied tensors with those recorded at the first conversion.

    Raises:
        InputError: A digest differs.
    """
    for name, digest in recorded.items():
        if outcome.digests[name] != digest:
            raise changed_bytes_error(name, outcome.digests[name], digest)


def changed_bytes_error(name: str, found: str, recorded: str) -> InputError:
    """Return the error for a tensor whose digest differs from the recorded one."""
    return InputError(
        f'tensor "{name}": digest is {found}, but ckptx.json records {recorded}; the bytes changed since they '
        "were converted, restore the checkpoint from a copy"
    )


class _PlannedBlocks:
    """Planned blocks by tensor and file, with a count of those found.

    A file has at most one block of each tensor, and tensors with the same shards share the list of their files.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._file_indices: dict[int, dict[str, int]] = {}
        self._ids = ObjectIds()
        self._found = 0

    def record_found(self, tensor: HeaderTensor, offsets: Shape | None, file: str) -> None:
        """Record a block that was found, and compare it with the plan.

        Args:
            tensor: Tensor from the header of the file.
            offsets: Offset of the block in the whole tensor, by dimension; None for the whole tensor.
            file: Name of the file.

        Raises:
            InternalError: No such block was planned.
        """
        name, dtype, shape, begin, end = tensor
        entry = self._catalog.tensors.get(name)
        chunk = self._planned_chunk(entry, file) if entry is not None and entry.dtype is dtype else None
        if (
            chunk is None
            or (chunk.offset, chunk.nbytes, chunk.region.sizes) != (begin, end - begin, shape)
            or (any(chunk.region.offsets) if offsets is None else chunk.region.offsets != offsets)
        ):
            raise _internal_error(file, f'"{name}" {dtype} {list(shape)} at byte {begin}')
        self._found += 1

    def _planned_chunk(self, entry: TensorEntry, file: str) -> Chunk | None:
        chunks = entry.chunks
        if type(chunks) is not ShardedChunks:
            return next((chunk for chunk in chunks if chunk.file == file), None)
        key = self._ids(chunks.files)
        numbers = self._file_indices.get(key)
        if numbers is None:
            numbers = self._file_indices[key] = {name: number for number, name in enumerate(chunks.files)}
        return chunks[numbers[file]] if file in numbers else None

    def require_all_found(self) -> None:
        """Raise InternalError if a planned block was not found.

        Comparing numbers is enough, because names in a header are unique, so that no block counts twice.
        """
        planned = sum(len(entry.chunks) for entry in self._catalog.tensors.values())
        if self._found != planned:
            raise _internal_error(str(self._catalog.root), f"{self._found} blocks of {planned}")


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


def _internal_error(where: str, found: str) -> InternalError:
    return InternalError(f"{where}: contains {found}, which differs from the plan; please report it")
