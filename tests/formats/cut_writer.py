"""Cuts made by hand, and cut checkpoints written block by block with plain Python, at the places a layout allocated."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import Block, TensorEntry
from ckptx.catalog.region import Region, Shape, full_region
from ckptx.formats.sharded.file_names import shard_name
from ckptx.formats.torch_archive.archive import archive_frame
from tests.support.checkpoint_writers import Value, part, write_safetensors

Blocks = tuple[Block, ...]


def spans(size: int, count: int) -> list[tuple[int, int]]:
    """`size` in `count` pieces as torch.chunk cuts it: (begin, length), the last ones shorter or empty."""
    step = -(-size // count) if size else 0
    return [(min(i * step, size), max(0, min(step, size - i * step))) for i in range(count)]


def along(shape: Shape, dim: int, count: int) -> Blocks:
    """One dim over `count` slots; slots that get nothing have no block."""
    blocks = []
    for rank_in_stage, (begin, size) in enumerate(spans(shape[dim], count)):
        offsets = tuple(begin if i == dim else 0 for i in range(len(shape)))
        sizes = tuple(size if i == dim else n for i, n in enumerate(shape))
        if size:
            blocks.append(Block(rank_in_stage, Region(offsets, sizes)))
    return tuple(blocks)


def grid(shape: Shape, rows: int, columns: int) -> Blocks:
    """Dim 0 over the outer axis of the mesh, dim 1 over the inner one."""
    return tuple(
        Block(r * columns + c, Region((top, left), (height, width)))
        for r, (top, height) in enumerate(spans(shape[0], rows))
        for c, (left, width) in enumerate(spans(shape[1], columns))
        if height and width
    )


def halves(shape: Shape, count: int) -> Blocks:
    """A fused tensor: each half of dim 0 over `count` slots, so two rectangles on a rank_in_stage."""
    half = shape[0] // 2
    both = [
        [(begin, n) for begin, n in spans(half, count)],
        [(half + begin, n) for begin, n in spans(shape[0] - half, count)],
    ]
    return tuple(
        Block(rank_in_stage, Region((begin, *[0] * (len(shape) - 1)), (n, *shape[1:])))
        for rank_in_stage in range(count)
        for begin, n in (both[0][rank_in_stage], both[1][rank_in_stage])
        if n
    )


def once(shape: Shape, rank_in_stage: int = 0) -> Blocks:
    """The whole tensor on one rank_in_stage."""
    return (Block(rank_in_stage, full_region(shape)),)


def everywhere(shape: Shape, count: int) -> Blocks:
    """The whole tensor on every rank_in_stage."""
    return tuple(Block(rank_in_stage, full_region(shape), rank_in_stage > 0) for rank_in_stage in range(count))


def entry(name: str, tensor: Value) -> TensorEntry:
    return TensorEntry(name, DTYPES_BY_NAME[tensor[0]], tensor[1], ())


def cuts(
    tensors: Mapping[str, Value], plan: Mapping[str, tuple[int, Blocks]]
) -> Iterable[tuple[TensorEntry, int, Blocks]]:
    """What an allocator takes: every tensor with its stage and blocks."""
    return [(entry(name, tensors[name]), stage, blocks) for name, (stage, blocks) in plan.items()]


class _Files:
    """Files that grow byte by byte into a layout; nothing may be written twice or left out."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._data = {name: bytearray(size) for name, size in sizes.items()}
        self._written = dict.fromkeys(sizes, 0)
        self._spans: dict[str, list[tuple[int, int]]] = {name: [] for name in sizes}

    def put(self, name: str, at: int, block: bytes) -> None:
        self._data[name][at : at + len(block)] = block
        self._spans[name].append((at, at + len(block)))

    def save(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        for name, data in self._data.items():
            end = 0
            for begin, stop in sorted(self._spans[name]):
                assert begin == end, f"{name}: hole or overlap at {begin}"
                end = stop
            assert end == len(data), f"{name}: ends at {end}, allocated {len(data)}"
            (root / name).write_bytes(data)


def write_sharded(root: Path, catalog: Catalog, prologues: Mapping[str, bytes], tensors: Mapping[str, Value]) -> Path:
    """An allocated catalog as sharded safetensors."""
    files = _Files(catalog.files)
    for name, prologue in prologues.items():
        files.put(name, 0, prologue)
    for name, tensor in catalog.tensors.items():
        for chunk in tensor.chunks:
            block = part(tensors[name], chunk.region)[2]
            assert len(block) == chunk.nbytes
            files.put(chunk.file, chunk.offset, block)
    files.save(root)
    return root


def write_cut_dcp(
    root: Path,
    catalog: Catalog,
    metadata: bytes,
    tensors: Mapping[str, Value],
    objects: Mapping[str, bytes] | None = None,
) -> Path:
    """An allocated catalog as a DCP."""
    files = _Files(catalog.files)
    for name, tensor in catalog.tensors.items():
        for chunk in tensor.chunks:
            block = part(tensors[name], chunk.region)[2]
            frame = archive_frame(tensor.dtype, chunk.region.sizes)
            archived = frame.head + block + frame.build_tail(zlib.crc32(block))
            assert len(archived) == chunk.nbytes
            files.put(chunk.file, chunk.offset, archived)
    for name, pickled in (objects or {}).items():
        place = catalog.objects[name]
        assert len(pickled) == place.nbytes
        files.put(place.file, place.offset, pickled)
    files.save(root)
    (root / ".metadata").write_bytes(metadata)
    return root


def write_shard(
    root: Path,
    shard: int,
    blocks: Mapping[str, tuple[Value, tuple[int, ...]]],
    *,
    number: int = 1,
    count: int = 1,
    info: Any = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """One file of a rank, written from the description of the format.

    Args:
        root: The directory.
        shard: The rank plus one.
        blocks: Name -> what the file holds of it, and the offsets of that.
        number: Of this file among those of the rank.
        count: Files of the rank.
        info: Instead of what DCP_SHARDING_INFO should say.
        metadata: Instead of all of `__metadata__`.
    """
    listed = {name: {"saved_offsets": list(offsets)} for name, (_, offsets) in blocks.items()}
    said = info if isinstance(info, str) else json.dumps(listed if info is None else info)
    usual = {"DCP_SHARDING_INFO": said, "DCP_VERSION": "1.0", "format": "pt"}
    tensors = {name: block for name, (block, _) in blocks.items()}
    return write_safetensors(root / shard_name(shard, number, count), tensors, usual if metadata is None else metadata)


def rows(tensor: Value, begin: int, end: int) -> tuple[Value, tuple[int, ...]]:
    """Rows of a tensor, with the offsets they have."""
    inner = tensor[1][1:]
    zeros = (0,) * len(inner)
    return part(tensor, Region((begin, *zeros), (end - begin, *inner))), (begin, *zeros)
