"""The weights of a Hugging Face model in Megatron's layout, by its formulas in torch operations, without ckptx."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

TE_NORMS = {
    "input_layernorm": "self_attention.linear_qkv.layer_norm_weight",
    "post_attention_layernorm": "mlp.linear_fc1.layer_norm_weight",
}
LOCAL_NORMS = {
    "input_layernorm": "input_layernorm.weight",
    "post_attention_layernorm": "pre_mlp_layernorm.weight",
}


def group_rows(q: Tensor, k: Tensor, v: Tensor, kv_heads: int) -> Tensor:
    """Rows of each kv head: those of its q heads, of its k head, of its v head."""
    return torch.cat([part for rows in zip(*(x.chunk(kv_heads) for x in (q, k, v)), strict=True) for part in rows])


def pad_rows(weight: Tensor, rows: int) -> Tensor:
    """Rows that no token has; Megatron trains them along, so they are not zero."""
    return torch.cat([weight, torch.full((rows - len(weight), *weight.shape[1:]), 7.0, dtype=weight.dtype)])


def layer_tensors(
    weights: Mapping[str, Tensor], config: Mapping[str, Any], layer: int, norms: Mapping[str, str] = TE_NORMS
) -> dict[str, Tensor]:
    """The tensors of one layer by Megatron's name below the layer."""
    prefix = f"model.layers.{layer}."
    own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    found = {megatron: own[f"{name}.weight"] for name, megatron in norms.items()}
    for leaf in ("weight", "bias"):
        if f"self_attn.q_proj.{leaf}" in own:
            q, k, v = (own[f"self_attn.{x}_proj.{leaf}"] for x in "qkv")
            found[f"self_attention.linear_qkv.{leaf}"] = group_rows(q, k, v, config["num_key_value_heads"])
    found["self_attention.linear_proj.weight"] = own["self_attn.o_proj.weight"]
    for x in "qk":
        if f"self_attn.{x}_norm.weight" in own:
            found[f"self_attention.{x}_layernorm.weight"] = own[f"self_attn.{x}_norm.weight"]
    if "mlp.gate_proj.weight" in own:
        found["mlp.linear_fc1.weight"] = torch.cat([own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"]])
        found["mlp.linear_fc2.weight"] = own["mlp.down_proj.weight"]
        return found
    moe, gate, up, down = (
        ("block_sparse_moe", "w1", "w3", "w2")
        if "block_sparse_moe.gate.weight" in own
        else ("mlp", "gate_proj", "up_proj", "down_proj")
    )
    found["mlp.router.weight"] = own[f"{moe}.gate.weight"]
    experts = range(config.get("num_experts") or config["num_local_experts"])
    fc1 = [torch.cat([own[f"{moe}.experts.{e}.{part}.weight"] for part in (gate, up)]) for e in experts]
    found["mlp.experts.experts.linear_fc1.weight"] = torch.stack(fc1)
    found["mlp.experts.experts.linear_fc2.weight"] = torch.stack(
        [own[f"{moe}.experts.{e}.{down}.weight"] for e in experts]
    )
    return found


def to_megatron(
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    *,
    rows: int,
    stacked: bool = True,
    norms: Mapping[str, str] = TE_NORMS,
    prefix: str = "",
) -> dict[str, Tensor]:
    """All tensors of a model by Megatron's names.

    Args:
        weights: Weights by the names of the Hub.
        config: Contents of `config.json`.
        rows: Rows of the padded vocabulary.
        stacked: True for one tensor with all layers, False for one for each.
        norms: Names of the norms.
        prefix: Prefix of the names.
    """
    found = {
        "embedding.word_embeddings.weight": pad_rows(weights["model.embed_tokens.weight"], rows),
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
    }
    if "lm_head.weight" in weights:
        found["output_layer.weight"] = pad_rows(weights["lm_head.weight"], rows)
    layers = [layer_tensors(weights, config, layer, norms) for layer in range(config["num_hidden_layers"])]
    if stacked:
        found |= {f"decoder.layers.{name}": torch.stack([each[name] for each in layers]) for name in layers[0]}
    else:
        found |= {f"decoder.layers.{i}.{name}": value for i, each in enumerate(layers) for name, value in each.items()}
    return {prefix + name: value for name, value in found.items()}
