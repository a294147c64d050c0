"""Load and save a family of Megatron Bridge with megatron-core's own `dist_checkpointing` on one rank, on a CPU.

usage: python -m tests.judges.megatron_family RANK WORLD STORE TP PP EP STYLE HF CHECKPOINT

The model has the settings that Bridge gives to the families of `FACTORS`. Every parameter and bias of experts that is
loaded from CHECKPOINT/release is compared with `tests/support/megatron_bridge_families.py`. The model is saved to
CHECKPOINT.saved, and the logits of Megatron's own forward pass to CHECKPOINT.logits.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.judges.megatron_writer import initialize, save_logits
from tests.support.megatron_bridge_families import megatron_layer

# Model type -> key in config.json of the factor of the weights of experts.
FACTORS = {"hy_v3": "router_scaling_factor", "exaone_moe": "routed_scaling_factor"}


def build_model(config: dict[str, Any], dtype: torch.dtype) -> Any:
    """Return the model, with layers of megatron-core and without TransformerEngine."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    layers = config["num_hidden_layers"]
    megatron_config = TransformerConfig(
        num_layers=layers,
        hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config["head_dim"],
        ffn_hidden_size=config["intermediate_size"],
        normalization="RMSNorm",
        layernorm_epsilon=config["rms_norm_eps"],
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        use_cpu_initialization=True,
        params_dtype=dtype,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        num_moe_experts=config["num_experts"],
        moe_ffn_hidden_size=config["moe_intermediate_size"],
        moe_shared_expert_intermediate_size=config["moe_intermediate_size"] * config["num_shared_experts"],
        moe_layer_freq=[0] + [1] * (layers - 1),
        moe_router_topk=config["num_experts_per_tok"],
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=config[FACTORS[config["model_type"]]],
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        moe_grouped_gemm=False,
    )
    return GPTModel(
        megatron_config,
        get_gpt_decoder_block_spec(megatron_config, use_transformer_engine=False, normalization="RMSNorm"),
        vocab_size=config["vocab_size"],
        max_sequence_length=64,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=int(config["rope_parameters"]["rope_theta"]),
    ).to(dtype)


def expected_value(name: str, weights: dict[str, Tensor], kind: str) -> Tensor:
    """Return the value of a parameter of the model by its name in megatron-core."""
    outer = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        "output_layer.weight": "lm_head.weight",
    }
    if name in outer:
        return weights[outer[name]]
    _, _, number, below = name.split(".", 3)
    prefix = f"model.layers.{number}."
    own = {each.removeprefix(prefix): value for each, value in weights.items() if each.startswith(prefix)}
    layer = megatron_layer(own, kind)
    if below == "input_layernorm.weight":
        below = "self_attention.linear_qkv.layer_norm_weight"
    if below == "pre_mlp_layernorm.weight" and below not in layer:
        below = "mlp.linear_fc1.layer_norm_weight"
    if ".local_experts." in below:
        expert, linear = below.split(".local_experts.")[1].split(".", 1)
        return layer[f"mlp.experts.experts.{linear}"][int(expert)]
    return layer[below]


def main() -> None:
    rank, world, store, tp, pp, ep, _, hf, checkpoint = sys.argv[1:]
    initialize(rank, world, store, tp, pp, ep)
    from megatron.core import dist_checkpointing, parallel_state

    config = json.loads((Path(hf) / "config.json").read_text())
    weights = load_file(Path(hf) / "model.safetensors")
    model = build_model(config, weights["model.norm.weight"].dtype)
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    compared = {name: value for name, value in tensors.items() if not name.endswith("local_tokens_per_expert")}
    with torch.no_grad():
        for value in compared.values():
            value.fill_(torch.nan)
    release = f"{checkpoint}/release"
    metadata = dist_checkpointing.load_content_metadata(release)
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = {"model": model.sharded_state_dict(metadata=metadata)}
    loaded = dist_checkpointing.load(state, release, strict="log_unexpected")
    model.load_state_dict(loaded["model"])
    for name, value in model.state_dict().items():
        if name in compared:
            assert torch.equal(value, expected_value(name, weights, config["model_type"])), name
    saved = f"{checkpoint}.saved"
    Path(saved).mkdir()
    dist_checkpointing.save(model.sharded_state_dict(metadata=metadata), saved)
    save_logits(model, Path(checkpoint))
    print(f"{len(compared)} tensors are equal", flush=True)


if __name__ == "__main__":
    main()
