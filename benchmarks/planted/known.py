"""The first list of defects, whose number is fixed."""

from __future__ import annotations

import torch

from benchmarks.planted import runtime as at
from benchmarks.planted.defect import Defect, c, of, r, w, wc
from benchmarks.planted.stored import (
    changed,
    element_scaled,
    exchanged,
    flipped,
    head_of_its_own,
    rows_exchanged,
    scaled,
    setting,
    together,
    zeroed,
)

_Q, _V, _O = (f"layers.3.self_attn.{name}_proj.weight" for name in "qvo")
_DOWN = "layers.3.mlp.down_proj.weight"
_SLIDING, _FULL = ["sliding_attention"], ["full_attention"]
_FLIPPED = (_FULL + _SLIDING) * 4
_NOT_COMPUTED = "noted: nothing that is computed without training depends on it"

_LLAMA = of(
    "llama",
    w("q_proj x(1+1e-4)", scaled(_Q, 1 + 1e-4)),
    w("q_proj x(1+1e-3)", scaled(_Q, 1 + 1e-3)),
    w("q_proj x(1+1e-2)", scaled(_Q, 1 + 1e-2)),
    w("down_proj x(1+1e-4)", scaled(_DOWN, 1 + 1e-4)),
    w("down_proj x(1+1e-3)", scaled(_DOWN, 1 + 1e-3)),
    w("down_proj x(1+1e-2)", scaled(_DOWN, 1 + 1e-2)),
    w("norm x(1+1e-4)", scaled("layers.3.input_layernorm.weight", 1 + 1e-4)),
    w("norm x(1+1e-2)", scaled("layers.3.input_layernorm.weight", 1 + 1e-2)),
    w("one element of v_proj x1.01", element_scaled(_V, 1.01)),
    w("one element of v_proj x2", element_scaled(_V, 2)),
    w("two q heads swapped", changed(_Q, rows_exchanged(0, 1, 16))),
    w("two q heads swapped across ranks", changed(_Q, rows_exchanged(1, 2, 16))),
    w("o_proj bias zeroed", zeroed("layers.3.self_attn.o_proj.bias")),
    w("o_proj bias doubled", scaled("layers.3.self_attn.o_proj.bias", 2)),
    w("gate/up swapped", exchanged("layers.3.mlp.gate_proj", "layers.3.mlp.up_proj")),
    w("q_proj transposed", changed(_Q, lambda tensor: tensor.t())),
    c("rope theta x1.01", setting("rope_parameters.rope_theta", 1.01e4)),
    c("rope theta x1.001", setting("rope_parameters.rope_theta", 1.001e4)),
    c("rope theta 1e4->1e6", setting("rope_parameters.rope_theta", 1e6)),
    c("rope linear factor 2", setting("rope_parameters", {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})),
    c(
        "rope linear factor 1.01",
        setting("rope_parameters", {"rope_type": "linear", "factor": 1.01, "rope_theta": 1e4}),
    ),
    c("rms eps 1e-6->1e-5", setting("rms_norm_eps", 1e-5)),
    c("rms eps 1e-6->1e-8", setting("rms_norm_eps", 1e-8)),
    c("attention_bias false", setting("attention_bias", False)),
    c("mlp_bias false", setting("mlp_bias", False)),
    c("hidden_act gelu", setting("hidden_act", "gelu")),
    c("attention_dropout 0.1", setting("attention_dropout", 0.1), _NOT_COMPUTED),
)

_ROPE = [
    *of(
        "llama3rope",
        c("llama3 rope scaling removed", setting("rope_parameters", {"rope_type": "default", "rope_theta": 5e5})),
        c("llama3 factor 8->32", setting("rope_parameters.factor", 32.0)),
    ),
    *of(
        "yarn",
        c("yarn removed", setting("rope_parameters", {"rope_type": "default", "rope_theta": 1e4})),
        c("yarn factor 4->2", setting("rope_parameters.factor", 2.0)),
    ),
]


def _noise(tensor: torch.Tensor) -> torch.Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)) * 0.08


_UNTIED = setting("tie_word_embeddings", False)
_TIED = of(
    "llama_tied",
    wc("tied head untied, head x1.01", together(_UNTIED, head_of_its_own(lambda tensor: tensor * 1.01))),
    wc("tied head untied, head random", together(_UNTIED, head_of_its_own(_noise))),
    w("config ties, head stored x1.01", head_of_its_own(lambda tensor: tensor * 1.01)),
)

_WINDOWS = [
    *of("mistral4", c("sliding window 4->5", setting("sliding_window", 5))),
    *of(
        "mistral4096",
        c("sliding window 4096->4095", setting("sliding_window", 4095)),
        c("sliding window 4096->64", setting("sliding_window", 64)),
        c("sliding window 4096->none", setting("sliding_window", None)),
    ),
    *of(
        "gptoss128",
        c("sliding window 128->127", setting("sliding_window", 127)),
        c("sliding window 128->12", setting("sliding_window", 12)),
        c("all layers full attention", setting("layer_types", _FULL * 8)),
        w("sinks zeroed", zeroed("sinks")),
        w("router bias zeroed", zeroed("router.bias")),
    ),
    *of(
        "gemma2",
        c("attn soft-cap removed", setting("attn_logit_softcapping", None)),
        c("attn soft-cap 50->5", setting("attn_logit_softcapping", 5.0)),
        c("final soft-cap removed", setting("final_logit_softcapping", None)),
        c("final soft-cap 30->31", setting("final_logit_softcapping", 31.0)),
        c("query_pre_attn_scalar 256->224", setting("query_pre_attn_scalar", 224)),
        c("gelu_tanh->gelu", setting("hidden_activation", "gelu")),
        c("layer_types flipped", setting("layer_types", _FLIPPED)),
    ),
    *of(
        "gemma3",
        c("layer_types flipped (window 512)", setting("layer_types", _FLIPPED)),
        c("window 512->511", setting("sliding_window", 511)),
    ),
]

_EXPERTS = [
    *of(
        "mixtral",
        c("top-2 -> top-1", setting("num_experts_per_tok", 1)),
        w(
            "experts 0,1 swapped",
            exchanged("layers.3.block_sparse_moe.experts.0.", "layers.3.block_sparse_moe.experts.1."),
        ),
        w("one expert w2 x1.01", scaled(r"layers.3.block_sparse_moe.experts.0.w2.weight", 1.01)),
        w("one expert w2 x1.1", scaled(r"layers.3.block_sparse_moe.experts.0.w2.weight", 1.1)),
    ),
    *of(
        "qwen3_moe",
        c("norm_topk_prob flipped", setting("norm_topk_prob", False)),
        w("one expert down x1.1", scaled(r"layers.3.mlp.experts.0.down_proj.weight", 1.1)),
        w("router x1.01", scaled("layers.3.mlp.gate.weight", 1.01)),
        w("q_norm x1.01", scaled("layers.3.self_attn.q_norm.weight", 1.01)),
    ),
    *of(
        "qwen3",
        w("k_norm x1.01", scaled("layers.3.self_attn.k_norm.weight", 1.01)),
        w("down_proj x1.01", scaled(_DOWN, 1.01)),
        c("rms eps 1e-6->1e-5", setting("rms_norm_eps", 1e-5)),
    ),
    *of(
        "deepseek",
        w("e_score_correction_bias zeroed", zeroed("e_score_correction_bias")),
        c("routed_scaling 2.5->2.6", setting("routed_scaling_factor", 2.6)),
        c("n_group 2->1", setting("n_group", 1)),
        c("rope_interleave flipped", setting("rope_interleave", False)),
    ),
    *of(
        "granite",
        c("embedding_multiplier 3->3.03", setting("embedding_multiplier", 3.03)),
        c("residual_multiplier 1->1.01", setting("residual_multiplier", 1.01)),
    ),
]

_RECURRENT = [
    *of(
        "qwen3_next",
        w("conv1d flipped", changed("conv1d.weight", flipped(-1))),
        w("dt_bias zeroed", zeroed("dt_bias")),
        w("A_log x1.1", scaled("A_log", 1.1)),
        w("gated norm x1.01", scaled("linear_attn.norm.weight", 1.01)),
    ),
    *of(
        "mamba",
        w("conv1d flipped", changed("conv1d.weight", flipped(-1))),
        w("D x1.01", scaled(r"mixer\.D", 1.01)),
    ),
]

_SEEING = [
    *of(
        "qwen3_vl",
        w("one vision qkv x1.01", scaled("visual.blocks.1.attn.qkv.weight", 1.01)),
        w("one vision qkv x1.1", scaled("visual.blocks.1.attn.qkv.weight", 1.1)),
        w("patch embed flipped", changed("patch_embed.proj.weight", flipped(-1))),
        c("mrope_section order", setting("text_config.rope_parameters.mrope_section", [2, 2, 4])),
        c("deepstack 1,2,3 -> 0,1,2", setting("vision_config.deepstack_visual_indexes", [0, 1, 2])),
    ),
    *of(
        "llava",
        w("one vision fc1 x1.01", scaled("encoder.layers.1.mlp.fc1.weight", 1.01)),
        w("projector x1.01", scaled("multi_modal_projector.linear_1.weight", 1.01)),
        c("vision_feature_layer -1->-2", setting("vision_feature_layer", -2)),
        w("position_embedding zeroed", zeroed("position_embedding.weight")),
        c("vision eps 1e-5->1e-6", setting("vision_config.layer_norm_eps", 1e-6)),
    ),
    *of(
        "qwen2_5_vl",
        c("fullatt_block_indexes 1->2", setting("vision_config.fullatt_block_indexes", [2])),
        c("window_size 16->8", setting("vision_config.window_size", 8)),
    ),
]


def _lost(factor: str) -> Defect:
    return r(f"part of the gradient lost at the input of module 16@{factor}", at.gradient_lost(16, float(factor)))


def _output(factor: str) -> Defect:
    return r(f"output scaled, row-parallel module 6@{factor}", at.output_scaled(6, float(factor)))


_FORGOTTEN_6 = r("sum over ranks forgotten in row-parallel module 6", at.sum_forgotten(6))
_EVERY_6 = r("row-parallel bias added on every rank, module 6", at.bias_on_every_rank(6))
_EVERY_ALL = r("row-parallel bias added on every rank, module all", at.bias_on_every_rank())
_DROPPED_6 = r("row-parallel bias dropped, module 6", at.bias_dropped(6))
_ON_0_6 = r("row-parallel bias on rank 0 only, module 6", at.bias_on_rank_0(6))
_UNSUMMED_9 = r("gradient of the input not summed, column-parallel module 9", at.gradient_not_summed(9))
_DOUBLED_ALL = r("norm gradient doubled all", at.norm_gradient_doubled())
_DOUBLED_3 = r("norm gradient doubled 3", at.norm_gradient_doubled(3))
_PARTIAL = r("norms of queries and keys trained on part of their gradient", at.partial_norms)
_OFFSET = r("vocabulary offset of rank 1 wrong", at.vocabulary_offset)
_UNMASKED = r("emb_no_mask", at.foreign_tokens_not_masked)

_RUNTIME = [
    *of(
        "llama b.02",
        r("sum over ranks forgotten in row-parallel module all", at.sum_forgotten()),
        _FORGOTTEN_6,
        _EVERY_ALL,
        _EVERY_6,
        r("row-parallel bias added on every rank, module 15", at.bias_on_every_rank(15)),
        _DROPPED_6,
        _ON_0_6,
        r("gradient of the input not summed, column-parallel module all", at.gradient_not_summed()),
        _UNSUMMED_9,
        r("gradient of the input summed twice, column-parallel module 9", at.gradient_summed_twice(9)),
        _DOUBLED_ALL,
        _DOUBLED_3,
        *map(_output, ("1e-4", "1e-3", "1e-2", "3e-2", "0.1")),
        *map(_lost, ("1e-3", "1e-2", "0.1", "0.5")),
        _OFFSET,
        _UNMASKED,
    ),
    *of("llama b.1", _EVERY_6, _DROPPED_6, _ON_0_6),
    *of("llama b.004", _EVERY_6, _EVERY_ALL, _ON_0_6),
    *of("llama b.001", _EVERY_6, _EVERY_ALL, _ON_0_6),
    *of("llama init.02 b.02", _EVERY_6, _FORGOTTEN_6, _UNSUMMED_9, *map(_output, ("1e-2", "0.1"))),
    *of(
        "llama init.3 b.02",
        _EVERY_6,
        _EVERY_ALL,
        _FORGOTTEN_6,
        _UNSUMMED_9,
        _DOUBLED_3,
        *map(_output, ("1e-2", "0.1", "0.5")),
    ),
    *of(
        "qwen3",
        _PARTIAL,
        _DOUBLED_ALL,
        _FORGOTTEN_6,
        r("gradient of the input not summed, column-parallel module 16", at.gradient_not_summed(16)),
    ),
    *of("qwen3_moe", _PARTIAL, r("experts_twice", at.experts_summed_twice), _FORGOTTEN_6, _DOUBLED_3),
    *of("bigvocab", _OFFSET, _UNMASKED),
]

KNOWN = [*_LLAMA, *_ROPE, *_TIED, *_WINDOWS, *_EXPERTS, *_RECURRENT, *_SEEING, *_RUNTIME]
