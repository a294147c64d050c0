"""More defects that converters and runtimes can have, one of each kind."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.planted import further_runtime as at
from benchmarks.planted import not_asked
from benchmarks.planted.defect import c, of, r, w, wc
from benchmarks.planted.stored import (
    by_part,
    changed,
    exchanged,
    flipped,
    head_dropped,
    head_is_the_embedding,
    layers_in_order_of_text,
    of_columns,
    of_each,
    parts,
    read_as,
    regrouped,
    rolled,
    rounded,
    rows_exchanged,
    rows_set,
    scaled,
    setting,
    to_int8,
    together,
    zeroed,
)

_LATE_POSITIONS = "rows of a table of positions that no input reaches"
_FUSED, _BOTH = r"query_key_value\.(weight|bias)", r"\.(weight|bias)"

_FUSED_PROJECTIONS = [
    *of(
        "gpt_neox",
        w("[q, k, v] of all heads in place of [q, k, v] of each", changed(_FUSED, regrouped((4, 3, 16), (1, 0, 2)))),
        c("parallel residual off", setting("use_parallel_residual", False)),
        c("half of the rotary dims", setting("rope_parameters.partial_rotary_factor", 0.25)),
    ),
    *of(
        "bloom",
        w("[q, k, v] of all heads in place of [q, k, v] of each", changed(_FUSED, regrouped((4, 3, 16), (1, 0, 2)))),
    ),
    *of(
        "falcon", w("[q, k, v] of all heads in place of those of each group", changed(_FUSED, by_part(2, (32, 16, 16))))
    ),
    *of(
        "gpt2",
        w(
            "c_attn cut by head in place of [q, k, v]",
            changed("c_attn.weight", of_columns(regrouped((3, 4, 16), (1, 0, 2)))),
        ),
        w("one Conv1D saved as a Linear", changed("h.3.attn.c_proj.weight", lambda tensor: tensor.t())),
        w(
            "positions after the inputs reversed",
            changed("wpe.weight", rows_set(32, None, flipped(0))),
            _LATE_POSITIONS,
        ),
    ),
    *of(
        "phi3",
        w(
            "k and v exchanged in one qkv_proj",
            changed("layers.3.self_attn.qkv_proj.weight", parts((64, 32, 32), (0, 2, 1))),
        ),
        w("[up, gate] in place of [gate, up]", changed("gate_up_proj.weight", rolled(96))),
    ),
    *of(
        "glm4",
        w("gate and up row by row in place of [gate, up]", changed("gate_up_proj.weight", regrouped((2, 96), (1, 0)))),
    ),
    *of(
        "gptoss128",
        w(
            "[gate, up] in place of gate and up column by column",
            changed(r"gate_up_proj(_bias)?", lambda tensor: tensor.unflatten(-1, (96, 2)).transpose(-1, -2)),
        ),
        w("sinks of the ranks exchanged in one layer", changed("layers.3.self_attn.sinks", rolled(2))),
        r("sinks of the ranks exchanged in one layer", at.sinks_of_the_other_rank),
    ),
    *of(
        "qwen2_5_vl",
        w("vision qkv by head in place of [q, k, v]", changed(f"attn.qkv{_BOTH}", regrouped((3, 4, 16), (1, 0, 2)))),
    ),
    *of(
        "qwen3_next",
        w("qkvz of all heads in place of those of each", changed("in_proj_qkvz.weight", by_part(2, (16, 16, 32, 32)))),
    ),
    *of(
        "mamba2", w("[x, z] in place of [z, x] in in_proj", changed("in_proj.weight", parts((128, 128, 40), (1, 0, 2))))
    ),
    *of(
        "mamba",
        w("[z, x] in place of [x, z] in in_proj", changed("in_proj.weight", rolled(128))),
        w("[dt, C, B] in place of [dt, B, C] in x_proj", changed("x_proj.weight", parts((4, 8, 8), (0, 2, 1)))),
        w("A stored in place of its logarithm", changed("A_log", torch.exp)),
        r("D of the ranks exchanged in one layer", at.skip_of_the_other_rank),
    ),
    *of(
        "deepseek",
        w("kv_b as [k, v] of all heads", changed("kv_b_proj.weight", regrouped((4, 2, 16), (1, 0, 2)))),
        w("rotary part before the latent in kv_a", changed("kv_a_proj_with_mqa.weight", parts((32, 16), (1, 0)))),
        w("rotary part first in each head of q_b", changed("q_b_proj.weight", of_each(4, rolled(16)))),
        w("router read as if it were transposed", changed("mlp.gate.weight", read_as(1, 0))),
        w("shared expert and expert 0 exchanged", exchanged("layers.3.mlp.shared_experts.", "layers.3.mlp.experts.0.")),
        r("gradient of the rotary part of kv_a not summed", at.latent_rope_gradient_not_summed),
    ),
]

_HEADS_AND_NORMS = [
    *of(
        "llama",
        w(
            "q and k rows for interleaved rope",
            together(
                changed(r"q_proj\.(weight|bias)", regrouped((4, 2, 8), (0, 2, 1))),
                changed(r"k_proj\.(weight|bias)", regrouped((2, 2, 8), (0, 2, 1))),
            ),
        ),
        w(
            "k rows for interleaved rope, one layer",
            changed("layers.3.self_attn.k_proj.weight", regrouped((2, 2, 8), (0, 2, 1))),
        ),
        w(
            "kv heads exchanged in one layer",
            changed(rf"layers.3.self_attn.[kv]_proj{_BOTH}", rows_exchanged(0, 1, 16)),
        ),
        w(
            "kv head 1 is a copy of head 0 in one layer",
            changed(rf"layers.3.self_attn.[kv]_proj{_BOTH}", lambda tensor: torch.cat([tensor[:16]] * 2)),
        ),
        w(
            "q_proj and o_proj exchanged in one layer",
            exchanged("layers.3.self_attn.q_proj.", "layers.3.self_attn.o_proj."),
        ),
        w(
            "bias of rank 1 missing in one v_proj",
            changed("layers.3.self_attn.v_proj.bias", rows_set(16, None, torch.zeros_like)),
        ),
        w("norms saved as w - 1", changed("norm.weight", lambda tensor: tensor - 1)),
        w("layers 3 and 4 exchanged", exchanged("layers.3.", "layers.4.")),
        w("the last three words zero", changed(r"(embed_tokens|lm_head).weight", rows_set(-3, None, torch.zeros_like))),
        w("embedding one word too late", changed("embed_tokens.weight", rolled(1))),
        w("head is a copy of the embedding", head_is_the_embedding),
        wc("head dropped and tied", head_dropped),
        w("one down_proj rounded to fp8", changed("layers.3.mlp.down_proj.weight", rounded(torch.float8_e4m3fn))),
        w("one down_proj rounded to int8", changed("layers.3.mlp.down_proj.weight", to_int8)),
        w("one down_proj rounded to bf16", changed("layers.3.mlp.down_proj.weight", rounded(torch.bfloat16))),
    ),
    *of("llama12", w("layers in the order of their numbers as text", layers_in_order_of_text)),
    *of(
        "gemma2",
        w("norms saved as 1 + w", changed("norm.weight", lambda tensor: tensor + 1)),
        w("embedding stored with its scale", scaled("embed_tokens.weight", 8)),
        r(
            "soft-cap of the scores forgotten on rank 1",
            at.cap_of_scores_on_one_rank,
            "scores far below the cap of 50: the difference is about as large as the tolerance",
        ),
        r("soft-cap of the logits forgotten on rank 1", at.final_cap_on_one_rank),
    ),
    *of(
        "olmo2",
        w(
            "q_norm of two heads exchanged in one layer",
            changed("layers.3.self_attn.q_norm.weight", rows_exchanged(0, 1, 16)),
        ),
    ),
    *of("cohere", c("logit_scale 0.0625->1", setting("logit_scale", 1.0))),
    *of("phi", c("partial rotary 0.5->0.25", setting("rope_parameters.partial_rotary_factor", 0.25))),
    *of(
        "opt",
        w("positions two too early", changed("embed_positions.weight", rolled(-2))),
        w(
            "positions after the inputs reversed",
            changed("embed_positions.weight", rows_set(40, None, flipped(0))),
            _LATE_POSITIONS,
        ),
        r("positions begin at 1 on rank 1", at.positions_later_on_one_rank),
    ),
    *of("roberta", c("pad_token_id 1->0", setting("pad_token_id", 0))),
    *of(
        "t5",
        w(
            "relative positions of encoder and decoder exchanged",
            exchanged(
                "encoder.block.0.layer.0.SelfAttention.relative", "decoder.block.0.layer.0.SelfAttention.relative"
            ),
        ),
        w(
            "relative positions of the furthest exchanged",
            changed("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", rows_exchanged(14, 15)),
            "no two tokens of the inputs are that far apart",
        ),
    ),
    *of(
        "bigvocab",
        w(
            "one word of the embedding x2",
            changed("embed_tokens.weight", rows_set(70_001, 70_002, lambda row: row * 2)),
            "the word is not among the inputs, and its gradient is zero on both sides",
        ),
        w("one word of the head x2", changed("lm_head.weight", rows_set(70_001, 70_002, lambda row: row * 2))),
    ),
]

_EXPERTS = [
    *of(
        "mixtral",
        w(
            "expert 0 of layers 2 and 3 exchanged",
            exchanged("layers.2.block_sparse_moe.experts.0.", "layers.3.block_sparse_moe.experts.0."),
        ),
        w(
            "w1 and w3 exchanged in one expert",
            exchanged("layers.3.block_sparse_moe.experts.0.w1.", "layers.3.block_sparse_moe.experts.0.w3."),
        ),
        w("router of one layer begins at expert 1", changed("layers.3.block_sparse_moe.gate.weight", rolled(1))),
        r("sum of the experts forgotten in one layer", at.experts_not_summed),
        r("w2 of the other rank in one layer", at.experts_down_of_the_other_rank),
        r("gradient of the routing not summed in one layer", at.router_gradient_not_summed),
        r("tokens go to the next expert on rank 1", at.next_expert_on_one_rank),
    ),
    *of(
        "qwen2_moe",
        w("gate of the shared expert zeroed", zeroed("shared_expert_gate.weight")),
        w(
            "gate and up of the shared expert exchanged in one layer",
            exchanged("layers.3.mlp.shared_expert.gate_proj.", "layers.3.mlp.shared_expert.up_proj."),
        ),
    ),
    *of("qwen3_moe", c("experts of a token 2->3", setting("num_experts_per_tok", 3))),
]

_IMAGES = [
    *of(
        "llava",
        w("positions of the tower one too late", changed("position_embedding.weight", rolled(1))),
        w("patches with their channels last", changed("patch_embedding.weight", read_as(0, 2, 3, 1))),
        r("tokens of an image from its end", at.image_reversed),
        r("output of the tower summed over ranks that all have it", at.tower_summed("multi_modal_projector")),
        r("no gradient reaches the tower", at.tower_without_gradient("multi_modal_projector.linear_1")),
    ),
    *of(
        "qwen3_vl",
        w("patches with frames before channels", changed("patch_embed.proj.weight", read_as(0, 2, 1, 3, 4))),
        w(
            "one position of the tower zeroed",
            changed("pos_embed.weight", rows_set(54, 55, torch.zeros_like)),
            "the image of the inputs has 4 x 6 patches, whose positions are taken from others",
        ),
        r("deepstack in the opposite order", at.deepstack_reversed),
    ),
]

_FSDP: dict[str, Any] = {"tp": 1, "dp_shard": 2}
_RUNTIME = [
    *of(
        "llama",
        r("loss summed over ranks that all have it", at.loss_scaled),
        r("gradient of the head not summed", at.head_gradient_not_summed),
        r("causal mask missing in one layer", at.causal_mask_missing),
        r("scores scaled by the heads of one rank", at.scaling_of_local_heads),
        r("heads of rank 1 reversed in one layer", at.heads_reversed_on_one_rank),
        r("values of the other rank in one layer", at.values_of_the_other_rank),
        r("rotary table of rank 1 in bfloat16", at.rotary_table_in_bfloat16),
        r("one MLP in bfloat16", at.in_bfloat16("layers.3.mlp")),
        r("last norm in bfloat16", at.in_bfloat16("model.norm")),
        r("dropout left on behind one o_proj", at.dropout_left_on),
        r("residual of one layer added on every rank", at.residual_twice),
        r("last norm skipped on rank 1", at.final_norm_skipped_on_one_rank),
        r("norms trained on a part of the sequence", at.norms_on_their_part_of_the_sequence),
        r("embedding not trained on rank 1", at.embedding_not_trained_on_one_rank),
        r(
            "recomputed otherwise under activation checkpointing",
            at.recomputed_otherwise,
            activation_checkpointing="full",
        ),
        r("FSDP2 sums gradients, dp_shard 2", at.fsdp_sums, **_FSDP),
        r("FSDP2 does not reduce one layer, dp_shard 2", at.fsdp_layer_not_reduced, **_FSDP),
    ),
    *of("llama_tied", r("tied embedding trained without its head", at.head_without_its_part_of_a_tie)),
    *of("bigvocab", r("logits of the ranks in the opposite order", at.head_in_order_of_other_ranks)),
    *of(
        "mistral4",
        r("window one longer in one layer", at.window_one_longer),
        r("window ignored in all layers", at.window_ignored),
    ),
    *of("bloom", r("ALiBi slopes of the other rank", at.slopes_of_the_other_rank)),
    *of("qwen3", r("queries normalized as keys in one layer", at.queries_normalized_as_keys)),
    *of("qwen3_next", r("A_log in bfloat16 in one layer", at.parameter_in_bfloat16("layers.2.linear_attn", "A_log"))),
    *of("gemma3", r("rotary table of windows in all layers", at.rope_of_the_window)),
    *of("gemma3n", r("keys and values shared with another kind of layer", at.keys_of_another_kind_of_layer)),
]

# Defects that the inputs of a run, or its single step, may not exercise.
_NOT_ASKED = [
    *of(
        "llama",
        w(
            "embedding of the first word of a text x2",
            changed("embed_tokens.weight", rows_set(1, 2, lambda row: row * 2)),
            "special tokens are not among the inputs",
        ),
        c("eos_token_id 2->5", setting("eos_token_id", 5), "noted: generating alone reads it"),
        r("padding ignored", not_asked.padding_ignored),
        r("positions wrap around at 64", not_asked.positions_wrap_around, "the inputs are shorter"),
        r("second step computes otherwise", not_asked.second_pass_otherwise, "one step is run"),
        r(
            "last norm in the dtype of its input",
            not_asked.norm_in_the_dtype_of_its_input,
            "both sides compute in float32, where it is the same",
        ),
    ),
    *of(
        "mixtral",
        c(
            "router_aux_loss_coef 0.001->0.1",
            setting("router_aux_loss_coef", 0.1),
            "noted: the loss that is compared is that of the words",
        ),
        r("experts drop tokens from the 17th on", not_asked.experts_of_a_capacity, "no expert has that many"),
    ),
    *of("qwen2_5_vl", r("height and width of images exchanged", not_asked.height_is_width)),
]

FURTHER = [*_FUSED_PROJECTIONS, *_HEADS_AND_NORMS, *_EXPERTS, *_IMAGES, *_RUNTIME, *_NOT_ASKED]
