"""Load and save a family of Megatron Bridge with megatron-core's own `dist_checkpointing` on one rank, on a CPU.

usage: python -m tests.judges.megatron_family RANK WORLD STORE TP PP EP STYLE HF CHECKPOINT

The model has the settings that Bridge gives to the families of `FACTORS`, with layers of megatron-core. MiniMax-M2 and
EXAONE 4 have modules of Bridge, which are written out here for one rank and without TransformerEngine. Every parameter
and bias of experts that is loaded from CHECKPOINT/release is compared with `tests/support/megatron_bridge_families.py`.
The model is saved to CHECKPOINT.saved, and the logits of Megatron's own forward pass to CHECKPOINT.logits.
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

# Model type -> key in config.json of the factor of the weights of experts; None for none.
FACTORS = {
    "hy_v3": "router_scaling_factor",
    "exaone_moe": "routed_scaling_factor",
    "minimax_m2": None,
    "exaone4": None,
}


class WholeNorm(torch.nn.Module):
    """RMS norm over all heads of q or k, as `_FullDimRMSNorm` in `minimax_m2_provider.py` of Bridge."""

    def __init__(self, *, hidden_size: int, config: Any, eps: float, heads: int) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(heads * hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(2)
        rows = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * rows).reshape(x.shape)


def use_whole_norms(spec: Any, config: dict[str, Any]) -> None:
    """Replace the norms of heads of q and k by those over all heads."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    for layer in spec.layer_specs:
        submodules = layer.submodules.self_attention.submodules
        submodules.q_layernorm = ModuleSpec(WholeNorm, {"heads": config["num_attention_heads"]})
        submodules.k_layernorm = ModuleSpec(WholeNorm, {"heads": config["num_key_value_heads"]})


def use_post_norms(spec: Any) -> None:
    """Move the norms of a layer behind its linear layers, as `exaone4_layer_spec` of Bridge."""
    from megatron.core.tensor_parallel.layers import RowParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    class RowParallelLinearNorm(RowParallelLinear):  # type: ignore[misc]
        """A linear layer with a norm of its output, as `TERowParallelLinearLayerNorm` of Bridge."""

        def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
            super().__init__(input_size, output_size, config=config, **options)
            self.post_layernorm = WrappedTorchNorm(config, output_size, config.layernorm_epsilon)

        def forward(self, x: Tensor) -> tuple[Tensor, None]:
            return self.post_layernorm(super().forward(x)[0]), None

    for layer in spec.layer_specs:
        submodules = layer.submodules
        submodules.input_layernorm = submodules.pre_mlp_layernorm = IdentityOp
        submodules.self_attention.submodules.linear_proj = RowParallelLinearNorm
        submodules.mlp.submodules.linear_fc2 = RowParallelLinearNorm


def build_model(config: dict[str, Any], dtype: torch.dtype) -> Any:
    """Return the model, with layers of megatron-core and without TransformerEngine."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    kind, layers = config["model_type"], config["num_hidden_layers"]
    values: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": config["hidden_size"],
        "num_attention_heads": config["num_attention_heads"],
        "num_query_groups": config["num_key_value_heads"],
        "kv_channels": config["head_dim"],
        "ffn_hidden_size": config["intermediate_size"],
        "normalization": "RMSNorm",
        "layernorm_epsilon": config["rms_norm_eps"],
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "qk_layernorm": True,
        "use_cpu_initialization": True,
        "params_dtype": dtype,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if kind != "exaone4":
        width = config.get("moe_intermediate_size") or config["intermediate_size"]
        values |= {
            "num_moe_experts": config.get("num_experts") or config["num_local_experts"],
            "moe_ffn_hidden_size": width,
            "moe_shared_expert_intermediate_size": width * config.get("num_shared_experts", 0) or None,
            "moe_layer_freq": 1 if kind == "minimax_m2" else [0] + [1] * (layers - 1),
            "moe_router_topk": config["num_experts_per_tok"],
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": config.get(FACTORS[kind] or ""),
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
            "moe_grouped_gemm": False,
        }
    megatron_config = TransformerConfig(**values)
    spec = get_gpt_decoder_block_spec(megatron_config, use_transformer_engine=False, normalization="RMSNorm")
    if kind == "minimax_m2":
        use_whole_norms(spec, config)
    if kind == "exaone4":
        use_post_norms(spec)
    return GPTModel(
        megatron_config,
        spec,
        vocab_size=config["vocab_size"],
        max_sequence_length=64,
        share_embeddings_and_output_weights=config["tie_word_embeddings"],
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
