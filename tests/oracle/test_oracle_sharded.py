"""Cut checkpoints against torch and transformers: what we lay out, they load; what they save sharded, we open.

The files are written block by block with plain Python, so that these tests judge the layouts alone.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files,
    consolidate_safetensors_files_on_every_rank,
)
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DTYPES_BY_TORCH_NAME
from ckptx.catalog.entry import BytesEntry, TensorEntry
from ckptx.errors import InputError
from ckptx.formats.chunk_assembly import replicas_with_chunks
from ckptx.formats.dcp.layout import allocate_sharded, metadata_bytes
from ckptx.formats.registry import open_checkpoint
from ckptx.formats.sharded.file_names import shard_name
from ckptx.formats.sharded.layout import allocate
from ckptx.formats.sharded.reader import open_sharded
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.storage.files import FilePool
from ckptx.storage.local import LocalSource
from tests.formats import cut_ranks
from tests.formats.cut_writer import Blocks, along, cuts, everywhere, grid, halves, once, write_cut_dcp, write_sharded
from tests.support import models
from tests.support.checkpoint_writers import Value
from tests.support.models import Recipe, assert_same_outputs, load, outputs, read_hf, tokens, write
from tests.support.pool import GlooPool
from tests.support.torch_dcp import assert_same_tensors, raw
from tests.support.torch_dcp import load as stock_load
from tests.support.transformers_version import READS_SHARDED_FILES, requires_sharded_file_loading

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:Distributed environment not initialized"
)


def value_of(tensor: torch.Tensor) -> Value:
    return DTYPES_BY_TORCH_NAME[str(tensor.dtype)[6:]].name, tuple(tensor.shape), raw(tensor)


def assembled(catalog: Catalog, entry: TensorEntry) -> bytes:
    """The bytes of a tensor, from its blocks; every replica must be what it repeats."""
    whole = np.zeros(entry.shape, f"V{entry.dtype.itemsize}")
    with FilePool(catalog.root) as files:
        for chunk in entry.chunks:
            spans = tuple(slice(at, at + n) for at, n in zip(*chunk.region, strict=True))
            block = files.read(chunk.file, chunk.offset, chunk.nbytes)
            whole[spans] = np.frombuffer(block, whole.dtype).reshape(chunk.region.sizes)
    return whole.tobytes()


def assert_holds(catalog: Catalog, expected: dict[str, torch.Tensor]) -> None:
    assert catalog.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        entry = catalog.tensors[name]
        assert (entry.dtype.torch_name, entry.shape) == (str(tensor.dtype)[6:], tuple(tensor.shape)), name
        assert assembled(catalog, entry) == raw(tensor), name
    with FilePool(catalog.root) as files:
        for entry, held, again in replicas_with_chunks(catalog):
            assert files.read(*held[1:4]) == files.read(*again[1:4]), entry.name


# What torch and transformers save


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("how", "world_size"),
    [("rows", 2), ("rows", 4), ("columns", 4), ("replicated", 2), ("hybrid", 4), ("grid", 4)],
)
def test_what_torch_saves_sharded_is_opened(pool: GlooPool, tmp_path: Path, how: str, world_size: int) -> None:
    pool.run(cut_ranks.save_sharded, world_size, tmp_path / "saved", how)
    catalog = open_checkpoint(tmp_path / "saved")
    assert catalog.format == "sharded"
    assert_holds(catalog, cut_ranks.tensors_to_save())
    ranks = {"replicated": 1, "hybrid": world_size // 2}.get(how, world_size)
    assert len(catalog.tensors["uneven"].chunks) == ranks if how != "columns" else 3


def test_without_a_rank_what_torch_saved_is_refused_where_stock_torch_loads_it(pool: GlooPool, tmp_path: Path) -> None:
    pool.run(cut_ranks.save_sharded, 4, tmp_path, "rows")
    (tmp_path / shard_name(2, 1, 1)).unlink()
    state = {"uneven": torch.zeros(101, 6, dtype=torch.bfloat16)}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert raw(state["uneven"]) != raw(cut_ranks.tensors_to_save()["uneven"])
    with pytest.raises(InputError, match=rf"no shard covers .*; missing {shard_name(2, 1, 1)}, copy"):
        open_sharded(LocalSource(tmp_path))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", [pytest.param("tp", marks=requires_sharded_file_loading), "fsdp"])
def test_what_transformers_saves_distributed_is_opened(pool: GlooPool, hf: Path, tmp_path: Path, how: str) -> None:
    pool.run(cut_ranks.save_pretrained, 2, hf, tmp_path / "saved", how)
    catalog = open_checkpoint(tmp_path / "saved")
    assert catalog.config is not None
    if not READS_SHARDED_FILES:  # it consolidates what it saved, and leaves the files of the ranks below
        assert catalog.format == "huggingface"
        assert_holds(catalog, read_hf(hf))
        catalog = open_checkpoint(tmp_path / "saved" / "sharded")
    assert catalog.format == "sharded"
    assert_holds(catalog, read_hf(hf))
    assert max(len(entry.chunks) for entry in catalog.tensors.values()) == 2


def test_a_file_of_ours_is_the_file_torch_writes(pool: GlooPool, tmp_path: Path) -> None:
    """All but the order of `__metadata__`, which is left to chance there, and blocks without rows, left out here."""
    pool.run(cut_ranks.save_sharded, 2, tmp_path / "saved", "rows")
    stock = open_sharded(LocalSource(tmp_path / "saved"))
    values = {name: value_of(tensor) for name, tensor in cut_ranks.tensors_to_save().items()}
    plan: dict[str, tuple[int, Blocks]] = {}
    for name, entry in stock.tensors.items():
        holder = int(entry.chunks[0].file[6:11]) - 1
        shape = values[name][1]
        plan[name] = (0, along(shape, 0, 2) if len(entry.chunks) > 1 else once(shape, holder))
    layout = allocate(tmp_path / "ours", cuts(values, plan), ParallelDims(dp_shard=2))
    write_sharded(tmp_path / "ours", layout.catalog, layout.prologues, values)
    assert list(layout.catalog.files) == list(stock.files)
    for name in stock.files:
        theirs, their_body = read_parts(tmp_path / "saved" / name)
        ours, our_body = read_parts(tmp_path / "ours" / name)
        assert list(ours.items()) == list(theirs.items())
        assert our_body == their_body


def read_parts(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and bytes of a safetensors file, without what says nothing: see the test above."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    empty = [name for name, row in header.items() if 0 in row.get("shape", [])]
    metadata = header.pop("__metadata__")
    info = json.loads(metadata.pop("DCP_SHARDING_INFO"))
    for name in empty:
        del header[name], info[name]
    return {"info": info, "metadata": metadata, "order": list(header), **header}, data[end:]


# What we lay out


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf") / "hf"
    write(Recipe(lambda: models.llama(num_key_value_heads=4, intermediate_size=96, vocab_size=102), tokens), path)
    return path


ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
COLUMNS = ("o_proj", "down_proj")
MESH = ParallelDims(tp=2, pp=2)


def plan_of(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, int | None]]:
    """Stage and dim of a tiny Llama on tp2 x pp2."""
    plan: dict[str, tuple[int, int | None]] = {}
    for name in tensors:
        stage = int(name.startswith(("model.layers.1", "model.norm", "lm_head")))
        part = name.split(".")[-2]
        plan[name] = (stage, 0 if part in ROWS else 1 if part in COLUMNS else None)
    return plan


def blocks_of(tensors: dict[str, torch.Tensor], *, replicate: bool) -> dict[str, tuple[int, Blocks]]:
    found: dict[str, tuple[int, Blocks]] = {}
    for name, (stage, dim) in plan_of(tensors).items():
        shape = tuple(tensors[name].shape)
        whole = everywhere(shape, 2) if replicate else once(shape)
        found[name] = (stage, whole if dim is None else along(shape, dim, 2))
    return found


def write_cut(kind: str, root: Path, hf: Path) -> Path:
    """A tiny Llama on tp2 x pp2."""
    tensors = read_hf(hf)
    values = {name: value_of(tensor) for name, tensor in tensors.items()}
    cut = cuts(values, blocks_of(tensors, replicate=kind == "sharded"))
    if kind == "sharded":
        layout = allocate(root, cut, MESH)
        write_sharded(root, layout.catalog, layout.prologues, values)
    else:
        catalog = allocate_sharded(root, cut, MESH, files_per_rank=2).catalog
        write_cut_dcp(root, catalog, metadata_bytes(catalog, {}), values)
    shutil.copy(hf / "config.json", root)
    return root


def load_whole(root: Path, expected: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By torch's reader of sharded safetensors, in one process."""
    state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(root)), no_dist=True)
    return state


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["dcp", "sharded"])
@pytest.mark.parametrize(("pp", "tp"), [(2, 2), (1, 4), (4, 1)])
def test_stock_torch_loads_a_cut_model_on_this_mesh_and_on_others(
    pool: GlooPool, hf: Path, tmp_path: Path, kind: str, pp: int, tp: int
) -> None:
    root = write_cut(kind, tmp_path / "cut", hf)
    expected = read_hf(hf)
    plan = {name: (stage * pp // 2, dim) for name, (stage, dim) in plan_of(expected).items()}
    if pp == 4:
        plan |= {name: (i % 4, dim) for i, (name, (_, dim)) in enumerate(plan.items())}
    whole = cut_ranks.write_expected(tmp_path / "whole.safetensors", expected)
    assert pool.run(cut_ranks.load_as_dtensors, 4, root, whole, plan, tp, kind) == [[]] * 4


def test_a_wrong_offset_in_our_files_would_be_noticed(pool: GlooPool, hf: Path, tmp_path: Path) -> None:
    root = write_cut("sharded", tmp_path / "cut", hf)
    file = root / shard_name(2, 1, 1)
    data = file.read_bytes()
    assert data.count(b"lm_head.weight") == 0
    swapped = data.replace(
        b'embed_tokens.weight\\": {\\"saved_offsets\\": [51', b'embed_tokens.weight\\": {\\"saved_offsets\\": [50'
    )
    assert swapped != data
    file.write_bytes(swapped)
    expected = read_hf(hf)
    whole = cut_ranks.write_expected(tmp_path / "whole.safetensors", expected)
    plan = {name: place for name, place in plan_of(expected).items() if "embed" in name or place[0]}
    with pytest.raises(AssertionError):
        assert pool.run(cut_ranks.load_as_dtensors, 4, root, whole, plan, 2, "sharded") == [[]] * 4
    with pytest.raises(InputError, match=r"both cover \[50:51, 0:32\]"):
        open_sharded(LocalSource(root))


def test_stock_torch_loads_a_cut_dcp_whole(hf: Path, tmp_path: Path) -> None:
    root = write_cut("dcp", tmp_path / "cut", hf)
    assert_same_tensors(stock_load(root), read_hf(hf))
    dcp_to_torch_save(root, tmp_path / "saved.pt")
    assert_same_tensors(torch.load(tmp_path / "saved.pt", weights_only=True), read_hf(hf))


def test_stock_loaders_read_cut_safetensors_whole(hf: Path, tmp_path: Path) -> None:
    root = write_cut("sharded", tmp_path / "cut", hf)
    expected = read_hf(hf)
    assert_same_tensors(load_whole(root, expected), expected)
    assert_same_outputs(outputs(load(root), tokens()), outputs(load(hf), tokens()))


@pytest.mark.sampled(1)
@requires_sharded_file_loading
@pytest.mark.parametrize("how", ["tp", "pp"])
def test_transformers_loads_cut_safetensors_on_two_ranks(pool: GlooPool, hf: Path, tmp_path: Path, how: str) -> None:
    root = write_cut("sharded", tmp_path / "cut", hf)
    assert pool.run(cut_ranks.load_pretrained, 2, root, hf, how) == [[]] * 2


@pytest.mark.parametrize(
    "how", ["torch", "torch on every rank", pytest.param("transformers", marks=requires_sharded_file_loading)]
)
def test_cut_safetensors_are_consolidated(hf: Path, tmp_path: Path, how: str) -> None:
    root, out = write_cut("sharded", tmp_path / "cut", hf), tmp_path / "out"
    out.mkdir()
    files = {name: 1 + i % 2 for i, name in enumerate(read_hf(hf))}
    if how == "torch":
        consolidate_safetensors_files(str(root), str(out), files)
    elif how == "transformers":
        from transformers.distributed import consolidate_distributed_checkpoint

        consolidate_distributed_checkpoint(root, out)
    else:
        consolidate_safetensors_files_on_every_rank(str(root), str(out), files)
    assert_same_tensors(read_hf(out), read_hf(hf))


# Every shape of cut, every dtype, objects and names that share bytes

ODD: dict[str, tuple[torch.dtype, tuple[int, ...], Blocks]] = {
    "fused": (torch.bfloat16, (10, 3), halves((10, 3), 4)),
    "grid": (torch.float32, (7, 5), grid((7, 5), 2, 2)),
    "bytes": (torch.float8_e4m3fn, (9, 4), along((9, 4), 0, 4)),
    "few": (torch.int64, (2, 3), along((2, 3), 0, 4)),
    "cube": (torch.float16, (3, 5, 4), along((3, 5, 4), 1, 4)),
    "flags": (torch.bool, (5,), along((5,), 0, 4)),
    "scalar": (torch.float64, (), once((), 2)),
    "none": (torch.bfloat16, (0, 4), once((0, 4))),
    "whole": (torch.bfloat16, (6, 4), once((6, 4), 3)),
}


def odd_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: (torch.randn(shape, generator=generator) * 8).to(dtype) for name, (dtype, shape, _) in ODD.items()}


@pytest.mark.parametrize("parts", [1, 3])
def test_stock_torch_loads_any_cut_with_objects_and_aliases(tmp_path: Path, parts: int) -> None:
    """Nested as a trainer saves it: the name of a tensor is its path, joined by dots."""
    plain = odd_tensors()
    tensors = {f"model.{name}": tensor for name, tensor in plain.items()}
    values = {name: value_of(tensor) for name, tensor in tensors.items()}
    torch.save({"lr": [0.5, 7]}, tmp_path / "object")
    data = (tmp_path / "object").read_bytes()
    cut = cuts(values, {f"model.{name}": (i % 2, ODD[name][2]) for i, name in enumerate(plain)})
    objects = [BytesEntry("trainer.rng", "", 0, len(data))]
    catalog = allocate_sharded(tmp_path, cut, ParallelDims(tp=2, pp=2, dp_shard=2), objects, parts).catalog
    planner_data = {f"model.{name}": ("model", name) for name in plain} | {"trainer.rng": ("trainer", "rng")}
    metadata = metadata_bytes(catalog, {"model.twin": "model.fused", "top": "model.grid"}, planner_data)
    write_cut_dcp(tmp_path / "dcp", catalog, metadata, values, {"trainer.rng": data})
    expected = {**tensors, "model.twin": tensors["model.fused"], "top": tensors["model.grid"]}
    assert_same_tensors(stock_load(tmp_path / "dcp"), expected)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    assert saved.pop("trainer") == {"rng": {"lr": [0.5, 7]}}
    assert_same_tensors(saved.pop("model"), {**plain, "twin": plain["fused"]})
    assert_same_tensors(saved, {"top": plain["grid"]})


def test_stock_torch_loads_any_cut_of_safetensors(tmp_path: Path) -> None:
    tensors = odd_tensors()
    values = {name: value_of(tensor) for name, tensor in tensors.items()}
    cut = cuts(values, {name: (i % 2, ODD[name][2]) for i, name in enumerate(tensors)})
    layout = allocate(tmp_path, cut, ParallelDims(tp=2, pp=2, dp_shard=2))
    root = write_sharded(tmp_path / "cut", layout.catalog, layout.prologues, values)
    assert_same_tensors(load_whole(root, tensors), tensors)
    assert_holds(open_sharded(LocalSource(root)), tensors)
