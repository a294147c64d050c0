"""Checkpoints that megatron-core saves, the logits that it computes, and checkpoints of ckptx that it loads.

`make judges` installs megatron-core and runs this folder. The weights get into Megatron's model by formulas in torch
operations (`tests/support/megatron_layout.py`), so no code of ckptx decides where a row belongs.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptx
from tests.judges.megatron_writer import TOKENS, optimizer_values
from tests.support.megatron_models import config_of, load_with_megatron, save_model, write_with_megatron
from tests.support.torch_dcp import load

MESHES = {
    "LlamaForCausalLM": (2, 2, 1, "stacked"),
    "Qwen2ForCausalLM": (2, 1, 1, "layers"),
    "Qwen3MoeForCausalLM": (2, 2, 1, "layers"),
    "MixtralForCausalLM": (1, 2, 2, "stacked"),
}


@pytest.mark.parametrize("class_name", MESHES)
def test_what_ranks_save_is_the_model_that_was_laid_out(class_name: str, tmp_path: Path) -> None:
    tp, pp, ep, style = MESHES[class_name]
    weights = save_model(tmp_path / "hf", config_of(class_name))
    write_with_megatron(tmp_path / "hf", tmp_path / "iter_0000001", tp=tp, pp=pp, ep=ep, style=style)
    report = ckptx.convert("to-hf", tmp_path / "iter_0000001", tmp_path / "out", base=tmp_path / "hf")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert report.exit == 0 and found.keys() == weights.keys()
    assert [name for name in weights if not torch.equal(found[name], weights[name])] == []
    assert ckptx.verify(tmp_path / "hf", tmp_path / "iter_0000001", strict=True).exit == 0
    assert torch.equal(logits_of(tmp_path / "out"), logits_of(tmp_path / "hf"))


@pytest.mark.parametrize("class_name", MESHES)
def test_the_optimizer_state_of_megatron_is_that_of_the_parameters(class_name: str, tmp_path: Path) -> None:
    tp, pp, ep, style = MESHES[class_name]
    weights = save_model(tmp_path / "hf", config_of(class_name))
    source = tmp_path / "iter_0000001"
    write_with_megatron(tmp_path / "hf", source, tp=tp, pp=pp, ep=ep, style=f"{style}+optimizer")
    report = ckptx.convert("to-dcp", source, tmp_path / "out", base=tmp_path / "hf", tied="drop")
    assert report.exit == 0 and not any("optimizer" in each["name"] for each in report.dropped)
    found = load(tmp_path / "out")
    suffixes = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "fp32_param": "master_param"}
    expected = {
        f"optimizer.state.{name}.{suffixes[kind]}": value
        for kind, values in optimizer_values(weights).items()
        for name, value in values.items()
    }
    expected |= {f"optimizer.state.{name}.step": torch.tensor(7.0) for name in weights}
    state = {name: value for name, value in found.items() if name.startswith("optimizer.")}
    tied = {name for name in state if ".lm_head." in name} if "lm_head.weight" not in weights else set()
    assert state.keys() - tied == expected.keys()
    assert [name for name in expected if not torch.equal(state[name], expected[name])] == []


@pytest.mark.parametrize("class_name", ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_transformers_computes_the_logits_of_megatron(class_name: str, tmp_path: Path) -> None:
    """In float32, so that only the order of additions differs."""
    save_model(tmp_path / "hf", config_of(class_name, dtype="float32"), torch.float32)
    write_with_megatron(tmp_path / "hf", tmp_path / "iter_0000001")
    ckptx.convert("to-hf", tmp_path / "iter_0000001", tmp_path / "out", base=tmp_path / "hf")
    found = logits_of(tmp_path / "out")
    expected = load_file(tmp_path / "iter_0000001.logits")["logits"][..., : found.shape[-1]]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# Class, TP, PP, EP, form of the layers, and multiple of the vocabulary: Megatron's model has 32 rows for 26 tokens. The
# model is the same for both forms: Megatron takes the form from `common.pt`.
LOADED = {
    "Llama on TP 2": ("LlamaForCausalLM", 2, 1, 1, "stacked", 32),
    "Llama on TP 2, separate layers, a vocabulary without padding": ("LlamaForCausalLM", 2, 1, 1, "separate", 1),
    "Qwen2, tied, on TP 2 x PP 2, a vocabulary with more padding": ("Qwen2ForCausalLM", 2, 2, 1, "stacked", 128),
    "Qwen3 MoE on EP 2 x PP 2": ("Qwen3MoeForCausalLM", 1, 2, 2, "stacked", 32),
    "Mixtral on TP 2, separate layers": ("MixtralForCausalLM", 2, 1, 1, "separate", 32),
}


@pytest.mark.parametrize("case", LOADED)
def test_megatron_loads_what_ckptx_writes(case: str, tmp_path: Path) -> None:
    class_name, tp, pp, ep, layers, multiple = LOADED[case]
    config = config_of(class_name)
    save_model(tmp_path / "hf", config)
    ckptx.convert(
        "to-megatron", tmp_path / "hf", tmp_path / "megatron", layers=layers, pad_vocab_to_multiple_of=multiple
    )
    outputs = load_with_megatron(tmp_path / "hf", tmp_path / "megatron" / "release", tp=tp, pp=pp, ep=ep)
    assert len(outputs) == pp * max(tp, ep) and all("parameters are equal" in output for output in outputs)


def test_the_comparison_finds_swapped_rows(tmp_path: Path) -> None:
    weights = save_model(tmp_path / "hf", config_of("LlamaForCausalLM"))
    shutil.copytree(tmp_path / "hf", tmp_path / "other")
    name = "model.layers.2.self_attn.k_proj.weight"
    save_file({**weights, name: weights[name].flip(0)}, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    ckptx.convert("to-megatron", tmp_path / "other", tmp_path / "megatron", pad_vocab_to_multiple_of=32)
    with pytest.raises(RuntimeError, match=r"AssertionError: decoder\.layers\.2\.self_attention\.linear_qkv\.weight"):
        load_with_megatron(tmp_path / "hf", tmp_path / "megatron" / "release", tp=2)


def logits_of(path: Path) -> torch.Tensor:
    """The logits of transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", experts_implementation="eager")
    with torch.no_grad():
        return model(TOKENS).logits.float()  # type: ignore[no-any-return]
