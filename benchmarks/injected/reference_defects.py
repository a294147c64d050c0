"""Defects that are common in converters and runtimes; the benchmark always has the same ones."""

from __future__ import annotations

import torch

from benchmarks.injected import runtime_defects as inject
from benchmarks.injected.checkpoint_changes import (
    combine,
    exchange,
    exchange_rows,
    flip,
    scale,
    scale_element,
    set_config,
    transform,
    untie_head,
    zero,
)
from benchmarks.injected.defect import Defect, combined_defect, config_defect, defects_of, runtime_defect, weight_defect

_Q, _V, _O = (f"layers.3.self_attn.{name}_proj.weight" for name in "qvo")
_DOWN = "layers.3.mlp.down_proj.weight"
_SLIDING, _FULL = ["sliding_attention"], ["full_attention"]
_FLIPPED = (_FULL + _SLIDING) * 4
_NOT_COMPUTED = "noted: nothing that is computed without training depends on it"

_LLAMA = defects_of(
    "llama",
    weight_defect("q_proj x(1+1e-4)", scale(_Q, 1 + 1e-4)),
    weight_defect("q_proj x(1+1e-3)", scale(_Q, 1 + 1e-3)),
    weight_defect("q_proj x(1+1e-2)", scale(_Q, 1 + 1e-2)),
    weight_defect("down_proj x(1+1e-4)", scale(_DOWN, 1 + 1e-4)),
    weight_defect("down_proj x(1+1e-3)", scale(_DOWN, 1 + 1e-3)),
    weight_defect("down_proj x(1+1e-2)", scale(_DOWN, 1 + 1e-2)),
    weight_defect("norm x(1+1e-4)", scale("layers.3.input_layernorm.weight", 1 + 1e-4)),
    weight_defect("norm x(1+1e-2)", scale("layers.3.input_layernorm.weight", 1 + 1e-2)),
    weight_defect("one element of v_proj x1.01", scale_element(_V, 1.01)),
    weight_defect("one element of v_proj x2", scale_element(_V, 2)),
    weight_defect("two q heads swapped", transform(_Q, exchange_rows(0, 1, 16))),
    weight_defect("two q heads swapped across ranks", transform(_Q, exchange_rows(1, 2, 16))),
    weight_defect("o_proj bias zeroed", zero("layers.3.self_attn.o_proj.bias")),
    weight_defect("o_proj bias doubled", scale("layers.3.self_attn.o_proj.bias", 2)),
    weight_defect("gate/up swapped", exchange("layers.3.mlp.gate_proj", "layers.3.mlp.up_proj")),
    weight_defect("q_proj transposed", transform(_Q, lambda tensor: tensor.t())),
    config_defect("rope theta x1.01", set_config("rope_parameters.rope_theta", 1.01e4)),
    config_defect("rope theta x1.001", set_config("rope_parameters.rope_theta", 1.001e4)),
    config_defect("rope theta 1e4->1e6", set_config("rope_parameters.rope_theta", 1e6)),
    config_defect(
        "rope linear factor 2", set_config("rope_parameters", {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    ),
    config_defect(
        "rope linear factor 1.01",
        set_config("rope_parameters", {"rope_type": "linear", "factor": 1.01, "rope_theta": 1e4}),
    ),
    config_defect("rms eps 1e-6->1e-5", set_config("rms_norm_eps", 1e-5)),
    config_defect("rms eps 1e-6->1e-8", set_config("rms_norm_eps", 1e-8)),
    config_defect("attention_bias false", set_config("attention_bias", False)),
    config_defect("mlp_bias false", set_config("mlp_bias", False)),
    config_defect("hidden_act gelu", set_config("hidden_act", "gelu")),
    config_defect("attention_dropout 0.1", set_config("attention_dropout", 0.1), _NOT_COMPUTED),
)

_ROPE = [
    *defects_of(
        "llama3rope",
        config_defect(
            "llama3 rope scaling removed", set_config("rope_parameters", {"rope_type": "default", "rope_theta": 5e5})
        ),
        config_defect("llama3 factor 8->32", set_config("rope_parameters.factor", 32.0)),
    ),
    *defects_of(
        "yarn",
        config_defect("yarn removed", set_config("rope_parameters", {"rope_type": "default", "rope_theta": 1e4})),
        config_defect("yarn factor 4->2", set_config("rope_parameters.factor", 2.0)),
    ),
]


def _noise(tensor: torch.Tensor) -> torch.Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)) * 0.08


_UNTIED = set_config("tie_word_embeddings", False)
_TIED = defects_of(
    "llama_tied",
    combined_defect("tied head untied, head x1.01", combine(_UNTIED, untie_head(lambda tensor: tensor * 1.01))),
    combined_defect("tied head untied, head random", combine(_UNTIED, untie_head(_noise))),
    weight_defect("config ties, head stored x1.01", untie_head(lambda tensor: tensor * 1.01)),
)

_WINDOWS = [
    *defects_of("mistral4", config_defect("sliding window 4->5", set_config("sliding_window", 5))),
    *defects_of(
        "mistral4096",
        config_defect("sliding window 4096->4095", set_config("sliding_window", 4095)),
        config_defect("sliding window 4096->64", set_config("sliding_window", 64)),
        config_defect("sliding window 4096->none", set_config("sliding_window", None)),
    ),
    *defects_of(
        "gptoss128",
        config_defect("sliding window 128->127", set_config("sliding_window", 127)),
        config_defect("sliding window 128->12", set_config("sliding_window", 12)),
        config_defect("all layers full attention", set_config("layer_types", _FULL * 8)),
        weight_defect("sinks zeroed", zero("sinks")),
        weight_defect("router bias zeroed", zero("router.bias")),
    ),
    *defects_of(
        "gemma2",
        config_defect("attn soft-cap removed", set_config("attn_logit_softcapping", None)),
        config_defect("attn soft-cap 50->5", set_config("attn_logit_softcapping", 5.0)),
        config_defect("final soft-cap removed", set_config("final_logit_softcapping", None)),
        config_defect("final soft-cap 30->31", set_config("final_logit_softcapping", 31.0)),
        config_defect("query_pre_attn_scalar 256->224", set_config("query_pre_attn_scalar", 224)),
        config_defect("gelu_tanh->gelu", set_config("hidden_activation", "gelu")),
        config_defect("layer_types flipped", set_config("layer_types", _FLIPPED)),
    ),
    *defects_of(
        "gemma3",
        config_defect("layer_types flipped (window 512)", set_config("layer_types", _FLIPPED)),
        config_defect("window 512->511", set_config("sliding_window", 511)),
    ),
]

_EXPERTS = [
    *defects_of(
        "mixtral",
        config_defect("top-2 -> top-1", set_config("num_experts_per_tok", 1)),
        weight_defect(
            "experts 0,1 swapped",
            exchange("layers.3.block_sparse_moe.experts.0.", "layers.3.block_sparse_moe.experts.1."),
        ),
        weight_defect("one expert w2 x1.01", scale(r"layers.3.block_sparse_moe.experts.0.w2.weight", 1.01)),
        weight_defect("one expert w2 x1.1", scale(r"layers.3.block_sparse_moe.experts.0.w2.weight", 1.1)),
    ),
    *defects_of(
        "qwen3_moe",
        config_defect("norm_topk_prob flipped", set_config("norm_topk_prob", False)),
        weight_defect("one expert down x1.1", scale(r"layers.3.mlp.experts.0.down_proj.weight", 1.1)),
        weight_defect("router x1.01", scale("layers.3.mlp.gate.weight", 1.01)),
        weight_defect("q_norm x1.01", scale("layers.3.self_attn.q_norm.weight", 1.01)),
    ),
    *defects_of(
        "qwen3",
        weight_defect("k_norm x1.01", scale("layers.3.self_attn.k_norm.weight", 1.01)),
        weight_defect("down_proj x1.01", scale(_DOWN, 1.01)),
        config_defect("rms eps 1e-6->1e-5", set_config("rms_norm_eps", 1e-5)),
    ),
    *defects_of(
        "deepseek",
        weight_defect("e_score_correction_bias zeroed", zero("e_score_correction_bias")),
        config_defect("routed_scaling 2.5->2.6", set_config("routed_scaling_factor", 2.6)),
        config_defect("n_group 2->1", set_config("n_group", 1)),
        config_defect("rope_interleave flipped", set_config("rope_interleave", False)),
    ),
    *defects_of(
        "granite",
        config_defect("embedding_multiplier 3->3.03", set_config("embedding_multiplier", 3.03)),
        config_defect("residual_multiplier 1->1.01", set_config("residual_multiplier", 1.01)),
    ),
]

_RECURRENT = [
    *defects_of(
        "qwen3_next",
        weight_defect("conv1d flipped", transform("conv1d.weight", flip(-1))),
        weight_defect("dt_bias zeroed", zero("dt_bias")),
        weight_defect("A_log x1.1", scale("A_log", 1.1)),
        weight_defect("gated norm x1.01", scale("linear_attn.norm.weight", 1.01)),
    ),
    *defects_of(
        "mamba",
        weight_defect("conv1d flipped", transform("conv1d.weight", flip(-1))),
        weight_defect("D x1.01", scale(r"mixer\.D", 1.01)),
    ),
]

_VISION = [
    *defects_of(
        "qwen3_vl",
        weight_defect("one vision qkv x1.01", scale("visual.blocks.1.attn.qkv.weight", 1.01)),
        weight_defect("one vision qkv x1.1", scale("visual.blocks.1.attn.qkv.weight", 1.1)),
        weight_defect("patch embed flipped", transform("patch_embed.proj.weight", flip(-1))),
        config_defect("mrope_section order", set_config("text_config.rope_parameters.mrope_section", [2, 2, 4])),
        config_defect("deepstack 1,2,3 -> 0,1,2", set_config("vision_config.deepstack_visual_indexes", [0, 1, 2])),
    ),
    *defects_of(
        "llava",
        weight_defect("one vision fc1 x1.01", scale("encoder.layers.1.mlp.fc1.weight", 1.01)),
        weight_defect("projector x1.01", scale("multi_modal_projector.linear_1.weight", 1.01)),
        config_defect("vision_feature_layer -1->-2", set_config("vision_feature_layer", -2)),
        weight_defect("position_embedding zeroed", zero("position_embedding.weight")),
        config_defect("vision eps 1e-5->1e-6", set_config("vision_config.layer_norm_eps", 1e-6)),
    ),
    *defects_of(
        "qwen2_5_vl",
        config_defect("fullatt_block_indexes 1->2", set_config("vision_config.fullatt_block_indexes", [2])),
        config_defect("window_size 16->8", set_config("vision_config.window_size", 8)),
    ),
]


def _gradient_reduced(factor: str) -> Defect:
    return runtime_defect(
        f"part of the gradient lost at the input of module 16@{factor}", inject.reduce_input_gradient(16, float(factor))
    )


def _scaled_output(factor: str) -> Defect:
    return runtime_defect(f"output scaled, row-parallel module 6@{factor}", inject.scale_output(6, float(factor)))


_NO_ALL_REDUCE_6 = runtime_defect("sum over ranks forgotten in row-parallel module 6", inject.skip_output_all_reduce(6))
_BIAS_EVERY_RANK_6 = runtime_defect("row-parallel bias added on every rank, module 6", inject.add_bias_on_every_rank(6))
_BIAS_EVERY_RANK = runtime_defect("row-parallel bias added on every rank, module all", inject.add_bias_on_every_rank())
_NO_BIAS_6 = runtime_defect("row-parallel bias dropped, module 6", inject.drop_bias(6))
_BIAS_RANK_0_6 = runtime_defect("row-parallel bias on rank 0 only, module 6", inject.add_bias_on_rank_0(6))
_NO_GRADIENT_ALL_REDUCE_9 = runtime_defect(
    "gradient of the input not summed, column-parallel module 9", inject.skip_input_gradient_all_reduce(9)
)
_DOUBLED_NORM_GRADIENTS = runtime_defect("norm gradient doubled all", inject.double_norm_gradient())
_DOUBLED_NORM_GRADIENT_3 = runtime_defect("norm gradient doubled 3", inject.double_norm_gradient(3))
_PARTIAL_NORM_GRADIENTS = runtime_defect(
    "norms of queries and keys trained on part of their gradient", inject.skip_qk_norm_gradient_all_reduce
)
_SHIFTED_EMBEDDING = runtime_defect("vocabulary offset of rank 1 wrong", inject.shift_embedding_rows)
_UNMASKED_TOKENS = runtime_defect("emb_no_mask", inject.skip_token_mask)

_RUNTIME = [
    *defects_of(
        "llama b.02",
        runtime_defect("sum over ranks forgotten in row-parallel module all", inject.skip_output_all_reduce()),
        _NO_ALL_REDUCE_6,
        _BIAS_EVERY_RANK,
        _BIAS_EVERY_RANK_6,
        runtime_defect("row-parallel bias added on every rank, module 15", inject.add_bias_on_every_rank(15)),
        _NO_BIAS_6,
        _BIAS_RANK_0_6,
        runtime_defect(
            "gradient of the input not summed, column-parallel module all", inject.skip_input_gradient_all_reduce()
        ),
        _NO_GRADIENT_ALL_REDUCE_9,
        runtime_defect(
            "gradient of the input summed twice, column-parallel module 9", inject.repeat_input_gradient_all_reduce(9)
        ),
        _DOUBLED_NORM_GRADIENTS,
        _DOUBLED_NORM_GRADIENT_3,
        *map(_scaled_output, ("1e-4", "1e-3", "1e-2", "3e-2", "0.1")),
        *map(_gradient_reduced, ("1e-3", "1e-2", "0.1", "0.5")),
        _SHIFTED_EMBEDDING,
        _UNMASKED_TOKENS,
    ),
    *defects_of("llama b.1", _BIAS_EVERY_RANK_6, _NO_BIAS_6, _BIAS_RANK_0_6),
    *defects_of("llama b.004", _BIAS_EVERY_RANK_6, _BIAS_EVERY_RANK, _BIAS_RANK_0_6),
    *defects_of("llama b.001", _BIAS_EVERY_RANK_6, _BIAS_EVERY_RANK, _BIAS_RANK_0_6),
    *defects_of(
        "llama init.02 b.02",
        _BIAS_EVERY_RANK_6,
        _NO_ALL_REDUCE_6,
        _NO_GRADIENT_ALL_REDUCE_9,
        *map(_scaled_output, ("1e-2", "0.1")),
    ),
    *defects_of(
        "llama init.3 b.02",
        _BIAS_EVERY_RANK_6,
        _BIAS_EVERY_RANK,
        _NO_ALL_REDUCE_6,
        _NO_GRADIENT_ALL_REDUCE_9,
        _DOUBLED_NORM_GRADIENT_3,
        *map(_scaled_output, ("1e-2", "0.1", "0.5")),
    ),
    *defects_of(
        "qwen3",
        _PARTIAL_NORM_GRADIENTS,
        _DOUBLED_NORM_GRADIENTS,
        _NO_ALL_REDUCE_6,
        runtime_defect(
            "gradient of the input not summed, column-parallel module 16", inject.skip_input_gradient_all_reduce(16)
        ),
    ),
    *defects_of(
        "qwen3_moe",
        _PARTIAL_NORM_GRADIENTS,
        runtime_defect("experts_twice", inject.repeat_expert_gradient_all_reduce),
        _NO_ALL_REDUCE_6,
        _DOUBLED_NORM_GRADIENT_3,
    ),
    *defects_of("bigvocab", _SHIFTED_EMBEDDING, _UNMASKED_TOKENS),
]

COMMON_DEFECTS = [*_LLAMA, *_ROPE, *_TIED, *_WINDOWS, *_EXPERTS, *_RECURRENT, *_VISION, *_RUNTIME]
