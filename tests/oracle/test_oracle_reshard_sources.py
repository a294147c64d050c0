"""`reshard` of whatever there is: other writers, states of optimizers, scales, strange names, huge meshes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import ckptx
from ckptx.errors import OutputError
from tests.support.models import EVERY, assert_same_outputs, load, outputs, read_hf, write
from tests.support.sharded_files import rank_of, read_dcp_regions, read_shard_regions, with_layers
from tests.support.slow import slow_but
from tests.support.torch_dcp import assert_same_tensors, file_bytes
from tests.support.torch_dcp import load as stock_load

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

LAYERS = 4


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama") / "hf"
    write(with_layers("llama-untied", LAYERS), path)
    return path


def save(state: dict[str, Any], path: Path) -> Path:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    return path


def write_single(tensors: dict[str, torch.Tensor], hf: Path, path: Path) -> Path:
    """An HF checkpoint of one file with the config of another."""
    path.mkdir()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    shutil.copy(hf / "config.json", path)
    return path


def load_shards(path: Path, expected: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=True)
    return state


# AdamW of every model, as trainers nest it

STATES = ("bare", "model-optim", "state", "flattened")


def state_of_training(model: Any, layout: str) -> dict[str, Any]:
    """Model and AdamW after a step with random gradients."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    optimizer.step()
    optimizer.zero_grad()
    options = StateDictOptions(flatten_optimizer_state_dict=layout == "flattened")
    weights, states = get_state_dict(model, optimizer, options=options)
    if layout == "bare":
        return {**weights, "optimizer": states}
    if layout == "state":
        return {"state": {"model": weights, "optimizers": states}, "step": 1}
    return {"model": weights, "optim": states}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", slow_but(STATES, ["model-optim"]))
@pytest.mark.parametrize(
    "name",
    slow_but([name for name, recipe in EVERY.items() if not recipe.add], ["mixtral", "gpt2", "llava"]),
)
def test_a_training_checkpoint_of_any_model(tmp_path: Path, name: str, layout: str) -> None:
    """Cut and merged it holds what the trainer saved; a tied name that had no state shares that of its twin."""
    recipe = EVERY[name]
    write(recipe, tmp_path / "hf")
    model = load(tmp_path / "hf")
    save(state_of_training(model, layout), tmp_path / "saved")
    expected = stock_load(tmp_path / "saved")
    base = str(tmp_path / "hf")
    ckptx.reshard(tmp_path / "saved", tmp_path / "cut", base=base, tp=2, pp=2, dp_shard=2)
    ckptx.reshard(tmp_path / "cut", tmp_path / "merged", base=base)
    for root in (tmp_path / "cut", tmp_path / "merged"):
        found = stock_load(root)
        assert_same_tensors({name: found[name] for name in expected}, expected)
        extra = {extra.rpartition(".")[0] for extra in found.keys() - expected.keys()}
        assert len(extra) <= len(recipe.aliases) or name == "t5-v1.1"
    assert len({each.file for blocks in read_dcp_regions(tmp_path / "cut").values() for each in blocks}) == 8
    ckptx.convert("dcp2hf", tmp_path / "cut", tmp_path / "back", base=base)
    assert_same_outputs(outputs(load(tmp_path / "back"), recipe.inputs()), outputs(model, recipe.inputs()))


def test_names_with_wrappers_stay_as_the_trainer_wants_them(hf: Path, tmp_path: Path) -> None:
    state: dict[str, torch.Tensor] = {}
    for name, tensor in read_hf(hf).items():
        wrapped = f"_orig_mod.{name.replace('.self_attn.', '.self_attn._checkpoint_wrapped_module.')}"
        state[f"model.{wrapped}"] = tensor
        state[f"optim.state.{wrapped}.exp_avg"] = tensor.float()
    report = ckptx.reshard(save(state, tmp_path / "saved"), tmp_path / "cut", base=str(hf), tp=2, pp=2)
    assert f'wrapper "_orig_mod." kept in {len(state)} names' in report.notes
    assert_same_tensors(stock_load(tmp_path / "cut"), state)
    held = read_dcp_regions(tmp_path / "cut")
    name = "_orig_mod.model.layers.3.self_attn._checkpoint_wrapped_module.q_proj.weight"
    for each in (f"model.{name}", f"optim.state.{name}.exp_avg"):
        assert [rank_of(rectangle.file) for rectangle in held[each]] == [2, 3]
    ckptx.convert("dcp2hf", tmp_path / "cut", tmp_path / "back", base=str(hf))
    assert_same_tensors(read_hf(tmp_path / "back"), read_hf(hf))


# Writers


def test_columns_that_lie_one_after_another(hf: Path, tmp_path: Path) -> None:
    state = {name: t.t().contiguous().t() if t.dim() == 2 else t for name, t in read_hf(hf).items()}
    save(state, tmp_path / "saved")
    ckptx.reshard(tmp_path / "saved", tmp_path / "cut", base=str(hf), tp=3, pp=2, dp_shard=2)
    assert_same_tensors(stock_load(tmp_path / "cut"), read_hf(hf))


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_pickled_weights(hf: Path, tmp_path: Path, to: str) -> None:
    (tmp_path / "bin").mkdir()
    torch.save(read_hf(hf), tmp_path / "bin" / "pytorch_model.bin")
    shutil.copy(hf / "config.json", tmp_path / "bin")
    ckptx.reshard(tmp_path / "bin", tmp_path / "cut", to=to, tp=2, pp=2)
    found = stock_load(tmp_path / "cut") if to == "dcp" else dict(load(tmp_path / "cut").state_dict())
    assert_same_tensors(found, read_hf(hf))


def test_a_model_in_shards_beside_the_dcp_of_its_optimizer(hf: Path, tmp_path: Path) -> None:
    """As Automodel keeps them; the output is a DCP of two parts."""
    ckptx.reshard(hf, tmp_path / "saved" / "model", to="safetensors", tp=2)
    (tmp_path / "saved" / "model" / "ckptx.json").unlink()
    states = {f"optim.state.{name}.exp_avg": tensor.float() for name, tensor in read_hf(hf).items()}
    save(dict(states), tmp_path / "saved" / "optim")
    ckptx.reshard(tmp_path / "saved", tmp_path / "cut", base=str(hf), to="dcp", tp=2, pp=2)
    assert_same_tensors(stock_load(tmp_path / "cut" / "optim"), states)
    assert_same_tensors(stock_load(tmp_path / "cut" / "model"), read_hf(hf))


def test_a_prefix_is_added_and_found_again(hf: Path, tmp_path: Path) -> None:
    ckptx.reshard(hf, tmp_path / "cut", to="dcp", tp=2, pp=2, prefix="app.model.")
    ckptx.reshard(tmp_path / "cut", tmp_path / "again", tp=4)
    for root in (tmp_path / "cut", tmp_path / "again"):
        assert_same_tensors(stock_load(root), {f"app.model.{name}": tensor for name, tensor in read_hf(hf).items()})
    ckptx.reshard(tmp_path / "again", tmp_path / "shards", to="safetensors", tp=2)
    assert_same_tensors(dict(load(tmp_path / "shards").state_dict()), read_hf(hf))


# Tensors with something beside them, and tensors that no model has


def with_scales(tensors: dict[str, torch.Tensor], block: int) -> dict[str, torch.Tensor]:
    """Projections in FP8, with a scale for each square."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("proj.weight"):
            found[name] = tensor.float().clamp(-3, 3).to(torch.float8_e4m3fn)
            rows, columns = (-(-size // block) for size in tensor.shape)
            found[f"{name}_scale_inv"] = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
    return found


@pytest.mark.parametrize(("tp", "pp", "dp"), [(2, 2, 1), (4, 1, 2), (3, 1, 1)])
@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_scales_of_blocks_come_back(hf: Path, tmp_path: Path, to: str, tp: int, pp: int, dp: int) -> None:
    tensors = with_scales(read_hf(hf), 8)
    source = write_single(tensors, hf, tmp_path / "hf")
    report = ckptx.reshard(source, tmp_path / "cut", to=to, tp=tp, pp=pp, dp_shard=dp)
    found = stock_load(tmp_path / "cut") if to == "dcp" else load_shards(tmp_path / "cut", tensors)
    assert_same_tensors(found, tensors)
    ckptx.convert("dcp2hf", tmp_path / "cut", tmp_path / "back", allow_config_mismatch=True)
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    # 32 rows of queries are 4 blocks, which 2 and 4 ranks share and 3 do not; 97 inner features divide by nothing.
    held = (read_dcp_regions if to == "dcp" else read_shard_regions)(tmp_path / "cut")
    parts = {each.offsets[0] for each in held["model.layers.0.self_attn.q_proj.weight_scale_inv"]}
    assert len(parts) == (4 if tp == 4 else 2 if tp == 2 else 1)
    reasons = {row["pattern"].split(".")[-2]: row["reason"] for row in report.rules if "scale" in row["pattern"]}
    assert reasons["up_proj"] == "scale replicated: a shard of the weight ends inside a block of 8"


STRANGE = {
    "llama-untied": {
        "mtp.layers.0.proj.weight": 3, "model.layers.4.eh_proj.weight": 3, "model.layers.4.self_attn.q_proj.weight": 3,
        "model.layers.1.strange.weight": 1, "strange": 0,
    },
    "llava": {"vision_tower.vision_model.strange": 0},
    "mixtral": {"model.layers.3.block_sparse_moe.strange": 3},
}  # fmt: skip


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
@pytest.mark.parametrize("name", STRANGE)
def test_tensors_of_no_model_stay_with_their_layer(tmp_path: Path, name: str, to: str) -> None:
    """On every rank of the stage or on the first, and byte for byte the same file at the end."""
    write(with_layers(name, LAYERS), tmp_path / "hf")
    tensors = read_hf(tmp_path / "hf")
    tensors |= {strange: torch.arange(5.0) + i for i, strange in enumerate(STRANGE[name])}
    source = write_single(tensors, tmp_path / "hf", tmp_path / "source")
    report = ckptx.reshard(source, tmp_path / "cut", to=to, tp=2, pp=LAYERS, allow_config_mismatch=True)
    assert set(report.other_tensors) == set(STRANGE[name])
    held = (read_dcp_regions if to == "dcp" else read_shard_regions)(tmp_path / "cut")
    for strange, stage in STRANGE[name].items():
        ranks = [rank_of(each.file) for each in held[strange]]
        assert ranks == ([2 * stage] if to == "dcp" else [2 * stage, 2 * stage + 1]), strange
    ckptx.convert("dcp2hf", tmp_path / "cut", tmp_path / "back", allow_config_mismatch=True)
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_a_checkpoint_of_nothing_known(tmp_path: Path) -> None:
    state = {"a.weight": torch.arange(35.0).reshape(7, 5), "b": torch.tensor(1.0), "c": torch.zeros(0, 3)}
    save(dict(state), tmp_path / "saved")
    report = ckptx.reshard(tmp_path / "saved", tmp_path / "cut", base="none", tp=2, dp_shard=3)
    assert_same_tensors(stock_load(tmp_path / "cut"), state)
    assert any(warning.startswith("--base none") for warning in report.notes)
    assert [rank_of(each.file) for each in read_dcp_regions(tmp_path / "cut")["a.weight"]] == [0, 2, 4]


# Meshes, files, threads


@pytest.mark.parametrize(("tp", "pp", "dp"), slow_but([(16, 2, 4), (64, 4, 1), (1, 1, 200)], [(16, 2, 4)]))
@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_more_ranks_than_rows(hf: Path, tmp_path: Path, to: str, tp: int, pp: int, dp: int) -> None:
    expected = read_hf(hf)
    ckptx.reshard(hf, tmp_path / "cut", to=to, tp=tp, pp=pp, dp_shard=dp)
    found = stock_load(tmp_path / "cut") if to == "dcp" else load_shards(tmp_path / "cut", expected)
    assert_same_tensors(found, expected)
    ckptx.convert("dcp2hf", tmp_path / "cut", tmp_path / "back")
    before, after = file_bytes(hf), file_bytes(tmp_path / "back")
    after.pop("ckptx.json")
    assert after == before


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_any_number_of_threads_gives_the_same_bytes(tmp_path: Path, to: str) -> None:
    write(EVERY["mixtral"], tmp_path / "hf")
    for workers in (1, 5):
        ckptx.reshard(tmp_path / "hf", tmp_path / str(workers), to=to, tp=3, pp=2, dp_shard=2, workers=workers)
    assert file_bytes(tmp_path / "1") == file_bytes(tmp_path / "5")


@pytest.mark.parametrize("files", [2, 50])
def test_several_files_for_each_rank(hf: Path, tmp_path: Path, files: int) -> None:
    ckptx.reshard(hf, tmp_path / "cut", to="dcp", tp=2, pp=2, files=files)
    assert_same_tensors(stock_load(tmp_path / "cut"), read_hf(hf))
    names = {file.name for file in (tmp_path / "cut").glob("*.distcp")}
    assert {rank_of(name) for name in names} == set(range(4))
    assert len(names) == 8 if files == 2 else len(names) > 40


def test_another_mesh_replaces_one_only_if_asked(hf: Path, tmp_path: Path) -> None:
    ckptx.reshard(hf, tmp_path / "cut", to="dcp", tp=2)
    before = file_bytes(tmp_path / "cut")
    for options in ({}, {"resume": True}):
        with pytest.raises(OutputError, match="exists"):
            ckptx.reshard(hf, tmp_path / "cut", to="dcp", tp=4, **options)
    assert file_bytes(tmp_path / "cut") == before
    ckptx.reshard(hf, tmp_path / "cut", to="dcp", tp=4, overwrite=True)
    assert_same_tensors(stock_load(tmp_path / "cut"), read_hf(hf))
    assert len(list((tmp_path / "cut").glob("*.distcp"))) == 4
    report = ckptx.reshard(hf, tmp_path / "cut", to="dcp", tp=4, resume=True)
    assert any("nothing to resume" in warning for warning in report.notes)
