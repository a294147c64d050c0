"""`pytorch_model.bin` as torch writes it, whole and in shards: shared storages, views, and the legacy format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import ckptx
from ckptx.errors import UnsupportedError
from tests.support.models import RECIPES, assert_same_outputs, build, load, outputs, read_hf, write
from tests.support.torch_dcp import assert_same_tensors, metadata, payload_bytes, raw
from tests.support.torch_dcp import load as stock_load

TIED = RECIPES["llama-tied"]


def state_dict() -> dict[str, torch.Tensor]:
    """Of a tied model: `lm_head.weight` shares its storage, and one matrix is kept transposed."""
    model = build(TIED)
    state = dict(model.state_dict())
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    name = "model.layers.0.mlp.up_proj.weight"
    state[name] = state[name].t().contiguous().t()
    assert not state[name].is_contiguous()
    wide = torch.randn(32, 200, generator=torch.Generator().manual_seed(0)).to(state[name].dtype)
    wide[:, 50:147] = state["model.layers.0.mlp.down_proj.weight"]
    state["model.layers.0.mlp.down_proj.weight"] = wide[:, 50:147]
    return state


def whole(path: Path, state: dict[str, torch.Tensor]) -> None:
    torch.save(state, path / "pytorch_model.bin")


def in_shards(path: Path, state: dict[str, torch.Tensor]) -> None:
    """Three files and an index; the tied names are in one file, as `save_pretrained` kept them."""
    names = list(state)
    shards = [names[:8], names[8:16], [name for name in names[16:] if name != "lm_head.weight"]]
    shards[0].append("lm_head.weight")
    weight_map = {}
    for i, shard in enumerate(shards):
        file = f"pytorch_model-{i + 1:05d}-of-00003.bin"
        torch.save({name: state[name] for name in shard}, path / file)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The model as safetensors, for comparison, and a directory with its config alone."""
    write(TIED, tmp_path / "reference")
    (tmp_path / "hf").mkdir()
    for name in ("config.json", "generation_config.json"):
        shutil.copy(tmp_path / "reference" / name, tmp_path / "hf")
    return tmp_path / "hf"


@pytest.mark.parametrize("save", [whole, in_shards])
def test_bin_becomes_a_dcp_and_safetensors(save: object, config: Path, tmp_path: Path) -> None:
    assert callable(save)
    save(config, state_dict())
    report = ckptx.convert("hf2dcp", config, tmp_path / "dcp")
    expected = read_hf(tmp_path / "reference")
    expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    assert_same_tensors(stock_load(tmp_path / "dcp"), expected)
    assert report.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    ckptx.convert("hf2dcp", tmp_path / "reference", tmp_path / "from_safetensors")
    assert payload_bytes(tmp_path / "dcp") == payload_bytes(tmp_path / "from_safetensors")
    ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "out")
    assert_same_outputs(
        outputs(load(tmp_path / "out"), TIED.inputs()), outputs(load(tmp_path / "reference"), TIED.inputs())
    )
    for other in (tmp_path / "reference", tmp_path / "dcp", tmp_path / "out"):
        assert ckptx.verify(config, other).exit == 0
        assert ckptx.diff(config, other).exit == 0


@pytest.mark.parametrize("save", [whole, in_shards])
def test_transformers_reads_the_same_from_the_bin(save: object, config: Path, tmp_path: Path) -> None:
    """The oracle of the oracle: what `from_pretrained` makes of these files is what the comparison is with."""
    assert callable(save)
    save(config, state_dict())
    assert_same_outputs(outputs(load(config), TIED.inputs()), outputs(load(tmp_path / "reference"), TIED.inputs()))


def test_undeclared_sharing_of_a_storage_gives_both_names_their_bytes(config: Path, tmp_path: Path) -> None:
    state = state_dict()
    (config / "config.json").unlink()
    whole(
        config,
        {"a": state["lm_head.weight"], "b": state["model.embed_tokens.weight"], "c": state["lm_head.weight"][3:5]},
    )
    ckptx.convert("hf2dcp", config, tmp_path / "dcp")
    loaded = stock_load(tmp_path / "dcp")
    assert set(metadata(tmp_path / "dcp")) == {"a", "b", "c"}
    assert raw(loaded["a"]) == raw(loaded["b"]) == raw(state["lm_head.weight"])
    assert raw(loaded["c"]) == raw(state["lm_head.weight"][3:5])


def test_legacy_format_is_refused(config: Path, tmp_path: Path) -> None:
    torch.save(state_dict(), config / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedError, match=r"pytorch_model\.bin") as refusal:
        ckptx.convert("hf2dcp", config, tmp_path / "dcp")
    assert refusal.value.exit_code == 4
    assert not (tmp_path / "dcp").exists()
