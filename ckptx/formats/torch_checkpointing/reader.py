"""Open a checkpoint of torch_checkpointing: items (`model`, `optimizer`, ...), each with one file per rank.

    model_0.pt, model_1.pt         item `model`: DTensors, which record their own mesh and placements
    model_0.safetensors, ...       the same with another layout; `metadata.pkl` records the shardings
    optimizer_0.pt, ...            item `optimizer`: nested dicts; names become `optimizer.state.norm.weight.exp_avg`
    step_0.pt, rng_0.pt, ...       other items of which nothing records how ranks share them: not converted
    metadata.pkl                   files and shardings of the items with a resharder; may be absent

Names of the model stay as they are, as in torchtitan's DCPs; those of other items begin with the name of the item.
Nothing is deduplicated when the library saves, so ranks have replicas, which are compared when a tensor is read. Only
the headers and pickles of the files are read here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from math import prod
from typing import Any, NamedTuple

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DType
from ckptx.catalog.entry import Chunk, Record
from ckptx.catalog.region import Shape
from ckptx.errors import CkptxError, InputError, StorageFailure, UnsupportedError
from ckptx.formats.fsdp.pickled_tensors import is_distributed, load_state_dict, shards_of_rank
from ckptx.formats.fsdp.reader import locate_shards
from ckptx.formats.hf.reader import read_header
from ckptx.formats.hf.torch_bin import describe_value, is_utf8
from ckptx.formats.rank_tensors import RankTensors
from ckptx.formats.torch_archive.archive import Archive, is_row_major, locate_tensor, open_archive
from ckptx.formats.torch_archive.unpickle import TensorRef, UnsupportedObject, without_garbage_collection
from ckptx.formats.torch_checkpointing.detect import find_metadata, has_dtensors
from ckptx.formats.torch_checkpointing.file_names import METADATA_FILE, MODEL, group_item_files
from ckptx.formats.torch_checkpointing.metadata import (
    ItemFile,
    ItemMetadata,
    LocalShards,
    Metadata,
    Path,
    default_file,
)
from ckptx.storage.interface import Source, SourceFiles
from ckptx.untrusted.limits import MAX_RANKS, MAX_TENSORS
from ckptx.wording import counted, list_names

_MAX_DEPTH = 16  # levels of dicts and lists in an item
_MAX_VALUES = 4 * MAX_TENSORS  # in one file
_MAX_LISTED = 4  # names in a message


def open_torch_checkpointing(source: Source) -> Catalog:
    """Return the catalog of a checkpoint of torch_checkpointing.

    Args:
        source: The directory.

    Raises:
        InputError: A rank has no file, a file is damaged or of another save, or the ranks do not cover a tensor.
        UnsupportedError: An item contains more than dense tensors, or nothing records how the ranks share the model.
    """
    with without_garbage_collection():
        return _ItemReader(source).read()


class _StoredTensor(NamedTuple):
    """A tensor in one file.

    Attributes:
        dtype: Dtype of the elements.
        shape: Shape of the local tensor.
        strides: Strides in elements; None if they are row-major.
        offset: Position of the first byte in the file.
        nbytes: Bytes from there to the end of the last element.
        record: Record of its storage; None in a safetensors file.
    """

    dtype: DType
    shape: Shape
    strides: Shape | None
    offset: int
    nbytes: int
    record: Record | None


class _ItemReader:
    """Reader of the items of one checkpoint.

    Attributes:
        source: The directory.
        catalog: Receives tensors, files and notes.
        tensors: The shards of each tensor.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.catalog = Catalog(source.location, "torch-checkpointing", {}, opened_source=source)
        self.tensors = RankTensors()
        self._item_by_name: dict[str, str] = {}  # tensor name in the catalog -> item

    def read(self) -> Catalog:
        """Read all items, and return the catalog; see `open_torch_checkpointing`."""
        metadata = find_metadata(self.source)
        items = group_item_files(self.source.listing())
        world_size = self._world_size(metadata, items)
        if metadata is not None:
            with self.source.open() as files:
                self.catalog.identities[METADATA_FILE] = files.identity(METADATA_FILE)
            for name, item in metadata.items.items():
                self._read_recorded(name, item)
        recorded = {} if metadata is None else metadata.items
        skipped = []
        for name, files_by_rank in items.items():
            if name not in recorded and not self._read_unrecorded(name, files_by_rank, world_size):
                skipped.append(name)
        if skipped:
            self.catalog.notes.append(
                f"not converted, because nothing records how ranks share them: {list_names(skipped)} "
                f"({counted(world_size, 'rank')})"
            )
        self.catalog.tensors = self.tensors.entries(f"{self.source.location}")
        return self.catalog

    def _world_size(self, metadata: Metadata | None, items: Mapping[str, Mapping[int, str]]) -> int:
        """Return the number of ranks in `metadata.pkl`; without one, the highest rank in file names plus 1.

        Raises:
            InputError: A file is of a rank that did not save the checkpoint.
        """
        count = max((max(files) for files in items.values()), default=-1) + 1
        if metadata is None:
            return count
        if count > metadata.world_size:
            stray = next(files[max(files)] for files in items.values() if max(files) >= metadata.world_size)
            raise InputError(
                f"{self.source.location / stray}: {METADATA_FILE} is of {counted(metadata.world_size, 'rank')}, so the "
                "file is of another save; remove it"
            )
        return metadata.world_size

    # ---------------------------------------------------------------------------------------------------------- items

    def _read_recorded(self, name: str, item: ItemMetadata) -> None:
        """Read an item that `metadata.pkl` lists."""
        listing = self.source.listing()
        missing = [file.name for file in item.files if not listing.has(file.name)]
        if missing:
            raise self._missing_error(missing, len(item.files))
        for rank, file in enumerate(item.files):
            if file.kind == "torch":
                self._add_archive(name, rank, file.name, item)
            elif file.kind == "safetensors":
                self._add_safetensors(name, rank, file, item)
            else:
                raise UnsupportedError(
                    f"{self.source.location / file.name}: item {name} is stored as {file.kind}, but {METADATA_FILE} "
                    "records tensors in it; save it with torch or safetensors"
                )

    def _read_unrecorded(self, name: str, files: Mapping[int, str], world_size: int) -> bool:
        """Read an item that `metadata.pkl` does not list; returns False if it cannot be converted.

        Raises:
            UnsupportedError: It is the model, and nothing records how the ranks share it.
        """
        if has_dtensors(self.source, files[min(files)]):
            missing = [default_file(name, rank) for rank in range(min(world_size, MAX_RANKS)) if rank not in files]
            if missing:
                raise self._missing_error(missing, world_size)
            for rank, file in files.items():
                self._add_archive(name, rank, file, None)
            return True
        if world_size == 1:
            return self._add_single(name, files[0])
        if name == MODEL:
            raise UnsupportedError(
                f"{self.source.location}: {files[min(files)]} and the files of other ranks have plain tensors, and no "
                f"{METADATA_FILE} records how {world_size} ranks share them; declare a resharder for the item, or save "
                "DTensors"
            )
        return False

    def _missing_error(self, missing: list[str], count: int) -> InputError:
        return InputError(
            f"{self.source.location}: {len(missing)} of {counted(count, 'file')} of an item are missing "
            f"({list_names(missing, _MAX_LISTED)}); copy them from the machines that wrote them"
        )

    # ---------------------------------------------------------------------------------------------------------- files

    def _open(self, name: str) -> SourceFiles:
        """Open the source to read one file, and add this file to the catalog; the caller closes the result."""
        files = self.source.open()
        self.catalog.identities[name] = identity = files.identity(name)
        self.catalog.files[name] = identity.nbytes
        return files

    def _load(self, file: str) -> Archive:
        """Read the pickle of one archive, and add its file to the catalog."""
        with self._open(file) as files:
            return open_archive(partial(files.read, file), 0, files.size(file), f"{files.root / file}", load_state_dict)

    def _add_single(self, name: str, file: str) -> bool:
        """Read an item that a single rank saved without DTensors.

        Returns:
            False if the item has no tensors or cannot be read; its file is not part of the catalog then.

        Raises:
            InputError, UnsupportedError: It is the model, and cannot be read.
        """
        try:
            tree = self._load(file).tree
            has_tensors = any(isinstance(value, TensorRef) for _, value in _leaves(tree, file))
        except StorageFailure:
            raise
        except CkptxError:
            if name == MODEL:
                raise
            has_tensors = False
        if has_tensors:
            self._add_archive(name, 0, file, None)
        else:
            self.catalog.files.pop(file, None)
        return has_tensors

    def _add_archive(self, item: str, rank: int, file: str, metadata: ItemMetadata | None) -> None:
        """Add the tensors in the archive of one rank."""
        archive = self._load(file)
        where = f"{self.source.location / file}"
        remaining = set() if metadata is None else metadata.paths_of_rank(rank)
        others = []
        for path, value in _leaves(archive.tree, where):
            if not isinstance(value, TensorRef | UnsupportedObject) and not is_distributed(value):
                others.append(".".join(path))
                continue
            subject = f'{where}: tensor "{".".join(path)}"'
            recorded = None if metadata is None else metadata.shards(path, rank)
            name = self._name(item, path, where)
            if metadata is not None and recorded is None:
                raise InputError(
                    f"{subject}: {METADATA_FILE} does not list it for rank {rank}; the files are of different saves, "
                    "pass those of one"
                )
            remaining.discard(path)
            if recorded is None or is_distributed(value):
                self._add_own_shards(name, value, rank, archive, file, recorded, subject)
                continue
            stored = _stored_tensor(value, archive, subject)
            chunks = list(_box_chunks(recorded, stored, file, subject))
            self._add_recorded(name, stored.dtype, recorded, chunks, file, subject)
        self._refuse_missing(remaining, rank, where)
        if others and rank == 0:
            parents = list(dict.fromkeys(".".join(each.split(".")[:1]) for each in others if each))
            self.catalog.notes.append(
                f"{file}: {counted(len(others), 'value')} other than tensors not converted"
                + (f", in {list_names(parents, _MAX_LISTED)}" if parents else "")
            )

    def _add_own_shards(
        self,
        name: str,
        value: object,
        rank: int,
        archive: Archive,
        file: str,
        recorded: LocalShards | None,
        where: str,
    ) -> None:
        """Add a tensor whose pickle records its sharding, which has to be that of `metadata.pkl`."""
        shards = shards_of_rank(value, rank, where)
        dtype, chunks = locate_shards(shards, archive.records, file, where)
        if recorded is None:
            self.tensors.add(name, dtype, shards.shape, chunks, file, where)
            return
        own = [chunk.region for chunk in chunks]
        listed = [box.region for box in recorded.boxes]
        if shards.shape != recorded.shape or own != listed:
            raise InputError(
                f"{where}: holds {', '.join(map(str, own))} of {list(shards.shape)}, but {METADATA_FILE} lists "
                f"{', '.join(map(str, listed))} of {list(recorded.shape)}; the files are of different saves, pass "
                "those of one"
            )
        self._add_recorded(name, dtype, recorded, chunks, file, where)

    def _add_safetensors(self, item: str, rank: int, file: ItemFile, metadata: ItemMetadata) -> None:
        """Add the tensors in the safetensors file of one rank."""
        where = f"{self.source.location / file.name}"
        with self._open(file.name) as files:
            header = read_header(files, file.name)
        paths: dict[str, Path] = {}
        for path in sorted(metadata.paths_of_rank(rank)):
            if paths.setdefault(".".join(path), path) != path:
                raise UnsupportedError(
                    f'{where}: {METADATA_FILE} lists two tensors under the name "{".".join(path)[:80]}" of the file; '
                    "save the item with torch"
                )
        remaining = set(paths.values())
        for name, dtype, shape, begin, end in header.tensors:
            subject = f'{where}: tensor "{name}"'
            stored_path = paths.get(name)
            recorded = None if stored_path is None else metadata.shards(stored_path, rank)
            if stored_path is None or recorded is None:
                raise InputError(
                    f"{subject}: {METADATA_FILE} does not list it for rank {rank}; the files are of different saves, "
                    "pass those of one"
                )
            remaining.discard(stored_path)
            if dtype.pack > 1:
                raise UnsupportedError(f"{subject}: dtype {dtype} is not supported in the files of ranks; save a DCP")
            stored = _StoredTensor(dtype, shape, None, begin, end - begin, None)
            chunks = list(_box_chunks(recorded, stored, file.name, subject))
            self._add_recorded(self._name(item, stored_path, where), dtype, recorded, chunks, file.name, subject)
        self._refuse_missing(remaining, rank, where)

    def _add_recorded(
        self,
        name: str,
        dtype: DType | None,
        recorded: LocalShards,
        chunks: list[Chunk],
        file: str,
        where: str,
    ) -> None:
        """Add shards of a tensor after comparing its dtype with that in `metadata.pkl`."""
        listed = recorded.dtype.removeprefix("torch.")
        if dtype is not None and dtype.torch_name is not None and dtype.torch_name != listed:
            raise InputError(
                f"{where}: has dtype {dtype.torch_name}, but {METADATA_FILE} lists {listed[:40]}; the files are of "
                "different saves, pass those of one"
            )
        self.tensors.add(name, dtype, recorded.shape, chunks, file, where)

    def _refuse_missing(self, missing: set[Path], rank: int, where: str) -> None:
        if missing:
            raise InputError(
                f'{where}: tensor "{".".join(min(missing))}" is missing, but {METADATA_FILE} lists it for rank {rank}; '
                "the files are of different saves, pass those of one"
            )

    def _name(self, item: str, path: Path, where: str) -> str:
        """Return the name of a tensor in the catalog.

        Raises:
            InputError: Another item has a tensor of this name.
            UnsupportedError: It is no valid name.
        """
        name = ".".join(path if item == MODEL else (item, *path)) or item
        if not is_utf8(name):
            raise UnsupportedError(f"{where}: has a tensor whose name is not Unicode; save it under another name")
        if self._item_by_name.setdefault(name, item) != item:
            raise InputError(
                f'{where}: tensor "{name}" is in the items {self._item_by_name[name]} and {item}; rename one of them'
            )
        return name


def _leaves(tree: object, where: str) -> Iterator[tuple[Path, Any]]:
    """Yield the values of nested dicts and lists, with the keys that lead to them.

    Raises:
        UnsupportedError: A key is neither a string nor an integer, or there are too many values or levels.
    """
    pending: list[tuple[Path, object]] = [((), tree)]
    count = 0
    while pending:
        path, value = pending.pop()
        count += 1
        if count > _MAX_VALUES or len(path) > _MAX_DEPTH:
            raise UnsupportedError(
                f"{where}: has more than {_MAX_VALUES:,} values or {_MAX_DEPTH} levels of dicts; save a DCP"
            )
        if isinstance(value, TensorRef | UnsupportedObject) or is_distributed(value):
            yield path, value
        elif isinstance(value, dict | list | tuple):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            nested: list[tuple[Path, object]] = []
            for key, item in pairs:
                if type(key) not in (str, int):
                    raise UnsupportedError(
                        f"{where}: has a key that is {describe_value(key)}, which is not supported; save a DCP"
                    )
                nested.append(((*path, str(key)), item))
            pending.extend(reversed(nested))
            if len(pending) > _MAX_VALUES:
                count = _MAX_VALUES  # so that the next value is refused
        else:
            yield path, value


def _stored_tensor(value: Any, archive: Archive, where: str) -> _StoredTensor:
    payload = locate_tensor(value, archive.records, where)
    if payload.dtype.pack > 1:
        raise UnsupportedError(
            f"{where}: dtype {payload.dtype.torch_name} is not supported in the files of ranks; save a DCP"
        )
    return _StoredTensor(
        payload.dtype, payload.torch_shape, payload.strides, payload.data_offset, payload.nbytes, payload.record
    )


def _box_chunks(recorded: LocalShards, stored: _StoredTensor, file: str, where: str) -> Iterator[Chunk]:
    """Yield the parts of a stored tensor that `metadata.pkl` lists, as chunks; parts without elements are omitted.

    Raises:
        InputError: The stored tensor has another shape, or a part is outside of it.
    """
    if recorded.local_shape is not None and stored.shape != recorded.local_shape:
        raise InputError(
            f"{where}: has shape {list(stored.shape)}, but {METADATA_FILE} lists {list(recorded.local_shape)} of "
            f"{list(recorded.shape)}; the files are of different saves, pass those of one"
        )
    itemsize = stored.dtype.itemsize
    strides = _row_major_strides(stored.shape) if stored.strides is None else stored.strides
    for region, begins in recorded.boxes:
        if len(stored.shape) != len(begins) or any(
            begin + size > extent for begin, size, extent in zip(begins, region.sizes, stored.shape, strict=True)
        ):
            raise InputError(
                f"{where}: {METADATA_FILE} lists a part of {list(region.sizes)} at {list(begins)}, which is outside of "
                f"its shape {list(stored.shape)}; the files are of different saves, pass those of one"
            )
        if region.sizes == stored.shape:
            yield Chunk(region, file, stored.offset, stored.nbytes, stored.strides, stored.record)
        elif prod(region.sizes):
            offset = stored.offset + sum(map(int.__mul__, begins, strides)) * itemsize
            span = sum((size - 1) * stride for size, stride in zip(region.sizes, strides, strict=True)) + 1
            part_strides = None if is_row_major(region.sizes, strides) else strides
            yield Chunk(region, file, offset, span * itemsize, part_strides, stored.record)


def _row_major_strides(shape: Shape) -> Shape:
    """Return the strides of a row-major tensor, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
