"""A `.metadata` in the form of ckptx says the same without its pickle being loaded, and any other is left alone."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import Block, Chunk, TensorEntry
from ckptx.catalog.region import Region, full_region
from ckptx.errors import CkptxError
from ckptx.formats.dcp import own_metadata
from ckptx.formats.dcp.layout import allocate, allocate_sharded, metadata_bytes
from ckptx.formats.dcp.metadata import DcpMetadata, LocatedMetadata, StorageInfo, TensorMetadata, parse_metadata
from ckptx.formats.dcp.metadata_writer import PickleEmitter, metadata_to_bytes
from ckptx.formats.dcp.own_metadata import parse_own_metadata
from ckptx.layout.parallel_dims import ParallelDims
from tests.formats.stock_goldens import GOLDENS

Plain = tuple[dict[str, TensorMetadata], dict[tuple[str, object], StorageInfo], Any]


def plain(found: LocatedMetadata) -> Plain:
    """What was found, in the words of `DcpMetadata`."""
    storage: dict[tuple[str, object], StorageInfo] = {
        (name, region.offsets): StorageInfo(*place)
        for name, places in found.locations.items()
        for region, *place in zip(found.tensors[name].chunks, *places, strict=True)
    }
    storage |= {(name, None): place for name, place in found.objects.items()}
    return dict(found.tensors), storage, found.planner_data


def unpickled(data: bytes) -> Plain:
    """The same of the pickle."""
    found = parse_metadata(data, "x")
    assert {key[0] for key in found.storage if key[1] is None} == set(found.objects)
    return dict(found.tensors), dict(found.storage), found.planner_data


def is_read_alike(data: bytes) -> bool:
    """Whether there is a result; where there is, it is that of the unpickler."""
    found = parse_own_metadata(data)
    if found is None:
        return False
    assert plain(found) == unpickled(data)
    return True


def entry(name: str, shape: tuple[int, ...], dtype: str = "BF16") -> TensorEntry:
    return TensorEntry(name, DTYPES_BY_NAME[dtype], shape, (Chunk(full_region(shape), "x", 0, 1),))


def of_cut(count: int, planner_data: dict[str, Any] | None = None) -> bytes:
    """Tensors cut into two, and one whole; half of them on another stage."""
    rows = (Block(0, Region((0, 0), (2, 4))), Block(1, Region((2, 0), (1, 4))))
    columns = (Block(0, Region((0, 0), (3, 2))), Block(1, Region((0, 2), (3, 2))))
    alone = (Block(0, full_region((5,))),)
    tensors = [
        (entry(f"layer.{number}.{name}", shape), number * 2 // count, blocks)
        for number in range(count)
        for name, shape, blocks in (("rows", (3, 4), rows), ("columns", (3, 4), columns), ("alone", (5,), alone))
    ]
    layout = allocate_sharded(Path("x"), tensors, ParallelDims(tp=2, pp=2))
    return metadata_bytes(layout.catalog, {"again": "layer.1.rows"}, planner_data)


def of_objects() -> bytes:
    """Dims, dtypes and numbers of every length, and objects."""
    shapes = {"none": (), "one": (3,), "two": (300, 2), "three": (70_000, 1, 1), "five": (1, 2, 3, 4, 1 << 33)}
    tensors = {
        name: TensorMetadata(dtype, shape, (full_region(shape),))
        for (name, shape), dtype in zip(shapes.items(), ("int8", "bfloat16", "int8", "bool", "uint8"), strict=True)
    }
    storage = {
        (name, (0,) * len(shape)): StorageInfo(f"{number}.distcp", 200 << 8 * number, 1 << 9 * number)
        for number, (name, shape) in enumerate(shapes.items())
    }
    objects = {("o", None): StorageInfo("0.distcp", 7, 8), ("größe", None): StorageInfo("9.distcp", 1 << 50, 9)}
    return metadata_to_bytes(DcpMetadata(tensors, ("o", "größe"), {**storage, **objects}, None))


def test_whole_tensors() -> None:
    entries = [entry(f"w{number}", (number % 3 + 1, 4)) for number in range(300)]
    assert is_read_alike(metadata_bytes(allocate(Path("x"), entries, 3), {"head": "w7"}))


def test_cut_tensors() -> None:
    assert is_read_alike(of_cut(100))


def test_objects_and_numbers_of_every_length() -> None:
    assert is_read_alike(of_objects())


def test_a_nested_planner_data() -> None:
    names = [f"layer.{number}.{name}" for number in range(4) for name in ("rows", "columns", "alone")]
    assert is_read_alike(of_cut(4, {name: ("model", *name.split(".", 1)) for name in names}))


def test_tensors_that_are_alike_are_one_object() -> None:
    found = parse_own_metadata(of_cut(100))
    assert found is not None
    assert found.tensors["layer.7.rows"] is found.tensors["layer.9.rows"]
    assert found.locations["layer.7.rows"].files is found.locations["layer.9.rows"].files
    assert found.locations["layer.7.rows"].files != found.locations["layer.90.rows"].files


@pytest.mark.parametrize("name", sorted(path.parent.name for path in GOLDENS.glob("*/.metadata")))
def test_what_torch_wrote_is_left_to_the_unpickler(name: str) -> None:
    assert not is_read_alike((GOLDENS / name / ".metadata").read_bytes())


def test_every_name_of_the_form_is_in_the_memo_before_the_first_tensor() -> None:
    writer = PickleEmitter()
    writer.emit_head()
    assert writer.memo == own_metadata._WRITER.memo


@pytest.mark.parametrize(
    ("shape", "chunks", "places"),
    [
        ((4,), [((0,), (4,)), ((0,), (0,))], [0]),  # two of one name
        ((1 << 62, 2), [((0, 0), (1 << 62, 2))], [0]),  # more elements than there can be
        ((4,), [((0,), (4,))], [(1 << 63) - 1]),  # ends behind the last byte
    ],
)
def test_what_has_to_be_looked_at_is_left_to_the_unpickler(
    shape: tuple[int, ...], chunks: list[tuple[tuple[int, ...], tuple[int, ...]]], places: list[int]
) -> None:
    tensor = TensorMetadata("int8", shape, tuple(Region(*chunk) for chunk in chunks))
    storage = {("w", tensor.chunks[at].offsets): StorageInfo("f", offset, 4) for at, offset in enumerate(places)}
    assert parse_own_metadata(metadata_to_bytes(DcpMetadata({"w": tensor}, (), storage))) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"\x8c\x02w3", b"\x8c\x02w2"),  # a name twice
        (b"\x8c\x02w3", b"\x8c\x02\xc3\x28"),  # no UTF-8
        (b"\x8c\x04int8", b"\x8c\x04eval"),  # no dtype
        (b"\x8c\x051.0.0", b"\x8c\x051.0.1"),
    ],
)
def test_odd_values_are_left_to_the_unpickler(old: bytes, new: bytes) -> None:
    tensors = {f"w{number}": TensorMetadata("int8", (4,), (full_region((4,)),)) for number in range(5)}
    storage = {(name, (0,)): StorageInfo("f", 4 * number, 4) for number, name in enumerate(tensors)}
    data = metadata_to_bytes(DcpMetadata(tensors, (), storage))
    assert is_read_alike(data)
    assert old in data
    assert parse_own_metadata(data.replace(old, new)) is None


def test_lines_that_define_their_file_again_are_numbered_as_the_pickle_numbers_them() -> None:
    tensors = {f"w{number}": TensorMetadata("int8", (4,), (full_region((4,)),)) for number in range(5)}
    storage = {(name, (0,)): StorageInfo("f", 4 * number, 4) for number, name in enumerate(tensors)}
    data = metadata_to_bytes(DcpMetadata(tensors, (), storage))
    at = data.rindex(own_metadata._FILE) + len(own_metadata._FILE)
    refers, defines = data[at : at + 2], b"\x8c\x01f\x94"
    assert data.count(own_metadata._FILE + refers) == 4
    assert is_read_alike(data.replace(own_metadata._FILE + refers, own_metadata._FILE + defines))


@pytest.mark.parametrize("made", [of_cut(2), of_objects()])
def test_damage_is_never_read_as_something_else(made: bytes) -> None:
    random = Random(7)
    start = len(PickleEmitter().emit_head())
    read = 0
    for _ in range(6000):
        sample = bytearray(made)
        at = random.randrange(start, len(sample))
        kind = random.randrange(4)
        if kind == 0:
            sample[at] = random.randrange(256)
        elif kind == 1:
            sample[at] ^= 1 << random.randrange(8)
        elif kind == 2:  # something that stands elsewhere
            other = random.randrange(start, len(sample))
            sample[at : at + random.randrange(12)] = sample[other : other + random.randrange(12)]
        else:
            del sample[at : at + random.randrange(1, 9)]
        found = parse_own_metadata(bytes(sample))
        if found is None:
            continue
        read += 1
        try:
            assert plain(found) == unpickled(bytes(sample))
        except CkptxError as error:
            pytest.fail(f"refused by the unpickler: {error}")
    assert read > 100  # other numbers and names
