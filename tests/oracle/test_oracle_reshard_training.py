"""Optimizer state through `reshard`: saved by FSDP2 under gloo, cut for TP x PP, loaded by stock torch into a trainer.

The whole tensors, as stock `dcp.load` gives them from what the trainer saved, are what every rank must find.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

import ckptx
from ckptx.errors import UnsupportedError, UsageError
from tests.support import reshard_ranks, torch_training
from tests.support.models import load, read_file, write
from tests.support.pool import GlooPool
from tests.support.sharded_files import coverage_fault, rank_of, read_dcp_regions, with_layers
from tests.support.slow import slow_but
from tests.support.torch_dcp import assert_same_tensors, metadata, raw
from tests.support.torch_dcp import load as stock_load

LAYERS = 3  # over two stages: 2 and 1
STAGES = [(0, 2), (2, 3)]
MESH = {"tp": 2, "pp": 2}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module", params=["untied", "tied"])
def hf(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp(request.param)
    write(with_layers(f"llama-{request.param}", LAYERS), root / "hf")
    yield root / "hf"
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("untied") / "hf"
    write(with_layers("llama-untied", LAYERS), path)
    return path


def is_tied(hf: Path) -> bool:
    return bool(json.loads((hf / "config.json").read_text())["tie_word_embeddings"])


def train(pool: GlooPool, hf: Path, out: Path, layout: str = "model-optim", threads: int = 1) -> Path:
    """Two ranks of FSDP2 save the model and AdamW after a step."""
    return torch_training.trained_once(pool, hf, out, 2, 1, layout, threads)


def objects(path: Path) -> dict[str, Any]:
    """Pickled objects of a DCP, as stock torch loads them."""
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state: dict[str, Any] = {name: None for name, each in entries.items() if isinstance(each, BytesStorageMetadata)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return state


def assert_same_training(found: Path, expected: Path, extra: frozenset[str] = frozenset()) -> None:
    """The same tensors and objects under the same names, but for `extra` names."""
    tensors = stock_load(found)
    assert tensors.keys() - extra == stock_load(expected).keys()
    assert_same_tensors({name: t for name, t in tensors.items() if name not in extra}, stock_load(expected))
    assert objects(found) == objects(expected)


def state_names(names: Any, parameter: str) -> set[str]:
    """Names of the optimizer's tensors of a parameter."""
    return {name for name in names if name.startswith(f"optim.state.{parameter}.")}


# AdamW from two ranks of FSDP2 to four of TP x PP, and back


def test_stock_trainer_continues_on_another_mesh(pool: GlooPool, hf: Path, tmp_path: Path) -> None:
    saved = train(pool, hf, tmp_path)
    whole = stock_load(saved)
    assert is_tied(hf) == (raw(whole[f"model.{HEAD}"]) == raw(whole[f"model.{EMBEDDING}"]))
    assert read_file(tmp_path / "expected.safetensors").keys() == {n[6:] for n in whole if n.startswith("model.")}
    ckptx.reshard(saved, tmp_path / "cut", base=str(hf), **MESH)

    assert (f"optim.state.{HEAD}.exp_avg" in whole) == (not is_tied(hf))
    if is_tied(hf):  # the head of a last stage has the moments of the embedding
        for leaf in ("exp_avg", "exp_avg_sq", "step"):
            whole[f"optim.state.{HEAD}.{leaf}"] = whole[f"optim.state.{EMBEDDING}.{leaf}"]
    torch.save(whole, tmp_path / "whole.pt")

    arguments = (hf, tmp_path / "cut", tmp_path / "whole.pt", STAGES, "optim")
    found = pool.run(reshard_ranks.load_training, 4, *arguments)
    assert [each["wrong"] for each in found] == [[]] * 4
    for rank, each in enumerate(found):
        own, first = f"__{rank}_0.distcp", f"__{rank - rank % 2}_0.distcp"
        # Pickled objects (the hyperparameters) lie with rank 0.
        assert set(each["files"]) <= {".metadata", own, first, "__0_0.distcp"}
        assert len(each["sharded"]) > 20
        head = {f"optim.state.{HEAD}.{leaf}" for leaf in ("exp_avg", "exp_avg_sq", "step")}
        assert (head < set(each["asked"])) == (rank >= 2)
    every = {name for each in found for name in each["asked"]}
    assert every == whole.keys()


def test_a_wrong_moment_would_be_noticed(pool: GlooPool, untied: Path, tmp_path: Path) -> None:
    saved = train(pool, untied, tmp_path)
    ckptx.reshard(saved, tmp_path / "cut", base=str(untied), **MESH)
    whole, name = stock_load(saved), "optim.state.model.layers.2.mlp.up_proj.weight.exp_avg"
    whole[name] = whole[name].flip(0)
    torch.save(whole, tmp_path / "whole.pt")
    found = pool.run(reshard_ranks.load_training, 4, untied, tmp_path / "cut", tmp_path / "whole.pt", STAGES, "optim")
    assert [each["wrong"] for each in found] == [[], [], [name], [name]]


def test_merged_again_it_is_what_the_trainer_saved(pool: GlooPool, hf: Path, tmp_path: Path) -> None:
    saved = train(pool, hf, tmp_path)
    ckptx.reshard(saved, tmp_path / "cut", base=str(hf), **MESH)
    ckptx.reshard(tmp_path / "cut", tmp_path / "other", tp=1, dp_shard=3, pp=3)
    report = ckptx.reshard(tmp_path / "other", tmp_path / "merged")
    head = frozenset(state_names(stock_load(tmp_path / "merged"), HEAD) - stock_load(saved).keys())
    assert len(head) == (3 if is_tied(hf) else 0)
    assert_same_training(tmp_path / "merged", saved, head)
    held = read_dcp_regions(tmp_path / "merged")
    assert all(len(blocks) == 1 for blocks in held.values())
    assert {each.file for blocks in held.values() for each in blocks} == {"__0_0.distcp"}
    if head:
        assert {name for name in report.aliases if name.startswith("optim.")} == head


@pytest.mark.parametrize("name", slow_but(["mixtral", "llama-untied", "phi3", "qwen3-moe"], ["mixtral"]))
def test_every_state_is_cut_as_its_parameter(pool: GlooPool, tmp_path: Path, name: str) -> None:
    """Experts of all of a layer are in fused tensors here, as the model has them, and fused projections in groups."""
    hf = tmp_path / "hf"
    write(with_layers(name, LAYERS), hf)
    saved = train(pool, hf, tmp_path)
    ckptx.reshard(saved, tmp_path / "cut", base=str(hf), tp=2, pp=2, dp_shard=2)
    assert_same_training(tmp_path / "cut", saved)
    held, shapes = (
        read_dcp_regions(tmp_path / "cut"),
        {name: tuple(each.size) for name, each in metadata(saved).items()},
    )
    assert held.keys() == shapes.keys()
    assert [name for name, shape in shapes.items() if coverage_fault(shape, held[name])] == []
    cut = 0
    for name, blocks in held.items():
        if name.startswith("optim."):
            parameter = held["model." + name.removeprefix("optim.state.").rpartition(".")[0]]
            if name.endswith(".step"):
                assert shapes[name] == () and len(blocks) == 1
                assert rank_of(blocks[0].file) // 4 == rank_of(parameter[0].file) // 4
            else:
                assert [tuple(each) for each in blocks] == [tuple(each) for each in parameter]
                cut += len({rank_of(each.file) for each in blocks}) == 4
    assert cut > 20


def test_states_of_experts_cannot_follow_names_on_disk(pool: GlooPool, tmp_path: Path) -> None:
    """There each expert is a tensor of its own, and no trainer has state for it."""
    write(with_layers("mixtral", LAYERS), tmp_path / "hf")
    saved = train(pool, tmp_path / "hf", tmp_path)
    options = {"base": str(tmp_path / "hf"), "names": "hf", **MESH}
    with pytest.raises(UnsupportedError, match="belongs to a parameter that these names combine, split or reorder"):
        ckptx.reshard(saved, tmp_path / "cut", **options)
    ckptx.reshard(saved, tmp_path / "cut", optimizer="drop", **options)
    ckptx.convert("dcp2hf", tmp_path / "cut", tmp_path / "back", base=str(tmp_path / "hf"))
    reference = load(tmp_path / "hf")
    reference.load_state_dict(read_expected(tmp_path))
    assert_same_tensors(dict(load(tmp_path / "back").state_dict()), dict(reference.state_dict()))


def test_a_cast_leaves_the_optimizer_alone(pool: GlooPool, tmp_path: Path) -> None:
    write(with_layers("llama-fp32", LAYERS), tmp_path / "hf")
    saved = train(pool, tmp_path / "hf", tmp_path)
    ckptx.reshard(saved, tmp_path / "cut", base=str(tmp_path / "hf"), dtype="bf16", **MESH)
    before, after = stock_load(saved), stock_load(tmp_path / "cut")
    expected = {name: tensor.bfloat16() if name.startswith("model.") else tensor for name, tensor in before.items()}
    assert_same_tensors({name: after[name] for name in before}, expected)


# Layouts of trainers


@pytest.mark.parametrize("layout", slow_but(["state", "flattened", "model-optim", "app"], ["state"]))
def test_prefixes_objects_and_nesting_are_carried(pool: GlooPool, untied: Path, tmp_path: Path, layout: str) -> None:
    saved = train(pool, untied, tmp_path, layout)
    ckptx.reshard(saved, tmp_path / "cut", base=str(untied), **MESH)
    assert_same_training(tmp_path / "cut", saved)
    before, after = (dcp.FileSystemReader(path).read_metadata() for path in (saved, tmp_path / "cut"))
    assert after.planner_data == before.planner_data
    for path, out in ((saved, "a.pt"), (tmp_path / "cut", "b.pt")):
        dcp_to_torch_save(path, tmp_path / out)
    a, b = (torch.load(tmp_path / name, weights_only=False) for name in ("a.pt", "b.pt"))
    assert_same_nested(a, b)
    assert {each.file for blocks in read_dcp_regions(tmp_path / "cut").values() for each in blocks} == {
        f"__{rank}_0.distcp" for rank in range(4)
    }


def assert_same_nested(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same_nested(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same_nested(x, y)
    elif isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, raw(a)) == (b.dtype, b.shape, raw(b))
    else:
        assert a == b


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", slow_but(["two-directories", "accelerate"], ["two-directories"]))
def test_model_and_optimizer_side_by_side_stay_so(pool: GlooPool, hf: Path, tmp_path: Path, layout: str) -> None:
    saved = train(pool, hf, tmp_path, layout)
    ckptx.reshard(saved, tmp_path / "cut", base=str(hf), **MESH)
    ckptx.reshard(tmp_path / "cut", tmp_path / "merged")
    parts = sorted(path.name for path in saved.iterdir() if path.is_dir())
    assert len(parts) == 2
    for part in parts:
        before = stock_load(saved / part)
        for root in (tmp_path / "cut", tmp_path / "merged"):
            names = stock_load(root / part)
            extra = frozenset(name for name in names if f"{HEAD}." in name and name not in before)
            assert_same_training(root / part, saved / part, extra)
            assert len(extra) == (3 if is_tied(hf) and part.startswith("optim") else 0)
        assert sorted(file.name for file in (tmp_path / "cut" / part).glob("*.distcp")) == [
            f"__{rank}_0.distcp" for rank in range(4)
        ]


# States that nobody can cut, or that nobody wants


def save(state: dict[str, Any], path: Path) -> Path:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    return path


def trained(hf: Path) -> tuple[Any, torch.optim.Optimizer]:
    model = load(hf)
    return model, torch_training.step(model)


def test_states_by_index_are_refused(untied: Path, tmp_path: Path) -> None:
    model, optimizer = trained(untied)
    saved = save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved")
    with pytest.raises(UnsupportedError, match=r'"optimizer\.state\.0\.\w+" is keyed by the index'):
        ckptx.reshard(saved, tmp_path / "cut", base=str(untied), **MESH)
    assert not (tmp_path / "cut").exists()
    report = ckptx.reshard(saved, tmp_path / "cut", base=str(untied), optimizer="drop", **MESH)
    assert set(metadata(tmp_path / "cut")) == {f"model.{name}" for name in model.state_dict()}
    assert len(report.dropped) == 3 * len(list(model.parameters()))


def test_states_of_another_shape_are_whole_and_listed(untied: Path, tmp_path: Path) -> None:
    model, _ = trained(untied)
    state: dict[str, Any] = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    rows = {f"optim.state.{name}.exp_avg_sq_row": tensor.float().mean(-1) for name, tensor in model.named_parameters()}
    blocks = {f"optim.state.{name}.block": torch.arange(7) for name, _ in model.named_parameters()}
    same = {f"optim.state.{name}.exp_avg": tensor.float() for name, tensor in model.named_parameters()}
    state |= rows | blocks | same | {"optim.param_groups": [{"lr": 0.1}], "step": torch.tensor(7), "rng": {"a": [1]}}
    saved = save(state, tmp_path / "saved")
    report = ckptx.reshard(saved, tmp_path / "cut", base=str(untied), **MESH)
    assert_same_training(tmp_path / "cut", saved)
    apart = {name for name, tensor in rows.items() if tensor.numel() > 1} | blocks.keys()
    assert set(report.state_replicated) == apart
    assert any(f"{len(apart)} tensors" in warning for warning in report.notes)
    held = read_dcp_regions(tmp_path / "cut")
    assert all(len(held[name]) == 1 for name in apart)
    assert any(len(held[name]) == 2 for name in same)
    for name in apart:
        parameter = "model." + name.removeprefix("optim.state.").rpartition(".")[0]
        assert rank_of(held[name][0].file) // 2 == rank_of(held[parameter][0].file) // 2


def test_states_of_nothing_known_are_whole_and_listed(untied: Path, tmp_path: Path) -> None:
    model, _ = trained(untied)
    state: dict[str, Any] = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    state |= {
        "optim.state.elsewhere.weight.exp_avg": torch.ones(6, 4),
        "optim.state.elsewhere.weight.step": torch.ones(()),
    }
    saved = save(state | {"rng": torch.arange(9)}, tmp_path / "saved")
    report = ckptx.reshard(saved, tmp_path / "cut", base=str(untied), **MESH)
    assert_same_training(tmp_path / "cut", saved)
    assert report.state_without_parameter == ["optim.state.elsewhere.weight.exp_avg"]
    assert any(warning.startswith("optimizer state without a known parameter") for warning in report.notes)


@pytest.mark.parametrize("layout", ["model-optim", "two-directories"])
def test_a_dropped_optimizer_is_gone(pool: GlooPool, untied: Path, tmp_path: Path, layout: str) -> None:
    saved = train(pool, untied, tmp_path, layout)
    report = ckptx.reshard(saved, tmp_path / "cut", base=str(untied), optimizer="drop", **MESH)
    every = {part: stock_load(part.parent) for part in (tmp_path / "cut").rglob(".metadata")}
    names = {name for tensors in every.values() for name in tensors}
    assert names == {f"{'model.' if layout == 'model-optim' else ''}{name}" for name in read_expected(tmp_path)}
    assert report.dropped_optimizer["tensors"] == len(report.dropped) == 3 * len(names)


def read_expected(root: Path) -> dict[str, torch.Tensor]:
    return read_file(root / "expected.safetensors")


def test_safetensors_cannot_keep_an_optimizer(pool: GlooPool, untied: Path, tmp_path: Path) -> None:
    saved = train(pool, untied, tmp_path)
    with pytest.raises(UsageError, match="--optimizer keep"):
        ckptx.reshard(saved, tmp_path / "no", base=str(untied), to="safetensors", optimizer="keep", tp=2)
    ckptx.reshard(saved, tmp_path / "cut", base=str(untied), to="safetensors", **MESH)
    assert json.loads((tmp_path / "cut" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_moments_of_tied_names_that_differ_are_reported(pool: GlooPool, tmp_path: Path) -> None:
    """Both names of a tied pair have state, and it is not the same."""
    write(with_layers("llama-tied", LAYERS), tmp_path / "hf")
    model, _ = trained(tmp_path / "hf")
    state: dict[str, Any] = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    moment = torch.ones_like(model.lm_head.weight)
    state |= {f"optim.state.{EMBEDDING}.exp_avg": moment, f"optim.state.{HEAD}.exp_avg": 2 * moment}
    saved = save(state, tmp_path / "saved")
    report = ckptx.reshard(saved, tmp_path / "cut", base=str(tmp_path / "hf"), **MESH)
    assert [row["name"] for row in report.dropped] == [f"optim.state.{HEAD}.exp_avg"]
    assert any("differ although their parameters are tied" in warning for warning in report.notes)
    found = stock_load(tmp_path / "cut")
    for name in (EMBEDDING, HEAD):
        assert raw(found[f"optim.state.{name}.exp_avg"]) == raw(moment)
