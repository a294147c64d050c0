"""Families of Megatron Bridge that megatron-core builds without TransformerEngine, on a CPU and without MTP layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptx
from tests.judges.megatron_family import FACTORS
from tests.judges.megatron_writer import TOKENS
from tests.support.megatron_bridge_families import FAMILIES, config_of, save_model
from tests.support.megatron_models import run_on_mesh

CLASSES = [name for name, (model_type, _) in FAMILIES.items() if model_type in FACTORS]


def make_config(class_name: str, **settings: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    key = FACTORS[FAMILIES[class_name][0]]
    factor = {} if key is None else {key: 2.5}
    return config_of(
        class_name, num_nextn_predict_layers=0, rms_norm_eps=1e-6, rope_parameters=rope, **factor, **settings
    )


@pytest.mark.parametrize("class_name", CLASSES)
def test_megatron_loads_and_saves_a_family(class_name: str, tmp_path: Path) -> None:
    config = make_config(class_name, layer_types=["sliding_attention"] * 3, sliding_window=64, dtype="float32")
    weights = save_model(tmp_path / "hf", config, torch.float32)
    ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "megatron", pad_vocab_to_multiple_of=1)
    (output,) = run_on_mesh(
        "tests.judges.megatron_family", tmp_path / "hf", tmp_path / "megatron", tp=1, pp=1, ep=1, style=""
    )
    assert "tensors are equal" in output
    ckptx.convert("to-hf", tmp_path / "megatron.saved", tmp_path / "back", base=tmp_path / "hf")
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == weights.keys()
    assert [name for name in weights if not torch.equal(found[name], weights[name])] == []
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        logits = model.eval()(TOKENS).logits
    expected = load_file(tmp_path / "megatron.logits")["logits"]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
