"""Open a torch DCP directory: `.metadata` and the `.distcp` files it refers to.

Opening parses only `.metadata` and checks that its chunks tile every tensor and lie inside their files. `open_payloads`
then locates the elements in each archive, for callers that read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from typing import NamedTuple

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import BY_TORCH, DType
from ckptx.catalog.entry import ArchivedChunks, BytesEntry, Chunk, StoredChunks, TensorEntry
from ckptx.catalog.region import Region, Shape, coverage_fault
from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.dcp.metadata import (
    ChunkLocations,
    DcpMetadata,
    Key,
    LocatedMetadata,
    StorageInfo,
    TensorMetadata,
    parse_metadata,
)
from ckptx.formats.dcp.own_metadata import parse_own
from ckptx.formats.torch_archive.archive import archive_frame, archive_length, locate_payload
from ckptx.formats.torch_archive.unpickle import without_garbage_collection
from ckptx.formats.unsupported import refuse_directory
from ckptx.storage.files import changed, inside
from ckptx.storage.interface import FileIdentity, Location, Source, SourceFiles
from ckptx.storage.listing import EntryKind
from ckptx.untrusted.limits import METADATA_BYTES
from ckptx.untrusted.numbers import identity

METADATA = ".metadata"

_LFS_POINTER = b"version https://git-lfs"


def open_dcp(source: Source) -> Catalog:
    """Return the catalog of the DCP in a directory. Its chunks are whole archives; `open_payloads` parses those.

    Raises:
        InputError: `.metadata` or a file is missing, damaged or too short, or the chunks do not tile a tensor.
        UnsupportedError: A dtype that ckptx does not know, or files saved with stream transforms.
    """
    with without_garbage_collection():
        root = source.location
        catalog = Catalog(root, "dcp", {}, identities=source.identities((METADATA,)), storage=source)
        data = _read_metadata(source)
        metadata = parse_own(data) or _locate_chunks(parse_metadata(data, f"{root / METADATA}"), root)
        shardings, places = _SharedMetadata(root), metadata.places
        in_order: dict[int, bool] = {}
        entries = [
            _tensor(name, shardings.of(name, tensor), places[name], in_order)
            for name, tensor in metadata.tensors.items()
        ]
        entries.sort(key=lambda entry: entry.place if entry.chunks else ("", 0))
        catalog.tensors = {entry.name: entry for entry in entries}
        catalog.objects = {name: BytesEntry(name, *place[:3]) for name, place in metadata.objects.items()}
        found = _check_files(catalog)
        catalog.files = {name: identity.nbytes for name, identity in found.items()}
        catalog.identities.update(found)
    if isinstance(metadata.planner_data, dict):
        catalog.planner_data = metadata.planner_data
    elif metadata.planner_data is not None:
        catalog.notes.append(f"planner_data of type {type(metadata.planner_data).__name__} ignored: expected a dict")
    return catalog


def _read_metadata(source: Source) -> bytes:
    path = source.location / METADATA
    try:
        data = source.read_small(METADATA, METADATA_BYTES)
    except InputError:
        if source.kind() is not EntryKind.DIRECTORY or source.listing().has(METADATA):
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
    places = {name: _chunk_locations(name, tensor, storage, root) for name, tensor in metadata.tensors.items()}
    objects = {}
    for name in metadata.objects:
        place = storage.get((name, None))
        if place is None:
            raise InputError(f'{root / METADATA}: object "{name}" has no entry in storage_data; save it again')
        objects[name] = place
    if len(storage) > len(objects) + sum(len(tensor.chunks) for tensor in metadata.tensors.values()):
        name, offsets = _unclaimed(metadata)
        raise InputError(
            f'{root / METADATA}: storage_data has an entry for "{name}" at {offsets}, but no tensor has that chunk; '
            "the checkpoint is damaged, save it again"
        )
    return LocatedMetadata(metadata.tensors, places, objects, metadata.planner_data)


def _unclaimed(metadata: DcpMetadata) -> Key:
    """Return the key of the first storage entry that belongs to no chunk and no object."""
    claimed: set[Key] = {(name, None) for name in metadata.objects}
    for name, tensor in metadata.tensors.items():
        claimed.update((name, region.offsets) for region in tensor.chunks)
    return next(key for key in metadata.storage if key not in claimed)


def _chunk_locations(
    name: str, tensor: TensorMetadata, storage: Mapping[Key, StorageInfo], root: Location
) -> ChunkLocations:
    found = []
    for region in tensor.chunks:
        place = storage.get((name, region.offsets))
        if place is None:
            raise InputError(
                f'{root / METADATA}: chunk {region} of tensor "{name}" has no entry in storage_data; '
                "the checkpoint is incomplete, save it again"
            )
        if place.transforms:
            raise UnsupportedError(
                f'{root / place.path}: tensor "{name}" was saved with stream transforms '
                f"({', '.join(place.transforms)}), which are not supported; save it without them"
            )
        found.append(place)
    return ChunkLocations(
        [place.path for place in found], [place.offset for place in found], [place.length for place in found]
    )


class _TensorSharding(NamedTuple):
    """The sharding of one or more tensors; `regions` were checked to tile `shape`."""

    dtype: DType
    shape: Shape
    regions: Sequence[Region]


class _SharedMetadata:
    """Checks metadata, or at least the regions in it, only once for all tensors that share it."""

    def __init__(self, root: Location) -> None:
        self._where = str(root / METADATA)
        self._known: dict[int, _TensorSharding] = {}  # by `id` of the `TensorMetadata`, which outlives this object
        self._checked: dict[tuple[DType, bytes], _TensorSharding] = {}

    def of(self, name: str, tensor: TensorMetadata) -> _TensorSharding:
        """Return the sharding of a tensor.

        Raises:
            InputError, UnsupportedError: See `open_dcp`.
        """
        known = self._known.get(id(tensor))
        if known is None:
            known = self._known[id(tensor)] = self._check(name, tensor)
        return known

    def _check(self, name: str, tensor: TensorMetadata) -> _TensorSharding:
        dtype, where = BY_TORCH.get(tensor.dtype), f'{self._where}: tensor "{name}"'
        if dtype is None:
            raise UnsupportedError(f"{where} has dtype {tensor.dtype}, which is not supported")
        key = (dtype, identity((tensor.size, *tensor.chunks)))  # equal shapes and regions are one object
        proved = self._checked.get(key)
        if proved is not None:
            return proved
        shape, regions = _widen(dtype, tensor.size), tensor.chunks
        if dtype.pack > 1:
            regions = tuple([_elements(dtype, region) for region in regions])
        if len(regions) != 1 or regions[0].sizes != shape or any(regions[0].offsets):
            _check_coverage(where, shape, regions)
        if dtype.pack > 1 and not shape:
            raise UnsupportedError(f"{where} is a 0-d {tensor.dtype}, which is not supported")
        proved = self._checked[key] = _TensorSharding(dtype, shape, regions)
        return proved


def _tensor(name: str, sharding: _TensorSharding, places: ChunkLocations, in_order: dict[int, bool]) -> TensorEntry:
    """Return the entry of a tensor; `in_order` caches, by `id`, whether a list of files is ascending."""
    files = places.files
    if id(files) not in in_order:
        in_order[id(files)] = all(file < following for file, following in pairwise(files))
    chunks = StoredChunks(sharding.regions, *places)
    return TensorEntry(name, sharding.dtype, sharding.shape, chunks if in_order[id(files)] else chunks.in_order())


def _widen(dtype: DType, sizes: Shape) -> Shape:
    """Convert torch elements to elements: the last dim of a packed dtype counts packs."""
    return sizes if dtype.pack == 1 or not sizes else (*sizes[:-1], sizes[-1] * dtype.pack)


def _narrow(dtype: DType, shape: Shape) -> Shape:
    """Convert elements to torch elements."""
    return shape if dtype.pack == 1 else (*shape[:-1], shape[-1] // dtype.pack)


def _elements(dtype: DType, region: Region) -> Region:
    return Region(_widen(dtype, region.offsets), _widen(dtype, region.sizes))


def _check_coverage(where: str, shape: Shape, regions: Sequence[Region]) -> None:
    fault = coverage_fault(shape, regions)
    if fault is None:
        return
    if fault.kind == "tangle":
        raise UnsupportedError(
            f"{where} of shape {list(shape)}: its {len(regions)} chunks are split at too many positions to be checked; "
            "save it sharded along a device mesh"
        )
    found = {
        "gap": "no chunk covers",
        "overlap": "more than one chunk covers",
        "outside": "a chunk lies outside at",
    }[fault.kind]
    raise InputError(
        f"{where} of shape {list(shape)}: {found} {fault.region}; the save is incomplete or damaged, save it again"
    )


def _check_files(catalog: Catalog) -> dict[str, FileIdentity]:
    """Return the identities of the files in `.metadata`, checked to be as long as their last chunk requires."""
    source, required = catalog.source, _ends(catalog)
    paths = {name: inside(catalog.root, name) for name in sorted(required)}
    found = source.identities(paths)
    for name, path in paths.items():
        size = found[name].nbytes if name in found else source.size(name)
        is_odd = size < required[name] or name not in found
        if is_odd and source.head(name, len(_LFS_POINTER)) == _LFS_POINTER:
            raise InputError(f"{path}: a git-lfs pointer, not the data; run `git lfs pull`")
        if name not in found:
            raise changed(path)
        if size < required[name]:
            raise InputError(
                f"{path}: has {size} bytes, but .metadata refers to bytes up to {required[name]}; "
                "the file is truncated, copy or download it again"
            )
    return found


def _ends(catalog: Catalog) -> dict[str, int]:
    """Return for each file in `.metadata` the end of its last chunk or object, in bytes."""
    offsets_by_layout: dict[
        tuple[int, int], tuple[StoredChunks, list[Sequence[int]]]
    ] = {}  # by `id` of files and lengths
    for entry in catalog.tensors.values():
        chunks = entry.chunks
        assert type(chunks) is StoredChunks
        key = id(chunks.files), id(chunks.lengths)
        if key not in offsets_by_layout:
            offsets_by_layout[key] = chunks, []
        offsets_by_layout[key][1].append(chunks.offsets)
    places = [
        zip(chunks.files, map(max, zip(*offsets, strict=True)), chunks.lengths, strict=True)
        for chunks, offsets in offsets_by_layout.values()
    ]
    ends: dict[str, int] = {}
    for file, offset, nbytes in chain(*places, (pickled[1:] for pickled in catalog.objects.values())):
        ends[file] = max(ends.get(file, 0), offset + nbytes)
    return ends


def open_payloads(catalog: Catalog, files: SourceFiles, *, lazy: bool = False) -> Catalog:
    """Locate the elements of every chunk: their offset and strides in the file, and the zip record to check.

    Args:
        catalog: A catalog that `open_dcp` returned.
        files: Its files; they must stay open while the result is used.
        lazy: Parse archives of the length that torch 2.13 writes only when their chunk is accessed.

    Raises:
        InputError: An archive is damaged, or has another dtype or shape than `.metadata` lists.
        UnsupportedError: A conjugate or negative view, compressed or safetensors payloads.
    """
    tensors = {}
    ahead = _ReadAhead(files)
    expected = _ExpectedLengths()
    chunks: Sequence[Chunk]
    with without_garbage_collection():
        for name, entry in catalog.tensors.items():
            chunks = entry.chunks
            if type(chunks) is ArchivedChunks:
                if not lazy:
                    assert chunks.located
            elif lazy and type(chunks) is StoredChunks and expected.fit(entry.dtype, chunks):
                chunks = ArchivedChunks(chunks, archive_frame, partial(_locate_all, entry, files))
            else:
                chunks = tuple([_locate(entry, chunk, ahead) if chunk.archive else chunk for chunk in chunks])
            tensors[name] = TensorEntry(name, entry.dtype, entry.shape, chunks)
    return replace(catalog, tensors=tensors)


class _ExpectedLengths:
    """Caches the archive lengths that torch 2.13 writes for blocks of each dtype and shape."""

    def __init__(self) -> None:
        self._known: dict[tuple[DType, Shape], int] = {}
        self._fits: dict[tuple[DType, int, int], bool] = {}  # by `id` of regions and lengths

    def fit(self, dtype: DType, archives: StoredChunks) -> bool:
        """Return True if the archives have the lengths that torch 2.13 writes for blocks of `dtype`."""
        key = dtype, id(archives.regions), id(archives.lengths)
        fit = self._fits.get(key)
        if fit is None:
            lengths = zip(archives.regions, archives.lengths, strict=True)
            fit = all(self._length(dtype, region.sizes) == nbytes for region, nbytes in lengths)
            self._fits[key] = fit
        return fit

    def _length(self, dtype: DType, sizes: Shape) -> int:
        length = self._known.get((dtype, sizes))
        if length is None:
            length = self._known[dtype, sizes] = archive_length(dtype, _narrow(dtype, sizes))
        return length


def _locate_all(entry: TensorEntry, files: SourceFiles, archives: Iterable[Chunk]) -> tuple[Chunk, ...]:
    ahead = _ReadAhead(files)
    return tuple([_locate(entry, archive, ahead) for archive in archives])


class _ReadAhead:
    """Reads a little more than requested, because the head of the next archive follows the end of each."""

    _NBYTES = 2560

    def __init__(self, files: SourceFiles) -> None:
        self.root = files.root
        self._files = files
        self._windows: dict[str, tuple[int, bytes]] = {}

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        """Return exactly `nbytes` bytes; see `SourceFiles.read`."""
        begin, window = self._windows.get(file, (0, b""))
        at = offset - begin
        if at >= 0 and at + nbytes <= len(window):
            return window[at : at + nbytes]
        window = self._files.read_up_to(file, offset, max(nbytes, self._NBYTES))
        if len(window) < nbytes:
            return self._files.read(file, offset, nbytes)
        self._windows[file] = offset, window
        return window[:nbytes]


def _locate(entry: TensorEntry, chunk: Chunk, files: _ReadAhead) -> Chunk:
    region, file, offset, length = chunk[:4]
    dtype = entry.dtype
    shape = _narrow(dtype, region.sizes)
    where = f'{files.root}/{file}: tensor "{entry.name}"'
    found = locate_payload(partial(files.read, file), offset, length, where, dtype, shape)
    if found.dtype is not dtype or found.shape != shape:
        raise InputError(
            f"{where}: payload is {found.dtype.torch} {list(found.shape)}, but .metadata lists {dtype.torch} "
            f"{list(shape)}; the checkpoint is damaged, save it again"
        )
    if found.strides is not None and dtype.pack > 1:
        raise UnsupportedError(f"{where}: {dtype.torch} is not row-major; save it with .contiguous()")
    return Chunk(region, file, found.data_offset, found.nbytes, found.strides, found.record)
