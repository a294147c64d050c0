"""Small models of families that Megatron Bridge maps, and their tensors under Megatron's names, without ckptx.

The names and values are those of Bridge's mappings, written out in torch operations:

    MiniMaxM2ForCausalLM     models/minimax_m2/minimax_m2_bridge.py
    HYV3ForCausalLM          models/hy_v3/hy_v3_bridge.py
    ExaoneMoeForCausalLM     models/exaone/exaone_moe/exaone_moe_bridge.py
    Exaone4ForCausalLM       models/exaone/exaone4/exaone4_bridge.py
    GlmMoeDsaForCausalLM     models/glm_moe_dsa/glm5_bridge.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.megatron_layout import group_rows

HIDDEN, FFN, EXPERT_FFN, EXPERTS, HEADS, KV_HEADS, HEAD, VOCABULARY = 32, 48, 24, 4, 4, 2, 8, 130
LAYERS = 3
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": EXPERT_FFN, "num_shared_experts": 1}
LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "num_key_value_heads": HEADS, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 4,
    "n_routed_experts": EXPERTS, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
# Class -> model type, and settings in addition to the common ones.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "MiniMaxM2ForCausalLM": (
        "minimax_m2",
        {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "intermediate_size": EXPERT_FFN, "rotary_dim": HEAD},
    ),
    "HYV3ForCausalLM": ("hy_v3", {**MOE, "num_experts": EXPERTS, "num_nextn_predict_layers": 2}),
    "ExaoneMoeForCausalLM": (
        "exaone_moe",
        {**MOE, "num_experts": EXPERTS, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1},
    ),
    "Exaone4ForCausalLM": ("exaone4", {"tie_word_embeddings": True, "sliding_window": 16}),
    "GlmMoeDsaForCausalLM": ("glm_moe_dsa", {**MOE, **LATENT, "num_nextn_predict_layers": 1}),
}


def config_of(class_name: str, **settings: Any) -> dict[str, Any]:
    model_type, own = FAMILIES[class_name]
    return {
        "architectures": [class_name], "model_type": model_type, "dtype": "bfloat16", "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "head_dim": HEAD,
        "num_key_value_heads": KV_HEADS, "intermediate_size": FFN, "max_position_embeddings": 64,
        "tie_word_embeddings": False, "eos_token_id": 2, **own, **settings,
    }  # fmt: skip


# --- the checkpoint on the Hub


def mlp(module: str, width: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> dict[str, Any]:
    gate, up, down = (f"{module}.{name}.weight" for name in names)
    return {gate: (width, HIDDEN), up: (width, HIDDEN), down: (HIDDEN, width)}


def attention_shapes(kind: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the attention of a layer by name on the Hub below `self_attn`."""
    if kind == "glm_moe_dsa":
        shapes: dict[str, tuple[int, ...]] = {
            "q_a_proj.weight": (16, HIDDEN), "q_a_layernorm.weight": (16,), "q_b_proj.weight": (HEADS * 12, 16),
            "kv_a_proj_with_mqa.weight": (12, HIDDEN), "kv_a_layernorm.weight": (8,),
            "kv_b_proj.weight": (HEADS * 16, 8), "o_proj.weight": (HIDDEN, HEADS * 8),
        }  # fmt: skip
        return shapes | {
            "indexer.wq_b.weight": (32, 16), "indexer.wk.weight": (16, HIDDEN), "indexer.k_norm.weight": (16,),
            "indexer.k_norm.bias": (16,), "indexer.weights_proj.weight": (2, HIDDEN),
        }  # fmt: skip
    rows = {"q": HEADS * HEAD, "k": KV_HEADS * HEAD, "v": KV_HEADS * HEAD}
    shapes = {f"{x}_proj.weight": (rows[x], HIDDEN) for x in "qkv"} | {"o_proj.weight": (HIDDEN, rows["q"])}
    return shapes | {f"{x}_norm.weight": (rows[x] if kind == "minimax_m2" else HEAD,) for x in "qk"}


def layer_shapes(kind: str, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a decoder layer by name on the Hub below the layer."""
    shapes = {f"self_attn.{name}": shape for name, shape in attention_shapes(kind).items()}
    norms = ("post_attention", "post_feedforward") if kind == "exaone4" else ("input", "post_attention")
    shapes |= {f"{name}_layernorm.weight": (HIDDEN,) for name in norms}
    if kind == "exaone4" or (layer == 0 and kind != "minimax_m2"):
        return shapes | mlp("mlp", FFN)
    if kind == "minimax_m2":
        for expert in range(EXPERTS):
            shapes |= mlp(f"block_sparse_moe.experts.{expert}", EXPERT_FFN, ("w1", "w3", "w2"))
        return shapes | {
            "block_sparse_moe.gate.weight": (EXPERTS, HIDDEN),
            "block_sparse_moe.e_score_correction_bias": (EXPERTS,),
        }
    for expert in range(EXPERTS):
        shapes |= mlp(f"mlp.experts.{expert}", EXPERT_FFN)
    router, bias, shared = ROUTING[kind]
    return shapes | {router: (EXPERTS, HIDDEN), bias: (EXPERTS,)} | mlp(shared, EXPERT_FFN)


# Model type -> router, bias of each expert and shared expert on the Hub.
ROUTING = {
    "hy_v3": ("mlp.router.gate.weight", "mlp.expert_bias", "mlp.shared_mlp"),
    "exaone_moe": ("mlp.gate.weight", "mlp.e_score_correction_bias", "mlp.shared_experts"),
    "glm_moe_dsa": ("mlp.gate.weight", "mlp.gate.e_score_correction_bias", "mlp.shared_experts"),
}


def mtp_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the MTP layers by name on the Hub."""
    kind, count = config["model_type"], config.get("num_nextn_predict_layers", 0)
    if kind == "exaone_moe":
        shapes: dict[str, tuple[int, ...]] = {
            f"mtp.layers.0.{name}": shape for name, shape in layer_shapes(kind, 0).items() if count
        }
        outer = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm") if count else ()
        shapes |= {f"mtp.{name}.weight": (HIDDEN,) for name in outer}
        return shapes | ({"mtp.fc.weight": (HIDDEN, 2 * HIDDEN)} if count else {})
    shapes = {}
    for layer in range(LAYERS, LAYERS + count):
        norms = ("enorm", "hnorm", "final_layernorm" if kind == "hy_v3" else "shared_head.norm")
        own = layer_shapes(kind, layer) | {f"{name}.weight": (HIDDEN,) for name in norms}
        own["eh_proj.weight"] = (HIDDEN, 2 * HIDDEN)
        if kind == "glm_moe_dsa":
            own |= {"embed_tokens.weight": (VOCABULARY, HIDDEN), "shared_head.head.weight": (VOCABULARY, HIDDEN)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    return shapes


def save_model(path: Path, config: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Save a model with random weights, its MTP layers included; return the weights."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    shapes["model.norm.weight"] = (HIDDEN,)
    for layer in range(LAYERS):
        own = layer_shapes(config["model_type"], layer)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    shapes |= mtp_shapes(config)
    generator = torch.Generator().manual_seed(11)
    weights = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    for name in weights:
        if name.endswith(("correction_bias", "expert_bias", "weights_proj.weight")):
            weights[name] = weights[name].float()
        if name.endswith(".shared_head.head.weight"):
            weights[name] = weights["lm_head.weight"].clone()
        if name.endswith(".embed_tokens.weight") and name.startswith("model.layers."):
            weights[name] = weights["model.embed_tokens.weight"].clone()
    path.mkdir()
    write(path, config, weights)
    return weights


def write(path: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(weights, path / "model.safetensors", {"format": "pt"})


# --- the mappings of Megatron Bridge


def megatron_attention(own: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Return the attention of a layer, with its norm, by Megatron's name below the layer."""
    found = {"self_attention.linear_proj.weight": own["self_attn.o_proj.weight"]}
    if kind == "glm_moe_dsa":
        names = {
            "input_layernorm.weight": "input_layernorm.weight",
            "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
            "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
            "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
            "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
            "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
            "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
        }
        if "self_attn.indexer.wk.weight" in own:
            indexer = "self_attention.core_attention.indexer"
            names |= {
                f"{indexer}.linear_wq_b.weight": "self_attn.indexer.wq_b.weight",
                f"{indexer}.linear_wk.weight": "self_attn.indexer.wk.weight",
                f"{indexer}.k_norm.weight": "self_attn.indexer.k_norm.weight",
                f"{indexer}.k_norm.bias": "self_attn.indexer.k_norm.bias",
                f"{indexer}.linear_weights_proj.weight": "self_attn.indexer.weights_proj.weight",
            }
        return found | {megatron: own[hub] for megatron, hub in names.items()}
    if kind == "exaone4":
        found["self_attention.linear_proj.post_layernorm.weight"] = own["post_attention_layernorm.weight"]
    else:
        found["self_attention.linear_qkv.layer_norm_weight"] = own["input_layernorm.weight"]
    q, k, v = (own[f"self_attn.{x}_proj.weight"] for x in "qkv")
    found["self_attention.linear_qkv.weight"] = group_rows(q, k, v, KV_HEADS)
    return found | {f"self_attention.{x}_layernorm.weight": own[f"self_attn.{x}_norm.weight"] for x in "qk"}


def megatron_layer(own: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Return the tensors of a decoder layer by Megatron's name below the layer, from those on the Hub."""
    found = megatron_attention(own, kind)
    if "mlp.gate_proj.weight" in own:
        found["mlp.linear_fc1.weight"] = torch.cat([own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"]])
        found["mlp.linear_fc2.weight"] = own["mlp.down_proj.weight"]
        if kind == "exaone4":
            found["mlp.linear_fc2.post_layernorm.weight"] = own["post_feedforward_layernorm.weight"]
        else:
            found["mlp.linear_fc1.layer_norm_weight"] = own["post_attention_layernorm.weight"]
        return found
    found["pre_mlp_layernorm.weight"] = own["post_attention_layernorm.weight"]
    if kind == "minimax_m2":
        moe, gate, up, down = "block_sparse_moe", "w1", "w3", "w2"
        found["mlp.router.weight"] = own["block_sparse_moe.gate.weight"]
        found["mlp.router.expert_bias"] = own["block_sparse_moe.e_score_correction_bias"]
    else:
        moe, gate, up, down = "mlp", "gate_proj", "up_proj", "down_proj"
        router, bias, shared = ROUTING[kind]
        found["mlp.router.weight"], found["mlp.router.expert_bias"] = own[router], own[bias]
        found["mlp.shared_experts.linear_fc1.weight"] = torch.cat(
            [own[f"{shared}.gate_proj.weight"], own[f"{shared}.up_proj.weight"]]
        )
        found["mlp.shared_experts.linear_fc2.weight"] = own[f"{shared}.down_proj.weight"]
    experts = [f"{moe}.experts.{expert}" for expert in range(EXPERTS)]
    found["mlp.experts.experts.linear_fc1.weight"] = torch.stack(
        [torch.cat([own[f"{each}.{gate}.weight"], own[f"{each}.{up}.weight"]]) for each in experts]
    )
    found["mlp.experts.experts.linear_fc2.weight"] = torch.stack([own[f"{each}.{down}.weight"] for each in experts])
    return found


def below(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def to_megatron(
    weights: dict[str, Tensor], config: dict[str, Any], *, mtp_module: str = "mtp_model_layer"
) -> dict[str, Tensor]:
    """Return all tensors of a model by Megatron's names, with one tensor for each layer, and without padding."""
    kind = config["model_type"]
    found = {
        "embedding.word_embeddings.weight": weights["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
    }
    if "lm_head.weight" in weights:
        found["output_layer.weight"] = weights["lm_head.weight"]
    for layer in range(LAYERS):
        own = below(weights, f"model.layers.{layer}.")
        found |= {f"decoder.layers.{layer}.{name}": value for name, value in megatron_layer(own, kind).items()}
    for index in range(config.get("num_nextn_predict_layers", 0)):
        if kind == "exaone_moe":
            own, outer = below(weights, "mtp.layers.0."), below(weights, "mtp.")
            names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        else:
            own = outer = below(weights, f"model.layers.{LAYERS + index}.")
            names = ("enorm", "hnorm", "eh_proj", "final_layernorm" if kind == "hy_v3" else "shared_head.norm")
        prefix = f"mtp.layers.{index}"
        found |= {f"{prefix}.{mtp_module}.{name}": value for name, value in megatron_layer(own, kind).items()}
        modules = zip(("enorm", "hnorm", "eh_proj", "final_layernorm"), names, strict=True)
        found |= {f"{prefix}.{name}.weight": outer[f"{hub}.weight"] for name, hub in modules}
    return found
