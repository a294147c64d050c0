"""`.distcp` files: how whole tensors are dealt out, how cut ones are, and the `.metadata` that says so."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import Block, BytesEntry, ShardedChunks, TensorEntry
from ckptx.catalog.region import Region
from ckptx.errors import UnsupportedError
from ckptx.formats.dcp.layout import (
    DcpLayout,
    allocate,
    allocate_sharded,
    extend_planner_data,
    file_count,
    in_torch_elements,
    metadata_bytes,
    parts_per_rank,
    split_evenly,
)
from ckptx.formats.dcp.metadata import parse_metadata
from ckptx.formats.dcp.metadata_writer import metadata_to_bytes
from ckptx.formats.dcp.reader import locate_payloads, open_dcp
from ckptx.formats.torch_archive.archive import archive_frame
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.storage.files import FilePool
from ckptx.storage.local import LocalSource
from tests.formats.cut_writer import Blocks, along, cuts, grid, halves, once, write_cut_dcp
from tests.support.checkpoint_writers import archive, part, value


def entries(sizes: list[int]) -> list[TensorEntry]:
    return [TensorEntry(f"t{i}", DTYPES_BY_NAME["U8"], (size,), ()) for i, size in enumerate(sizes)]


@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=30), st.integers(1, 40))
@settings(deadline=None)
def test_every_file_gets_consecutive_tensors_without_holes(sizes: list[int], files: int) -> None:
    catalog = allocate(Path("x"), entries(sizes), files)
    count = min(files, len(sizes))
    assert list(catalog.files) == [f"__{i}_0.distcp" for i in range(count)]
    assert list(catalog.tensors) == [f"t{i}" for i in range(len(sizes))]
    at = dict.fromkeys(catalog.files, 0)
    seen: list[str] = []
    for entry in catalog.tensors.values():
        (chunk,) = entry.chunks
        assert chunk.offset == at[chunk.file]
        at[chunk.file] += chunk.nbytes
        if chunk.file not in seen[-1:]:
            seen.append(chunk.file)
    assert at == catalog.files
    assert seen == list(catalog.files)


def test_files_are_balanced_by_bytes() -> None:
    catalog = allocate(Path("x"), entries([1_000_000] * 32), 4)
    assert len(set(catalog.files.values())) == 1


@pytest.mark.parametrize(("nbytes", "files"), [(0, 1), (1, 1), (256 << 20, 1), ((256 << 20) + 1, 2), (1 << 50, 64)])
def test_the_size_decides_how_many_files(nbytes: int, files: int) -> None:
    assert file_count(nbytes) == files


@pytest.mark.parametrize("dtype", ["BF16", "F32", "I64", "BOOL", "F8_E4M3", "U32", "F4"])
@pytest.mark.parametrize("shape", [(), (0, 2), (3, 4), (2, 2, 2, 2)])
def test_a_frame_and_the_elements_are_the_archive(dtype: str, shape: tuple[int, ...]) -> None:
    kind = DTYPES_BY_NAME[dtype]
    frame = archive_frame(kind, shape)
    data = value("U8", kind.nbytes(prod(shape)))[2]
    import zlib

    tail = frame.build_tail(zlib.crc32(data))
    assert len(tail) == frame.tail_nbytes
    assert frame.head + data + tail == archive((dtype, shape, data))


def test_metadata_of_a_layout_with_an_alias() -> None:
    catalog = allocate(Path("x"), entries([5, 7]), 1)
    parsed = parse_metadata(metadata_bytes(catalog, {"alias": "t1"}), ".metadata")
    assert list(parsed.tensors) == ["t0", "t1", "alias"]
    assert parsed.storage["alias", (0,)] == parsed.storage["t1", (0,)]
    assert parsed.storage["t1", (0,)].offset == parsed.storage["t0", (0,)].length


@pytest.mark.parametrize(("dtype", "shape"), [("F4", (3,)), ("F4", ()), ("F6_E2M3", (4,))])
def test_what_torch_cannot_hold_is_refused(dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedError, match='tensor "x" has dtype F'):
        in_torch_elements(DTYPES_BY_NAME[dtype], shape, "x")


# Cut for a mesh

TENSORS = {
    "embed": value("BF16", 5, 4, seed=1),
    "step": value("I64", seed=2),
    "qkv": value("BF16", 10, 3, seed=3),
    "norm": value("F32", 3, seed=4),
    "down": value("BF16", 3, 7, seed=5),
    "none": value("BF16", 0, 7),
    "head": value("F8_E4M3", 9, 4, seed=7),
}
# Two stages of four ranks: tp2 x dp_shard2.
DIMS = ParallelDims(tp=2, pp=2, dp_shard=2)
PLAN: dict[str, tuple[int, Blocks]] = {
    "embed": (0, along((5, 4), 0, 4)),
    "step": (0, once(())),
    "qkv": (0, halves((10, 3), 4)),
    "norm": (1, once((3,))),
    "down": (1, grid((3, 7), 2, 2)),
    "none": (1, once((0, 7))),
    "head": (1, along((9, 4), 0, 4)),
}
OBJECTS = {"rng": b"\x80\x02N.", "lr_scheduler": b"\x80\x02K\x01."}


def cut(parts: int | None = None, objects: bool = True) -> DcpLayout:
    pickled = [BytesEntry(name, "elsewhere", 7, len(data)) for name, data in OBJECTS.items()] if objects else []
    return allocate_sharded(Path("x"), cuts(TENSORS, PLAN), DIMS, pickled, parts)


def test_cut_tensors_are_described_as_chunk_by_chunk() -> None:
    """Tensors that are cut alike are written from one template; line by line they come out the same."""
    alike = {f"expert.{i}": value("BF16", 10, 3, seed=i) for i in range(40)}
    plan = {name: (0, halves((10, 3), 4)) for name in alike}
    shared = plan["expert.0"]
    catalog = allocate_sharded(
        Path("x"), cuts({**TENSORS, **alike}, {**PLAN, **dict.fromkeys(plan, shared)}), DIMS, (), 1
    ).catalog
    data = metadata_bytes(catalog, {"twin": "expert.3"})
    assert metadata_to_bytes(parse_metadata(data, "x")) == data
    found = parse_metadata(data, "x").storage
    for name in ("expert.0", "expert.39", "twin", "head"):
        for chunk in catalog.tensors["expert.3" if name == "twin" else name].chunks:
            assert found[name, chunk.region.offsets] == (chunk.file, chunk.offset, chunk.nbytes, None)


def test_every_rank_has_its_file() -> None:
    layout = cut()
    # The last rank of the first stage gets nothing of five rows, nor of two halves of five.
    assert list(layout.catalog.files) == [f"__{rank}_0.distcp" for rank in (0, 1, 2, 4, 5, 6, 7)]
    for name, (stage, blocks) in PLAN.items():
        files = [chunk.file for chunk in layout.catalog.tensors[name].chunks]
        assert files == [f"__{stage * 4 + block.rank_in_stage}_0.distcp" for block in blocks]


def test_parts_are_dealt_out_alike_for_all_ranks_of_a_stage() -> None:
    layout = cut(parts=2)
    part_of = {name: {chunk.file[-8] for chunk in entry.chunks} for name, entry in layout.catalog.tensors.items()}
    assert part_of == {
        "embed": {"0"}, "step": {"0"}, "qkv": {"1"},
        "norm": {"0"}, "down": {"0"}, "none": {"1"}, "head": {"1"},
    }  # fmt: skip
    assert layout.file_groups == (
        ("__0_0.distcp", "__1_0.distcp", "__2_0.distcp"),
        ("__0_1.distcp", "__1_1.distcp", "__2_1.distcp"),
        ("__4_0.distcp", "__5_0.distcp", "__6_0.distcp", "__7_0.distcp"),
        ("__4_1.distcp", "__5_1.distcp", "__6_1.distcp"),
    )
    assert sorted(name for group in layout.file_groups for name in group) == sorted(layout.catalog.files)


@pytest.mark.parametrize("parts", [1, 2, 3, 99])
def test_blocks_of_a_file_follow_each_other_and_objects_come_last(parts: int) -> None:
    layout = cut(parts)
    at = dict.fromkeys(layout.catalog.files, 0)
    for entry in layout.catalog.tensors.values():
        for chunk in entry.chunks:
            assert (chunk.offset, chunk.is_archive) == (at[chunk.file], True)
            at[chunk.file] += chunk.nbytes
    last = max(name for name in layout.catalog.files if name.startswith("__0_"))
    for name, data in OBJECTS.items():
        place = layout.catalog.objects[name]
        assert (place.file, place.offset, place.nbytes) == (last, at[last], len(data))
        at[last] += len(data)
    assert at == layout.catalog.files


def test_objects_alone_have_a_file_of_rank_0() -> None:
    layout = allocate_sharded(
        Path("x"), cuts(TENSORS, {"norm": (1, once((3,)))}), ParallelDims(pp=2), [BytesEntry("a", "", 0, 5)]
    )
    assert list(layout.catalog.files) == ["__0_0.distcp", "__1_0.distcp"]
    assert layout.file_groups == (("__0_0.distcp",), ("__1_0.distcp",))


def test_tensors_cut_alike_share_all_but_offsets() -> None:
    blocks = [along((8, 2), 0, 4) for _ in range(2)]
    pair = [(TensorEntry(f"t{i}", DTYPES_BY_NAME["BF16"], (8, 2), ()), 0, blocks[i]) for i in (0, 1)]
    layout = allocate_sharded(Path("x"), pair, ParallelDims(tp=4), files_per_rank=1)
    first, second = (entry.chunks for entry in layout.catalog.tensors.values())
    for field in ("blocks", "files", "lengths"):
        assert getattr(first, field) is getattr(second, field)
    assert list(first.offsets) != list(second.offsets)  # type: ignore[attr-defined]


@given(st.lists(st.tuples(st.sampled_from(["BF16", "F32", "F4"]), st.integers(0, 2)), min_size=1, max_size=12))
@settings(deadline=None)
def test_tensors_share_if_and_only_if_blocks_and_dtype_are_equal(tensors: list[tuple[str, int]]) -> None:
    """In any order, as in a checkpoint whose layers mix two dtypes."""
    shardings = [along((8, 4), 0, 4), grid((8, 4), 2, 2), halves((8, 4), 4)]
    layout = allocate_sharded(
        Path("x"),
        [(TensorEntry(f"t{i}", DTYPES_BY_NAME[dtype], (8, 4), ()), 0, shardings[at])
         for i, (dtype, at) in enumerate(tensors)],
        ParallelDims(tp=4),
        files_per_rank=1,
    )  # fmt: skip
    end = dict.fromkeys(layout.catalog.files, 0)
    shared: dict[tuple[int, int, int], set[tuple[str, int]]] = {}
    for entry, (dtype, at) in zip(layout.catalog.tensors.values(), tensors, strict=True):
        chunks = entry.chunks
        assert isinstance(chunks, ShardedChunks)
        shared.setdefault((id(chunks.blocks), id(chunks.files), id(chunks.lengths)), set()).add((dtype, at))
        for block, chunk in zip(shardings[at], chunks, strict=True):
            frame = archive_frame(entry.dtype, block.region.sizes)
            nbytes = len(frame.head) + entry.dtype.nbytes(block.region.numel) + frame.tail_nbytes
            file = f"__{block.rank_in_stage}_0.distcp"
            assert chunk[:4] == (block.region, file, end[file], nbytes)
            end[file] += nbytes
    assert end == layout.catalog.files
    assert sorted(map(len, shared.values())) == [1] * len({*tensors})
    data = metadata_bytes(layout.catalog, {})
    assert metadata_to_bytes(parse_metadata(data, "x")) == data


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30), st.integers(1, 40))
@settings(deadline=None)
def test_hands_are_consecutive_and_none_is_empty(lengths: list[int], count: int) -> None:
    count = min(count, len(lengths))
    hands = list(split_evenly(lengths, count))
    assert sorted(hands) == hands
    assert set(hands) == set(range(count))


@pytest.mark.parametrize(
    ("stages", "ranks", "parts"),
    [
        ([0], 1, 1),
        ([64 << 20], 1, 1),
        ([(64 << 20) + 1], 1, 2),  # a second writer has something to do
        ([(64 << 20) + 1], 8, 2),
        ([40 << 20, 40 << 20], 2, 1),  # and here, because each stage is one
        ([1 << 30], 1, 4),
        ([1 << 30], 4, 2),
        ([8 << 30, 9 << 30], 4, 9),
        ([1 << 50], 8, 64),
    ],
)
def test_the_size_decides_how_many_files_a_rank_has(stages: list[int], ranks: int, parts: int) -> None:
    assert parts_per_rank(stages, ranks) == parts


@pytest.mark.parametrize("parts", [1, 3])
def test_what_is_written_reads_back(tmp_path: Path, parts: int) -> None:
    catalog = cut(parts).catalog
    write_cut_dcp(tmp_path, catalog, metadata_bytes(catalog, {"twin": "qkv"}), TENSORS, OBJECTS)
    found = open_dcp(LocalSource(tmp_path))
    assert set(found.tensors) == {*TENSORS, "twin"}
    assert found.objects == catalog.objects
    assert found.tensors["twin"].chunks == found.tensors["qkv"].chunks
    with FilePool(tmp_path) as files:
        for name, entry in locate_payloads(found, files).tensors.items():
            tensor = TENSORS[{"twin": "qkv"}.get(name, name)]
            assert (entry.dtype.name, entry.shape) == tensor[:2]
            assert {chunk.region for chunk in entry.chunks} == {
                block.region for block in PLAN[{"twin": "qkv"}.get(name, name)][1]
            }
            for chunk in entry.chunks:
                assert files.read(chunk.file, chunk.offset, chunk.nbytes) == part(tensor, chunk.region)[2]


def test_pairs_of_four_bits_are_counted_as_torch_does() -> None:
    entry = TensorEntry("x", DTYPES_BY_NAME["F4"], (2, 8), ())
    layout = allocate_sharded(Path("x"), [(entry, 0, along((2, 8), 1, 2))], ParallelDims(tp=2))
    parsed = parse_metadata(metadata_bytes(layout.catalog, {}), "x").tensors["x"]
    assert (parsed.size, parsed.chunks) == ((2, 4), (((0, 0), (2, 2)), ((0, 2), (2, 2))))
    odd = (Block(0, Region((0, 0), (2, 3))), Block(1, Region((0, 3), (2, 5))))
    with pytest.raises(UnsupportedError, match='tensor "x" has dtype F4'):
        allocate_sharded(Path("x"), [(entry, 0, odd)], ParallelDims(tp=2))


def test_a_replica_is_never_stored_in_a_dcp() -> None:
    blocks = (*once((3,)), Block(1, Region((0,), (3,)), is_replica=True))
    with pytest.raises(AssertionError):
        allocate_sharded(Path("x"), cuts(TENSORS, {"norm": (0, blocks)}), ParallelDims(tp=2))


PATHS: dict[str, Any] = {
    "model.embed.weight": ("model", "embed.weight"),
    "optim.state.embed.weight.exp_avg": ("optim", "state", "embed.weight", "exp_avg"),
    "optim.param_groups.0.lr": ("optim", "param_groups", 0, "lr"),
    "odd": ["no", "path"],
}


@pytest.mark.parametrize(
    ("name", "twin", "path"),
    [
        ("model.head.weight", "model.embed.weight", ("model", "head.weight")),
        ("optim.state.head.weight.exp_avg", "optim.state.embed.weight.exp_avg",
         ("optim", "state", "head.weight", "exp_avg")),
        ("optim.param_groups.1.lr", "optim.param_groups.0.lr", ("optim", "param_groups", "1", "lr")),
        ("head.weight", "model.embed.weight", ("head.weight",)),  # nothing in common: on top
        ("head.weight", None, ("head.weight",)),
        ("head.weight", "odd", ("head.weight",)),
        ("model.embed.weight", None, ("model", "embed.weight")),  # known already
    ],
)  # fmt: skip
def test_a_new_name_gets_a_path_beside_its_twin(name: str, twin: str | None, path: tuple[Any, ...]) -> None:
    found = extend_planner_data(PATHS, [name], {} if twin is None else {name: twin})
    assert found[name] == path
    assert {key: value for key, value in found.items() if key != name or key in PATHS} == PATHS


def test_planner_data_is_carried_over_with_aliases_and_copies() -> None:
    names = ("model.embed.weight", "model.copy.weight", "other")
    catalog = allocate(Path("x"), [TensorEntry(name, DTYPES_BY_NAME["U8"], (2,), ()) for name in names], 1)
    catalog.objects["rng"] = BytesEntry("rng", "__0_0.distcp", 0, 1)
    data = metadata_bytes(
        catalog, {"model.head.weight": "model.embed.weight"}, PATHS, {"model.copy.weight": "model.embed.weight"}
    )
    assert parse_metadata(data, "x").planner_data == {
        **PATHS,
        "model.copy.weight": ("model", "copy.weight"),
        "model.head.weight": ("model", "head.weight"),
        "other": ("other",),
        "rng": ("rng",),
    }


def test_metadata_of_many_chunks_stays_small() -> None:
    shapes = [along((256, 4), 0, 64)] * 200
    tensors = [
        (TensorEntry(f"t{i}", DTYPES_BY_NAME["BF16"], (256, 4), ()), 0, blocks) for i, blocks in enumerate(shapes)
    ]
    layout = allocate_sharded(Path("x"), tensors, ParallelDims(tp=64), files_per_rank=1)
    data = metadata_bytes(layout.catalog, {})
    assert len(data) < 200 * 64 * 100
