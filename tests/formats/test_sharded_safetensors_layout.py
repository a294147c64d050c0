"""Sharded safetensors: which file a block goes to, at which byte, and that the files read back are what was cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import Block, TensorEntry
from ckptx.catalog.region import Region
from ckptx.errors import UnsupportedError
from ckptx.formats.hf.safetensors import parse_header
from ckptx.formats.sharded.file_names import shard_name
from ckptx.formats.sharded.layout import ShardedLayout, allocate
from ckptx.formats.sharded.reader import open_sharded
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.storage.files import FilePool
from ckptx.storage.local import LocalSource
from tests.formats.cut_writer import Blocks, along, cuts, everywhere, grid, halves, once, write_sharded
from tests.support.checkpoint_writers import part, value

TENSORS = {
    "embed": value("BF16", 5, 4, seed=1),
    "step": value("I64", seed=2),
    "qkv": value("BF16", 10, 3, seed=3),
    "norm": value("F32", 3, seed=4),
    "down": value("BF16", 3, 7, seed=5),
    "none": value("BF16", 0, 7),
    "mask": value("BOOL", 3, 3, seed=6),
    "head": value("F8_E4M3", 9, 4, seed=7),
}
# Two stages of four ranks: tp2 x dp_shard2.
DIMS = ParallelDims(tp=2, pp=2, dp_shard=2)
PLAN: dict[str, tuple[int, Blocks]] = {
    "embed": (0, along((5, 4), 0, 4)),
    "step": (0, once(())),
    "qkv": (0, halves((10, 3), 4)),
    "norm": (1, everywhere((3,), 4)),
    "down": (1, grid((3, 7), 2, 2)),
    "none": (1, once((0, 7))),
    "mask": (1, once((3, 3), 3)),
    "head": (1, along((9, 4), 0, 4)),
}


def laid_out() -> ShardedLayout:
    return allocate(Path("x"), cuts(TENSORS, PLAN), DIMS)


def headers(layout: ShardedLayout) -> dict[str, list[str]]:
    """Names in each file, in the order of their bytes, as the reader of plain safetensors sees them."""
    found = {}
    for name, prologue in layout.prologues.items():
        size = layout.catalog.files[name]
        data = prologue + bytes(size - len(prologue))
        found[name] = [tensor.name for tensor in parse_header(lambda at, n, d=data: d[at : at + n], size, name).tensors]
    return found


def test_the_second_rectangle_of_a_tensor_goes_to_the_second_file() -> None:
    assert headers(laid_out()) == {
        shard_name(1, 1, 2): ["step", "embed", "qkv"],
        shard_name(1, 2, 2): ["qkv"],
        shard_name(2, 1, 2): ["embed", "qkv"],
        shard_name(2, 2, 2): ["qkv"],
        shard_name(3, 1, 2): ["embed", "qkv"],
        shard_name(3, 2, 2): ["qkv"],
        shard_name(5, 1, 1): ["norm", "down", "none", "head"],
        shard_name(6, 1, 1): ["norm", "down", "head"],
        shard_name(7, 1, 1): ["norm", "down", "head"],
        shard_name(8, 1, 1): ["norm", "down", "mask"],
    }


def test_a_group_is_the_files_of_a_stage() -> None:
    layout = laid_out()
    assert [[int(name[6:11]) - 1 for name in group] for group in layout.file_groups] == [
        [0, 0, 1, 1, 2, 2],
        [4, 5, 6, 7],
    ]
    assert (
        [name for group in layout.file_groups for name in group] == list(layout.catalog.files) == list(layout.prologues)
    )


def test_a_stage_without_tensors_has_no_group() -> None:
    layout = allocate(Path("x"), cuts(TENSORS, {"mask": (2, once((3, 3)))}), ParallelDims(pp=4))
    assert layout.file_groups == ((shard_name(3, 1, 1),),)


def test_every_block_is_aligned_and_follows_the_one_before_it() -> None:
    layout = laid_out()
    at = {name: len(prologue) for name, prologue in layout.prologues.items()}
    for entry in layout.catalog.tensors.values():
        for chunk in entry.chunks:
            assert chunk.offset == at[chunk.file]
            assert chunk.offset % entry.dtype.itemsize == 0
            at[chunk.file] += chunk.nbytes
    assert at == layout.catalog.files


def test_a_header_says_what_a_writer_of_torch_says() -> None:
    prologue = laid_out().prologues[shard_name(8, 1, 1)]
    header = json.loads(prologue[8:])
    assert header.pop("__metadata__") == {
        "DCP_SHARDING_INFO": '{"norm": {"saved_offsets": [0]}, "down": {"saved_offsets": [2, 4]}, '
        '"mask": {"saved_offsets": [0, 0]}}',
        "DCP_VERSION": "1.0",
        "format": "pt",
    }
    assert header == {
        "norm": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
        "down": {"dtype": "BF16", "shape": [1, 3], "data_offsets": [12, 18]},
        "mask": {"dtype": "BOOL", "shape": [3, 3], "data_offsets": [18, 27]},
    }


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    layout = laid_out()
    write_sharded(tmp_path, layout.catalog, layout.prologues, TENSORS)
    catalog = open_sharded(LocalSource(tmp_path))
    assert catalog.files == layout.catalog.files
    with FilePool(tmp_path) as files:
        for name, (_, blocks) in PLAN.items():
            entry = catalog.tensors[name]
            assert (entry.dtype.name, entry.shape) == TENSORS[name][:2]
            assert sorted(chunk.region for chunk in entry.chunks) == sorted(
                b.region for b in blocks if not b.is_replica
            )
            assert len(entry.replicas) == sum(block.is_replica for block in blocks)
            for chunk in (*entry.chunks, *entry.replicas):
                assert files.read(chunk.file, chunk.offset, chunk.nbytes) == part(TENSORS[name], chunk.region)[2]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.sampled_from(["rows", "columns", "grid", "once"]))),
    st.integers(1, 3),
    st.integers(1, 3),
)
@settings(deadline=None, max_examples=60)
def test_any_cut_is_one_block_after_the_other(shapes: list[tuple[int, int, str]], dp: int, tp: int) -> None:
    ranks = dp * tp
    plan: dict[str, tuple[int, Blocks]] = {}
    for i, (height, width, how) in enumerate(shapes):
        shape = (height, width)
        made = {
            "rows": along(shape, 0, ranks),
            "columns": along(shape, 1, ranks),
            "grid": grid(shape, dp, tp),
            "once": once(shape),
        }[how]
        plan[f"t{i}"] = (i % 2, made)
    tensors = {f"t{i}": value("BF16", *shape[:2], seed=i) for i, shape in enumerate(shapes)}
    layout = allocate(Path("x"), cuts(tensors, plan), ParallelDims(tp=tp, pp=2, dp_shard=dp))
    at = {name: len(prologue) for name, prologue in layout.prologues.items()}
    for entry in layout.catalog.tensors.values():
        for block, chunk in zip(plan[entry.name][1], entry.chunks, strict=True):
            assert int(chunk.file[6:11]) - 1 == plan[entry.name][0] * ranks + block.rank_in_stage
            assert (chunk.region, chunk.offset) == (block.region, at[chunk.file])
            at[chunk.file] += chunk.nbytes
    assert at == layout.catalog.files


def test_tensors_cut_alike_share_all_but_offsets() -> None:
    blocks = [along((8, 2), 0, 4) for _ in range(2)]
    assert blocks[0] is not blocks[1]
    pair = [(TensorEntry(f"t{i}", DTYPES_BY_NAME["BF16"], (8, 2), ()), 0, blocks[i]) for i in (0, 1)]
    first, second = (entry.chunks for entry in allocate(Path("x"), pair, ParallelDims(tp=4)).catalog.tensors.values())
    for field in ("blocks", "files", "lengths"):
        assert getattr(first, field) is getattr(second, field)


@pytest.mark.parametrize(
    ("dtype", "shape", "blocks", "said"),
    [
        ("C128", (2,), once((2,)), "has dtype C128, which safetensors cannot hold"),
        ("F4", (1, 6), along((1, 6), 1, 2), r"block \[0:1, 0:3\] does not fill whole bytes"),
        ("F6_E2M3", (4, 3), along((4, 3), 0, 4), r"block \[0:1, 0:3\] does not fill whole bytes"),
    ],
)
def test_what_safetensors_cannot_hold_is_refused(dtype: str, shape: tuple[int, ...], blocks: Blocks, said: str) -> None:
    entry = TensorEntry("x", DTYPES_BY_NAME[dtype], shape, ())
    with pytest.raises(UnsupportedError, match=f'tensor "x" .*{said}'):
        allocate(Path("x"), [(entry, 0, blocks)], ParallelDims(tp=4))


def test_pairs_of_four_bits_are_cut_between_bytes() -> None:
    entry = TensorEntry("x", DTYPES_BY_NAME["F4"], (1, 8), ())
    blocks = (Block(0, Region((0, 0), (1, 4))), Block(1, Region((0, 4), (1, 4))))
    layout = allocate(Path("x"), [(entry, 0, blocks)], ParallelDims(tp=2))
    assert [chunk.nbytes for chunk in layout.catalog.tensors["x"].chunks] == [2, 2]
