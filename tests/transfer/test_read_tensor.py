"""Small tensors read with one read per chunk: the bytes of the tensor, an error, or False, but never other bytes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from functools import partial
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import ArchiveChunks, Chunk, LazyChunks, Record, TensorEntry
from ckptx.catalog.region import Region, full_region
from ckptx.errors import InputError
from ckptx.formats.torch_archive.archive import archive_frame
from ckptx.transfer.grid import is_grid
from ckptx.transfer.stream import TensorReader
from tests.support.memory_storage import MemoryPath
from tests.transfer.test_stream import ITEMSIZES, Array, Files, Shape, cut, cuts, halves, numbers, stored

many = settings(max_examples=30, deadline=None)


def read(root: MemoryPath, *entries: TensorEntry) -> tuple[list[bool], bytes, int]:
    """Read tensors of one size into the same memory, with one reader; results, last bytes, and records without CRC."""
    with root.open() as files:
        reader = TensorReader(files)
        view = memoryview(bytearray(entries[0].nbytes))
        found = [reader.read_tensor(entry, view) for entry in entries]
        return found, bytes(view), reader.records_without_crc


def is_one_run(shape: Shape, region: Region) -> bool:
    """Return True if the elements of a region are consecutive in the tensor."""
    slices = tuple(slice(begin, begin + size) for begin, size in zip(region.offsets, region.sizes, strict=True))
    numbered = np.arange(prod(shape)).reshape(shape)[slices].ravel()
    return bool((np.diff(numbered) == 1).all())


# Chunks whose elements were located


@given(cuts(), st.data())
@many
def test_chunks_are_read_in_place_if_they_form_a_grid(
    place: MemoryPath, tensor: tuple[Shape, list[Region]], data: st.DataObject
) -> None:
    """Chunks that are sharded on the first dim and several others are left to `stream`, unless each is one run."""
    shape, regions = tensor
    dtype = data.draw(st.sampled_from(sorted(ITEMSIZES)))
    array = numbers(shape, ITEMSIZES[dtype])
    files = Files(place, dtype, shape, count=data.draw(st.integers(1, 3)))
    for region in regions:
        files.add(region, stored(array, region)[0])
    (is_read,), view, _ = read(place, files.entry())
    other_dims = {dim for dim in range(1, len(shape)) if any(region.sizes[dim] != shape[dim] for region in regions)}
    assert is_read is is_grid(shape, regions)
    if all(region.numel for region in regions):
        assert is_read is (len(other_dims) < 2 or all(is_one_run(shape, region) for region in regions))
    if is_read:
        assert view == array.tobytes()


@pytest.mark.parametrize("dims", [(1, 2), (1, 3), (2, 3), (0, 1, 2), (1, 2, 3), (0, 1, 2, 3)], ids=str)
def test_chunks_sharded_on_two_inner_dims_are_not_read_in_place(place: MemoryPath, dims: tuple[int, ...]) -> None:
    shape = (4, 4, 4, 4)
    array = numbers(shape, 2)
    files = Files(place, "BF16", shape)
    for index in range(1 << len(dims)):
        halves_of = {dim: index >> bit & 1 for bit, dim in enumerate(dims)}
        region = Region(
            tuple(2 * halves_of.get(dim, 0) for dim in range(4)), tuple(2 if dim in dims else 4 for dim in range(4))
        )
        files.add(region, stored(array, region)[0])
    assert read(place, files.entry())[0] == [False]
    assert files.stream() == array.tobytes()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("crc", [None, 1, -1], ids=["not recorded", "wrong", "right"])
def test_the_checksum_of_a_chunk_is_checked(place: MemoryPath, crc: int | None, count: int) -> None:
    if count == 1:
        files = Files(place, "F32", (4, 4))
        files.add(full_region((4, 4)), numbers((4, 4), 4).tobytes(), record_crc=crc)
    else:
        files = halves(place, record_crc=crc)
    if crc == 1:
        with pytest.raises(InputError, match=r'tensor "x": CRC-32 of its bytes is [0-9a-f]{8}, .* 00000001'):
            read(place, files.entry())
    else:
        assert read(place, files.entry()) == ([True], numbers((4, 4), 4).tobytes(), 1 if crc is None else 0)


@pytest.mark.parametrize("kind", ["strides", "record from another byte", "record of more bytes"])
def test_what_needs_more_than_one_read_is_left_to_stream(place: MemoryPath, kind: str) -> None:
    array = numbers((4, 6), 4)
    files = Files(place, "F32", (4, 6))
    files.add(
        full_region((4, 6)), *(stored(array, full_region((4, 6)), (1, 0)) if kind == "strides" else (array.tobytes(),))
    )
    entry = files.entry()
    chunk = entry.chunks[0]
    if kind != "strides":
        shift = 1 if kind == "record from another byte" else 0
        chunk = chunk._replace(record=Record(chunk.offset - shift, chunk.nbytes + 1, 1))
    assert read(place, entry._replace(chunks=(chunk,)))[0] == [False]


# Archives whose frames are checked in the same read


def archive_of(array: Array, dtype: str) -> bytes:
    frame = archive_frame(DTYPES_BY_NAME[dtype], array.shape)
    data = array.tobytes()
    return frame.head + data + frame.build_tail(zlib.crc32(data))


def lazy(
    root: MemoryPath,
    name: str,
    dtype: str,
    shape: Shape,
    regions: list[Region],
    archives: Iterable[bytes],
    **fields: Any,
) -> TensorEntry:
    """A tensor of archives that were not parsed, each in a file of its own, behind a few other bytes."""
    archives = list(archives)
    names = [f"{name}{index}" for index in range(len(archives))]
    for each, data in zip(names, archives, strict=True):
        (root / each).write_bytes(b"##" + data)
    lengths = fields.get("lengths") or [len(data) for data in archives]

    def parse(chunks: Iterable[Chunk]) -> tuple[Chunk, ...]:
        raise AssertionError("an archive was parsed")

    chunks = LazyChunks(ArchiveChunks(regions, names, [2] * len(names), lengths), archive_frame, parse)
    return TensorEntry(name, DTYPES_BY_NAME[dtype], shape, chunks)


@given(cuts(most=6), st.data())
@many
def test_archives_are_read_in_place_if_they_form_a_grid(
    place: MemoryPath, tensor: tuple[Shape, list[Region]], data: st.DataObject
) -> None:
    shape, regions = tensor
    dtype = data.draw(st.sampled_from(sorted(ITEMSIZES)))
    array = numbers(shape, ITEMSIZES[dtype])
    entry = lazy(place, "x", dtype, shape, regions, (archive_of(cut(array, region), dtype) for region in regions))
    (is_read,), view, _ = read(place, entry)
    assert is_read is is_grid(shape, regions)
    if is_read:
        assert view == array.tobytes()


SHAPE: Shape = (3, 5)
ROWS = [Region((0, 0), (2, 5)), Region((2, 0), (1, 5))]
COLUMNS = [Region((0, 0), (3, 2)), Region((0, 2), (3, 3))]


@pytest.mark.parametrize("regions", [[full_region(SHAPE)], ROWS, COLUMNS], ids=["whole", "rows", "columns"])
def test_a_changed_byte_anywhere_in_an_archive_is_noticed(place: MemoryPath, regions: list[Region]) -> None:
    """No elements are accepted from an archive of another layout. Of several archives, some bytes of each head."""
    array = numbers(SHAPE, 4)
    archives = [archive_of(cut(array, region), "F32") for region in regions]
    for index, region in enumerate(regions):
        frame = archive_frame(DTYPES_BY_NAME["F32"], region.sizes)
        before = len(frame.tail_around_crc[0])
        elements = len(frame.head)
        tail = elements + region.numel * 4
        for at in (*range(0, elements, 1 if len(regions) == 1 else 13), *range(elements, tail + frame.tail_nbytes)):
            changed = bytearray(archives[index])
            changed[at] ^= 1 << at % 8
            entry = lazy(place, "x", "F32", SHAPE, regions, [*archives[:index], bytes(changed), *archives[index + 1 :]])
            if elements <= at < tail or tail + before <= at < tail + before + 4:
                with pytest.raises(InputError, match='tensor "x": CRC-32'):
                    read(place, entry)
            else:
                assert read(place, entry)[0] == [False], at


@pytest.mark.parametrize("regions", [[full_region(SHAPE)], ROWS, COLUMNS], ids=["whole", "rows", "columns"])
def test_an_archive_without_a_checksum_is_counted(place: MemoryPath, regions: list[Region]) -> None:
    array = numbers(SHAPE, 4)
    archives = []
    for region in regions:
        frame, data = archive_frame(DTYPES_BY_NAME["F32"], region.sizes), cut(array, region).tobytes()
        archives.append(frame.head + data + frame.build_tail(0))
    entry = lazy(place, "x", "F32", SHAPE, regions, archives)
    assert read(place, entry) == ([True], array.tobytes(), len(regions))


def cut_file(root: MemoryPath, entry: TensorEntry, nbytes: int) -> TensorEntry:
    """The same tensor, in a file that ends early."""
    (root / "y0").write_bytes((root / "y0").read_bytes()[: 2 + nbytes])
    return entry


def shorten(root: MemoryPath, entry: TensorEntry, nbytes: int) -> TensorEntry:
    """The same tensor, with a length that ends inside what would be read."""
    chunks = entry.chunks
    assert isinstance(chunks, LazyChunks)
    archives = chunks.archives
    shorter = ArchiveChunks(archives.regions, archives.files, archives.offsets, [nbytes])
    return entry._replace(chunks=LazyChunks(shorter, archive_frame, partial(tuple[Chunk, ...])))


@pytest.mark.parametrize("change", [cut_file, shorten])
def test_an_archive_that_ends_early_is_not_completed_from_the_one_before(
    place: MemoryPath, change: Callable[[MemoryPath, TensorEntry, int], TensorEntry]
) -> None:
    """A reader keeps its buffers, which hold the bytes of an equal archive."""
    array = numbers(SHAPE, 4)
    frame = archive_frame(DTYPES_BY_NAME["F32"], SHAPE)
    needed = len(frame.head) + array.nbytes + frame.tail_nbytes
    for nbytes in range(needed):
        first, second = (
            lazy(place, name, "F32", SHAPE, [full_region(SHAPE)], [archive_of(array, "F32")]) for name in "xy"
        )
        assert read(place, first, change(place, second, nbytes))[0] == [True, False], nbytes
    second = lazy(place, "y", "F32", SHAPE, [full_region(SHAPE)], [archive_of(array, "F32")])
    assert read(place, change(place, second, needed))[:2] == ([True], array.tobytes())
