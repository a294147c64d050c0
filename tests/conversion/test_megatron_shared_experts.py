"""Megatron's names of models with latent attention, shared experts and layers for multi-token prediction (MTP).

megatron-core builds these layers on a GPU only, so the expected names and values are those of Megatron Bridge's
mappings, written out here in torch operations.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor

import ckptx
from ckptx.errors import CkptxError
from ckptx.report.text import conversion_text
from tests.support.megatron_layout import group_rows
from tests.support.torch_dcp import load

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

HIDDEN, FFN, EXPERT_FFN, EXPERTS, HEADS, KV_HEADS, VOCABULARY = 32, 48, 24, 4, 4, 2, 130
LAYERS = 3  # the first is dense
LATENT = {
    "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": HEADS,
}  # fmt: skip
SHARED = {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
GROUPED = {"num_key_value_heads": KV_HEADS, "head_dim": 8}
# Class -> model type, and settings in addition to the common ones.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepseekV3ForCausalLM": ("deepseek_v3", {**LATENT, **SHARED, "q_lora_rank": 16, "num_nextn_predict_layers": 1}),
    "DeepseekV2ForCausalLM": ("deepseek_v2", {**LATENT, **SHARED, "q_lora_rank": None}),
    "Glm4MoeLiteForCausalLM": (
        "glm4_moe_lite",
        {**LATENT, **SHARED, "q_lora_rank": 16, "num_nextn_predict_layers": 2},
    ),
    "Glm4MoeForCausalLM": (
        "glm4_moe",
        {**GROUPED, **SHARED, "use_qk_norm": True, "attention_bias": True, "num_nextn_predict_layers": 1},
    ),
    "OlmoeForCausalLM": ("olmoe", {"num_key_value_heads": KV_HEADS, "num_experts": EXPERTS}),
}


def config_of(class_name: str) -> dict[str, Any]:
    model_type, settings = FAMILIES[class_name]
    return {
        "architectures": [class_name], "model_type": model_type, "dtype": "bfloat16", "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": FFN,
        "moe_intermediate_size": EXPERT_FFN, "num_experts_per_tok": 2, "max_position_embeddings": 64,
        "tie_word_embeddings": False, "eos_token_id": 2, **settings,
    }  # fmt: skip


def attention_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of one attention block by name on the Hub."""
    if "kv_lora_rank" in config:
        rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
        q_rows = HEADS * (config["qk_nope_head_dim"] + rope)
        kv_rows = HEADS * (config["qk_nope_head_dim"] + config["v_head_dim"])
        shapes: dict[str, tuple[int, ...]] = {
            "kv_a_proj_with_mqa.weight": (rank + rope, HIDDEN), "kv_a_layernorm.weight": (rank,),
            "kv_b_proj.weight": (kv_rows, rank), "o_proj.weight": (HIDDEN, HEADS * config["v_head_dim"]),
        }  # fmt: skip
        q_rank = config["q_lora_rank"]
        if q_rank is None:
            return {**shapes, "q_proj.weight": (q_rows, HIDDEN)}
        return {
            **shapes, "q_a_proj.weight": (q_rank, HIDDEN), "q_a_layernorm.weight": (q_rank,),
            "q_b_proj.weight": (q_rows, q_rank),
        }  # fmt: skip
    head = config.get("head_dim", HIDDEN // HEADS)
    rows = {"q": HEADS * head, "k": KV_HEADS * head, "v": KV_HEADS * head}
    shapes = {f"{x}_proj.weight": (rows[x], HIDDEN) for x in "qkv"} | {"o_proj.weight": (HIDDEN, rows["q"])}
    if config.get("attention_bias"):
        shapes |= {f"{x}_proj.bias": (rows[x],) for x in "qkv"}
    is_full_width = config["model_type"] == "olmoe"
    return shapes | {f"{x}_norm.weight": (rows[x] if is_full_width else head,) for x in "qk"}


def layer_shapes(config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of one layer by name on the Hub below the layer; layers after the last one are for MTP."""
    shapes: dict[str, tuple[int, ...]] = {
        f"self_attn.{name}": shape for name, shape in attention_shapes(config).items()
    }
    shapes |= {f"{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}

    def mlp(module: str, width: int) -> dict[str, tuple[int, ...]]:
        rows = {"gate": (width, HIDDEN), "up": (width, HIDDEN), "down": (HIDDEN, width)}
        return {f"{module}.{name}_proj.weight": shape for name, shape in rows.items()}

    if layer < config.get("first_k_dense_replace", 0):
        return shapes | mlp("mlp", FFN)
    width = FFN if config["model_type"] == "olmoe" else EXPERT_FFN
    for expert in range(EXPERTS):
        shapes |= mlp(f"mlp.experts.{expert}", width)
    shapes["mlp.gate.weight"] = (EXPERTS, HIDDEN)
    if "n_shared_experts" in config:
        shapes |= mlp("mlp.shared_experts", width)
        if config["model_type"] != "deepseek_v2":
            shapes["mlp.gate.e_score_correction_bias"] = (EXPERTS,)
    if layer >= LAYERS:
        shapes |= {f"{name}.weight": (HIDDEN,) for name in ("enorm", "hnorm", "shared_head.norm")}
        shapes["eh_proj.weight"] = (HIDDEN, 2 * HIDDEN)
    return shapes


def save_model(path: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    """Save a model with random weights, its MTP layers included; return the weights."""
    outer = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    shapes: dict[str, tuple[int, ...]] = {**outer, "model.norm.weight": (HIDDEN,)}
    mtp_layers = range(LAYERS, LAYERS + config.get("num_nextn_predict_layers", 0))
    for layer in range(LAYERS + len(mtp_layers)):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes(config, layer).items()}
    generator = torch.Generator().manual_seed(7)
    weights = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    for name in weights:
        if name.endswith("e_score_correction_bias"):
            weights[name] = weights[name].float()
    for layer in mtp_layers:
        weights[f"model.layers.{layer}.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        weights[f"model.layers.{layer}.shared_head.head.weight"] = weights["lm_head.weight"].clone()
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return weights


def megatron_layer(own: dict[str, Tensor], *, local_norms: bool) -> dict[str, Tensor]:
    """Return the tensors of one layer by Megatron's name below the layer, from those on the Hub."""
    found = {"self_attention.linear_proj.weight": own["self_attn.o_proj.weight"]}
    if "self_attn.kv_b_proj.weight" in own:
        found["input_layernorm.weight"] = own["input_layernorm.weight"]
        found["self_attention.linear_kv_down_proj.weight"] = own["self_attn.kv_a_proj_with_mqa.weight"]
        found["self_attention.linear_kv_up_proj.weight"] = own["self_attn.kv_b_proj.weight"]
        kv_norm = "kv_layernorm.weight" if local_norms else "linear_kv_up_proj.layer_norm_weight"
        found[f"self_attention.{kv_norm}"] = own["self_attn.kv_a_layernorm.weight"]
        if "self_attn.q_proj.weight" in own:
            found["self_attention.linear_q_proj.weight"] = own["self_attn.q_proj.weight"]
        else:
            found["self_attention.linear_q_down_proj.weight"] = own["self_attn.q_a_proj.weight"]
            found["self_attention.linear_q_up_proj.weight"] = own["self_attn.q_b_proj.weight"]
            q_norm = "q_layernorm.weight" if local_norms else "linear_q_up_proj.layer_norm_weight"
            found[f"self_attention.{q_norm}"] = own["self_attn.q_a_layernorm.weight"]
    else:
        norm = "input_layernorm.weight" if local_norms else "self_attention.linear_qkv.layer_norm_weight"
        found[norm] = own["input_layernorm.weight"]
        for leaf in ("weight", "bias"):
            if f"self_attn.q_proj.{leaf}" in own:
                q, k, v = (own[f"self_attn.{x}_proj.{leaf}"] for x in "qkv")
                found[f"self_attention.linear_qkv.{leaf}"] = group_rows(q, k, v, KV_HEADS)
        found |= {f"self_attention.{x}_layernorm.weight": own[f"self_attn.{x}_norm.weight"] for x in "qk"}
    if "mlp.gate_proj.weight" in own:
        found["mlp.linear_fc1.layer_norm_weight"] = own["post_attention_layernorm.weight"]
        found["mlp.linear_fc1.weight"] = torch.cat([own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"]])
        found["mlp.linear_fc2.weight"] = own["mlp.down_proj.weight"]
    else:
        found["pre_mlp_layernorm.weight"] = own["post_attention_layernorm.weight"]
        found["mlp.router.weight"] = own["mlp.gate.weight"]
        experts = [f"mlp.experts.{expert}" for expert in range(EXPERTS)]
        found["mlp.experts.experts.linear_fc1.weight"] = torch.stack(
            [torch.cat([own[f"{each}.gate_proj.weight"], own[f"{each}.up_proj.weight"]]) for each in experts]
        )
        found["mlp.experts.experts.linear_fc2.weight"] = torch.stack(
            [own[f"{each}.down_proj.weight"] for each in experts]
        )
        if "mlp.gate.e_score_correction_bias" in own:
            found["mlp.router.expert_bias"] = own["mlp.gate.e_score_correction_bias"]
        if "mlp.shared_experts.down_proj.weight" in own:
            gate, up, down = (own[f"mlp.shared_experts.{x}_proj.weight"] for x in ("gate", "up", "down"))
            found["mlp.shared_experts.linear_fc1.weight"] = torch.cat([gate, up])
            found["mlp.shared_experts.linear_fc2.weight"] = down
    return found


def to_megatron(
    weights: dict[str, Tensor],
    config: dict[str, Any],
    *,
    local_norms: bool = False,
    mtp_module: str = "mtp_model_layer",
) -> dict[str, Tensor]:
    """Return all tensors of a model by Megatron's names, with one tensor for each layer, and without padding."""
    found = {
        "embedding.word_embeddings.weight": weights["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
        "output_layer.weight": weights["lm_head.weight"],
    }
    for layer in range(LAYERS + config.get("num_nextn_predict_layers", 0)):
        prefix = f"model.layers.{layer}."
        own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        k = layer - LAYERS
        module = f"decoder.layers.{layer}" if k < 0 else f"mtp.layers.{k}.{mtp_module}"
        found |= {f"{module}.{name}": value for name, value in megatron_layer(own, local_norms=local_norms).items()}
        if k >= 0:
            found |= {f"mtp.layers.{k}.{name}.weight": own[f"{name}.weight"] for name in ("enorm", "hnorm", "eh_proj")}
            found[f"mtp.layers.{k}.final_layernorm.weight"] = own["shared_head.norm.weight"]
    return found


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("class_name", FAMILIES)
def test_a_family_is_written_under_the_names_of_the_bridge_and_comes_back(class_name: str, tmp_path: Path) -> None:
    config = config_of(class_name)
    weights = save_model(tmp_path / "hf", config)
    report = ckptx.convert(
        "to-megatron", tmp_path / "hf", tmp_path / "out", pad_vocab_to_multiple_of=1, layers="separate"
    )
    copies = 2 * config.get("num_nextn_predict_layers", 0)
    assert report.exit == 0 and report.ledger["written"] == len(weights) - copies
    expected = to_megatron(weights, config)
    found = load(tmp_path / "out" / "release")
    norms = {name for name in found if name.endswith("mlp.linear_fc1.layer_norm_weight")} - expected.keys()
    assert all(name.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight") in found for name in norms)
    assert_equal({name: value for name, value in found.items() if name not in norms}, expected)

    assert ckptx.convert("to-hf", tmp_path / "out", tmp_path / "back").exit == 0
    assert (tmp_path / "back/model.safetensors").read_bytes() == (tmp_path / "hf/model.safetensors").read_bytes()
    assert ckptx.verify(tmp_path / "hf", tmp_path / "out", strict=True).exit == 0


@pytest.mark.parametrize("mtp_module", ["mtp_model_layer", "transformer_layer"])
@pytest.mark.parametrize("local_norms", [False, True])
@pytest.mark.parametrize("class_name", FAMILIES)
def test_what_megatron_saves_is_read_under_both_spellings(
    class_name: str, local_norms: bool, mtp_module: str, tmp_path: Path
) -> None:
    config = config_of(class_name)
    weights = save_model(tmp_path / "hf", config)
    tensors = to_megatron(weights, config, local_norms=local_norms, mtp_module=mtp_module)
    dcp.save(tensors, checkpoint_id=tmp_path / "megatron")
    report = ckptx.convert("to-hf", tmp_path / "megatron", tmp_path / "out", base=tmp_path / "hf")
    assert report.ledger["written"] == report.ledger["source"] == len(tensors)
    assert_equal(dict(load_file(tmp_path / "out" / "model.safetensors")), weights)


@pytest.mark.parametrize("class_name", ["DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"])
def test_it_is_resharded_from_megatron(class_name: str, tmp_path: Path) -> None:
    save_model(tmp_path / "hf", config_of(class_name))
    ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "megatron")
    assert ckptx.reshard(tmp_path / "megatron", tmp_path / "tp2", tp=2, pp=2, to="dcp").exit == 0
    ckptx.convert("to-hf", tmp_path / "tp2", tmp_path / "back")
    assert (tmp_path / "back/model.safetensors").read_bytes() == (tmp_path / "hf/model.safetensors").read_bytes()


def test_copies_of_mtp_layers_are_reported_as_dropped(tmp_path: Path) -> None:
    save_model(tmp_path / "hf", config_of("DeepseekV3ForCausalLM"))
    report = ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out")
    assert {each["name"]: each["reason"] for each in report.dropped} == {
        "model.layers.3.embed_tokens.weight": "copy of model.embed_tokens.weight, which Megatron's MTP layers use",
        "model.layers.3.shared_head.head.weight": "copy of lm_head.weight, which Megatron's MTP layers use",
    }
    assert "dropped: 1 tensor (copy of lm_head.weight" in conversion_text(report)


def test_an_mtp_layer_without_copies_is_complete(tmp_path: Path) -> None:
    config = config_of("DeepseekV3ForCausalLM")
    weights = save_model(tmp_path / "hf", config)
    for name in ("embed_tokens.weight", "shared_head.head.weight"):
        del weights[f"model.layers.3.{name}"]
    save_file(weights, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    report = ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out", pad_vocab_to_multiple_of=1)
    assert report.dropped == []
    assert "mtp.layers.0.eh_proj.weight" in load(tmp_path / "out" / "release")


def test_a_megatron_checkpoint_without_mtp_becomes_a_model_without_it(tmp_path: Path) -> None:
    config = config_of("DeepseekV3ForCausalLM")
    weights = save_model(tmp_path / "hf", config)
    tensors = {name: value for name, value in to_megatron(weights, config).items() if not name.startswith("mtp.")}
    dcp.save(tensors, checkpoint_id=tmp_path / "megatron")
    ckptx.convert("to-hf", tmp_path / "megatron", tmp_path / "out", base=tmp_path / "hf")
    expected = {name: value for name, value in weights.items() if not name.startswith("model.layers.3.")}
    assert_equal(dict(load_file(tmp_path / "out" / "model.safetensors")), expected)


def test_kimi_k2_has_the_class_of_deepseek_v3(tmp_path: Path) -> None:
    """Its model type is unknown to transformers, so its names and shapes are not checked."""
    config = {**config_of("DeepseekV3ForCausalLM"), "model_type": "kimi_k2", "num_nextn_predict_layers": 0}
    weights = save_model(tmp_path / "hf", config)
    ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out", pad_vocab_to_multiple_of=1)
    found = load(tmp_path / "out" / "release")
    assert [name for name, value in to_megatron(weights, config).items() if not torch.equal(found[name], value)] == []
    ckptx.convert("to-hf", tmp_path / "out", tmp_path / "back")
    assert (tmp_path / "back/model.safetensors").read_bytes() == (tmp_path / "hf/model.safetensors").read_bytes()


def test_fp8_weights_are_written_dequantized(tmp_path: Path) -> None:
    """As DeepSeek-V3 is published, in smaller blocks."""
    config = config_of("DeepseekV3ForCausalLM")
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [8, 8]}
    weights = save_model(tmp_path / "hf", {**config, "quantization_config": quantization})
    stored, expected = dict(weights), dict(weights)
    for name, weight in weights.items():
        if not name.endswith("_proj.weight") or ".eh_proj" in name:
            continue
        blocks = torch.nn.functional.pad(
            weight.float(), (0, -weight.shape[1] % 8, 0, -weight.shape[0] % 8)
        ).unflatten(0, (-1, 8)).unflatten(2, (-1, 8))  # fmt: skip
        scale = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        rows, columns = weight.shape
        decoded = (codes.float() * scale[:, None, :, None]).bfloat16().flatten(0, 1).flatten(1)[:rows, :columns]
        stored[name] = codes.view(torch.uint8).flatten(0, 1).flatten(1)[:rows, :columns].contiguous()
        stored[name] = stored[name].view(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"], expected[name] = scale, decoded.contiguous()
    save_file(stored, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    report = ckptx.convert(
        "to-megatron", tmp_path / "hf", tmp_path / "out", dequantize=True, pad_vocab_to_multiple_of=1
    )
    assert report.exit == 0
    found = load(tmp_path / "out" / "release")
    assert [name for name, value in to_megatron(expected, config).items() if not torch.equal(found[name], value)] == []


# --- what cannot be written: one line each, and no output

Change = Callable[[dict[str, Tensor], dict[str, Any]], None]


def changed_copy(weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    weights["model.layers.3.embed_tokens.weight"][0, 0] += 1


def no_mtp_in_the_config(weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["num_nextn_predict_layers"] = 0


def an_own_bias(weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    weights["model.layers.3.self_attn.o_proj.bias"] = torch.zeros(HIDDEN).bfloat16()


def mtp_modules_in_a_decoder_layer(weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    weights["model.layers.1.enorm.weight"] = torch.zeros(HIDDEN).bfloat16()


def too_many_mtp_layers(weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["num_nextn_predict_layers"] = 10**9


def a_flag_for_the_number_of_mtp_layers(weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["num_nextn_predict_layers"] = True


def scales(weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    weights["model.layers.1.self_attn.o_proj.weight"] = weights["model.layers.1.self_attn.o_proj.weight"].to(
        torch.float8_e4m3fn
    )
    weights["model.layers.1.self_attn.o_proj.weight_scale_inv"] = torch.ones(1, 1)


REFUSED: dict[str, tuple[Change, str]] = {
    "a copy that was trained": (changed_copy, '"model.layers.3.embed_tokens.weight": have different bytes, but'),
    "MTP layers that the config does not declare": (no_mtp_in_the_config, "model.layers.3."),
    "a bias in an MTP layer": (an_own_bias, "model.layers.3.self_attn.o_proj.bias"),
    "modules of MTP in a decoder layer": (mtp_modules_in_a_decoder_layer, "model.layers.1.enorm.weight"),
    "a huge number of MTP layers": (too_many_mtp_layers, "at most 64 MTP layers"),
    "a flag for the number of MTP layers": (a_flag_for_the_number_of_mtp_layers, "num_nextn_predict_layers True must"),
    "quantized weights": (scales, "--dequantize"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    change, message = REFUSED[case]
    config = config_of("DeepseekV3ForCausalLM")
    weights = save_model(tmp_path / "hf", config)
    change(weights, config)
    save_file(weights, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CkptxError) as caught:
        ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out")
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.exit_code in (3, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
