"""The bias of each expert in models of torchtitan: dropped, renamed, or added as zeros."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckptx
from ckptx.errors import CkptxError, InputError
from ckptx.formats.registry import open_checkpoint
from tests.support import torch_dcp
from tests.support.models import EVERY, build, read_hf

BIASES = {f"layers.{layer}.moe.expert_bias_E": torch.tensor([0.5, -1.0, 2.0, 0.25]) + layer for layer in range(2)}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a Qwen3-MoE as on the Hub, `hub`, and under torchtitan's names, `titan`."""
    root = tmp_path_factory.mktemp("qwen")
    build(EVERY["qwen3-moe"]).save_pretrained(root / "hub")
    ckptx.convert("to-dcp", root / "hub", root / "titan", names="torchtitan")
    return root


def save_trained(root: Path, biases: dict[str, torch.Tensor]) -> Path:
    """Save the model with these biases, a step and optimizer state, as torchtitan does; returns the checkpoint."""
    state = {name: each for name, each in torch_dcp.load(root / "titan").items() if "expert_bias" not in name}
    moments = {f"optimizer.state.{name}.exp_avg": torch.zeros_like(each) for name, each in state.items()}
    path = root / f"trained {len(biases)} {next(iter(biases), '')}"
    dcp.save({**state, **biases, **moments, "train_state.step": torch.tensor(7)}, checkpoint_id=path, no_dist=True)
    return path


def test_zeros_are_written_for_torchtitan_and_dropped_on_the_way_back(qwen: Path, tmp_path: Path) -> None:
    stored = torch_dcp.load(qwen / "titan")
    for name, bias in BIASES.items():
        assert torch.equal(stored[name], torch.zeros_like(bias)) and stored[name].dtype is torch.float32
    report = ckptx.convert("to-hf", qwen / "titan", tmp_path / "back")
    assert {row["name"] for row in report.dropped} == BIASES.keys()
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / file).read_bytes() == (qwen / "hub" / file).read_bytes()


@pytest.mark.parametrize("legacy", [False, True])
def test_trained_biases_are_dropped_with_their_reason(legacy: bool, qwen: Path, tmp_path: Path) -> None:
    biases = {name.removesuffix("_E") if legacy else name: bias for name, bias in BIASES.items()}
    report = ckptx.convert("to-hf", save_trained(qwen, biases), tmp_path / "out", base=qwen / "hub")
    reasons = {row["name"]: row["reason"] for row in report.dropped if row["name"] in biases}
    assert set(reasons.values()) == {"Qwen3MoeForCausalLM has no bias for balancing the load of its experts"}
    assert reasons.keys() == biases.keys()
    assert any("unless these biases are zero" in note for note in report.notes)
    torch_dcp.assert_same_tensors(read_hf(tmp_path / "out"), read_hf(qwen / "hub"))


def test_a_resharded_checkpoint_keeps_the_biases(qwen: Path, tmp_path: Path) -> None:
    trained = save_trained(qwen, BIASES)
    assert ckptx.reshard(trained, tmp_path / "out", tp=2, dp_shard=2, base=qwen / "hub").exit == 0
    torch_dcp.assert_same_tensors(torch_dcp.load(tmp_path / "out"), torch_dcp.load(trained))


def test_zeros_are_sharded_with_the_model(qwen: Path, tmp_path: Path) -> None:
    ckptx.reshard(qwen / "hub", tmp_path / "out", to="dcp", names="torchtitan", tp=2, dp_shard=2)
    torch_dcp.assert_same_tensors(torch_dcp.load(tmp_path / "out"), torch_dcp.load(qwen / "titan"))


def test_a_bias_of_another_name_is_still_refused(qwen: Path, tmp_path: Path) -> None:
    trained = save_trained(qwen, {"layers.0.moe.expert_bias_X": BIASES["layers.0.moe.expert_bias_E"]})
    with pytest.raises(CkptxError, match="has no such tensor"):
        ckptx.convert("to-hf", trained, tmp_path / "out", base=qwen / "hub")


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a DeepSeek-V3 with one MTP layer as on the Hub."""
    root = tmp_path_factory.mktemp("deepseek")
    model = build(EVERY["deepseek-v3"])
    model.save_pretrained(root / "hub")
    tensors = read_hf(root / "hub")
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors[bias] = torch.arange(1, 5, dtype=torch.float32)
    last = {name: each for name, each in tensors.items() if name.startswith("model.layers.1.")}
    tensors |= {name.replace("layers.1", "layers.2"): each + 1 for name, each in last.items()}
    hidden = model.config.hidden_size
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"model.layers.2.{name}.weight"] = torch.full([hidden], 3.0)
    tensors["model.layers.2.eh_proj.weight"] = torch.arange(2.0 * hidden * hidden).view(hidden, 2 * hidden)
    save_file(tensors, root / "hub" / "model.safetensors")
    config = json.loads((root / "hub" / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    (root / "hub" / "config.json").write_text(json.dumps(config))
    return root / "hub"


def test_deepseek_has_the_bias_on_the_hub(deepseek: Path, tmp_path: Path) -> None:
    ckptx.convert("to-dcp", deepseek, tmp_path / "titan", names="torchtitan")
    hub, titan = read_hf(deepseek), torch_dcp.load(tmp_path / "titan")
    expected = {
        "layers.1.moe.expert_bias_E": "layers.1.mlp.gate.e_score_correction_bias",
        "layers.0.attention.wq_a.weight": "layers.0.self_attn.q_a_proj.weight",
        "layers.0.attention.q_norm.weight": "layers.0.self_attn.q_a_layernorm.weight",
        "layers.0.attention.wq_b.weight": "layers.0.self_attn.q_b_proj.weight",
        "layers.0.attention.wkv_a.weight": "layers.0.self_attn.kv_a_proj_with_mqa.weight",
        "layers.0.attention.kv_norm.weight": "layers.0.self_attn.kv_a_layernorm.weight",
        "layers.1.attention.wkv_b.weight": "layers.1.self_attn.kv_b_proj.weight",
        "layers.0.feed_forward.w3.weight": "layers.0.mlp.up_proj.weight",
        "layers.1.moe.router.gate.weight": "layers.1.mlp.gate.weight",
        "layers.1.moe.shared_experts.w2.weight": "layers.1.mlp.shared_experts.down_proj.weight",
        "mtp_layers.0.moe.expert_bias_E": "layers.2.mlp.gate.e_score_correction_bias",
        "mtp_layers.0.attention_norm.weight": "layers.2.input_layernorm.weight",
        "mtp_layers.0.mtp_norm.weight": "layers.2.shared_head.norm.weight",
        "mtp_layers.0.eh_proj.weight": "layers.2.eh_proj.weight",
    }
    for name, disk_name in expected.items():
        assert torch.equal(titan[name], hub[f"model.{disk_name}"]), name
    for layer, disk_layer in (("layers.1", 1), ("mtp_layers.0", 2)):
        experts = [hub[f"model.layers.{disk_layer}.mlp.experts.{each}.down_proj.weight"] for each in range(4)]
        assert torch.equal(titan[f"{layer}.moe.routed_experts.inner_experts.w2_EDF"], torch.stack(experts))
    assert not [name for name in titan if "model." in name or name.startswith("layers.2.")]
    (tmp_path / "titan" / "ckptx.json").unlink()
    assert ckptx.convert("to-hf", tmp_path / "titan", tmp_path / "back", base=deepseek).exit == 0
    torch_dcp.assert_same_tensors(read_hf(tmp_path / "back"), hub)


def test_no_tensor_is_added_that_the_checkpoint_has(deepseek: Path, tmp_path: Path) -> None:
    report = ckptx.convert("to-dcp", deepseek, tmp_path / "titan", names="torchtitan")
    assert not [note for note in report.notes if "zeros" in note]
    assert len(open_checkpoint(tmp_path / "titan").tensors) == report.ledger["target"]["tensors"]


@pytest.mark.parametrize("count", [-1, 65, "one"])
def test_a_wrong_number_of_mtp_layers_is_refused(count: object, deepseek: Path, tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "model.safetensors").write_bytes((deepseek / "model.safetensors").read_bytes())
    config = json.loads((deepseek / "config.json").read_text())
    config["num_nextn_predict_layers"] = count
    (tmp_path / "hub" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="num_nextn_predict_layers"):
        ckptx.convert("to-dcp", tmp_path / "hub", tmp_path / "titan", names="torchtitan")
