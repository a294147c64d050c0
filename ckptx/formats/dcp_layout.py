"""Laying tensors out in `.distcp` files: which file, at which byte, before a byte moves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import prod
from pathlib import Path

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DType
from ckptx.catalog.entry import Chunk, Frame, TensorEntry
from ckptx.catalog.region import Shape, whole
from ckptx.errors import UnsupportedError
from ckptx.formats.dcp_metadata import DcpMetadata, Key, StorageInfo, TensorMetadata, emit_metadata
from ckptx.formats.torch_zip import archive_head, archive_length, archive_tail

# Two writers on one file wait for each other, so files are what workers share out. Their number depends on the
# checkpoint alone, so that the output does not depend on the machine.
_BYTES_PER_FILE = 256 << 20
_MAX_FILES = 64


def torch_shape(dtype: DType, shape: Shape, name: str) -> Shape:
    """`shape` as torch counts it.

    Raises:
        UnsupportedError: torch lacks the dtype, or cannot pair up the elements of the last dim.
    """
    if dtype.torch is None:
        raise UnsupportedError(f'tensor "{name}" has dtype {dtype}, which torch lacks; a DCP cannot hold it')
    if dtype.pack == 1:
        return shape
    if not shape or shape[-1] % dtype.pack:
        raise UnsupportedError(
            f'tensor "{name}" has dtype {dtype} and shape {shape}; torch holds {dtype} in pairs along the last dim'
        )
    return (*shape[:-1], shape[-1] // dtype.pack)


@lru_cache(maxsize=4096)
def archive_frame(dtype: DType, shape: Shape) -> Frame:
    """The torch archive around the elements of one chunk."""
    sizes = torch_shape(dtype, shape, "")
    head = archive_head(dtype, sizes)
    tail_nbytes = archive_length(dtype, sizes) - len(head) - dtype.nbytes(prod(shape))
    return Frame(head, lambda crc: archive_tail(dtype, sizes, crc), tail_nbytes)


def file_count(nbytes: int) -> int:
    """How many `.distcp` files a checkpoint of `nbytes` gets."""
    return max(1, min(_MAX_FILES, -(-nbytes // _BYTES_PER_FILE)))


def allocate(root: Path, tensors: Iterable[TensorEntry], files: int | None) -> Catalog:
    """Lays whole tensors out in order, balanced over files by bytes; a tensor is never split.

    Args:
        root: The directory to be.
        tensors: Names, dtypes and shapes in the order in which the source holds them; their chunks are not looked at.
        files: Number of files, or None to let the size decide. There are never more files than tensors.

    Raises:
        UnsupportedError: torch cannot hold a tensor.
    """
    entries = list(tensors)
    lengths = [archive_length(entry.dtype, torch_shape(entry.dtype, entry.shape, entry.name)) for entry in entries]
    total = sum(lengths)
    count = min(files or file_count(total), max(1, len(entries)))
    catalog = Catalog(root, "dcp", {})
    done = index = at = 0
    for i, (entry, length) in enumerate(zip(entries, lengths, strict=True)):
        # A tensor goes where its middle falls; every file gets at least one.
        ideal = min(count - 1, (2 * done + length) * count // (2 * total)) if total else 0
        least = max(index, count - (len(entries) - i))
        if max(ideal, least) > index and at:
            index, at = index + 1, 0
        name = f"__{index}_0.distcp"
        chunk = Chunk(whole(entry.shape), name, at, length, archive=True)
        catalog.tensors[entry.name] = entry._replace(chunks=(chunk,))
        at += length
        done += length
        catalog.files[name] = at
    return catalog


def metadata_bytes(catalog: Catalog, aliases: Mapping[str, str]) -> bytes:
    """`.metadata` of an allocated catalog of whole tensors; an alias points at the bytes of the tensor it names."""
    tensors: dict[str, TensorMetadata] = {}
    storage: dict[Key, StorageInfo] = {}
    named = [*((name, name) for name in catalog.tensors), *aliases.items()]
    for name, stored in named:
        entry = catalog.tensors[stored]
        sizes = torch_shape(entry.dtype, entry.shape, name)
        region = whole(sizes)
        assert entry.dtype.torch is not None
        tensors[name] = TensorMetadata(entry.dtype.torch, sizes, (region,))
        chunk = entry.chunks[0]
        storage[name, region.offsets] = StorageInfo(chunk.file, chunk.offset, chunk.nbytes)
    return emit_metadata(DcpMetadata(tensors, (), storage))
