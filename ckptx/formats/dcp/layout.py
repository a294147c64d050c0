"""Plan `.distcp` files: assign each tensor a file and a byte offset before any data is written.

`ckptx.catalog` defines region, chunk and block.

`allocate` keeps tensors whole; `allocate_sharded` shards them and gives every rank of a mesh its own files.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DType
from ckptx.catalog.entry import Block, BytesEntry, ShardedChunks, TensorEntry
from ckptx.catalog.region import Region, Shape, full_region
from ckptx.errors import UnsupportedError
from ckptx.formats.by_stage import ShardedTensor, group_by_stage
from ckptx.formats.dcp.metadata import StorageInfo, TensorMetadata
from ckptx.formats.dcp.metadata_writer import ShardedStorageEntries, StorageEntry, pickle_metadata
from ckptx.formats.torch_archive.archive import archive_length
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.storage.interface import Location

# Two writers on one file wait for each other, so work is divided by file. The number of files depends on the
# checkpoint alone, so that the output does not depend on the machine.
_BYTES_PER_FILE = 256 << 20
_MAX_FILES = 64
# A larger checkpoint is worth a second writer.
_BYTES_FOR_ONE_WRITER = 64 << 20


class DcpLayout(NamedTuple):
    """Planned files of a DCP.

    Attributes:
        catalog: Tensors and objects with their files and byte offsets.
        file_groups: For each group of files that are written together, their names.
    """

    catalog: Catalog
    file_groups: tuple[tuple[str, ...], ...]


def in_torch_elements(dtype: DType, counts: Shape, name: str) -> Shape:
    """Return a shape or offsets in torch elements, which hold two elements of a packed dtype each.

    Args:
        dtype: Dtype of the tensor.
        counts: The shape or the offsets.
        name: Name of the tensor, for the error message.

    Raises:
        UnsupportedError: torch lacks the dtype, or the last count of a packed dtype is odd.
    """
    if dtype.torch_name is None:
        raise UnsupportedError(
            f'tensor "{name}" has dtype {dtype}, which torch lacks, so that a DCP cannot hold it; '
            "write safetensors instead"
        )
    if dtype.pack > 1 and (not counts or counts[-1] % dtype.pack):
        raise UnsupportedError(
            f'tensor "{name}" has dtype {dtype} and a shape or offsets of {counts}; torch holds {dtype} in pairs along '
            "the last dim"
        )
    return dtype.to_torch_elements(counts)


def _archive_length(dtype: DType, shape: Shape, name: str) -> int:
    """Return the length in bytes of the archive of one chunk; raises the errors of `in_torch_elements`."""
    in_torch_elements(dtype, shape, name)
    return archive_length(dtype, shape)


def file_count(nbytes: int) -> int:
    """Return the default number of `.distcp` files for a checkpoint of `nbytes`."""
    return max(1, min(_MAX_FILES, -(-nbytes // _BYTES_PER_FILE)))


def allocate(root: Location, tensors: Iterable[TensorEntry], files: int | None) -> Catalog:
    """Assign whole tensors to files in order, balanced by bytes; a tensor is never split.

    Args:
        root: Output directory.
        tensors: Names, dtypes and shapes in the order of the source; their chunks are ignored, and so are replicas.
        files: Number of files; None chooses it by size. There are never more files than tensors.

    Raises:
        UnsupportedError: torch cannot hold a tensor.
    """
    entries = list(tensors)
    # (dtype, shape) -> the only block of such a tensor, and its archive length.
    layouts: dict[tuple[DType, Shape], tuple[tuple[Block, ...], tuple[int, ...]]] = {}
    for entry in entries:
        dtype, shape = entry.dtype, entry.shape
        if (dtype, shape) not in layouts:
            length = _archive_length(dtype, shape, entry.name)
            layouts[dtype, shape] = (Block(0, full_region(shape)),), (length,)
    placements = [layouts[entry.dtype, entry.shape] for entry in entries]
    sizes = [length for _, (length,) in placements]
    count = min(files or file_count(sum(sizes)), max(1, len(entries)))
    file_names = [(f"__{index}_0.distcp",) for index in range(count)]
    catalog = Catalog(root, "dcp", {})
    for entry, (blocks, lengths), size, index in zip(
        entries, placements, sizes, split_evenly(sizes, count), strict=True
    ):
        (file,) = file_names[index]
        offset = catalog.files.get(file, 0)
        chunks = ShardedChunks(blocks, file_names[index], array("q", [offset]), lengths, are_archives=True)
        catalog.tensors[entry.name] = TensorEntry(entry.name, entry.dtype, entry.shape, chunks)
        catalog.files[file] = offset + size
    return catalog


def split_evenly(lengths: Sequence[int], count: int) -> Iterator[int]:
    """Split consecutive lengths into `count` groups of about equal sums; yield the group index of each length.

    A length joins the group in which its middle falls; no group is empty, so there must be at least `count` lengths.
    """
    total = sum(lengths)
    assigned_bytes = index = 0
    for i, length in enumerate(lengths):
        if index == count - 1:
            yield index
            continue
        ideal_index = min(count - 1, (2 * assigned_bytes + length) * count // (2 * total)) if total else 0
        min_index = max(index, count - (len(lengths) - i))
        if max(ideal_index, min_index) > index and i:
            index += 1
        assigned_bytes += length
        yield index


def parts_per_rank(stage_sizes: Sequence[int], ranks: int) -> int:
    """Return the number of parts into which the tensors of a stage are split: one file each on every rank.

    Args:
        stage_sizes: Bytes of the tensors of each pipeline stage.
        ranks: Number of ranks per stage.
    """
    parts = max(1, min(_MAX_FILES, -(-max(stage_sizes) // (ranks * _BYTES_PER_FILE))))
    is_single_group = parts == 1 and sum(1 for nbytes in stage_sizes if nbytes) == 1
    return 2 if is_single_group and sum(stage_sizes) > _BYTES_FOR_ONE_WRITER else parts


def allocate_sharded(
    root: Location,
    tensors: Iterable[ShardedTensor],
    dims: ParallelDims,
    objects: Iterable[BytesEntry] = (),
    files_per_rank: int | None = None,
) -> DcpLayout:
    """Assign sharded tensors to files `__{rank}_{part}.distcp`.

    The tensors of a stage are split into parts in order, in the same way for all its ranks: the files of one part of
    one stage are a group, which one writer fills while another fills the next. A rank without data in a part gets no
    file for it.

    Args:
        root: Output directory.
        tensors: Names, dtypes and shapes, with stage and blocks. No block is a replica: a DCP stores elements once.
        dims: The mesh.
        objects: Pickled objects; they follow the tensors of rank 0.
        files_per_rank: Number of parts; None chooses it by size.

    Raises:
        UnsupportedError: torch cannot hold a tensor, or a block of it.
    """
    stages = group_by_stage(tensors, dims)
    parts = files_per_rank or parts_per_rank(
        [sum(entry.nbytes for entry, _ in stage) for stage in stages], dims.ranks_per_stage
    )
    catalog = Catalog(root, "dcp", {})
    sizes: dict[tuple[int, int], int] = {}
    for stage, members in enumerate(stages):
        ranks = dims.ranks_of_stage(stage)
        for part, part_members in _split_into_parts(members, min(parts, len(members))):
            part_sizes = _append_tensors(catalog, part_members, [f"__{rank}_{part}.distcp" for rank in ranks])
            sizes.update(((ranks[rank_in_stage], part), nbytes) for rank_in_stage, nbytes in part_sizes.items())
    last_part = max((part for rank, part in sizes if rank == 0), default=0)
    for pickled in objects:
        offset = sizes.get((0, last_part), 0)
        catalog.objects[pickled.name] = pickled._replace(file=f"__0_{last_part}.distcp", offset=offset)
        sizes[0, last_part] = offset + pickled.nbytes
    catalog.files = {f"__{rank}_{part}.distcp": sizes[rank, part] for rank, part in sorted(sizes)}
    groups: dict[tuple[int, int], list[str]] = {}
    for (rank, part), name in zip(sorted(sizes), catalog.files, strict=True):
        groups.setdefault((rank // dims.ranks_per_stage, part), []).append(name)
    return DcpLayout(catalog, tuple(tuple(groups[key]) for key in sorted(groups)))


_Members = list[tuple[TensorEntry, tuple[Block, ...]]]  # tensors of one stage, each with its blocks


def _split_into_parts(members: _Members, count: int) -> Iterator[tuple[int, _Members]]:
    """Split tensors into `count` consecutive parts of about equal bytes; yield (index, part)."""
    parts: list[_Members] = [[] for _ in range(count)]
    for member, part in zip(members, split_evenly([entry.nbytes for entry, _ in members], count), strict=True):
        parts[part].append(member)
    return enumerate(parts)


class _SharedSharding(NamedTuple):
    """Sizes that equally sharded tensors share in the files to which they are appended.

    Attributes:
        files: File of each block, see `ShardedChunks`.
        lengths: Archive length of each block in bytes.
        positions: For each block its rank_in_stage, and the bytes of the same tensor before it in the file of that
            rank.
        bytes_by_rank: (rank_in_stage, bytes of the tensor), for each rank that has some.
    """

    files: tuple[str, ...]
    lengths: tuple[int, ...]
    positions: tuple[tuple[int, int], ...]
    bytes_by_rank: tuple[tuple[int, int], ...]


def _append_tensors(catalog: Catalog, members: _Members, file_names: list[str]) -> dict[int, int]:
    """Append tensors to one new file per rank of a stage.

    Args:
        catalog: Receives the tensors.
        members: Tensors with their blocks, which must be kept alive: their `id` is a key.
        file_names: Name of the file of each rank, by `rank_in_stage`.

    Returns:
        rank_in_stage -> bytes of its file, for the ranks that have blocks.
    """
    shardings: dict[tuple[int, DType], _SharedSharding] = {}
    sizes: dict[int, int] = {}
    for entry, blocks in members:
        key = id(blocks), entry.dtype
        sharding = shardings.get(key)
        if sharding is None:
            sharding = shardings[key] = _shared_sharding(entry, blocks, file_names)
            for rank, _ in sharding.bytes_by_rank:
                sizes.setdefault(rank, 0)
        offsets = array("q", [sizes[rank] + before for rank, before in sharding.positions])
        for rank, nbytes in sharding.bytes_by_rank:
            sizes[rank] += nbytes
        chunks = ShardedChunks(blocks, sharding.files, offsets, sharding.lengths, are_archives=True)
        catalog.tensors[entry.name] = TensorEntry(entry.name, entry.dtype, entry.shape, chunks)
    return sizes


def _shared_sharding(entry: TensorEntry, blocks: tuple[Block, ...], file_names: list[str]) -> _SharedSharding:
    assert not any(block.is_replica for block in blocks)
    dtype, name = entry.dtype, entry.name
    files = tuple([file_names[block.rank_in_stage] for block in blocks])
    lengths = tuple(_archive_length(dtype, block.region.sizes, name) for block in blocks)
    positions: list[tuple[int, int]] = []
    bytes_by_rank: dict[int, int] = {}
    for block, length in zip(blocks, lengths, strict=True):
        before = bytes_by_rank.get(block.rank_in_stage, 0)
        positions.append((block.rank_in_stage, before))
        bytes_by_rank[block.rank_in_stage] = before + length
    return _SharedSharding(files, lengths, tuple(positions), tuple(bytes_by_rank.items()))


def metadata_bytes(
    catalog: Catalog,
    aliases: Mapping[str, str],
    planner_data: Mapping[str, Any] | None = None,
    counterparts: Mapping[str, str] | None = None,
) -> bytes:
    """Return the bytes of `.metadata` for an allocated catalog.

    Args:
        catalog: Whole or sharded tensors, and objects.
        aliases: Tied name -> name of the stored tensor whose bytes it shares.
        planner_data: `planner_data` of the source, extended by new names; None describes a flat state dict.
        counterparts: Name of a stored copy -> name in `planner_data` next to which its path is put; aliases are added
            automatically.

    Raises:
        UnsupportedError: torch cannot hold a tensor, or `planner_data` contains more than plain values.
    """
    tensors: dict[str, TensorMetadata] = {}
    by_sharding: dict[object, TensorMetadata] = {}
    stored_names = {**{name: name for name in catalog.tensors}, **aliases}
    for name, stored_name in stored_names.items():
        entry = catalog.tensors[stored_name]
        chunks = entry.chunks
        regions = id(chunks.blocks) if type(chunks) is ShardedChunks else tuple([chunk.region for chunk in chunks])
        sharding = (regions, entry.dtype, entry.shape)
        tensor = by_sharding.get(sharding)
        if tensor is None:
            tensor = by_sharding[sharding] = _tensor_metadata(entry)
        tensors[name] = tensor
    objects = list(catalog.objects)
    if planner_data is not None:
        planner_data = extend_planner_data(planner_data, [*tensors, *objects], {**aliases, **(counterparts or {})})
    return pickle_metadata(tensors, objects, _storage_entries(catalog, tensors, stored_names), planner_data)


def _tensor_metadata(entry: TensorEntry) -> TensorMetadata:
    dtype, name = entry.dtype, entry.name
    assert dtype.torch_name is not None
    regions = tuple(
        Region(in_torch_elements(dtype, region.offsets, name), in_torch_elements(dtype, region.sizes, name))
        for region in (chunk.region for chunk in entry.chunks)
    )
    return TensorMetadata(dtype.torch_name, in_torch_elements(dtype, entry.shape, name), regions)


def _storage_entries(
    catalog: Catalog, tensors: Mapping[str, TensorMetadata], stored_names: Mapping[str, str]
) -> Iterator[StorageEntry | ShardedStorageEntries]:
    for name, stored_name in stored_names.items():
        chunks, regions = catalog.tensors[stored_name].chunks, tensors[name].chunks
        if type(chunks) is ShardedChunks:
            yield ShardedStorageEntries(name, regions, chunks.files, chunks.offsets, chunks.lengths)
            continue
        for index, (region, chunk) in enumerate(zip(regions, chunks, strict=True)):
            yield StorageEntry(name, index, region.offsets, StorageInfo(chunk.file, chunk.offset, chunk.nbytes))
    for name, pickled in catalog.objects.items():
        yield StorageEntry(name, None, None, StorageInfo(pickled.file, pickled.offset, pickled.nbytes))


def extend_planner_data(
    planner_data: Mapping[str, Any], names: Iterable[str], counterparts: Mapping[str, str]
) -> dict[str, Any]:
    """Return `planner_data` with a path for each name: next to that of its counterpart if possible, else top level.

    Example:
        {"model.embed.weight": ("model", "embed.weight")} with the name "model.head.weight", a counterpart of the first,
        gets "model.head.weight": ("model", "head.weight").
    """
    paths = dict(planner_data)
    for name in names:
        if name not in paths:
            paths[name] = _sibling_path(name, paths.get(counterparts.get(name, "")))
    return paths


def _sibling_path(name: str, path: Any) -> tuple[Any, ...]:
    """Return the path of a name that shares the first and last keys of another path; (name,) if none fits.

    Example:
        "optim.state.head.exp_avg" next to ("optim", "state", "embed", "exp_avg") is at
        ("optim", "state", "head", "exp_avg").
    """
    if not isinstance(path, tuple):
        return (name,)
    front, back, rest = 0, len(path), name
    while front < back - 1 and rest.startswith(f"{path[front]}."):
        rest = rest[len(f"{path[front]}.") :]
        front += 1
    while front < back - 1 and rest.endswith(f".{path[back - 1]}"):
        rest = rest[: -len(f".{path[back - 1]}")]
        back -= 1
    return (*path[:front], rest, *path[back:]) if back - front == 1 else (name,)
