"""Open sharded safetensors: plain safetensors files, each with the shards of one rank.

    shard-RRRRR-model-IIIII-of-NNNNN.safetensors     file I of N of rank R - 1
    __metadata__                                     DCP_SHARDING_INFO: {NAME: {"saved_offsets": [...]}} as JSON text

Stock writers use these names; a file with another name is a shard if its header has the same record. There is no index:
the shards that extend farthest determine the shape of a tensor. So a missing shard leaves a gap, unless it was the last
one: then only a manifest or a caller that knows the shapes can detect it. Stock readers use every safetensors file in
the directory, and return uninitialized memory for a gap; here both are refused.
Source: `torch/distributed/checkpoint/hf_storage.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DType
from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.region import Region, Shape, full_region
from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.chunk_assembly import CoverageCheck, RegionCache, split_replicas
from ckptx.formats.hf.layout import natural_key
from ckptx.formats.hf.reader import INDEX_FILE, read_header
from ckptx.formats.hf.safetensors import Header
from ckptx.formats.manifest_file import read_manifest
from ckptx.formats.sharded.file_names import is_shard, shard_name, shard_numbers
from ckptx.formats.sharding_info import (
    SHARDING_INFO,
    check_offsets,
    files_with_sharding_info,
    read_sharding_info,
    recorded_offsets,
    refuse_unknown_entries,
)
from ckptx.formats.sidecars import MANIFEST
from ckptx.formats.torch_archive.unpickle import without_garbage_collection
from ckptx.storage.interface import Location, Source
from ckptx.untrusted.hash_keys import salted_key
from ckptx.untrusted.limits import find_shape_fault


def open_sharded(source: Source, expected_shapes: Mapping[str, Shape] | None = None) -> Catalog:
    """Return the catalog of the shards in a directory.

    Tensors are in the order in which they first occur: by rank, and by their bytes in each file. A region in several
    files is a chunk in the first of them and a replica in the others.

    Args:
        source: The directory.
        expected_shapes: Known shapes of whole tensors, which reveal a missing last shard; None if unknown.

    Raises:
        InputError: A shard is missing, duplicated, damaged or of another checkpoint, or there are other safetensors
            files in the directory.
        UnsupportedError: See `read_sharding_info`; or shards are split at too many positions to be checked.
    """
    root, names = source.location, _shard_files(source)
    catalog = Catalog(root, "sharded", {}, opened_source=source)
    recorded_shapes = _recorded_shapes(source, names, catalog.notes)
    with without_garbage_collection():
        headers = _ShardHeaders(root)
        for name in names:
            with source.open() as files:
                identity = files.identity(name)
                catalog.files[name], catalog.identities[name] = identity.nbytes, identity
                headers.add(name, read_header(files, name))
        assembly = _TensorAssembly(root, names)
        catalog.tensors = {
            name: assembly.entry(name, headers.dtypes[name][0], chunks) for name, chunks in headers.chunks.items()
        }
    if recorded_shapes is None:
        assembly.refuse_duplicate_files()
    check_shapes(catalog, {**(recorded_shapes or {}), **(expected_shapes or {})})
    if source.listing().has(INDEX_FILE):
        catalog.notes.append(f"{INDEX_FILE} ignored: sharded safetensors have no index")
    return catalog


def _shard_files(source: Source) -> list[str]:
    """Return the names of all safetensors files, by rank; raises InputError if one of them is not a shard."""
    names = [name for name in source.listing() if name.endswith(".safetensors")]
    others = [name for name in names if not is_shard(name)]
    strays = sorted(set(others).difference(files_with_sharding_info(source, others)))
    if strays:
        raise InputError(
            f"{source.location}: contains {', '.join(strays[:3])} next to {_describe_shards(names, strays)}, and "
            "loaders would read both; move one kind to another directory, or pass a file or index as SRC"
        )
    return sorted(names, key=natural_key)


def _describe_shards(names: Iterable[str], strays: Iterable[str]) -> str:
    """Describe the shards among the names, for error messages."""
    shards = sorted(set(names).difference(strays))
    return "shard-* files" if any(map(is_shard, shards)) else f"{shards[0]}, a shard by its {SHARDING_INFO}"


def _recorded_shapes(source: Source, names: Iterable[str], notes: list[str]) -> dict[str, Shape] | None:
    """Return the shapes of whole tensors in the manifest of ckptx; None without one of this format.

    Raises:
        InputError: The manifest lists other shards than are present, or another size of one.
    """
    manifest, root = read_manifest(source, notes), source.location
    if manifest is None or manifest.format != "sharded":
        return None
    recorded_sizes = {name: file.nbytes for name, file in manifest.files.items() if is_shard(name)}
    present = set(names)
    for name in sorted(recorded_sizes.keys() - present):
        raise InputError(
            f"{root / name}: no such file, but {MANIFEST} lists it; the checkpoint is incomplete, copy it again"
        )
    for name in sorted(present - recorded_sizes.keys()):
        raise InputError(
            f"{root / name}: {MANIFEST} does not list this file; remove it if it is stale, or {MANIFEST} if another "
            "tool has saved here since"
        )
    for name, nbytes in recorded_sizes.items():
        found = source.size(name)
        if found != nbytes:
            raise InputError(
                f"{root / name}: has {found} bytes, but {MANIFEST} lists {nbytes}; copy it again, or remove {MANIFEST} "
                "if another tool has saved here since"
            )
    return {name: tensor.shape for name, tensor in manifest.tensors.items()}


class _ShardHeaders:
    """The shards of each tensor, collected from the headers.

    Attributes:
        chunks: Chunks by tensor name, in the order of files.
        dtypes: (dtype, file that has it first), by tensor name.
    """

    def __init__(self, root: Location) -> None:
        self._root = root
        self._regions = RegionCache()
        self.chunks: dict[str, list[Chunk]] = {}
        self.dtypes: dict[str, tuple[DType, str]] = {}

    def add(self, file: str, header: Header) -> None:
        """Add the shards in one file.

        Raises:
            InputError, UnsupportedError: See `open_sharded`.
        """
        where = str(self._root / file)
        info = read_sharding_info(header.metadata, where)
        for name, dtype, shape, begin, end in header.tensors:
            offsets = (0,) * len(shape) if info is None else recorded_offsets(info.pop(name, None), name, shape, where)
            region = self._region(offsets, shape, name, where)
            chunk = Chunk(region, file, begin, end - begin)
            chunks = self.chunks.setdefault(name, [])
            known, first = self.dtypes.setdefault(name, (dtype, file))
            dims = len(chunks[0].region.sizes) if chunks else len(shape)
            if known is not dtype or dims != len(shape):
                raise InputError(
                    f'{where}: tensor "{name}" is {dtype} with {len(shape)} dims, but {known} with {dims} in {first}; '
                    "the shards are of different checkpoints, remove those of one"
                )
            chunks.append(chunk)
        refuse_unknown_entries(info or {}, where)

    def _region(self, offsets: Shape, shape: Shape, name: str, where: str) -> Region:
        region = Region(offsets, shape)
        known = self._regions.get(region)
        if known is not None:
            return known
        check_offsets(offsets, name, shape, where)
        return self._regions.keep(region, name, where)


class _TensorAssembly:
    """Assembles tensors from their shards, and finds files that only duplicate others."""

    def __init__(self, root: Location, names: list[str]) -> None:
        self._root, self._names = root, names
        self._unique_regions: Counter[str] = Counter()  # file -> number of its regions that no other file has
        self._coverage = CoverageCheck()
        # (file of a chunk, file of a replica of it) -> tensor and region that were first found in both.
        self._duplicates: dict[tuple[str, str], tuple[str, Region]] = {}

    def entry(self, name: str, dtype: DType, shards: list[Chunk]) -> TensorEntry:
        """Return the tensor that consists of these shards.

        Raises:
            InputError: The shards leave a gap, overlap without being equal, or make up an invalid shape.
            UnsupportedError: They are split at too many positions to be checked.
        """
        if len(shards) == 1 and not any(shards[0].region.offsets):
            self._unique_regions[shards[0].file] += 1
            return TensorEntry(name, dtype, shards[0].region.sizes, tuple(shards))
        dims = range(len(shards[0].region.sizes))
        shape = self._check_whole_shape(
            name, tuple(max(chunk.region.offsets[dim] + chunk.region.sizes[dim] for chunk in shards) for dim in dims)
        )
        # Ranks without elements have empty shards, all with the same offsets.
        filled = [chunk for chunk in shards if chunk.region.numel] or [Chunk(full_region(shape), *shards[0][1:])]
        chunks, replicas = split_replicas(filled)
        if len(chunks) > 1 or chunks[0].region.sizes != shape:
            self._check_coverage(name, shape, chunks)
            self._count_unique_regions(name, chunks, replicas)
        elif not replicas:
            self._unique_regions[chunks[0].file] += 1
        return TensorEntry(name, dtype, shape, chunks, replicas)

    def _check_whole_shape(self, name: str, shape: Shape) -> Shape:
        fault = find_shape_fault(shape)
        if fault is not None:
            raise InputError(
                f'{self._root}: the shards of tensor "{name}" add up to {fault}; they are damaged, copy them again'
            )
        return shape

    def _check_coverage(self, name: str, shape: Shape, chunks: tuple[Chunk, ...]) -> None:
        fault = self._coverage.fault(shape, chunks)
        if fault is None:
            return
        where = f'{self._root}: tensor "{name}" of shape {list(shape)}'
        if fault.kind == "gap":
            raise InputError(f"{where}: no shard covers {fault.region}; {self._describe_missing()}")
        if fault.kind == "unverifiable":
            raise UnsupportedError(
                f"{where}: its {len(chunks)} shards are split at too many positions to be checked; save it sharded "
                "along a device mesh"
            )
        files = sorted({chunk.file for chunk in chunks if chunk.region.intersect(fault.region)}, key=natural_key)
        raise InputError(
            f"{where}: {' and '.join(files[:2])} both cover {fault.region}; one of them is of another checkpoint, "
            "remove it"
        )

    def _describe_missing(self) -> str:
        """Describe the files that are missing according to the numbers in file names, for an error message."""
        if not all(map(is_shard, self._names)):
            return "a shard is missing or damaged, copy the checkpoint again"
        present = {shard_numbers(name) for name in self._names}
        counts = {shard: count for shard, _, count in present}
        max_count = max(counts.values())
        expected = (
            (shard, number, counts.get(shard, max_count))
            for shard in range(1, max(counts) + 1)
            for number in range(1, counts.get(shard, max_count) + 1)
        )
        # Only the first few, because the numbers in a name may be astronomically large.
        missing = [shard_name(*numbers) for numbers in islice((each for each in expected if each not in present), 4)]
        if not missing:
            return "a shard is missing or damaged, copy the checkpoint again"
        more = " and more" if len(missing) > 3 else ""
        return f"missing {', '.join(missing[:3])}{more}, copy the checkpoint again"

    def _count_unique_regions(self, name: str, chunks: Iterable[Chunk], replicas: Iterable[Chunk]) -> None:
        """Count the regions of one tensor that are in one file only, and note which files share the others."""
        file_of_region = {salted_key(chunk.region): chunk.file for chunk in chunks}
        shared = set()
        for replica in replicas:
            self._duplicates.setdefault(
                (file_of_region[salted_key(replica.region)], replica.file), (name, replica.region)
            )
            shared.add(salted_key(replica.region))
        self._unique_regions.update(file for region, file in file_of_region.items() if region not in shared)

    def refuse_duplicate_files(self) -> None:
        """Refuse a file of shards that are all in other files, too; call it after `entry` for all tensors.

        Ranks that replicate a small tensor still have shards of their own; a copy under another number does not.

        Raises:
            InputError: There is such a file.
        """
        for (first, second), (name, region) in self._duplicates.items():
            if not self._unique_regions[first] or not self._unique_regions[second]:
                raise InputError(
                    f'{self._root}: duplicated shard: {first} and {second} both contain {region} of tensor "{name}", '
                    "and one of them has no other data; remove the copy"
                )


def check_shapes(catalog: Catalog, expected: Mapping[str, Shape]) -> None:
    """Check the shapes that the shards add up to against known shapes.

    Raises:
        InputError: A tensor has another shape, as when the last shards are missing.
    """
    for name, shape in expected.items():
        entry = catalog.tensors.get(name)
        if entry is not None and entry.shape != shape:
            raise InputError(
                f'{catalog.root}: the shards of tensor "{name}" add up to {list(entry.shape)}, expected '
                f"{list(shape)}; the last shards are missing, or the expected shape is that of another model"
            )
