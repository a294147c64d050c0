"""Adapters of parameters that hold all experts of a layer (`target_parameters`), against PEFT."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file

import ckptx
from ckptx.errors import InputError, UnsupportedError
from tests.support.models import RECIPES, Recipe, load, outputs, read_file, read_hf, tokens, write
from tests.support.peft_adapters import ulps


def _gpt_oss(**changes: Any) -> Any:
    """Build a model whose experts are stored as [experts, in, out]."""
    sizes = {
        "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 101,
        "layer_types": ["sliding_attention", "full_attention"], **changes,
    }  # fmt: skip
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes))


_BOTH = ["experts.gate_up_proj", "experts.down_proj"]
CASES = {
    "one for each expert on disk": (RECIPES["qwen3-moe"], ["q_proj"], _BOTH),
    "linear layers of experts": (RECIPES["deepseek-v3"], ["gate_proj", "up_proj", "down_proj"], None),
    "one parameter": (RECIPES["mixtral"], ["q_proj"], ["experts.down_proj"]),
    "one tensor on disk": (RECIPES["gemma4-moe"], ["q_proj"], _BOTH),
    "transposed": (Recipe(_gpt_oss, tokens), ["q_proj"], _BOTH),
}


def _train(recipe: Recipe, targets: list[str], parameters: list[str] | None, root: Path) -> None:
    write(recipe, root / "model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LoraConfig(
            r=4, lora_alpha=6, target_modules=targets, target_parameters=parameters, init_lora_weights=False
        )
        get_peft_model(load(root / "model"), config).save_pretrained(root / "adapter")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_merged_experts_equal_those_of_peft(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    recipe, targets, parameters = CASES[case]
    recipe = replace(recipe, dtype=dtype)
    _train(recipe, targets, parameters, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wide = PeftModel.from_pretrained(load(tmp_path / "model"), tmp_path / "adapter").double().merge_and_unload()
        separate = PeftModel.from_pretrained(load(tmp_path / "model"), tmp_path / "adapter").eval()
    report = ckptx.merge(tmp_path / "model", tmp_path / "adapter", tmp_path / "out")
    merged = load(tmp_path / "out")
    exact = wide.state_dict()
    for name, tensor in merged.state_dict().items():
        if tensor.is_floating_point():
            assert ulps(tensor, exact[name].to(tensor.dtype)) <= 1, name
    if dtype is torch.float32:
        for mine, theirs in zip(outputs(merged, recipe.inputs()), outputs(separate, recipe.inputs()), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    before, after = read_hf(tmp_path / "model"), read_hf(tmp_path / "out")
    assert report.merged_weights == sum(not torch.equal(before[name], after[name]) for name in before)
    ckptx.merge(tmp_path / "model", tmp_path / "adapter", tmp_path / "sharded", tp=2)
    assert ckptx.verify(tmp_path / "out", tmp_path / "sharded").exit == 0


@pytest.mark.parametrize("sizes", [{"intermediate_size": 16}, {"intermediate_size": 32}])
def test_shapes_that_do_not_tell_are_refused(sizes: dict[str, int], tmp_path: Path) -> None:
    """With equal sizes, the orientation or the parameter of a pair of factors is not known."""
    _train(replace(Recipe(lambda: _gpt_oss(**sizes), tokens), dtype=torch.float32), ["q_proj"], _BOTH, tmp_path)
    with pytest.raises(UnsupportedError, match="fit several parameters or orientations"):
        ckptx.merge(tmp_path / "model", tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_experts_of_another_model_are_refused(tmp_path: Path) -> None:
    recipe, targets, parameters = CASES["one for each expert on disk"]
    _train(replace(recipe, dtype=torch.float32), targets, parameters, tmp_path)
    path = tmp_path / "adapter/adapter_model.safetensors"
    tensors = read_file(path)
    changed = {name: each[:, :-4].contiguous() if ".experts.lora_B" in name else each for name, each in tensors.items()}
    save_file(changed, path, {"format": "pt"})
    with pytest.raises(InputError, match="fit none of its parameters"):
        ckptx.merge(tmp_path / "model", tmp_path / "adapter", tmp_path / "out")
    save_file(tensors, path, {"format": "pt"})
    config_path = tmp_path / "adapter/adapter_config.json"
    config = json.loads(config_path.read_text())
    for changes, error, text in (
        ({"target_parameters": None}, UnsupportedError, "names no target_parameters"),
        ({"target_parameters": ["experts.down_proj"]}, InputError, "names 1 of its parameters"),
        ({"r": 2}, InputError, "rank"),
        ({"auto_mapping": {"unsloth_fixed": True}}, UnsupportedError, "Unsloth"),
    ):
        config_path.write_text(json.dumps({**config, **changes}))
        with pytest.raises(error, match=text):
            ckptx.merge(tmp_path / "model", tmp_path / "adapter", tmp_path / "out")
