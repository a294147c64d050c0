"""`.metadata` read without torch, and written so that stock torch reads it."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._shard.sharded_tensor import metadata as older
from torch.distributed.checkpoint import metadata as stock
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from ckptx.catalog.region import Region, full_region
from ckptx.errors import CkptxError, InputError, UnsupportedError
from ckptx.formats.dcp.metadata import DcpMetadata, StorageInfo, TensorMetadata, parse_metadata
from ckptx.formats.dcp.metadata_writer import ShardedStorageEntries, metadata_to_bytes, pickle_metadata
from tests.formats.stock_goldens import GOLDENS, raw_bytes, raw_tensor, write_dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/.metadata"))


def stock_read(root: Path) -> Any:
    return FileSystemReader(root).read_metadata()


@pytest.mark.parametrize("name", NAMES)
def test_what_we_read_is_what_torch_reads(name: str) -> None:
    ours = parse_metadata((GOLDENS / name / ".metadata").read_bytes(), "x")
    theirs = stock_read(GOLDENS / name)
    for fqn, described in theirs.state_dict_metadata.items():
        if isinstance(described, stock.BytesStorageMetadata):
            assert fqn in ours.objects
            continue
        assert f"torch.{ours.tensors[fqn].dtype}" == str(described.properties.dtype)
        assert ours.tensors[fqn].size == tuple(described.size)
        assert ours.tensors[fqn].chunks == tuple((tuple(c.offsets), tuple(c.sizes)) for c in described.chunks)
    assert len(ours.tensors) + len(ours.objects) == len(theirs.state_dict_metadata)
    assert {
        stock.MetadataIndex(fqn, offsets): _StorageInfo(place.path, place.offset, place.length)
        for (fqn, offsets), place in ours.storage.items()
    } == theirs.storage_data
    assert ours.planner_data == theirs.planner_data
    assert ours.version == theirs.version


@pytest.mark.parametrize("name", NAMES)
def test_what_we_write_is_what_torch_wrote(name: str, tmp_path: Path) -> None:
    ours = parse_metadata((GOLDENS / name / ".metadata").read_bytes(), "x")
    data = metadata_to_bytes(ours)
    (tmp_path / ".metadata").write_bytes(data)
    written, read = stock_read(GOLDENS / name), stock_read(tmp_path)
    for field in ("state_dict_metadata", "planner_data", "storage_data", "version"):
        assert getattr(read, field) == getattr(written, field), field
    for index in read.storage_data:
        if index.index is not None:
            assert read.state_dict_metadata[index.fqn].chunks[index.index].offsets == index.offset
    assert parse_metadata(data, "x") == ours


def test_it_names_only_classes_of_torch_2_4_and_no_path() -> None:
    data = metadata_to_bytes(parse_metadata((GOLDENS / "trainer" / ".metadata").read_bytes(), "x"))
    assert b"\x0bStorageMeta" not in data
    assert b"pathlib" not in data
    assert b"transform_descriptors" not in data
    assert data == metadata_to_bytes(parse_metadata(data, "x"))


def test_stock_torch_loads_chunks_of_every_dim_and_aliases(tmp_path: Path) -> None:
    full = {
        "whole": raw_tensor("bfloat16", (4, 6), 1),
        "columns": raw_tensor("float32", (3, 10), 2),
        "grid": raw_tensor("int64", (5, 4), 3),
        "scalar": raw_tensor("float64", (), 4),
        "none": raw_tensor("float16", (0, 3)),
        "fp8": raw_tensor("float8_e4m3fn", (300, 2), 5),
    }
    cuts = {
        "columns": [(slice(0, 3), slice(0, 4)), (slice(0, 3), slice(4, 10))],
        "grid": [(slice(a, b), slice(c, d)) for a, b in ((0, 3), (3, 5)) for c, d in ((0, 1), (1, 4))],
    }
    write_dcp(tmp_path, full, cuts, aliases={"head.weight": "whole", "other": "grid"})
    full |= {"head.weight": full["whole"], "other": full["grid"]}
    state = {name: torch.empty_like(tensor) for name, tensor in full.items()}
    dcp_load(state, checkpoint_id=tmp_path, no_dist=True)
    empty: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]
    _load_state_dict(empty, FileSystemReader(tmp_path), planner=planner, no_dist=True)
    dcp_to_torch_save(tmp_path, tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    some: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner(keys={"grid"})  # type: ignore[no-untyped-call]
    _load_state_dict(some, FileSystemReader(tmp_path), planner=planner, no_dist=True)
    assert list(some) == ["grid"]
    for loaded in (state, empty, saved):
        assert set(loaded) == set(full)
        assert all(raw_bytes(loaded[name]) == raw_bytes(full[name]) for name in full)


def test_a_nested_planner_data_is_carried_over(tmp_path: Path) -> None:
    tensors = {"model.w": raw_tensor("float32", (2,)), "list.0": raw_tensor("float32", (3,))}
    write_dcp(tmp_path, tensors, planner_data={"model.w": ("model", "w"), "list.0": ("list", 0)})
    dcp_to_torch_save(tmp_path, tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    assert raw_bytes(saved["model"]["w"]) == raw_bytes(tensors["model.w"])
    assert raw_bytes(saved["list"][0]) == raw_bytes(tensors["list.0"])


def test_a_flat_planner_data_is_written_when_there_is_none() -> None:
    metadata = DcpMetadata({"w": TensorMetadata("float32", (), (full_region(()),))}, ("o",), {})
    assert parse_metadata(metadata_to_bytes(metadata), "x").planner_data == {"w": ("w",), "o": ("o",)}


def test_big_numbers_and_long_names_survive(tmp_path: Path) -> None:
    names = ["a" * 255, "b" * 256, "c" * 70000, "größe.ü"]
    sizes = [(1 << 8,), (1 << 16, 1 << 31), (1, 2, 3, 4, 5), ()]
    metadata = DcpMetadata(
        {name: TensorMetadata("int8", size, (full_region(size),)) for name, size in zip(names, sizes, strict=True)},
        (),
        {
            (name, (0,) * len(size)): StorageInfo("__0_0.distcp", 1 << 40, 1 << 33)
            for name, size in zip(names, sizes, strict=True)
        },
        {name: (name, -1, 1.5, None, True, [1, 2, 3, 4], {}) for name in names},
    )
    data = metadata_to_bytes(metadata)
    assert parse_metadata(data, "x") == metadata
    (tmp_path / ".metadata").write_bytes(data)
    assert [tuple(stock_read(tmp_path).state_dict_metadata[name].size) for name in names] == sizes


@given(st.lists(st.sampled_from([(4,), (2, 2), (3, 1), (1, 3)]), min_size=1, max_size=20))
@settings(deadline=None)
def test_entries_may_be_made_one_by_one(tensors: list[tuple[int, ...]]) -> None:
    """Objects that are freed before the next entry is made are not confused with those of the next entry."""

    def tensor(sizes: tuple[int, ...]) -> TensorMetadata:
        begins = [sum(sizes[:i]) for i in range(len(sizes))]
        return TensorMetadata("int8", (4,), tuple([Region((a,), (n,)) for a, n in zip(begins, sizes, strict=True)]))

    def entries() -> Iterator[ShardedStorageEntries]:
        for i, sizes in enumerate(tensors):
            regions, count = tensor(sizes).chunks, len(sizes)
            files = tuple([f"__{i}_{at}.distcp" for at in range(count)])
            yield ShardedStorageEntries(f"t{i}", regions, files, [i] * count, tuple([700 + i] * count))

    class Tensors(Mapping[str, TensorMetadata]):
        def __getitem__(self, name: str) -> TensorMetadata:
            return tensor(tensors[int(name[1:])])

        def __iter__(self) -> Iterator[str]:
            return (f"t{i}" for i in range(len(tensors)))

        def __len__(self) -> int:
            return len(tensors)

    parsed = parse_metadata(pickle_metadata(Tensors(), (), entries()), "x")
    assert parsed.tensors == dict(Tensors().items())
    assert parsed.storage == {
        (f"t{i}", region.offsets): StorageInfo(f"__{i}_{at}.distcp", i, 700 + i)
        for i, sizes in enumerate(tensors)
        for at, region in enumerate(tensor(sizes).chunks)
    }


@pytest.mark.parametrize("count", [300, pytest.param(70_000, marks=pytest.mark.slow)])
def test_more_names_than_one_byte_can_number(tmp_path: Path, count: int) -> None:
    shape = (4,)
    names = [f"layer.{i}" for i in range(count)]
    metadata = DcpMetadata(
        {name: TensorMetadata("int8", shape, (full_region(shape),)) for name in names},
        (),
        {(name, (0,)): StorageInfo(f"__{i % 3}_0.distcp", i, i) for i, name in enumerate(names)},
    )
    data = metadata_to_bytes(metadata)
    assert parse_metadata(data, "x") == replace(metadata, planner_data={name: (name,) for name in names})
    (tmp_path / ".metadata").write_bytes(data)
    assert len(stock_read(tmp_path).storage_data) == len(names)


def test_planner_data_beyond_plain_values_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="planner_data contains a complex"):
        metadata_to_bytes(DcpMetadata({}, (), {}, {"x": 1j}))


def stock_metadata(**fields: Any) -> stock.Metadata:
    size = torch.Size([2])
    chunk = stock.ChunkStorageMetadata(torch.Size([0]), size)
    tensor = stock.TensorStorageMetadata(stock.TensorProperties(torch.int8), size, [chunk])
    place = {stock.MetadataIndex("w", [0]): _StorageInfo("__0_0.distcp", 0, 10)}
    defaults: dict[str, Any] = {"state_dict_metadata": {"w": tensor}, "storage_data": place}
    return stock.Metadata(**defaults | fields)


def test_metadata_of_torch_2_0_is_read() -> None:
    metadata = stock_metadata()
    properties = older.TensorProperties(torch.int8)
    metadata.state_dict_metadata["w"].properties = properties  # type: ignore[union-attr]
    for name in ("version", "storage_meta"):
        del metadata.__dict__[name]
    parsed = parse_metadata(pickle.dumps(metadata, 2), "x")
    assert parsed.tensors == {"w": TensorMetadata("int8", (2,), (Region((0,), (2,)),))}
    assert (parsed.version, parsed.planner_data) == (None, None)


def test_an_attribute_of_megatron_is_tolerated() -> None:
    metadata = stock_metadata()
    metadata.mcore_data = {"w": {"nd_reformulated_orig_global_shape": (2, 3)}}  # type: ignore[attr-defined]
    assert list(parse_metadata(pickle.dumps(metadata), "x").tensors) == ["w"]


def test_transforms_are_reported() -> None:
    place = {stock.MetadataIndex("w", [0]): _StorageInfo("__0_0.distcp", 0, 10, ["zstd"])}
    parsed = parse_metadata(pickle.dumps(stock_metadata(storage_data=place)), "x")
    assert parsed.storage["w", (0,)].transforms == ("zstd",)
    assert parse_metadata(metadata_to_bytes(parsed), "x").storage == parsed.storage


class Foreign:
    pass


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"a": 1}, "expected the metadata of a torch DCP, found a pickled dict"),
        (stock.BytesStorageMetadata(), "expected the metadata of a torch DCP"),
        (stock_metadata(storage_data=None), "damaged metadata"),
        (
            stock_metadata(state_dict_metadata={1: stock.BytesStorageMetadata()}),
            "a name is a int, not a string",
        ),
        (stock_metadata(state_dict_metadata={"\ud800": stock.BytesStorageMetadata()}), "damaged metadata"),
        (
            stock_metadata(state_dict_metadata={"w": stock.StorageMeta()}),
            "'w' is neither a tensor nor an object",
        ),
        (stock_metadata(storage_data={stock.MetadataIndex("w", [0]): None}), "damaged metadata"),
        (
            stock_metadata(storage_data={stock.MetadataIndex("w", [0]): _StorageInfo("f", -1, 2)}),
            "'w' has an invalid byte range",
        ),
        (
            stock_metadata(storage_data={stock.MetadataIndex("w", [0]): _StorageInfo("f", 1, (1 << 63) - 1)}),
            "'w' has an invalid byte range",
        ),
        (
            stock_metadata(storage_data={stock.MetadataIndex("w", [-1]): _StorageInfo("f", 1, 1)}),
            "sizes or offsets are not a tuple of at most",
        ),
        (stock_metadata(planner_data=Foreign()), "Foreign, which is not allowed in a checkpoint"),
    ],
)
def test_damaged_metadata_is_refused(value: object, reason: str) -> None:
    with pytest.raises(InputError, match=f"^x: .*{reason}"):
        parse_metadata(pickle.dumps(value), "x")


def test_two_places_for_one_chunk_are_refused() -> None:
    metadata = DcpMetadata({}, (), {("w", (0,)): StorageInfo("f", 0, 1), ("v", (0,)): StorageInfo("f", 1, 1)})
    data = metadata_to_bytes(metadata).replace(b"\x8c\x01v", b"\x8c\x01w")
    with pytest.raises(InputError, match="'w' has two locations for one chunk"):
        parse_metadata(data, "x")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damage_never_escapes_as_another_error(data: st.DataObject) -> None:
    original = (GOLDENS / data.draw(st.sampled_from(["objects", "sharded"])) / ".metadata").read_bytes()
    sample = bytearray(original if data.draw(st.booleans()) else metadata_to_bytes(parse_metadata(original, "x")))
    for _ in range(data.draw(st.integers(1, 4))):
        sample[data.draw(st.integers(0, len(sample) - 1))] = data.draw(st.integers(0, 255))
    with suppress(CkptxError):
        metadata_to_bytes(parse_metadata(bytes(sample), "x"))


def test_a_long_name_of_a_file_is_looked_at_once() -> None:
    long = "\u00e9" * 2_000_000
    storage = {stock.MetadataIndex(f"w{number}", torch.Size([0])): _StorageInfo(long, 0, 4) for number in range(4000)}
    data = pickle.dumps(stock.Metadata({}, None, storage))
    began = time.process_time()
    assert len(parse_metadata(data, "x").storage) == len(storage)
    assert time.process_time() - began < 1.0  # each look at its four megabytes takes a millisecond
