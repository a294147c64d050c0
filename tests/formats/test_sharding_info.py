"""What a safetensors header says decides what a file is; what the file is called, or who lists it, does not."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptx.api.convert import convert
from ckptx.catalog.catalog import Catalog
from ckptx.catalog.region import Region
from ckptx.errors import CkptxError, InputError, UnsupportedError
from ckptx.formats.registry import open_checkpoint
from ckptx.formats.sharded.file_names import shard_name
from ckptx.storage.files import FilePool
from tests.formats.cut_writer import grid
from tests.support.checkpoint_writers import (
    INDEX,
    LLAMA,
    SINGLE,
    Value,
    llama,
    part,
    tree_bytes,
    value,
    write_index,
    write_safetensors,
)

TENSORS: dict[str, Value] = {
    "w": value("BF16", 6, 4, seed=1),
    "v": value("F32", 5, 3, seed=2),
    "norm": value("F32", 4, seed=3),
    "step": value("I64", seed=4),
}
# What trainers, tests and people call the file of rank R of N.
NAMINGS = {
    "stock": lambda rank, ranks: shard_name(rank + 1, 1, 1),
    "as whole shards": lambda rank, ranks: f"model-{rank + 1:05d}-of-{ranks:05d}.safetensors",
    "by rank": lambda rank, ranks: f"rank_{rank}.safetensors",
    "as an engine's": lambda rank, ranks: f"rank{rank}.safetensors",
    "as another engine's": lambda rank, ranks: f"model-rank-{rank}-part-0.safetensors",
    "first as one file": lambda rank, ranks: SINGLE if rank == 0 else f"part{rank}.safetensors",
    "last as one file": lambda rank, ranks: SINGLE if rank == ranks - 1 else f"a{rank}.safetensors",
    "mixed": lambda rank, ranks: shard_name(1, 1, 1) if rank == 0 else f"other.{rank}.safetensors",
}
Placed = dict[str, tuple[Value, tuple[int, ...]]]


def info_of(blocks: Placed) -> dict[str, Any]:
    return {name: {"saved_offsets": list(offsets)} for name, (_, offsets) in blocks.items()}


def write_file(path: Path, blocks: Placed, info: Any = None) -> None:
    said = json.dumps(info_of(blocks)) if info is None else info if isinstance(info, str) else json.dumps(info)
    metadata = {"DCP_SHARDING_INFO": said, "DCP_VERSION": "1.0", "format": "pt"}
    write_safetensors(path, {name: block for name, (block, _) in blocks.items()}, metadata)


def on_ranks(rows: int, columns: int) -> list[Placed]:
    """Matrices in a grid of blocks, the vector on every rank, the counter on the last."""
    ranks: list[Placed] = [{} for _ in range(rows * columns)]
    for name in ("w", "v"):
        for block in grid(TENSORS[name][1], rows, columns):
            ranks[block.rank_in_stage][name] = part(TENSORS[name], block.region), block.region.offsets
    for rank in ranks:
        rank["norm"] = TENSORS["norm"], (0,)
    ranks[-1]["step"] = TENSORS["step"], ()
    return ranks


def bytes_of(catalog: Catalog, name: str) -> Value:
    entry = catalog.tensors[name]
    whole = np.zeros(entry.shape, f"V{entry.dtype.itemsize}")
    with FilePool(catalog.root) as files:
        for chunk in (*entry.chunks, *entry.replicas):
            spans = tuple(slice(at, at + n) for at, n in zip(*chunk.region, strict=True))
            block = files.read(chunk.file, chunk.offset, chunk.nbytes)
            whole[spans] = np.frombuffer(block, whole.dtype).reshape(chunk.region.sizes)
    return entry.dtype.name, entry.shape, whole.tobytes()


def assert_holds(catalog: Catalog) -> None:
    assert catalog.tensors.keys() == TENSORS.keys()
    for name, expected in TENSORS.items():
        assert bytes_of(catalog, name) == expected, name


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


@given(
    st.sampled_from(sorted(NAMINGS)),
    st.sampled_from([(1, 2), (2, 1), (3, 1), (2, 2), (6, 1)]),
    st.sampled_from(["none", INDEX, "other.safetensors.index.json"]),
    st.data(),
)
@settings(max_examples=120, deadline=None)
def test_shards_are_found_whatever_they_are_called_and_whoever_lists_them(
    naming: str, mesh: tuple[int, int], index: str, data: st.DataObject
) -> None:
    ranks = on_ranks(*mesh)
    names = [NAMINGS[naming](rank, len(ranks)) for rank in range(len(ranks))]
    with scratch() as root:
        for name, blocks in zip(names, ranks, strict=True):
            write_file(root / name, blocks)
        if index != "none":
            # An index can name one file for a tensor: which of those that hold a part is the writer's accident.
            holders = {
                tensor: [n for n, blocks in zip(names, ranks, strict=True) if tensor in blocks] for tensor in TENSORS
            }
            listed = {tensor: data.draw(st.sampled_from(files)) for tensor, files in holders.items()}
            (root / index).write_text(json.dumps({"metadata": {}, "weight_map": listed}))
            if SINGLE in names and index == INDEX and SINGLE not in listed.values():
                return  # two sets of weights, of which loaders take different ones: refused before anything is opened
        catalog = open_checkpoint(root)
        assert catalog.format == "sharded"
        assert_holds(catalog)
        one = open_checkpoint(root / data.draw(st.sampled_from(names)))
        assert (one.format, one.tensors.keys()) == ("sharded", TENSORS.keys())
        (root / "above").mkdir()
        for path in list(root.iterdir()):
            if path.is_file():
                path.rename(root / "above" / path.name)
        assert open_checkpoint(root).root == root / "above"


@pytest.mark.parametrize("parts", [("model", "optim"), ("weights", "optimizer")])
@pytest.mark.parametrize("naming", sorted(NAMINGS))
def test_shards_of_any_name_are_the_model_beside_a_dcp_of_the_optimizer(
    tmp_path: Path, parts: tuple[str, str], naming: str
) -> None:
    from tests.support.checkpoint_writers import write_dcp

    for rank, blocks in enumerate(on_ranks(2, 1)):
        write_file(tmp_path / parts[0] / NAMINGS[naming](rank, 2), blocks)
    write_dcp(tmp_path / parts[1], {"state.w.exp_avg": TENSORS["w"]})
    catalog = open_checkpoint(tmp_path)
    assert [part.directory for part in catalog.parts] == list(parts)
    assert TENSORS.keys() < catalog.tensors.keys()


def write_whole(root: Path, files: int) -> None:
    """A Llama as torch's writer leaves one that nobody sharded: offsets recorded, all 0, and an index."""
    root.mkdir(parents=True)
    (root / "config.json").write_text(json.dumps(LLAMA))
    tensors = list(llama().items())
    weight_map: dict[str, str] = {}
    for at in range(files):
        name = f"model-{at + 1:05d}-of-{files:05d}.safetensors"
        mine = dict(tensors[at::files])
        write_file(root / name, {n: (tensor, (0,) * len(tensor[1])) for n, tensor in mine.items()})
        weight_map.update(dict.fromkeys(mine, name))
    write_index(root, weight_map)


@pytest.mark.parametrize("files", [1, 2, 3])
def test_whole_tensors_that_record_offsets_stay_huggingface_and_come_back_byte_for_byte(
    tmp_path: Path, files: int
) -> None:
    write_whole(tmp_path / "hf", files)
    assert open_checkpoint(tmp_path / "hf").format == "huggingface"
    first = tmp_path / "hf" / f"model-00001-of-{files:05d}.safetensors"
    assert open_checkpoint(first).format == "huggingface"
    convert("hf2dcp", tmp_path / "hf", tmp_path / "dcp")
    convert("dcp2hf", tmp_path / "dcp", tmp_path / "back")
    back = tree_bytes(tmp_path / "back")
    back.pop("ckptx.json")
    assert back == tree_bytes(tmp_path / "hf")


def test_one_whole_file_is_what_its_name_says(tmp_path: Path) -> None:
    blocks: Placed = {name: (tensor, (0,) * len(tensor[1])) for name, tensor in TENSORS.items()}
    write_file(tmp_path / "hf" / SINGLE, blocks)
    write_file(tmp_path / "one" / "model-00001-of-00001.safetensors", blocks)
    assert open_checkpoint(tmp_path / "hf").format == "huggingface"
    assert open_checkpoint(tmp_path / "one").format == "sharded"
    for name in ("hf", "one"):
        assert_holds(open_checkpoint(tmp_path / name))


def test_a_whole_index_is_not_disturbed_by_strays_that_hold_nothing_of_it(tmp_path: Path) -> None:
    write_whole(tmp_path / "hf", 2)
    write_file(tmp_path / "hf" / "old.safetensors", {"norm": (TENSORS["norm"], (0,))})
    catalog = open_checkpoint(tmp_path / "hf")
    assert (catalog.format, catalog.notes) == (
        "huggingface",
        ["old.safetensors ignored: it is not part of the checkpoint"],
    )


def halves_with(tmp_path: Path, first: Any = None, second: Any = None) -> Path:
    names = [NAMINGS["as whole shards"](rank, 2) for rank in range(2)]
    for name, blocks, info in zip(names, on_ranks(2, 1), (first, second), strict=True):
        write_file(tmp_path / name, blocks, info)
    return tmp_path


GOOD = [info_of(blocks) for blocks in on_ranks(2, 1)]
DAMAGED: dict[str, tuple[Any, type[CkptxError], str]] = {
    "no JSON": ("{", InputError, "is not JSON"),
    "a list": ("[1]", InputError, "must be a JSON object, found a list"),
    "a name the file lacks": ({**GOOD[1], "x": {"saved_offsets": [0]}}, InputError, 'lists tensor "x", which the file'),
    "a name it leaves out": ({k: v for k, v in GOOD[1].items() if k != "v"}, InputError, 'tensor "v" has no saved_off'),
    "too few dims": ({**GOOD[1], "w": {"saved_offsets": [3]}}, InputError, "must be one integer per dim"),
    "negative": ({**GOOD[1], "w": {"saved_offsets": [-3, 0]}}, InputError, "must be one integer per dim"),
    "no number": ({**GOOD[1], "w": {"saved_offsets": ["3", 0]}}, InputError, "must be one integer per dim"),
    "a gap": ({**GOOD[1], "w": {"saved_offsets": [4, 0]}}, InputError, "no shard covers"),
    "an overlap": ({**GOOD[1], "w": {"saved_offsets": [2, 0]}}, InputError, "both cover"),
}  # fmt: skip


@pytest.mark.parametrize("door", ["directory", "index", "file"])
@pytest.mark.parametrize("fault", sorted(DAMAGED))
def test_damaged_offsets_are_refused_through_every_door(tmp_path: Path, fault: str, door: str) -> None:
    info, kind, said = DAMAGED[fault]
    root = halves_with(tmp_path, second=info)
    names = [NAMINGS["as whole shards"](rank, 2) for rank in range(2)]
    if door == "index":
        write_index(root, {"w": names[0], "v": names[0], "norm": names[0], "step": names[1]})
    with pytest.raises(kind, match=said) as refusal:
        open_checkpoint(root / names[1] if door == "file" else root)
    assert "\n" not in str(refusal.value)


def test_a_newer_version_is_refused_under_any_name(tmp_path: Path) -> None:
    metadata = {"DCP_SHARDING_INFO": json.dumps(GOOD[0]), "DCP_VERSION": "2.0"}
    blocks = on_ranks(2, 1)[0]
    write_safetensors(tmp_path / "x.safetensors", {n: block for n, (block, _) in blocks.items()}, metadata)
    with pytest.raises(UnsupportedError, match=r"DCP_VERSION is 2\.0"):
        open_checkpoint(tmp_path)


def test_files_that_record_nothing_are_not_mixed_with_shards(tmp_path: Path) -> None:
    write_safetensors(halves_with(tmp_path) / "plain.safetensors", {"x": TENSORS["norm"]})
    with pytest.raises(InputError, match=r"contains plain\.safetensors next to model-00001.*by its DCP_SHARDING_INFO"):
        open_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path / "plain.safetensors").format == "huggingface"


def test_a_lost_shard_is_a_gap_under_any_name(tmp_path: Path) -> None:
    (halves_with(tmp_path) / NAMINGS["as whole shards"](0, 2)).unlink()
    with pytest.raises(InputError, match=r"no shard covers \[0:3, 0:4\]; a shard is missing or damaged"):
        open_checkpoint(tmp_path)


def test_a_half_alone_is_no_tensor(tmp_path: Path) -> None:
    block = part(TENSORS["w"], Region((3, 0), (3, 4)))
    for name in (SINGLE, "one.safetensors", "model-00001-of-00001.safetensors"):
        root = tmp_path / name
        write_file(root / name, {"w": (block, (3, 0))})
        for path in (root, root / name):
            with pytest.raises(InputError, match="no shard covers"):
                open_checkpoint(path)


@pytest.mark.parametrize("at", [1, 3])
def test_no_manifest_makes_whole_tensors_look_like_parts(tmp_path: Path, at: int) -> None:
    """Stock readers would take the output for the last rows of larger tensors, the rest of them uninitialized."""
    write_whole(tmp_path / "hf", 1)
    convert("hf2dcp", tmp_path / "hf", tmp_path / "dcp")
    manifest = json.loads((tmp_path / "dcp" / "ckptx.json").read_text())
    metadata = manifest["origin"]["files"][0]["metadata"]
    info = json.loads(metadata["DCP_SHARDING_INFO"])
    info["model.norm.weight"] = {"saved_offsets": [at]}
    metadata["DCP_SHARDING_INFO"] = json.dumps(info)
    (tmp_path / "dcp" / "ckptx.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=r"as recorded in ckptx\.json, marks whole tensors as parts"):
        convert("dcp2hf", tmp_path / "dcp", tmp_path / "back")
    assert not (tmp_path / "back").exists()
