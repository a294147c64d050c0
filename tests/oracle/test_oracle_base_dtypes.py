"""A float32 step of a mixed model: transformers must load what training made, or what the base had, under any names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.support.replays import read_tensors, run_convert
from tests.support.torch_dcp import assert_same_tensors

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base` in bf16 with routers in fp32, experts apart; `step` all in fp32 under the names of the model."""
    root = tmp_path_factory.mktemp("trained")
    config = Qwen3MoeConfig(
        hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=8, vocab_size=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).bfloat16()
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data = parameter.data.float()
    model.save_pretrained(root / "base")
    dcp.save(state(model.float()), checkpoint_id=root / "step", no_dist=True)
    return root


def state(model: Qwen3MoeForCausalLM) -> dict[str, torch.Tensor]:
    """Trained a little: no value is one of bf16 any more."""
    return {name: tensor + 1e-4 for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("names", ["hf", "model"])
def test_the_base_decides_under_names_that_are_not_its_own(trained: Path, tmp_path: Path, names: str) -> None:
    base = read_tensors(trained / "base")
    for dtype in ("base", "bf16"):
        options = ("--base", trained / "base", "--names", names, "--dtype", dtype)
        report = run_convert("dcp2hf", trained / "step", tmp_path / dtype, *options)
        found = read_tensors(tmp_path / dtype)
        routers = {name for name, tensor in found.items() if tensor.dtype is torch.float32}
        assert routers == {name for name in base if name.endswith("mlp.gate.weight")}
        assert {tensor.dtype for name, tensor in found.items() if name not in routers} == {torch.bfloat16}
        assert report["config_edits"] == []
    assert (names == "hf") is (found.keys() == base.keys())


def test_from_pretrained_rounds_nothing_of_a_step_as_it_is(trained: Path, tmp_path: Path) -> None:
    report = run_convert("dcp2hf", trained / "step", tmp_path / "hf", "--base", trained / "base", "--names", "hf")
    assert [(edit["key"], edit["after"]) for edit in report["config_edits"]] == [("dtype", "float32")]
    expected = Qwen3MoeForCausalLM.from_pretrained(trained / "base", dtype=torch.float32)
    model = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "hf")
    assert_same_tensors(dict(model.state_dict()), state(expected))
