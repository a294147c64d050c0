"""`ckptx.json` of an output lists every name that loaders see, with its bytes, and the mesh that it was written for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

import ckptx
from tests.conversion.steps import CONFIG, TIED
from tests.support.checkpoint_writers import Value, llama, value, write_dcp, write_hf
from tests.support.megatron_models import config_of, save_model
from tests.support.torch_dcp import load, metadata, raw

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
COMMANDS = ["to-hf", "to-dcp", "to-megatron", "dcp", "safetensors"]
MESHES: list[dict[str, int]] = [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}, {"dp_shard": 2}]


def equal_head() -> dict[str, Value]:
    tensors = llama()
    return {**tensors, HEAD: tensors[EMBED]}


def run(command: str, source: Path, out: Path, **options: Any) -> Any:
    if command.startswith("to-"):
        return ckptx.convert(command, source, out, **options)
    return ckptx.reshard(source, out, to=command, **{"tp": 2, **options})


def manifest_of(out: Path) -> Any:
    return json.loads((out / "ckptx.json").read_text())


def names_of_loaders(out: Path) -> set[str]:
    """Return the names that torch or safetensors find."""
    directory = out / "release" if (out / "release").exists() else out
    if (directory / ".metadata").exists():
        return {*metadata(directory)}
    names: set[str] = set()
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= {*file.keys()}
    return names


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_name_is_listed_with_its_tie(tmp_path: Path, command: str, config: dict[str, Any]) -> None:
    source = write_hf(tmp_path / "hf", equal_head() if config is TIED else llama(), config=config)
    report = run(command, source, tmp_path / "out")
    rows = manifest_of(tmp_path / "out")["tensors"]
    assert rows.keys() == names_of_loaders(tmp_path / "out")
    assert len(rows) == report.tensors
    ties = {name: row["tied_to"] for name, row in rows.items() if "tied_to" in row}
    is_stored_twice = config is TIED and command in ("to-dcp", "dcp", "safetensors")
    assert ties == ({HEAD: EMBED} if is_stored_twice else {})
    assert report.aliases == ({HEAD: EMBED} if is_stored_twice and command != "safetensors" else {})
    assert all(rows[name]["digest"] == rows[other]["digest"] for name, other in ties.items())


@pytest.mark.parametrize("class_name", ["Qwen3MoeForCausalLM", "MixtralForCausalLM", "LlamaForCausalLM"])
@pytest.mark.parametrize("layers", ["stacked", "separate"])
def test_both_names_of_a_norm_in_megatron_are_listed(tmp_path: Path, class_name: str, layers: str) -> None:
    save_model(tmp_path / "hf", config_of(class_name))
    report = ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out", layers=layers)
    rows = manifest_of(tmp_path / "out")["tensors"]
    assert rows.keys() == names_of_loaders(tmp_path / "out") and report.tensors == len(rows)
    ties = {name: row["tied_to"] for name, row in rows.items() if "tied_to" in row}
    assert ties == report.aliases
    assert bool(ties) == (class_name != "LlamaForCausalLM")
    tensors = load(tmp_path / "out" / "release")
    for name, other in ties.items():
        assert raw(tensors[name]) == raw(tensors[other])


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_mesh_and_the_layers_of_the_stages_are_listed(tmp_path: Path, mesh: dict[str, int], to: str) -> None:
    source = write_hf(tmp_path / "hf", llama(), config=CONFIG)
    report = ckptx.reshard(source, tmp_path / "out", to=to, **mesh)
    layout = manifest_of(tmp_path / "out")["layout"]
    dims = {name: mesh.get(name, 1) for name in ("tp", "pp", "dp_shard")}
    stages = [[["model.layers", 0, 1]], [["model.layers", 1, 2]]] if "pp" in mesh else [[["model.layers", 0, 2]]]
    assert layout == {**dims, "rank_order": "pp,dp,tp", "stages": stages}
    assert report.layout == {**dims, "stages": stages}
    assert len(report.ranks) == dims["tp"] * dims["pp"] * dims["dp_shard"]


@pytest.mark.parametrize("command", ["to-hf", "to-dcp", "to-megatron"])
def test_whole_tensors_have_no_stages(tmp_path: Path, command: str) -> None:
    run(command, write_hf(tmp_path / "hf", llama(), config=CONFIG), tmp_path / "out")
    manifest = manifest_of(tmp_path / "out")
    assert manifest["layout"] == {"tp": 1, "pp": 1, "dp_shard": 1, "rank_order": "pp,dp,tp", "stages": None}
    assert (manifest["origin"] is not None) == (command == "to-dcp")


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_replicated_share_counts_the_bytes_that_no_rank_splits(tmp_path: Path, mesh: dict[str, int]) -> None:
    source = write_hf(tmp_path / "hf", equal_head(), config=TIED)
    report = ckptx.reshard(source, tmp_path / "out", to="safetensors", **mesh)
    if mesh.get("tp", 1) == 1:
        assert report.replicated is None
        return
    norms = {name: len(data) for name, (_, _, data) in equal_head().items() if "norm" in name}
    whole = sum(len(data) for name, (_, _, data) in equal_head().items() if name != HEAD)
    assert report.replicated == {
        "tensors": len(norms), "bytes": sum(norms.values()), "share": round(sum(norms.values()) / whole, 6),
    }  # fmt: skip


# Two names of one tensor, and the state of parameters under other names


@pytest.mark.parametrize("mesh", [{}, {"tp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_state_that_is_stored_under_two_names_keeps_both(tmp_path: Path, mesh: dict[str, int]) -> None:
    """A trainer saved the model once with and once without the wrapper of torch.compile."""
    model = llama()
    state = {f"optimizer.state.{name}.exp_avg": value("F32", *each[1], seed=9) for name, each in model.items()}
    plain = {**model, **state, "train_state.step": value("I64", 3)}
    wrapped = {**{f"_orig_mod.{name}": each for name, each in model.items()}}
    wrapped |= {name.replace("state.", "state._orig_mod.", 1): each for name, each in state.items()}
    source = write_dcp(tmp_path / "dcp", {**plain, **wrapped}, config=CONFIG)
    report = (
        ckptx.reshard(source, tmp_path / "out", to="dcp", **mesh)
        if mesh
        else ckptx.convert("to-dcp", source, tmp_path / "out")
    )
    expected, found = load(source), load(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert [name for name, each in expected.items() if raw(found[name]) != raw(each)] == []
    assert report.aliases.keys() == wrapped.keys()
    assert report.ledger["written"] == len(plain) and report.ledger["tied"] == len(wrapped)
    rows = manifest_of(tmp_path / "out")["tensors"]
    assert {name: row["tied_to"] for name, row in rows.items() if "tied_to" in row} == report.aliases
