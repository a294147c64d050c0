"""Open a torch DCP directory: `.metadata` and the `.distcp` files it refers to.

Opening parses only `.metadata` and checks that its chunks tile every tensor and lie inside their files.
`locate_payloads` then locates the elements in each archive, for callers that read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from typing import NamedTuple

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DTYPES_BY_TORCH_NAME, DType
from ckptx.catalog.entry import ArchiveChunks, BytesEntry, Chunk, LazyChunks, TensorEntry
from ckptx.catalog.region import Region, Shape, find_coverage_fault
from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.dcp.metadata import (
    ChunkLocations,
    DcpMetadata,
    LocatedMetadata,
    StorageInfo,
    StorageKey,
    TensorMetadata,
    parse_metadata,
)
from ckptx.formats.dcp.own_metadata import parse_own_metadata
from ckptx.formats.torch_archive.archive import archive_frame, archive_length, locate_payload
from ckptx.formats.torch_archive.unpickle import without_garbage_collection
from ckptx.formats.unsupported import refuse_directory
from ckptx.storage.files import changed_error, resolve_inside
from ckptx.storage.interface import FileIdentity, Location, Source, SourceFiles
from ckptx.storage.listing import EntryKind
from ckptx.untrusted.hash_keys import identity_key
from ckptx.untrusted.limits import MAX_METADATA_BYTES

METADATA = ".metadata"

_LFS_POINTER = b"version https://git-lfs"


def open_dcp(source: Source) -> Catalog:
    """Return the catalog of the DCP in a directory. Its chunks are whole archives; `locate_payloads` parses those.

    Raises:
        InputError: `.metadata` or a file is missing, damaged or too short, or the chunks do not tile a tensor.
        UnsupportedError: A dtype that ckptx does not know, or files saved with stream transforms.
    """
    with without_garbage_collection():
        root = source.location
        catalog = Catalog(root, "dcp", {}, identities=source.read_identities((METADATA,)), opened_source=source)
        data = _read_metadata(source)
        metadata = parse_own_metadata(data) or _locate_chunks(parse_metadata(data, f"{root / METADATA}"), root)
        checker, locations = _MetadataChecker(root), metadata.locations
        is_ascending: dict[int, bool] = {}
        entries = [
            _tensor_entry(name, checker.sharding_of(name, tensor), locations[name], is_ascending)
            for name, tensor in metadata.tensors.items()
        ]
        entries.sort(key=lambda entry: entry.position if entry.chunks else ("", 0))
        catalog.tensors = {entry.name: entry for entry in entries}
        catalog.objects = {name: BytesEntry(name, *location[:3]) for name, location in metadata.objects.items()}
        identities = _check_files(catalog)
        catalog.files = {name: identity.nbytes for name, identity in identities.items()}
        catalog.identities.update(identities)
    if isinstance(metadata.planner_data, dict):
        catalog.planner_data = metadata.planner_data
    elif metadata.planner_data is not None:
        catalog.notes.append(f"planner_data of type {type(metadata.planner_data).__name__} ignored: expected a dict")
    return catalog


def _read_metadata(source: Source) -> bytes:
    path = source.location / METADATA
    try:
        data = source.read_small(METADATA, MAX_METADATA_BYTES)
    except InputError:
        if source.read_kind() is not EntryKind.DIRECTORY or source.listing().has(METADATA):
            raise
        names = source.listing().names
        refuse_directory(source.location, [name for name in names if name.startswith("__") and name.endswith(METADATA)])
        if any(name.endswith(".distcp") for name in names):
            raise InputError(
                f"{path}: no such file next to .distcp files; the save was interrupted, use an earlier checkpoint"
            ) from None
        raise
    if data.startswith(_LFS_POINTER):
        raise InputError(f"{path}: a git-lfs pointer, not the data; run `git lfs pull`")
    return data


def _locate_chunks(metadata: DcpMetadata, root: Location) -> LocatedMetadata:
    """Combine chunks and objects with their locations."""
    storage = metadata.storage
    locations = {name: _chunk_locations(name, tensor, storage, root) for name, tensor in metadata.tensors.items()}
    objects = {}
    for name in metadata.objects:
        location = storage.get((name, None))
        if location is None:
            raise InputError(f'{root / METADATA}: object "{name}" has no entry in storage_data; save it again')
        objects[name] = location
    if len(storage) > len(objects) + sum(len(tensor.chunks) for tensor in metadata.tensors.values()):
        name, offsets = _first_unclaimed_key(metadata)
        raise InputError(
            f'{root / METADATA}: storage_data has an entry for "{name}" at {offsets}, but no tensor has that chunk; '
            "the checkpoint is damaged, save it again"
        )
    return LocatedMetadata(metadata.tensors, locations, objects, metadata.planner_data)


def _first_unclaimed_key(metadata: DcpMetadata) -> StorageKey:
    """Return the key of the first storage entry that belongs to no chunk and no object."""
    claimed: set[StorageKey] = {(name, None) for name in metadata.objects}
    for name, tensor in metadata.tensors.items():
        claimed.update((name, region.offsets) for region in tensor.chunks)
    return next(key for key in metadata.storage if key not in claimed)


def _chunk_locations(
    name: str, tensor: TensorMetadata, storage: Mapping[StorageKey, StorageInfo], root: Location
) -> ChunkLocations:
    """Return the locations of the chunks of one tensor, which must all be in `storage`, without transforms."""
    locations = []
    for region in tensor.chunks:
        location = storage.get((name, region.offsets))
        if location is None:
            raise InputError(
                f'{root / METADATA}: chunk {region} of tensor "{name}" has no entry in storage_data; '
                "the checkpoint is incomplete, save it again"
            )
        if location.transforms:
            raise UnsupportedError(
                f'{root / location.path}: tensor "{name}" was saved with stream transforms '
                f"({', '.join(location.transforms)}), which are not supported; save it without them"
            )
        locations.append(location)
    return ChunkLocations(
        [location.path for location in locations],
        [location.offset for location in locations],
        [location.length for location in locations],
    )


class _TensorSharding(NamedTuple):
    """The sharding of one or more tensors.

    Attributes:
        dtype: Dtype of the tensors.
        shape: Shape in elements.
        regions: Regions of the chunks in elements; they tile `shape`.
    """

    dtype: DType
    shape: Shape
    regions: Sequence[Region]


class _MetadataChecker:
    """Checks metadata, or at least the regions in it, only once for all tensors that share it."""

    def __init__(self, root: Location) -> None:
        self._subject = str(root / METADATA)
        self._known: dict[int, _TensorSharding] = {}  # by `id` of the `TensorMetadata`, which outlives this object
        self._checked: dict[tuple[DType, bytes], _TensorSharding] = {}  # by dtype, and `id` of size and regions

    def sharding_of(self, name: str, tensor: TensorMetadata) -> _TensorSharding:
        """Return the sharding of a tensor.

        Raises:
            InputError, UnsupportedError: See `open_dcp`.
        """
        known = self._known.get(id(tensor))
        if known is None:
            known = self._known[id(tensor)] = self._check(name, tensor)
        return known

    def _check(self, name: str, tensor: TensorMetadata) -> _TensorSharding:
        dtype, where = DTYPES_BY_TORCH_NAME.get(tensor.dtype), f'{self._subject}: tensor "{name}"'
        if dtype is None:
            raise UnsupportedError(f"{where} has dtype {tensor.dtype}, which is not supported")
        key = (dtype, identity_key((tensor.size, *tensor.chunks)))  # equal shapes and regions are one object
        sharding = self._checked.get(key)
        if sharding is not None:
            return sharding
        shape, regions = dtype.from_torch_elements(tensor.size), tensor.chunks
        if dtype.pack > 1:
            regions = tuple([_region_in_elements(dtype, region) for region in regions])
        if len(regions) != 1 or regions[0].sizes != shape or any(regions[0].offsets):
            _check_coverage(where, shape, regions)
        if dtype.pack > 1 and not shape:
            raise UnsupportedError(f"{where} is a 0-d {tensor.dtype}, which is not supported")
        sharding = self._checked[key] = _TensorSharding(dtype, shape, regions)
        return sharding


def _tensor_entry(
    name: str, sharding: _TensorSharding, locations: ChunkLocations, is_ascending: dict[int, bool]
) -> TensorEntry:
    """Return the entry of a tensor; `is_ascending` caches, by `id`, whether a list of files is ascending."""
    files = locations.files
    if id(files) not in is_ascending:
        is_ascending[id(files)] = all(file < following for file, following in pairwise(files))
    chunks = ArchiveChunks(sharding.regions, *locations)
    return TensorEntry(
        name, sharding.dtype, sharding.shape, chunks if is_ascending[id(files)] else chunks.sorted_by_position()
    )


def _region_in_elements(dtype: DType, region: Region) -> Region:
    return Region(dtype.from_torch_elements(region.offsets), dtype.from_torch_elements(region.sizes))


def _check_coverage(where: str, shape: Shape, regions: Sequence[Region]) -> None:
    fault = find_coverage_fault(shape, regions)
    if fault is None:
        return
    if fault.kind == "unverifiable":
        raise UnsupportedError(
            f"{where} of shape {list(shape)}: its {len(regions)} chunks are split at too many positions to be checked; "
            "save it sharded along a device mesh"
        )
    problem = {
        "gap": "no chunk covers",
        "overlap": "more than one chunk covers",
        "outside": "a chunk is out of bounds at",
    }[fault.kind]
    raise InputError(
        f"{where} of shape {list(shape)}: {problem} {fault.region}; the save is incomplete or damaged, save it again"
    )


def _check_files(catalog: Catalog) -> dict[str, FileIdentity]:
    """Return the identities of the files to which `.metadata` refers.

    Raises:
        InputError: A file is missing, outside the directory, a git-lfs pointer, or ends before its last chunk.
    """
    source, required_sizes = catalog.source, _required_file_sizes(catalog)
    paths = {name: resolve_inside(catalog.root, name) for name in sorted(required_sizes)}
    identities = source.read_identities(paths)
    for name, path in paths.items():
        size = identities[name].nbytes if name in identities else source.size(name)
        is_suspicious = size < required_sizes[name] or name not in identities
        if is_suspicious and source.read_head(name, len(_LFS_POINTER)) == _LFS_POINTER:
            raise InputError(f"{path}: a git-lfs pointer, not the data; run `git lfs pull`")
        if name not in identities:
            raise changed_error(path)
        if size < required_sizes[name]:
            raise InputError(
                f"{path}: has {size} bytes, but .metadata refers to bytes up to {required_sizes[name]}; "
                "the file is truncated, copy or download it again"
            )
    return identities


def _required_file_sizes(catalog: Catalog) -> dict[str, int]:
    """Return for each file in `.metadata` the end of its last chunk or object, in bytes."""
    # By `id` of files and lengths.
    offsets_by_layout: dict[tuple[int, int], tuple[ArchiveChunks, list[Sequence[int]]]] = {}
    for entry in catalog.tensors.values():
        chunks = entry.chunks
        assert type(chunks) is ArchiveChunks
        key = id(chunks.files), id(chunks.lengths)
        if key not in offsets_by_layout:
            offsets_by_layout[key] = chunks, []
        offsets_by_layout[key][1].append(chunks.offsets)
    locations = [
        zip(chunks.files, map(max, zip(*offsets, strict=True)), chunks.lengths, strict=True)
        for chunks, offsets in offsets_by_layout.values()
    ]
    ends: dict[str, int] = {}
    for file, offset, nbytes in chain(*locations, (pickled[1:] for pickled in catalog.objects.values())):
        ends[file] = max(ends.get(file, 0), offset + nbytes)
    return ends


def locate_payloads(catalog: Catalog, files: SourceFiles, *, lazy: bool = False) -> Catalog:
    """Locate the elements of every chunk: their offset and strides in the file, and the zip record to check.

    Args:
        catalog: A catalog that `open_dcp` returned.
        files: Its files; they must stay open while the result is used.
        lazy: Parse archives of the length that torch 2.13 writes only when their chunk is accessed.

    Raises:
        InputError: An archive is damaged, or has another dtype or shape than `.metadata` lists.
        UnsupportedError: A conjugate or negative view, compressed or safetensors payloads, or F4 that is not row-major.
    """
    tensors = {}
    reader = _ReadAheadFiles(files)
    expected_lengths = _ExpectedLengths()
    chunks: Sequence[Chunk]
    with without_garbage_collection():
        for name, entry in catalog.tensors.items():
            chunks = entry.chunks
            if type(chunks) is LazyChunks:
                if not lazy:
                    _ = chunks.parsed_chunks  # parses the archives
            elif lazy and type(chunks) is ArchiveChunks and expected_lengths.match(entry.dtype, chunks):
                chunks = LazyChunks(chunks, archive_frame, partial(_locate_all, entry, files))
            else:
                chunks = tuple([_locate(entry, chunk, reader) if chunk.is_archive else chunk for chunk in chunks])
            tensors[name] = TensorEntry(name, entry.dtype, entry.shape, chunks)
    return replace(catalog, tensors=tensors)


class _ExpectedLengths:
    """Caches the archive lengths that torch 2.13 writes for blocks of each dtype and shape."""

    def __init__(self) -> None:
        self._lengths: dict[tuple[DType, Shape], int] = {}
        self._matches: dict[tuple[DType, int, int], bool] = {}  # by `id` of regions and lengths

    def match(self, dtype: DType, archives: ArchiveChunks) -> bool:
        """Return True if the archives have the lengths that torch 2.13 writes for blocks of `dtype`."""
        key = dtype, id(archives.regions), id(archives.lengths)
        is_match = self._matches.get(key)
        if is_match is None:
            lengths = zip(archives.regions, archives.lengths, strict=True)
            is_match = all(self._length(dtype, region.sizes) == nbytes for region, nbytes in lengths)
            self._matches[key] = is_match
        return is_match

    def _length(self, dtype: DType, sizes: Shape) -> int:
        length = self._lengths.get((dtype, sizes))
        if length is None:
            length = self._lengths[dtype, sizes] = archive_length(dtype, sizes)
        return length


def _locate_all(entry: TensorEntry, files: SourceFiles, archives: Iterable[Chunk]) -> tuple[Chunk, ...]:
    reader = _ReadAheadFiles(files)
    return tuple([_locate(entry, archive, reader) for archive in archives])


class _ReadAheadFiles:
    """Reads a little more than requested, because the head of the next archive follows the end of each."""

    _NBYTES = 2560  # more than the end of an archive and the head of the next, some 900 and 700 bytes

    def __init__(self, files: SourceFiles) -> None:
        self.root = files.root
        self._files = files
        self._windows: dict[str, tuple[int, bytes]] = {}  # file -> position and bytes of the last read

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        """Return exactly `nbytes` bytes; see `SourceFiles.read`."""
        begin, window = self._windows.get(file, (0, b""))
        start = offset - begin
        if start >= 0 and start + nbytes <= len(window):
            return window[start : start + nbytes]
        window = self._files.read_up_to(file, offset, max(nbytes, self._NBYTES))
        if len(window) < nbytes:
            return self._files.read(file, offset, nbytes)
        self._windows[file] = offset, window
        return window[:nbytes]


def _locate(entry: TensorEntry, chunk: Chunk, files: _ReadAheadFiles) -> Chunk:
    """Return an archived chunk with the location of its elements; raises the errors of `locate_payloads`."""
    region, file, offset, length = chunk[:4]
    dtype = entry.dtype
    torch_shape = dtype.to_torch_elements(region.sizes)
    where = f'{files.root}/{file}: tensor "{entry.name}"'
    payload = locate_payload(partial(files.read, file), offset, length, where, dtype, region.sizes)
    if payload.dtype is not dtype or payload.torch_shape != torch_shape:
        raise InputError(
            f"{where}: payload is {payload.dtype.torch_name} {list(payload.torch_shape)}, but .metadata lists "
            f"{dtype.torch_name} {list(torch_shape)}; the checkpoint is damaged, save it again"
        )
    if payload.strides is not None and dtype.pack > 1:
        raise UnsupportedError(f"{where}: {dtype.torch_name} is not row-major; save it with .contiguous()")
    return Chunk(region, file, payload.data_offset, payload.nbytes, payload.strides, payload.record)
