"""Plan the safetensors files of an output: new shards by size or by file number, with an index."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.region import full_region
from ckptx.errors import UnsupportedError
from ckptx.formats.hf.reader import INDEX_FILE, SINGLE_FILE, format_index
from ckptx.formats.hf.safetensors import format_header_text, frame_header, pad_header
from ckptx.storage.interface import Location

_METADATA = {"format": "pt"}  # transformers refuses files without it


class HuggingFaceLayout(NamedTuple):
    """Planned safetensors files.

    Attributes:
        catalog: Tensors with their files and byte offsets.
        prologues: File name -> first bytes of the file: length and header.
        index_name: File name of the index.
        index_text: Contents of the index; None for a single file without one.
    """

    catalog: Catalog
    prologues: dict[str, bytes]
    index_name: str
    index_text: str | None


def allocate(
    root: Location,
    tensors: Iterable[TensorEntry],
    max_shard_size: int,
    file_numbers: Mapping[str, int] | None = None,
    groups: Mapping[str, int] | None = None,
) -> HuggingFaceLayout:
    """Fill shards in natural order of names.

    In each shard, wide dtypes come first, so that the offset of each tensor is a multiple of its element size.

    Args:
        root: Output directory.
        tensors: Names, dtypes and shapes.
        max_shard_size: Maximum bytes of tensors in a shard; a larger tensor gets a shard of its own.
        file_numbers: Tensor name -> number of its shard; tensors without a number go to the shard with the highest
            number, and `max_shard_size` is ignored. None or empty to split by size.
        groups: Tensor name -> number of its group. Each group gets its own shards, and tensors without a group come
            first. None for no groups; unused with `file_numbers`.

    Raises:
        UnsupportedError: safetensors cannot hold a dtype.
    """
    entries = sorted(tensors, key=lambda entry: natural_key(entry.name))
    for entry in entries:
        if not entry.dtype.in_safetensors:
            raise UnsupportedError(
                f'tensor "{entry.name}" has dtype {entry.dtype}, which safetensors cannot hold; write a DCP instead'
            )
    if file_numbers:
        shards = _shards_by_number(entries, file_numbers)
    else:
        shards = _shards_by_size(entries, max_shard_size, groups or {})
    total = len(shards)
    names = [SINGLE_FILE] if total == 1 else [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)]
    catalog, prologues = Catalog(root, "huggingface", {}), {}
    for name, shard in zip(names, shards, strict=True):
        shard.sort(key=lambda entry: (-entry.dtype.bits, entry.name))
        prologues[name] = place_file(catalog, name, shard, pad_header(format_header(shard, _METADATA)))
    if total == 1:
        return HuggingFaceLayout(catalog, prologues, INDEX_FILE, None)
    return HuggingFaceLayout(catalog, prologues, INDEX_FILE, _format_index(catalog))


def _shards_by_size(
    entries: Iterable[TensorEntry], max_size: int, groups: Mapping[str, int]
) -> list[list[TensorEntry]]:
    """Fill shards up to a size, those of each group separately.

    Args:
        entries: Tensors in the order to write them.
        max_size: Maximum bytes of tensors in a shard.
        groups: Tensor name -> number of its group.
    """
    shards: list[list[TensorEntry]] = [[]]
    size, group = 0, -1
    for entry in sorted(entries, key=lambda entry: groups.get(entry.name, -1)):  # a stable sort
        entry_group = groups.get(entry.name, -1)
        if shards[-1] and (size + entry.nbytes > max_size or entry_group != group):
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size, group = size + entry.nbytes, entry_group
    return shards


def _shards_by_number(entries: Iterable[TensorEntry], file_numbers: Mapping[str, int]) -> list[list[TensorEntry]]:
    """Group tensors by shard number, in ascending order; numbers without tensors are skipped."""
    last = max(file_numbers.values())
    shards: dict[int, list[TensorEntry]] = {}
    for entry in entries:
        shards.setdefault(file_numbers.get(entry.name, last), []).append(entry)
    return [shards[number] for number in sorted(shards)]


def with_index(layout: HuggingFaceLayout) -> HuggingFaceLayout:
    """Return the layout with an index, even for a single file."""
    return layout if layout.index_text is not None else layout._replace(index_text=_format_index(layout.catalog))


def _format_index(catalog: Catalog) -> str:
    weight_map = {name: entry.chunks[0].file for name, entry in catalog.tensors.items()}
    nbytes = sum(entry.nbytes for entry in catalog.tensors.values())
    parameters = sum(entry.numel for entry in catalog.tensors.values())
    return format_index(weight_map, {"total_parameters": parameters, "total_size": nbytes})


def format_header(shard: list[TensorEntry], metadata: Mapping[str, str]) -> str:
    """Return the text of the header of a file with these tensors in order, without padding."""
    header_tensors, begin = [], 0
    for entry in shard:
        name, dtype, shape, _, _ = entry
        end = begin + entry.nbytes
        header_tensors.append((name, dtype, shape, begin, end))
        begin = end
    return format_header_text(header_tensors, metadata)


def place_file(catalog: Catalog, file: str, shard: list[TensorEntry], text: str) -> bytes:
    """Add a file with these tensors to `catalog`, and return its first bytes: the framed header `text`."""
    prologue = frame_header(text)
    offset = len(prologue)
    for entry in shard:
        name, dtype, shape, _, replicas = entry
        nbytes = entry.nbytes
        catalog.tensors[name] = TensorEntry(
            name, dtype, shape, (Chunk(full_region(shape), file, offset, nbytes),), replicas
        )
        offset += nbytes
    catalog.files[file] = offset
    return prologue


def natural_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts `layers.10` after `layers.2`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
