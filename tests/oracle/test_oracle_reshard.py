"""`reshard` of models of many builds: stock torch and transformers load the result, and files hold what they should.

Every class is cut for several meshes, into a DCP and into sharded safetensors.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import ckptx
from tests.support.models import EVERY, Recipe, assert_same_outputs, load, outputs, read_hf, write
from tests.support.sharded_files import (
    StoredRegion,
    coverage_fault,
    first_wrong_region,
    layer_of,
    rank_of,
    read_dcp_regions,
    read_shard_regions,
    state_of,
)
from tests.support.slow import slow_but
from tests.support.torch_dcp import assert_same_tensors, payload_bytes, raw
from tests.support.torch_dcp import load as stock_load
from tests.support.transformers_version import requires_sharded_file_loading

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Mesh = tuple[int, int, int]  # tp, pp, dp_shard

MESHES: tuple[Mesh, ...] = ((4, 2, 1), (2, 2, 2))
MORE_MESHES: tuple[Mesh, ...] = ((2, 1, 1), (3, 2, 1), (8, 1, 1), (1, 2, 3))
# Dense, tied, fused qkv, Conv1D, experts one by one and fused, MLA, Mamba, towers, encoder and decoder.
MODELS = (
    "llama-tied", "gpt2", "phi3", "mixtral", "gemma4-moe", "gpt-oss", "deepseek-v3", "mamba", "gemma3-vlm", "t5",
)  # fmt: skip
# transformers ties the head of this class before it loads, so that a head of its own is lost in sharded safetensors.
TIED_BY_THE_LOADER = {"t5-v1.1"}


class Model(NamedTuple):
    """One model as its HF checkpoint."""

    name: str
    recipe: Recipe
    hf: Path
    logits: list[torch.Tensor]
    state: dict[str, torch.Tensor]
    encoder_layers: int


@pytest.fixture(scope="module", params=slow_but(EVERY, MODELS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    root = tmp_path_factory.mktemp(request.param)
    yield made(request.param, root / "hf")
    shutil.rmtree(root)


def made(name: str, hf: Path) -> Model:
    recipe = EVERY[name]
    write(recipe, hf)
    loaded = load(hf)
    encoder_layers = loaded.config.num_hidden_layers if loaded.config.is_encoder_decoder else 0
    return Model(name, recipe, hf, outputs(loaded, recipe.inputs()), state_of(recipe, hf), encoder_layers)


on_meshes = pytest.mark.parametrize(("tp", "pp", "dp"), slow_but((*MESHES, *MORE_MESHES), MESHES))


def misplaced(model: Model, held: dict[str, list[StoredRegion]], mesh: Mesh) -> list[str]:
    """Tensors of a layer that lie in a file of another stage than theirs; the first stages have a layer more."""
    tp, pp, dp = mesh
    layers = {name: layer_of(name, model.encoder_layers) for name in held}
    count = 1 + max(layer for layer in layers.values() if layer is not None)
    assert count >= pp
    stages = [stage for stage in range(pp) for _ in range(count // pp + (stage < count % pp))]
    return [
        name
        for name, rectangles in held.items()
        if (layer := layers[name]) is not None
        and {rank_of(each.file) // (tp * dp) for each in rectangles} != {stages[layer]}
    ]


@pytest.mark.sampled(6)
@on_meshes
def test_a_cut_dcp(model: Model, tmp_path: Path, tp: int, pp: int, dp: int) -> None:
    report = ckptx.reshard(model.hf, tmp_path / "cut", to="dcp", tp=tp, pp=pp, dp_shard=dp)
    expected = read_hf(model.hf)
    for alias, stored in model.recipe.aliases.items():
        expected.setdefault(alias, expected[stored])
    assert_same_tensors(stock_load(tmp_path / "cut"), expected)

    held = read_dcp_regions(tmp_path / "cut")
    faults = {name: coverage_fault(tuple(expected[name].shape), held[name]) for name in expected}
    assert [name for name, fault in faults.items() if fault] == []
    assert misplaced(model, held, (tp, pp, dp)) == []
    assert {rank_of(each.file) for blocks in held.values() for each in blocks} <= set(range(tp * pp * dp))

    # Nothing is stored twice but what a tied name needs on a stage of its own.
    copies = len(set(model.recipe.aliases) - set(report.aliases))
    assert copies == 0 or pp > 1
    rows = report.ranks
    assert [row["rank"] for row in rows] == list(range(tp * pp * dp))
    assert sum(row["bytes"] for row in rows) == payload_bytes(tmp_path / "cut")
    files = {file.name for file in (tmp_path / "cut").glob("*.distcp")}
    assert {file for row in rows for file in row["files"]} == files == {each.file for b in held.values() for each in b}


@pytest.mark.sampled(6)
@on_meshes
def test_cut_safetensors(model: Model, tmp_path: Path, tp: int, pp: int, dp: int) -> None:
    ckptx.reshard(model.hf, tmp_path / "cut", to="safetensors", tp=tp, pp=pp, dp_shard=dp)
    if model.name not in TIED_BY_THE_LOADER:
        assert_same_outputs(outputs(load(tmp_path / "cut"), model.recipe.inputs()), model.logits)

    held = read_shard_regions(tmp_path / "cut")
    assert held.keys() == model.state.keys()
    faults = {name: coverage_fault(tuple(model.state[name].shape), held[name], copies=tp) for name in held}
    assert [name for name, fault in faults.items() if fault] == []
    assert first_wrong_region(tmp_path / "cut", held, model.state) is None
    assert misplaced(model, held, (tp, pp, dp)) == []
    for name, blocks in held.items():
        twice = [each for each in blocks if blocks.count(each) > 1]
        assert twice == [], name


@requires_sharded_file_loading
def test_a_head_that_the_loader_ties_is_warned_of(tmp_path: Path) -> None:
    model = made("t5-v1.1", tmp_path / "hf")
    report = ckptx.reshard(model.hf, tmp_path / "cut", to="safetensors", tp=2)
    assert any("the class always ties them" in warning and "lm_head.weight" in warning for warning in report.notes)
    loaded = load(tmp_path / "cut").state_dict()
    assert raw(loaded["lm_head.weight"]) == raw(loaded["shared.weight"]) != raw(model.state["lm_head.weight"])
    other = made("llama-both-different", tmp_path / "other")  # its config is edited
    report = ckptx.reshard(other.hf, tmp_path / "fine", to="safetensors", tp=2)
    assert not any("the class always ties them" in warning for warning in report.notes)


@pytest.mark.parametrize(
    ("held", "copies", "is_whole"),
    [
        ([((0, 0), (2, 2)), ((2, 0), (1, 2))], 1, True),
        ([((0, 0), (3, 2)), ((0, 0), (3, 2))], 2, True),
        ([((0, 0), (3, 2)), ((0, 0), (3, 2))], 1, False),
        ([((0, 0), (2, 2))], 1, False),
        ([((0, 0), (2, 2)), ((1, 0), (2, 2))], 2, False),
        ([((0, 0), (2, 2)), ((2, 0), (2, 2))], 1, False),
    ],
)
def test_gaps_overlaps_and_replicas_would_be_noticed(
    held: list[tuple[tuple[int, ...], tuple[int, ...]]], copies: int, is_whole: bool
) -> None:
    fault = coverage_fault((3, 2), [StoredRegion("", *each) for each in held], copies)
    assert (fault is None) == is_whole


def test_other_bytes_in_a_replica_would_be_noticed(tmp_path: Path) -> None:
    model = made("llama-tied", tmp_path / "hf")
    ckptx.reshard(model.hf, tmp_path / "cut", to="safetensors", tp=2)
    held = read_shard_regions(tmp_path / "cut")
    assert first_wrong_region(tmp_path / "cut", held, model.state) is None
    changed = {**model.state, "model.norm.weight": model.state["model.norm.weight"].flip(0)}
    assert first_wrong_region(tmp_path / "cut", held, changed) is not None


def test_a_layer_on_another_stage_would_be_noticed(tmp_path: Path) -> None:
    model = made("llama-tied", tmp_path / "hf")
    ckptx.reshard(model.hf, tmp_path / "cut", to="dcp", tp=2, pp=2, pp_split="2,0")
    found = misplaced(model, read_dcp_regions(tmp_path / "cut"), (2, 2, 1))
    assert len(found) == 9 and all(".layers.1." in name for name in found)
