"""Sharded safetensors: what makes a tensor, and every way in which shards can be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from ckptx.catalog.manifest import encode_manifest
from ckptx.catalog.region import Region, full_region
from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.chunk_assembly import replicas_with_chunks
from ckptx.formats.sharded.file_names import is_shard, shard_name
from ckptx.formats.sharded.reader import open_sharded
from tests.formats.cut_writer import rows, write_shard
from tests.support.checkpoint_writers import INDEX, SINGLE, flip, manifest, value, write_safetensors
from tests.support.memory_storage import MemoryPath

W = value("BF16", 6, 4, seed=1)
NORM = value("F32", 4, seed=2)
STEP = value("I64", seed=3)


def three_ranks(root: MemoryPath) -> MemoryPath:
    """`w` in three blocks of rows, `norm` on every rank, `step` on the second."""
    for rank in range(3):
        blocks = {"w": rows(W, 2 * rank, 2 * rank + 2), "norm": (NORM, (0,))}
        if rank == 1:
            blocks["step"] = (STEP, ())
        write_shard(root, rank + 1, blocks)
    return root


def read(root: MemoryPath, file: str, offset: int, nbytes: int) -> bytes:
    with root.open() as files:
        return files.read(file, offset, nbytes)


def test_blocks_of_all_ranks_make_a_tensor(place: MemoryPath) -> None:
    catalog = open_sharded(three_ranks(place))
    assert (catalog.format, list(catalog.tensors)) == ("sharded", ["w", "norm", "step"])
    assert list(catalog.files) == [shard_name(rank, 1, 1) for rank in (1, 2, 3)]
    w = catalog.tensors["w"]
    assert (w.dtype.name, w.shape, w.replicas) == ("BF16", (6, 4), ())
    assert [chunk.region for chunk in w.chunks] == [Region((at, 0), (2, 4)) for at in (0, 2, 4)]
    assert b"".join(read(place, *chunk[1:4]) for chunk in w.chunks) == W[2]
    assert catalog.tensors["step"].chunks[0].region == full_region(())
    assert catalog.nbytes == 48 + 16 + 8


def test_what_every_rank_holds_is_one_chunk_and_replicas_to_compare(place: MemoryPath) -> None:
    catalog = open_sharded(three_ranks(place))
    norm = catalog.tensors["norm"]
    assert [chunk.file for chunk in (*norm.chunks, *norm.replicas)] == list(catalog.files)
    pairs = list(replicas_with_chunks(catalog))
    assert [(entry.name, held.file, again.file) for entry, held, again in pairs] == [
        ("norm", shard_name(1, 1, 1), shard_name(rank, 1, 1)) for rank in (2, 3)
    ]
    for _, held, again in pairs:
        assert read(place, *held[1:4]) == read(place, *again[1:4]) == NORM[2]


def test_a_replica_that_differs_is_among_the_pairs(place: MemoryPath) -> None:
    three_ranks(place)
    flip(place / shard_name(3, 1, 1), -1)
    differing = [
        (entry.name, held.file, again.file)
        for entry, held, again in replicas_with_chunks(open_sharded(place))
        if read(place, *held[1:4]) != read(place, *again[1:4])
    ]
    assert differing == [("norm", shard_name(1, 1, 1), shard_name(3, 1, 1))]


def test_ranks_come_in_the_order_of_their_numbers(place: MemoryPath) -> None:
    big = value("U8", 100_000, 1)
    for shard, begin, end in ((2, 0, 1), (99_999, 1, 2), (100_000, 2, 100_000)):
        write_shard(place, shard, {"w": rows(big, begin, end)})
    catalog = open_sharded(place)
    assert [name[6:12] for name in catalog.files] == ["00002-", "99999-", "100000"]


def test_rectangles_of_one_rank_lie_in_several_files(place: MemoryPath) -> None:
    for rank in (0, 1):
        for number in (0, 1):
            at = 3 * number + (2 if rank else 0)
            write_shard(place, rank + 1, {"w": rows(W, at, at + (1 if rank else 2))}, number=number + 1, count=2)
    entry = open_sharded(place).tensors["w"]
    assert [chunk.region.offsets[0] for chunk in entry.chunks] == [0, 3, 2, 5]


def test_ranks_without_rows_are_legal(place: MemoryPath) -> None:
    narrow = value("BF16", 2, 4)
    empty = ("BF16", (0, 4), b""), (2, 0)
    for rank, block in enumerate((rows(narrow, 0, 1), rows(narrow, 1, 2), empty, empty)):
        write_shard(place, rank + 1, {"w": block, "own": (value("U8", 3, seed=rank), (3 * rank,))})
    entry = open_sharded(place).tensors["w"]
    assert (entry.shape, len(entry.chunks), entry.replicas) == ((2, 4), 2, ())


def test_a_tensor_without_elements_has_one_chunk(place: MemoryPath) -> None:
    for rank in (1, 2):
        write_shard(place, rank, {"none": (("BF16", (0, 4), b""), (0, 0))})
    entry = open_sharded(place).tensors["none"]
    assert (entry.shape, [chunk.region for chunk in entry.chunks]) == ((0, 4), [full_region((0, 4))])


def test_a_shard_that_says_no_offsets_holds_whole_tensors(place: MemoryPath) -> None:
    write_shard(place, 1, {"w": (W, ())}, metadata={"format": "pt"})
    write_shard(place, 2, {"norm": (NORM, (0,))})
    assert {name: entry.shape for name, entry in open_sharded(place).tensors.items()} == {
        "w": (6, 4),
        "norm": (4,),
    }


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("shard-00001-model-00001-of-00001.safetensors", True),
        ("shard-123456-model-00001-of-00001.safetensors", True),
        ("shard-1-model-00001-of-00001.safetensors", False),
        ("shard-00001-model-00001-of-00001.safetensors.index.json", False),
        ("model-00001-of-00001.safetensors", False),
    ],
)
def test_names_of_shards(name: str, is_one: bool) -> None:
    assert is_shard(name) is is_one


def test_an_index_beside_shards_is_noted(place: MemoryPath) -> None:
    (three_ranks(place) / INDEX).write_text("{}")
    assert open_sharded(place).notes == [f"{INDEX} ignored: sharded safetensors have no index"]


def refused(root: MemoryPath, said: str, kind: type[Exception] = InputError, **arguments: Any) -> None:
    with pytest.raises(kind, match=said) as refusal:
        open_sharded(root, **arguments)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("lost", "region"), [(1, r"\[0:2, 0:4\]"), (2, r"\[2:4, 0:4\]")])
def test_a_lost_shard_is_named(place: MemoryPath, lost: int, region: str) -> None:
    (three_ranks(place) / shard_name(lost, 1, 1)).unlink()
    refused(place, rf'tensor "w" of shape \[6, 4\]: no shard covers {region}; missing {shard_name(lost, 1, 1)},')


def test_a_lost_second_file_of_a_rank_is_named(place: MemoryPath) -> None:
    for rank, number, begin in ((1, 1, 0), (2, 1, 2), (2, 2, 4)):
        write_shard(place, rank, {"w": rows(W, begin, begin + 2)}, number=number, count=2)
    (place / shard_name(2, 1, 2)).unlink()
    refused(place, rf"covers \[2:4, 0:4\]; missing {shard_name(1, 2, 2)}, {shard_name(2, 1, 2)}, copy")


def test_a_lost_block_where_no_file_is_missing(place: MemoryPath) -> None:
    write_shard(place, 1, {"w": rows(W, 0, 2)})
    write_shard(place, 2, {"w": rows(W, 3, 6)})
    refused(place, r"no shard covers \[2:3, 0:4\]; a shard is missing or damaged")


def test_a_lost_last_shard_shows_where_the_shape_is_known(place: MemoryPath) -> None:
    (three_ranks(place) / shard_name(3, 1, 1)).unlink()
    assert open_sharded(place).tensors["w"].shape == (4, 4)
    assert open_sharded(place, {"w": (4, 4), "absent": (1,)}).tensors["w"].shape == (4, 4)
    refused(place, r'tensor "w" add up to \[4, 4\], expected \[6, 4\]', expected_shapes={"w": (6, 4)})


@pytest.mark.parametrize("copy", [4, 7])
def test_a_duplicated_shard_is_named(place: MemoryPath, copy: int) -> None:
    three_ranks(place)
    (place / shard_name(copy, 1, 1)).write_bytes((place / shard_name(2, 1, 1)).read_bytes())
    both = f"{shard_name(2, 1, 1)} and {shard_name(copy, 1, 1)}"
    refused(place, rf'duplicated shard: {both} both contain \[2:4, 0:4\] of tensor "w"')


def test_a_shard_in_the_place_of_another_is_named(place: MemoryPath) -> None:
    three_ranks(place)
    (place / shard_name(2, 1, 1)).write_bytes((place / shard_name(1, 1, 1)).read_bytes())
    refused(place, r'tensor "w" of shape \[6, 4\]: no shard covers \[2:4, 0:4\]')
    (place / shard_name(3, 1, 1)).write_bytes((three_ranks(place) / shard_name(1, 1, 1)).read_bytes())
    refused(place, r"duplicated shard: shard-00001-.* and shard-00003-")


def test_ranks_that_repeat_blocks_and_hold_others_of_their_own_are_replicas(place: MemoryPath) -> None:
    """FSDP inside TP: both TP ranks of a row hold the same rows of a norm, and columns of their own."""
    for rank in range(4):
        dp = rank // 2
        own = value("U8", 2, seed=rank), (2 * rank,)
        write_shard(place, rank + 1, {"norm": rows(NORM, 2 * dp, 2 * dp + 2), "own": own})
    entry = open_sharded(place).tensors["norm"]
    assert [chunk.file for chunk in entry.chunks] == [shard_name(1, 1, 1), shard_name(3, 1, 1)]
    assert [chunk.file for chunk in entry.replicas] == [shard_name(2, 1, 1), shard_name(4, 1, 1)]


def test_blocks_that_overlap_are_refused(place: MemoryPath) -> None:
    write_shard(place, 1, {"w": rows(W, 0, 3)})
    write_shard(place, 2, {"w": rows(W, 2, 6)})
    refused(place, rf"{shard_name(1, 1, 1)} and {shard_name(2, 1, 1)} both cover \[2:3, 0:4\]")


def test_a_whole_tensor_over_blocks_of_it_is_refused(place: MemoryPath) -> None:
    write_shard(three_ranks(place), 4, {"w": (W, (0, 0))})
    refused(place, r'tensor "w" of shape \[6, 4\]: .* both cover \[0:2, 0:4\]')


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (("F16", (2, 4), W[2][:16]), r"is F16 with 2 dims, but BF16 with 2 in shard-00001"),
        (("BF16", (8,), W[2][:16]), r"is BF16 with 1 dims, but BF16 with 2 in shard-00001"),
    ],
)
def test_shards_that_disagree_are_refused(place: MemoryPath, other: Any, said: str) -> None:
    write_shard(place, 1, {"w": rows(W, 0, 2)})
    write_shard(place, 2, {"w": (other, (2, 0)[: len(other[1])])})
    refused(place, f'shard-00002.*: tensor "w" {said}')


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({}, 'tensor "w" has no saved_offsets'),
        ({"w": [2, 0]}, 'tensor "w" has no saved_offsets'),
        ({"w": {}}, 'tensor "w" has no saved_offsets'),
        (
            {"w": {"saved_offsets": [2]}},
            r'saved_offsets of tensor "w" of shape \[2, 4\] must be one integer per dim, found \[2\]',
        ),
        ({"w": {"saved_offsets": [2, 0, 0]}}, r".*must be one integer per dim, found \[2, 0, 0\];"),
        ({"w": {"saved_offsets": [-2, 0]}}, r".*must be one integer per dim, found \[-2, 0\];"),
        ({"w": {"saved_offsets": [1 << 63, 0]}}, r".*must be one integer per dim, found \[9223372036854775808, 0\];"),
        ({"w": {"saved_offsets": ["2", 0]}}, r".*must be one integer per dim, found \['2', 0\];"),
        ({"w": {"saved_offsets": [2.0, 0]}}, r".*must be one integer per dim, found \[2.0, 0\];"),
        ({"w": {"saved_offsets": [True, 0]}}, r".*must be one integer per dim, found \[True, 0\];"),
        ({"w": {"saved_offsets": 2}}, r".*must be one integer per dim, found 2;"),
        (
            {"w": {"saved_offsets": [2, 0]}, "x": {"saved_offsets": [0]}},
            'DCP_SHARDING_INFO lists tensor "x", which the file does not contain',
        ),
        ("[1]", "DCP_SHARDING_INFO must be a JSON object, found a list"),
        ("{", "DCP_SHARDING_INFO is not JSON"),
    ],
)
def test_a_damaged_header_is_named(place: MemoryPath, info: Any, said: str) -> None:
    write_shard(place, 1, {"w": rows(W, 0, 2)})
    write_shard(place, 2, {"w": rows(W, 2, 4)}, info=info)
    refused(place, f"{shard_name(2, 1, 1)}: {said}")


def test_another_version_is_refused(place: MemoryPath) -> None:
    write_shard(place, 1, {}, metadata={"DCP_VERSION": "2.0"})
    refused(place, r"DCP_VERSION is 2\.0, but this ckptx supports 1\.0", UnsupportedError)


@pytest.mark.parametrize("name", [SINGLE, "model-00001-of-00001.safetensors", "adapter_model.safetensors"])
def test_other_safetensors_beside_shards_are_refused(place: MemoryPath, name: str) -> None:
    write_safetensors(three_ranks(place) / name, {"w": W})
    refused(place, f"contains {name} next to shard-")


def test_other_safetensors_below_are_none_of_our_business(place: MemoryPath) -> None:
    write_safetensors(three_ranks(place) / "consolidated" / SINGLE, {"w": W})
    assert len(open_sharded(place).tensors) == 3


def write_manifest(root: MemoryPath) -> MemoryPath:
    files = {file.name: len(file.read_bytes()) for file in root.iterdir() if file.name.startswith("shard-")}
    found = manifest("sharded", files, {"w": ("BF16", [6, 4]), "norm": ("F32", [4])})
    (root / "ckptx.json").write_bytes(encode_manifest(found))
    return root


def lose(root: MemoryPath) -> None:
    (root / shard_name(3, 1, 1)).unlink()


def double(root: MemoryPath) -> None:
    (root / shard_name(4, 1, 1)).write_bytes((root / shard_name(3, 1, 1)).read_bytes())


def grow(root: MemoryPath) -> None:
    path = root / shard_name(3, 1, 1)
    path.write_bytes(path.read_bytes() + b"\0")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lose, f"{shard_name(3, 1, 1)}: no such file, but ckptx.json lists it"),
        (double, f"{shard_name(4, 1, 1)}: ckptx.json does not list this file"),
        (grow, rf"{shard_name(3, 1, 1)}: has \d+ bytes, but ckptx.json lists"),
    ],
)
def test_a_manifest_knows_every_shard(place: MemoryPath, damage: Callable[[MemoryPath], None], said: str) -> None:
    root = write_manifest(three_ranks(place))
    assert open_sharded(root).tensors["w"].shape == (6, 4)
    damage(root)
    refused(root, said)


def test_a_manifest_knows_shapes(place: MemoryPath) -> None:
    """The offset of the last block is wrong by one digit, so that it looks like a replica of another."""
    root = three_ranks(place)
    write_shard(root, 3, {"w": rows(W, 4, 6), "norm": (NORM, (0,))}, info=json.loads(info_of(root, 1)))
    write_manifest(root)
    refused(root, r'tensor "w" add up to \[4, 4\], expected \[6, 4\]')


def info_of(root: MemoryPath, shard: int) -> str:
    data = (root / shard_name(shard, 1, 1)).read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return str(header["__metadata__"]["DCP_SHARDING_INFO"])


def test_a_manifest_vouches_for_ranks_that_only_repeat(place: MemoryPath) -> None:
    for rank in range(4):
        write_shard(place, rank + 1, {"w": rows(W, 3 * (rank // 2), 3 * (rank // 2) + 3)})
    refused(place, "duplicated shard")
    write_manifest(place)
    assert len(open_sharded(place).tensors["w"].replicas) == 2


def test_the_manifest_of_another_format_says_nothing(place: MemoryPath) -> None:
    root = three_ranks(place)
    (root / "ckptx.json").write_bytes(encode_manifest(manifest("dcp", {}, {})))
    assert len(open_sharded(root).tensors) == 3
