"""Quantized experts through whole conversions: nothing vanishes, scales are cut with their weights, files come back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ckptx
from ckptx.errors import UnsupportedError
from ckptx.formats.registry import open_checkpoint
from tests.mapping.test_quantization_scales import KINDS
from tests.support.checkpoint_writers import SINGLE, Value, value, write_hf

pytest.importorskip("transformers")  # the shapes of a class with experts may come from its model

HIDDEN, INNER, EXPERTS = 16, 16, 3
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "moe_intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "vocab_size": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}


def moe(root: Path, kind_name: str) -> Path:
    """A Qwen3-MoE whose projections are all quantized alike."""
    kind = KINDS[kind_name]
    shapes = {"model.embed_tokens.weight": (8, HIDDEN), "lm_head.weight": (8, HIDDEN), "model.norm.weight": (HIDDEN,)}
    modules: dict[str, tuple[int, ...]] = {}
    for layer in range(2):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{name}.weight": (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{at}.self_attn.{name}.weight": (4,) for name in ("q_norm", "k_norm")}
        shapes[f"{at}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
        rows = {"q": 16, "k": 8, "v": 8, "o": HIDDEN}
        modules |= {f"{at}.self_attn.{name}_proj": (rows[name], 16) for name in rows}
        for expert in range(EXPERTS):
            modules |= {f"{at}.mlp.experts.{expert}.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up", "down")}
    tensors: dict[str, Value] = {name: value("BF16", *shape, seed=1) for name, shape in shapes.items()}
    for seed, (module, shape) in enumerate(modules.items()):
        for tail, (dtype, sizes) in kind.tensors(shape).items():
            tensors[f"{module}.{tail}"] = value(dtype, *sizes, seed=seed)
    return write_hf(root, tensors, config=CONFIG | {"quantization_config": kind.config})


@pytest.mark.sampled(6)
@pytest.mark.parametrize("to", ["safetensors", "dcp"])
@pytest.mark.parametrize("kind", [name for name in KINDS if name != "none"])
def test_every_kind_comes_back(tmp_path: Path, kind: str, to: str) -> None:
    source = moe(tmp_path / "hf", kind)
    report = ckptx.reshard(source, tmp_path / "cut", to=to, tp=2, pp=2)
    ledger = report.ledger
    assert ledger["source"] == ledger["written"] == len(open_checkpoint(source).tensors)
    assert ckptx.verify(source, tmp_path / "cut").exit == 0
    names = set(open_checkpoint(tmp_path / "cut").tensors)
    is_fused = "model.layers.0.mlp.experts.gate_up_proj" in names
    assert is_fused == (to == "safetensors" and KINDS[kind].is_fused)
    assert ("model.layers.0.mlp.experts.gate_up_proj_scale_inv" in names) == is_fused
    assert is_fused == (not any(".experts.0." in name for name in names))
    if to == "safetensors" and not is_fused and any(name.endswith(".weight") for name in KINDS[kind].tensors((4, 4))):
        assert any("quantized, names unchanged" in note for note in report.notes)
    ckptx.convert("dcp2hf", tmp_path / "cut", tmp_path / "back")
    assert (tmp_path / "back" / SINGLE).read_bytes() == (source / SINGLE).read_bytes()


@pytest.mark.parametrize("to", ["safetensors", "dcp"])
@pytest.mark.parametrize("tp", [2, 4])
def test_scales_of_blocks_are_cut_where_their_weights_are(tmp_path: Path, to: str, tp: int) -> None:
    source = moe(tmp_path / "hf", "fp8 in blocks")
    ckptx.reshard(source, tmp_path / "cut", to=to, tp=tp)
    tensors = open_checkpoint(tmp_path / "cut").tensors
    scales = [name for name in tensors if name.endswith("_scale_inv")]
    assert any("experts" in name for name in scales)
    for name in scales:
        weight, scale = tensors[name.removesuffix("_scale_inv")], tensors[name]
        sides = [size // count for size, count in zip(weight.shape, scale.shape, strict=True)]  # 1 along the experts
        starts = {chunk.region.offsets for chunk in weight.chunks}
        is_between_blocks = all(at % side == 0 for offsets in starts for at, side in zip(offsets, sides, strict=True))
        assert is_between_blocks or "experts" not in name
        blocks = {tuple(at // side for at, side in zip(offsets, sides, strict=True)) for offsets in starts}
        cut = {chunk.region.offsets for chunk in scale.chunks}
        assert cut == (blocks if is_between_blocks else {(0,) * len(scale.shape)}), name


def test_fused_scales_come_apart_without_a_manifest(tmp_path: Path) -> None:
    source = moe(tmp_path / "hf", "fp8 in blocks")
    ckptx.reshard(source, tmp_path / "cut", to="safetensors", tp=2)
    (tmp_path / "cut" / "ckptx.json").unlink()
    ckptx.convert("dcp2hf", tmp_path / "cut", tmp_path / "back", names="hf")
    assert open_checkpoint(tmp_path / "back").tensors.keys() == open_checkpoint(source).tensors.keys()
    assert ckptx.verify(source, tmp_path / "back").exit == 0


@pytest.mark.parametrize("kind", ["fp8 in blocks", "nvfp4"])
def test_torchtitan_has_no_names_for_them(tmp_path: Path, kind: str) -> None:
    source = moe(tmp_path / "hf", kind)
    with pytest.raises(UnsupportedError, match="--names torchtitan"):
        ckptx.convert("hf2dcp", source, tmp_path / "dcp", names="torchtitan")
    assert not (tmp_path / "dcp").exists()


def test_the_scales_of_a_quantized_model_are_not_called_unknown(tmp_path: Path) -> None:
    source = moe(tmp_path / "hf", "fp8 in blocks")
    assert ckptx.inspect(source).unknown_tensors == []
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (source / "config.json").write_text(json.dumps(config))
    assert ckptx.inspect(source).unknown_tensors != []
