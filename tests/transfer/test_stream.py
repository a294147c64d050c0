"""Regions read through `TensorReader`: whatever the chunks and their strides, the stream is what numpy would give."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import Chunk, Record, TensorEntry
from ckptx.catalog.region import Region, full_region
from ckptx.errors import InputError, UnsupportedError
from ckptx.transfer import segments as segments_module
from ckptx.transfer import stream as stream_module
from ckptx.transfer.stream import TensorReader
from tests.support.memory_storage import MemoryPath

Shape = tuple[int, ...]
Array = np.ndarray[Any, Any]
ITEMSIZES = {"F64": 8, "F32": 4, "BF16": 2, "U8": 1}


class Collect:
    """A sink that keeps everything and hands out little memory at a time."""

    def __init__(self, room: int = 7) -> None:
        self.data = bytearray()
        self._buffer = memoryview(bytearray(room))

    def space(self, nbytes: int) -> memoryview:
        assert nbytes > 0
        return self._buffer[:nbytes]

    def commit(self, view: memoryview) -> None:
        self.data += view


def numbers(shape: Shape, itemsize: int, seed: int = 0) -> Array:
    """Random elements of `itemsize` bytes."""
    data = np.random.default_rng(seed).integers(0, 256, (*shape, itemsize), dtype=np.uint8)
    return data.reshape(-1).view(f"V{itemsize}").reshape(shape)


def cut(array: Array, region: Region) -> Array:
    return array[tuple(slice(begin, begin + size) for begin, size in zip(*region, strict=True))]


def stored(array: Array, region: Region, order: Sequence[int] = (), step: int = 1, gap: int = 0) -> tuple[bytes, Shape]:
    """A block laid out with its dims in `order` (outermost first), `step` elements apart, rows `gap` elements longer.

    Returns:
        The bytes, and the strides in elements.
    """
    block = cut(array, region)
    order = list(order) or list(range(block.ndim))
    strides, width = [0] * block.ndim, step
    for place, dim in enumerate(reversed(order)):
        strides[dim] = width
        width = width * block.shape[dim] + (gap if place == 0 else 0)
    span = sum((size - 1) * stride for size, stride in zip(block.shape, strides, strict=True)) + 1
    flat = np.frombuffer(bytes([0xEE]) * (span * array.itemsize), array.dtype).copy()
    view = np.lib.stride_tricks.as_strided(flat, block.shape, [stride * array.itemsize for stride in strides])
    view[...] = block
    return flat.tobytes(), tuple(strides)


class Files:
    """Writes chunks of one tensor into files, with some bytes between them."""

    def __init__(self, root: MemoryPath, dtype: str, shape: Shape, count: int = 1, crc: bool = True) -> None:
        self.root, self.dtype, self.shape, self.count, self.crc = root, DTYPES_BY_NAME[dtype], shape, count, crc
        self.bodies = [bytearray(b"##") for _ in range(count)]
        self.chunks: list[Chunk] = []

    def add(self, region: Region, data: bytes, strides: Shape | None = None, record_crc: int | None = -1) -> None:
        index = len(self.chunks) % self.count
        body = self.bodies[index]
        offset = len(body)
        body += data + b"#" * 3
        record = Record(offset, len(data), zlib.crc32(data) if record_crc == -1 else record_crc) if self.crc else None
        self.chunks.append(Chunk(region, f"f{index}", offset, len(data), strides, record))

    def entry(self) -> TensorEntry:
        for i, body in enumerate(self.bodies):
            (self.root / f"f{i}").write_bytes(body)
        return TensorEntry("x", self.dtype, self.shape, tuple(self.chunks))

    def stream(self, region: Region | None = None, max_memory: int = 64 << 20, room: int = 7) -> bytes:
        entry, sink = self.entry(), Collect(room)
        with self.root.open() as files:
            TensorReader(files, max_memory).stream(entry, region or full_region(self.shape), sink)
        return bytes(sink.data)


@st.composite
def cuts(draw: st.DrawFn, most: int = 9) -> tuple[Shape, list[Region]]:
    """A shape, and a grid of chunks cut along 1 to 3 of its dims."""
    shape = tuple(draw(st.lists(st.integers(1, most), min_size=1, max_size=4)))
    spans: list[list[tuple[int, int]]] = []
    for size in shape:
        points = draw(st.lists(st.integers(1, max(1, size - 1)), max_size=2, unique=True)) if size > 1 else []
        edges = [0, *sorted(points), size]
        spans.append([(a, b - a) for a, b in pairwise(edges)])
    cells = [()]
    for span in spans:
        cells = [(*cell, each) for cell in cells for each in span]  # type: ignore[misc]
    regions = [Region(tuple(a for a, _ in cell), tuple(n for _, n in cell)) for cell in cells]
    return shape, draw(st.permutations(regions))


@st.composite
def regions_of(draw: st.DrawFn, shape: Shape) -> Region:
    """Any rectangle of `shape`, the whole now and then."""
    if draw(st.booleans()):
        return full_region(shape)
    begin = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return Region(begin, tuple(draw(st.integers(1, size - b)) for size, b in zip(shape, begin, strict=True)))


many = settings(max_examples=120, deadline=None)


@given(cuts(), st.data())
@many
def test_row_major_chunks_give_any_region(
    place: MemoryPath, tensor: tuple[Shape, list[Region]], data: st.DataObject
) -> None:
    shape, regions = tensor
    dtype = data.draw(st.sampled_from(sorted(ITEMSIZES)))
    array = numbers(shape, ITEMSIZES[dtype])
    files = Files(place, dtype, shape, count=data.draw(st.integers(1, 3)))
    for region in regions:
        files.add(region, stored(array, region)[0])
    region = data.draw(regions_of(shape))
    assert files.stream(region) == cut(array, region).tobytes()


@given(cuts(most=6), st.data())
@many
def test_chunks_with_strides_give_any_region(
    place: MemoryPath, tensor: tuple[Shape, list[Region]], data: st.DataObject
) -> None:
    shape, regions = tensor
    array = numbers(shape, 2)
    files = Files(place, "BF16", shape, count=2)
    for region in regions:
        if data.draw(st.booleans()):
            files.add(region, stored(array, region)[0])
            continue
        order = data.draw(st.permutations(range(len(shape))))
        block, strides = stored(array, region, order, data.draw(st.integers(1, 3)), data.draw(st.integers(0, 2)))
        files.add(region, block, strides)
    region = data.draw(regions_of(shape))
    memory = data.draw(st.sampled_from([2000, 64 << 20]))
    assert files.stream(region, memory) == cut(array, region).tobytes()


@given(cuts(), st.data())
@many
def test_narrow_tiles_and_wide_spans_agree(
    place: MemoryPath, tensor: tuple[Shape, list[Region]], data: st.DataObject
) -> None:
    """The sizes at which reading changes its ways do not change what is read."""
    shape, regions = tensor
    array = numbers(shape, 2)
    files = Files(place, "BF16", shape)
    for region in regions:
        files.add(region, stored(array, region)[0])
    region = data.draw(regions_of(shape))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments_module, "_MIN_SPAN_NBYTES", data.draw(st.sampled_from([1, 4, 1 << 16])))
        patch.setattr(segments_module, "TILE_NBYTES", data.draw(st.sampled_from([8, 32, 1 << 20])))
        assert files.stream(region) == cut(array, region).tobytes()


def test_rows_then_columns_then_a_grid(place: MemoryPath) -> None:
    array = numbers((6, 4), 4)
    for regions in (
        [Region((0, 0), (4, 4)), Region((4, 0), (2, 4))],
        [Region((0, 0), (6, 1)), Region((0, 1), (6, 3))],
        [Region((r, c), (3, 2)) for r in (0, 3) for c in (0, 2)],
    ):
        files = Files(place, "F32", (6, 4), count=2)
        for region in regions:
            files.add(region, stored(array, region)[0])
        assert files.stream() == array.tobytes()


def test_a_large_tensor_cut_along_columns(place: MemoryPath) -> None:
    """More than one tile, with a last tile of fewer rows."""
    array = numbers((3001, 400), 2)
    files = Files(place, "BF16", array.shape, count=2)
    for begin, size in ((0, 150), (150, 1), (151, 249)):
        files.add(Region((0, begin), (3001, size)), stored(array, Region((0, begin), (3001, size)))[0])
    assert files.stream(room=1 << 20) == array.tobytes()


def test_a_transposed_matrix(place: MemoryPath) -> None:
    array = numbers((300, 200), 2)
    files = Files(place, "BF16", array.shape)
    files.add(full_region(array.shape), *stored(array, full_region(array.shape), (1, 0)))
    assert files.chunks[0].strides == (1, 300)
    assert files.stream(room=4096) == array.tobytes()


def test_a_transposed_matrix_is_read_by_its_columns(place: MemoryPath, monkeypatch: pytest.MonkeyPatch) -> None:
    array = numbers((30, 20), 2)
    files = Files(place, "BF16", array.shape, crc=False)
    files.add(full_region(array.shape), *stored(array, full_region(array.shape), (1, 0)))
    reads: list[int] = []
    read_into = TensorReader._read_into

    def counted(reader: TensorReader, file: str, offset: int, view: memoryview, name: str) -> None:
        reads.append(len(view))
        read_into(reader, file, offset, view, name)

    monkeypatch.setattr(TensorReader, "_read_into", counted)
    assert files.stream(room=4096) == array.tobytes()
    assert reads == [30 * 2] * 20


def test_channels_last(place: MemoryPath) -> None:
    array = numbers((2, 3, 4, 5), 4)
    files = Files(place, "F32", array.shape)
    files.add(full_region(array.shape), *stored(array, full_region(array.shape), (0, 2, 3, 1)))
    assert files.stream() == array.tobytes()


def test_an_expanded_row_is_stored_once(place: MemoryPath) -> None:
    row = numbers((5,), 4)
    files = Files(place, "F32", (3, 5))
    files.add(full_region((3, 5)), row.tobytes(), (0, 1))
    assert files.stream() == row.tobytes() * 3


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_a_scalar_and_a_tensor_without_elements(place: MemoryPath, shape: Shape) -> None:
    array = numbers(shape, 4)
    files = Files(place, "F32", shape)
    files.add(full_region(shape), array.tobytes())
    assert files.stream() == array.tobytes()


def test_pairs_of_four_bits(place: MemoryPath) -> None:
    """F4: two elements a byte; chunks are cut at whole bytes."""
    packed = numbers((4, 6), 1)
    files = Files(place, "F4", (4, 12), count=2)
    for begin, size in ((0, 4), (4, 8)):
        region = Region((0, begin), (4, size))
        files.add(region, cut(packed, Region((0, begin // 2), (4, size // 2))).tobytes())
    assert files.stream() == packed.tobytes()
    assert files.stream(Region((1, 2), (2, 8))) == cut(packed, Region((1, 1), (2, 4))).tobytes()


def test_a_strided_chunk_keeps_to_its_memory(place: MemoryPath) -> None:
    """A transposed matrix far larger than the memory allowed is read some rows at a time."""
    array = numbers((512, 2048), 2)
    files = Files(place, "BF16", array.shape)
    files.add(full_region(array.shape), *stored(array, full_region(array.shape), (1, 0)))
    entry, sink = files.entry(), Collect(1 << 16)
    limit = 64 << 10
    with place.open() as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_module, "TILE_NBYTES", 16 << 10)
        reader = TensorReader(pool, limit)
        reader.stream(entry._replace(chunks=(entry.chunks[0]._replace(record=None),)), full_region(array.shape), sink)
        assert len(reader._tile_buffer(0)) + len(reader._strip_buffer(0)) <= 2 * limit
    assert sink.data == array.tobytes()


def test_a_few_columns_of_wide_rows_keep_to_their_memory(place: MemoryPath) -> None:
    """What lies between the rows of a narrow region is read along with them: not all of it at once."""
    array = numbers((1024, 2048), 2)
    files = Files(place, "BF16", array.shape)
    files.add(full_region(array.shape), array.tobytes())
    entry, sink, region = files.entry(), Collect(1 << 16), Region((0, 5), (1024, 3))
    with place.open() as pool:
        reader = TensorReader(pool)
        reader.stream(entry, region, sink)
        assert len(reader._strip_buffer(0)) <= 1 << 20
    assert sink.data == cut(array, region).tobytes()


def test_a_row_that_spans_more_than_the_memory_is_refused(place: MemoryPath) -> None:
    array = numbers((2, 600), 2)
    files = Files(place, "BF16", (2, 600))
    files.add(full_region((2, 600)), *stored(array, full_region((2, 600)), step=4))
    with pytest.raises(UnsupportedError, match=r'f0: tensor "x" is stored with strides .* raise --max-memory'):
        files.stream(max_memory=256)


def halves(place: MemoryPath, **second: Any) -> Files:
    array = numbers((4, 4), 4)
    files = Files(place, "F32", (4, 4), count=2)
    top, bottom = Region((0, 0), (2, 4)), Region((2, 0), (2, 4))
    files.add(top, stored(array, top)[0])
    files.add(bottom, stored(array, bottom)[0], **second)
    return files


@pytest.mark.parametrize(
    "region",
    [
        pytest.param(full_region((4, 4)), id="whole: checked on the way"),
        pytest.param(Region((0, 1), (4, 2)), id="columns: checked in a pass of its own"),
        pytest.param(Region((3, 0), (1, 1)), id="one element"),
    ],
)
def test_a_wrong_crc_names_file_and_tensor(place: MemoryPath, region: Region) -> None:
    with pytest.raises(InputError, match=r'f1: tensor "x": CRC-32 of its bytes is [0-9a-f]{8}, .* 00000001'):
        halves(place, record_crc=1).stream(region)


def test_a_wrong_crc_elsewhere_is_not_looked_at(place: MemoryPath) -> None:
    halves(place, record_crc=1).stream(Region((0, 0), (2, 4)))


def test_a_wrong_crc_of_a_strided_chunk_is_found(place: MemoryPath) -> None:
    array = numbers((4, 4), 4)
    files = Files(place, "F32", (4, 4))
    files.add(full_region((4, 4)), *stored(array, full_region((4, 4)), (1, 0)), record_crc=1)
    with pytest.raises(InputError, match="CRC-32"):
        files.stream()


def test_a_record_larger_than_the_chunk_is_checked_whole(place: MemoryPath) -> None:
    """A view into a storage: the checksum is that of the storage."""
    storage = numbers((10,), 4)
    (place / "f0").write_bytes(storage.tobytes())
    right, wrong = (Record(0, 40, crc) for crc in (zlib.crc32(storage.tobytes()), 7))
    for record in (right, wrong):
        entry = TensorEntry("x", DTYPES_BY_NAME["F32"], (2,), (Chunk(full_region((2,)), "f0", 12, 8, None, record),))
        sink = Collect()
        with place.open() as files:
            reader = TensorReader(files)
            if record is wrong:
                with pytest.raises(InputError, match="CRC-32"):
                    reader.stream(entry, full_region((2,)), sink)
            else:
                reader.stream(entry, full_region((2,)), sink)
                assert sink.data == storage[3:5].tobytes()


def test_a_crc_that_was_not_recorded_is_counted_once(place: MemoryPath) -> None:
    files = halves(place, record_crc=None)
    entry = files.entry()
    with place.open() as pool:
        reader = TensorReader(pool)
        for _ in range(2):
            reader.stream(entry, full_region((4, 4)), Collect())
        assert reader.records_without_crc == 1


def test_a_file_that_was_cut_short_is_refused(place: MemoryPath) -> None:
    files = halves(place)
    entry = files.entry()
    (place / "f1").write_bytes((place / "f1").read_bytes()[: entry.chunks[1].offset + 10])
    with place.open() as pool, pytest.raises(InputError, match=r'f1: ends at byte 12 inside tensor "x"'):
        TensorReader(pool).stream(entry, full_region((4, 4)), Collect())


def test_bytes_read_are_counted(place: MemoryPath) -> None:
    entry = halves(place).entry()
    with place.open() as pool:
        reader = TensorReader(pool)
        reader.stream(entry, full_region((4, 4)), Collect())
        assert reader.bytes_read == prod((4, 4)) * 4
