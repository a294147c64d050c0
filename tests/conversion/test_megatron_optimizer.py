"""Optimizer state of Megatron that has the shapes of the parameters (`fully_reshardable`) is mapped along with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

import ckptx
from ckptx.errors import CkptxError
from tests.support.megatron_layout import to_megatron
from tests.support.megatron_models import MODELS, config_of, save_model
from tests.support.torch_dcp import load

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ROWS = 32  # of the padded vocabulary
KINDS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "fp32_param": "master_param"}
STEP = 1234


def common_state(step: Any = STEP) -> dict[str, Any]:
    """Return the contents of common.pt, as megatron-core's distributed optimizer fills it."""
    groups = [{"lr": 1e-4, "step": step}, {"lr": 1e-5, "step": step}]
    return {"iteration": STEP, "optimizer": {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "x"}}


def random_like(weights: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(value.shape, generator=generator) for name, value in weights.items()}


def save_training(
    tmp_path: Path,
    config: dict[str, Any],
    *,
    common: Any = None,
    prefix: str = "",
    chained: bool = False,
    **layout: Any,
) -> tuple[Path, dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Save weights and state as Megatron does; return the checkpoint, the weights, and the state by kind."""
    weights = save_model(tmp_path / "hf", config)
    state = {kind: random_like(weights, seed) for seed, kind in enumerate(KINDS)}
    tensors = to_megatron(weights, config, rows=ROWS, prefix=prefix, **layout)
    for kind, values in state.items():
        for name, value in to_megatron(values, config, rows=ROWS, prefix=prefix, **layout).items():
            chain = f"chained_{int('experts' in name)}." if chained else ""
            tensors[f"{chain}optimizer.state.{kind}.{name}"] = value
    path = tmp_path / "iter_0001234"
    dcp.save(tensors, checkpoint_id=path)
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    torch.save(common_state() if common is None else common, path / "common.pt")
    return path, weights, state


def expected_state(state: dict[str, dict[str, Tensor]], step: float | None = STEP) -> dict[str, Tensor]:
    names = next(iter(state.values()))
    expected = {
        f"optimizer.state.{name}.{KINDS[kind]}": value
        for kind, values in state.items()
        for name, value in values.items()
    }
    return expected | ({f"optimizer.state.{name}.step": torch.tensor(float(step)) for name in names} if step else {})


def assert_state(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    state = {name: value for name, value in found.items() if name.startswith("optimizer.")}
    assert state.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(state[name], expected[name])] == []


@pytest.mark.parametrize("layout", ["stacked", "separate", "chained"])
@pytest.mark.parametrize("class_name", [name for name in MODELS if name != "Qwen2ForCausalLM"])
def test_a_dcp_keeps_the_state_under_the_names_of_the_parameters(class_name: str, layout: str, tmp_path: Path) -> None:
    options = {"stacked": {}, "separate": {"stacked": False, "prefix": "module."}, "chained": {"chained": True}}[layout]
    source, weights, state = save_training(tmp_path, config_of(class_name), **options)
    report = ckptx.convert("to-dcp", source, tmp_path / "out", base=tmp_path / "hf")
    assert report.exit == 0 and report.ledger["written"] == report.ledger["source"] and report.dropped == []
    found = load(tmp_path / "out")
    assert_state(found, expected_state(state))
    assert [name for name, value in weights.items() if not torch.equal(found[name], value)] == []
    assert any("optimizer settings are not read" in note for note in report.notes)


def test_a_tied_head_has_the_state_of_the_embedding(tmp_path: Path) -> None:
    source, weights, state = save_training(tmp_path, config_of("Qwen2ForCausalLM"))
    assert "lm_head.weight" not in weights
    ckptx.convert("to-dcp", source, tmp_path / "out", base=tmp_path / "hf")
    found = load(tmp_path / "out")
    expected = expected_state(state)
    for suffix in (*KINDS.values(), "step"):
        expected[f"optimizer.state.lm_head.weight.{suffix}"] = expected[
            f"optimizer.state.model.embed_tokens.weight.{suffix}"
        ]
    assert_state(found, expected)


def test_it_is_resharded_with_the_parameters(tmp_path: Path) -> None:
    source, _, state = save_training(tmp_path, config_of("Qwen3MoeForCausalLM"))
    report = ckptx.reshard(source, tmp_path / "out", base=tmp_path / "hf", tp=2, pp=2, optimizer="keep")
    assert report.exit == 0
    assert_state(load(tmp_path / "out"), expected_state(state))
    assert ckptx.verify(source, tmp_path / "out").exit == 0


def test_the_masters_are_converted(tmp_path: Path) -> None:
    source, _, state = save_training(tmp_path, config_of("LlamaForCausalLM"))
    ckptx.convert("to-dcp", source, tmp_path / "dcp", base=tmp_path / "hf")
    ckptx.convert("to-hf", tmp_path / "dcp", tmp_path / "out", weights="masters")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert [name for name, value in state["fp32_param"].items() if not torch.equal(found[name], value)] == []


def test_hf_files_get_no_state_and_the_report_lists_it(tmp_path: Path) -> None:
    source, weights, state = save_training(tmp_path, config_of("LlamaForCausalLM"))
    report = ckptx.convert("to-hf", source, tmp_path / "out", base=tmp_path / "hf")
    stored = [name for name in ckptx.open_checkpoint(source).tensors if "optimizer.state" in name]
    assert report.dropped_optimizer is not None and report.dropped_optimizer["tensors"] == len(stored)
    assert sorted(each["name"] for each in report.dropped) == sorted(stored)
    assert any(f"optimizer state left out: {len(stored)} tensors" in note for note in report.notes)
    dropped = ckptx.convert("to-dcp", source, tmp_path / "dcp", base=tmp_path / "hf", optimizer="drop")
    assert len(dropped.dropped) == len(stored) and not any("optimizer" in name for name in load(tmp_path / "dcp"))
    assert state and weights


def test_state_of_some_parameters_is_enough(tmp_path: Path) -> None:
    """Frozen parameters have none."""
    config = config_of("LlamaForCausalLM")
    weights = save_model(tmp_path / "hf", config)
    tensors = to_megatron(weights, config, rows=ROWS)
    tensors["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = torch.ones(16)
    dcp.save(tensors, checkpoint_id=tmp_path / "step")
    ckptx.convert("to-dcp", tmp_path / "step", tmp_path / "out", base=tmp_path / "hf")
    assert_state(load(tmp_path / "out"), {"optimizer.state.model.norm.weight.exp_avg": torch.ones(16)})


@pytest.mark.parametrize(
    "common",
    [
        {}, {"optimizer": None}, {"optimizer": [{"optimizer": {"param_groups": [{"step": 3}, {"step": 4}]}}]},
        {"optimizer": {"step": "7"}}, {"optimizer": {"step": True}}, [],
    ],
    ids=str,
)  # fmt: skip
def test_without_one_step_the_state_has_none(common: Any, tmp_path: Path) -> None:
    source, _, state = save_training(tmp_path, config_of("LlamaForCausalLM"), common=common)
    report = ckptx.convert("to-dcp", source, tmp_path / "out", base=tmp_path / "hf")
    assert_state(load(tmp_path / "out"), expected_state(state, None))
    assert any("optimizer state without its step" in note for note in report.notes)


@pytest.mark.parametrize(
    "common",
    [
        {"optimizer": {"optimizer": {"state": {"common_step": STEP}, "param_groups": []}}},
        {"optimizer": {0: common_state()["optimizer"], 1: common_state()["optimizer"]}},
        {"optimizer": [common_state()["optimizer"]] * 2},
    ],
    ids=["common_step", "chained dict", "chained list"],
)
def test_the_step_is_found_in_every_form(common: Any, tmp_path: Path) -> None:
    source, _, state = save_training(tmp_path, config_of("LlamaForCausalLM"), common=common)
    ckptx.convert("to-dcp", source, tmp_path / "out", base=tmp_path / "hf")
    assert_state(load(tmp_path / "out"), expected_state(state))


def test_a_resumed_conversion_writes_the_same_files(tmp_path: Path) -> None:
    source, _, _ = save_training(tmp_path, config_of("LlamaForCausalLM"))
    for name in ("a", "b"):
        ckptx.convert("to-dcp", source, tmp_path / name, base=tmp_path / "hf")
    again = ckptx.convert("to-dcp", source, tmp_path / "a", base=tmp_path / "hf", resume=True)
    assert again.exit == 0
    files = [sorted((path.name, path.read_bytes()) for path in (tmp_path / name).glob("*.distcp")) for name in "ab"]
    assert files[0] == files[1]


# --- what cannot be mapped


def test_state_in_the_order_of_buffers_is_left_out(tmp_path: Path) -> None:
    config = config_of("LlamaForCausalLM")
    tensors = to_megatron(save_model(tmp_path / "hf", config), config, rows=ROWS)
    buffer = (
        "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg"
    )
    dcp.save({**tensors, buffer: torch.ones(99)}, checkpoint_id=tmp_path / "step")
    report = ckptx.convert("to-dcp", tmp_path / "step", tmp_path / "out", base=tmp_path / "hf")
    assert [each["name"] for each in report.dropped] == [buffer]
    assert not any("optimizer" in name for name in load(tmp_path / "out"))
    with pytest.raises(CkptxError, match=r"--optimizer keep: has no optimizer state that can be mapped") as caught:
        ckptx.convert("to-dcp", tmp_path / "step", tmp_path / "out2", base=tmp_path / "hf", optimizer="keep")
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("decoder.layers.mlp.linear_fc2.weight", (4, 16, 23), "has other rows or columns than its parameter"),
        ("decoder.layers.mlp.linear_fc2.weight", (3, 16, 24), "holds 3 layers"),
        ("decoder.layers.self_attention.linear_qkv.weight", (4, 60, 16), "does not split into"),
        ("decoder.layers.mlp.linear_fc3.weight", (4, 16, 24), "has no counterpart in LlamaForCausalLM"),
    ],
)
def test_state_of_another_model_is_refused(name: str, shape: tuple[int, ...], message: str, tmp_path: Path) -> None:
    config = config_of("LlamaForCausalLM")
    tensors = to_megatron(save_model(tmp_path / "hf", config), config, rows=ROWS)
    dcp.save({**tensors, f"optimizer.state.exp_avg.{name}": torch.ones(shape)}, checkpoint_id=tmp_path / "step")
    with pytest.raises(CkptxError) as caught:
        ckptx.convert("to-dcp", tmp_path / "step", tmp_path / "out", base=tmp_path / "hf")
    assert message in str(caught.value) and caught.value.exit_code in (3, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "step"]
    assert ckptx.convert("to-hf", tmp_path / "step", tmp_path / "out", base=tmp_path / "hf").exit == 0
