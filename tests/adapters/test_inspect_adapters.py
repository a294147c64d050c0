"""`inspect`, `diff` and `verify` of adapters: settings and contents, and settings as differences."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckptx
from ckptx.errors import InputError, UnsupportedError
from ckptx.report.text import inspect_text
from tests.support.checkpoint_writers import write_hf


def tensors(rank: int = 2, layers: int = 2) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter on q_proj of each layer, with a trained head."""
    generator = torch.Generator().manual_seed(0)
    found = {"base_model.model.lm_head.weight": torch.randn(11, 8, generator=generator)}
    for layer in range(layers):
        module = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        found[f"{module}.lora_A.weight"] = torch.randn(rank, 8, generator=generator)
        found[f"{module}.lora_B.weight"] = torch.randn(8, rank, generator=generator)
    return found


def write_adapter(path: Path, **settings: Any) -> Path:
    path.mkdir()
    save_file(tensors(), path / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"],
        "base_model_name_or_path": "org/name", **settings,
    }  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def test_inspect_describes_an_adapter(tmp_path: Path) -> None:
    report = ckptx.inspect(write_adapter(tmp_path / "adapter"))
    assert report.format == "peft" and report.architecture is None and not report.config_check
    assert report.adapter == {
        "ranks": [2], "alphas": [6.0], "scalings": [3.0], "rslora": False, "dora": False, "modules": ["q_proj"],
        "layers": 2, "replaced": ["lm_head.weight"], "has_config": True, "base": "org/name",
        "bytes": 4 * (11 * 8 + 4 * 16),
    }  # fmt: skip
    text = inspect_text(report)
    assert "LoRA, rank 2, alpha 6 (scaling 3), q_proj (2 modules)" in text
    assert "trained on    org/name" in text and "architecture" not in text


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_file_of_an_adapter_is_the_adapter(name: str, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    assert ckptx.inspect(adapter / name).adapter == ckptx.inspect(adapter).adapter


def test_bin_is_read_like_safetensors(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    shutil.copytree(adapter, tmp_path / "bin")
    torch.save(load_file(tmp_path / "bin/adapter_model.safetensors"), tmp_path / "bin/adapter_model.bin")
    (tmp_path / "bin/adapter_model.safetensors").unlink()
    assert ckptx.verify(adapter, tmp_path / "bin").exit == 0
    assert ckptx.inspect(tmp_path / "bin").adapter == ckptx.inspect(adapter).adapter


def test_inspect_names_an_adapter_that_cannot_be_merged(tmp_path: Path) -> None:
    report = ckptx.inspect(write_adapter(tmp_path / "adapter", peft_type="IA3"))
    assert report.adapter is None and report.tensors == 5
    assert any("IA3" in note for note in report.notes)


def test_inspect_finds_the_adapter_in_a_training_checkpoint(tmp_path: Path) -> None:
    state = {name.replace(".weight", ".default.weight"): each for name, each in tensors().items() if "lora" in name}
    dcp.save({"model": {**state, "base_model.model.model.norm.weight": torch.ones(8)}}, checkpoint_id=tmp_path / "step")
    report = ckptx.inspect(tmp_path / "step")
    assert report.adapter is not None
    assert report.adapter["ranks"] == [2] and report.adapter["layers"] == 2 and report.adapter["alphas"] == []
    assert "alpha not recorded" in inspect_text(report)


def test_inspect_finds_the_adapter_of_torchtitan(tmp_path: Path) -> None:
    """Its names need a config, and without one a note says so."""
    names = [f"layers.0.attention.w{part}.lora_{kind}.weight" for part in "qk" for kind in "ab"]
    state = {name: torch.ones((2, 32) if name.endswith("a.weight") else (32, 2)) for name in names}
    dcp.save({**state, "tok_embeddings.weight": torch.ones(11, 32)}, checkpoint_id=tmp_path / "step")
    report = ckptx.inspect(tmp_path / "step")
    assert report.adapter is None and any("torchtitan" in note for note in report.notes)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "num_attention_heads": 4,
        "num_key_value_heads": 4, "num_hidden_layers": 1, "vocab_size": 11, "intermediate_size": 16,
    }  # fmt: skip
    (tmp_path / "step/config.json").write_text(json.dumps(config))
    report = ckptx.inspect(tmp_path / "step")
    assert report.adapter is not None and report.adapter["modules"] == ["q_proj", "k_proj"]


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"lora_alpha": 7}, "lora_alpha"),
        ({"use_rslora": True}, "use_rslora"),
        ({"alpha_pattern": {"layers.1.*": 7}}, "alpha_pattern"),
    ],
)
def test_settings_that_change_the_result_are_differences(settings: dict[str, Any], name: str, tmp_path: Path) -> None:
    first, second = write_adapter(tmp_path / "a"), write_adapter(tmp_path / "b", **settings)
    for report in (ckptx.verify(first, second), ckptx.diff(first, second)):
        assert report.exit == 1
        assert [(each["name"], each["what"]) for each in report.differing] == [
            (f"adapter_config.json: {name}", "setting")
        ]


def test_settings_without_effect_are_none(tmp_path: Path) -> None:
    first = write_adapter(tmp_path / "a")
    second = write_adapter(
        tmp_path / "b", base_model_name_or_path="other/name", lora_dropout=0.1, target_modules="all-linear"
    )
    assert ckptx.verify(first, second).exit == 0 and ckptx.diff(first, second).exit == 0


def test_an_adapter_is_not_compared_with_a_model(tmp_path: Path) -> None:
    model = write_hf(tmp_path / "model", {"model.norm.weight": ("F32", [8], bytes(32))})
    for compare in (ckptx.verify, ckptx.diff):
        with pytest.raises(InputError, match=r"is an adapter, and .* is a model"):
            compare(write_adapter(tmp_path / compare.__name__), model)


def test_other_commands_refuse_an_adapter(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    for direction in ("to-hf", "to-megatron"):
        with pytest.raises(UnsupportedError, match="is an adapter, not a model"):
            ckptx.convert(direction, adapter, tmp_path / "out")
    with pytest.raises(UnsupportedError, match="is an adapter, not a model"):
        ckptx.reshard(adapter, tmp_path / "out", tp=2)
    with pytest.raises(UnsupportedError, match="is an adapter, not a model"):
        ckptx.convert("to-dcp", adapter, tmp_path / "out", tp=2)
