"""Defects that are rare in converters and runtimes, one of each kind."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.injected import more_runtime_defects as inject
from benchmarks.injected import unexercised_defects as not_exercised
from benchmarks.injected.checkpoint_changes import (
    combine,
    copy_embedding_to_head,
    drop_head,
    exchange,
    exchange_rows,
    flip,
    group_by_part,
    map_columns,
    map_groups,
    misread_order,
    permute_rows,
    reorder_parts,
    roll,
    round_to,
    round_to_int8,
    scale,
    set_config,
    sort_layers_as_strings,
    transform,
    transform_rows,
    zero,
)
from benchmarks.injected.defect import combined_defect, config_defect, defects_of, runtime_defect, weight_defect

_UNREACHED_POSITIONS = "rows of a table of positions that no input reaches"
_FUSED, _WEIGHT_AND_BIAS = r"query_key_value\.(weight|bias)", r"\.(weight|bias)"

_FUSED_PROJECTIONS = [
    *defects_of(
        "gpt_neox",
        weight_defect(
            "[q, k, v] of all heads in place of [q, k, v] of each",
            transform(_FUSED, permute_rows((4, 3, 16), (1, 0, 2))),
        ),
        config_defect("parallel residual off", set_config("use_parallel_residual", False)),
        config_defect("half of the rotary dims", set_config("rope_parameters.partial_rotary_factor", 0.25)),
    ),
    *defects_of(
        "bloom",
        weight_defect(
            "[q, k, v] of all heads in place of [q, k, v] of each",
            transform(_FUSED, permute_rows((4, 3, 16), (1, 0, 2))),
        ),
    ),
    *defects_of(
        "falcon",
        weight_defect(
            "[q, k, v] of all heads in place of those of each group", transform(_FUSED, group_by_part(2, (32, 16, 16)))
        ),
    ),
    *defects_of(
        "gpt2",
        weight_defect(
            "c_attn cut by head in place of [q, k, v]",
            transform("c_attn.weight", map_columns(permute_rows((3, 4, 16), (1, 0, 2)))),
        ),
        weight_defect("one Conv1D saved as a Linear", transform("h.3.attn.c_proj.weight", lambda tensor: tensor.t())),
        weight_defect(
            "positions after the inputs reversed",
            transform("wpe.weight", transform_rows(32, None, flip(0))),
            _UNREACHED_POSITIONS,
        ),
    ),
    *defects_of(
        "phi3",
        weight_defect(
            "k and v exchanged in one qkv_proj",
            transform("layers.3.self_attn.qkv_proj.weight", reorder_parts((64, 32, 32), (0, 2, 1))),
        ),
        weight_defect("[up, gate] in place of [gate, up]", transform("gate_up_proj.weight", roll(96))),
    ),
    *defects_of(
        "glm4",
        weight_defect(
            "gate and up row by row in place of [gate, up]",
            transform("gate_up_proj.weight", permute_rows((2, 96), (1, 0))),
        ),
    ),
    *defects_of(
        "gptoss128",
        weight_defect(
            "[gate, up] in place of gate and up column by column",
            transform(r"gate_up_proj(_bias)?", lambda tensor: tensor.unflatten(-1, (96, 2)).transpose(-1, -2)),
        ),
        weight_defect("sinks of the ranks exchanged in one layer", transform("layers.3.self_attn.sinks", roll(2))),
        runtime_defect("sinks of the ranks exchanged in one layer", inject.exchange_sink_shards),
    ),
    *defects_of(
        "qwen2_5_vl",
        weight_defect(
            "vision qkv by head in place of [q, k, v]",
            transform(f"attn.qkv{_WEIGHT_AND_BIAS}", permute_rows((3, 4, 16), (1, 0, 2))),
        ),
    ),
    *defects_of(
        "qwen3_next",
        weight_defect(
            "qkvz of all heads in place of those of each",
            transform("in_proj_qkvz.weight", group_by_part(2, (16, 16, 32, 32))),
        ),
    ),
    *defects_of(
        "mamba2",
        weight_defect(
            "[x, z] in place of [z, x] in in_proj",
            transform("in_proj.weight", reorder_parts((128, 128, 40), (1, 0, 2))),
        ),
    ),
    *defects_of(
        "mamba",
        weight_defect("[z, x] in place of [x, z] in in_proj", transform("in_proj.weight", roll(128))),
        weight_defect(
            "[dt, C, B] in place of [dt, B, C] in x_proj",
            transform("x_proj.weight", reorder_parts((4, 8, 8), (0, 2, 1))),
        ),
        weight_defect("A stored in place of its logarithm", transform("A_log", torch.exp)),
        runtime_defect("D of the ranks exchanged in one layer", inject.exchange_d_shards),
    ),
    *defects_of(
        "deepseek",
        weight_defect(
            "kv_b as [k, v] of all heads", transform("kv_b_proj.weight", permute_rows((4, 2, 16), (1, 0, 2)))
        ),
        weight_defect(
            "rotary part before the latent in kv_a",
            transform("kv_a_proj_with_mqa.weight", reorder_parts((32, 16), (1, 0))),
        ),
        weight_defect("rotary part first in each head of q_b", transform("q_b_proj.weight", map_groups(4, roll(16)))),
        weight_defect("router read as if it were transposed", transform("mlp.gate.weight", misread_order(1, 0))),
        weight_defect(
            "shared expert and expert 0 exchanged", exchange("layers.3.mlp.shared_experts.", "layers.3.mlp.experts.0.")
        ),
        runtime_defect("gradient of the rotary part of kv_a not summed", inject.skip_latent_rope_gradient_all_reduce),
    ),
]

_HEADS_AND_NORMS = [
    *defects_of(
        "llama",
        weight_defect(
            "q and k rows for interleaved rope",
            combine(
                transform(r"q_proj\.(weight|bias)", permute_rows((4, 2, 8), (0, 2, 1))),
                transform(r"k_proj\.(weight|bias)", permute_rows((2, 2, 8), (0, 2, 1))),
            ),
        ),
        weight_defect(
            "k rows for interleaved rope, one layer",
            transform("layers.3.self_attn.k_proj.weight", permute_rows((2, 2, 8), (0, 2, 1))),
        ),
        weight_defect(
            "kv heads exchanged in one layer",
            transform(rf"layers.3.self_attn.[kv]_proj{_WEIGHT_AND_BIAS}", exchange_rows(0, 1, 16)),
        ),
        weight_defect(
            "kv head 1 is a copy of head 0 in one layer",
            transform(rf"layers.3.self_attn.[kv]_proj{_WEIGHT_AND_BIAS}", lambda tensor: torch.cat([tensor[:16]] * 2)),
        ),
        weight_defect(
            "q_proj and o_proj exchanged in one layer",
            exchange("layers.3.self_attn.q_proj.", "layers.3.self_attn.o_proj."),
        ),
        weight_defect(
            "bias of rank 1 missing in one v_proj",
            transform("layers.3.self_attn.v_proj.bias", transform_rows(16, None, torch.zeros_like)),
        ),
        weight_defect("norms saved as w - 1", transform("norm.weight", lambda tensor: tensor - 1)),
        weight_defect("layers 3 and 4 exchanged", exchange("layers.3.", "layers.4.")),
        weight_defect(
            "the last three words zero",
            transform(r"(embed_tokens|lm_head).weight", transform_rows(-3, None, torch.zeros_like)),
        ),
        weight_defect("embedding one word too late", transform("embed_tokens.weight", roll(1))),
        weight_defect("head is a copy of the embedding", copy_embedding_to_head),
        combined_defect("head dropped and tied", drop_head),
        weight_defect(
            "one down_proj rounded to fp8", transform("layers.3.mlp.down_proj.weight", round_to(torch.float8_e4m3fn))
        ),
        weight_defect("one down_proj rounded to int8", transform("layers.3.mlp.down_proj.weight", round_to_int8)),
        weight_defect(
            "one down_proj rounded to bf16", transform("layers.3.mlp.down_proj.weight", round_to(torch.bfloat16))
        ),
    ),
    *defects_of("llama12", weight_defect("layers in the order of their numbers as text", sort_layers_as_strings)),
    *defects_of(
        "gemma2",
        weight_defect("norms saved as 1 + w", transform("norm.weight", lambda tensor: tensor + 1)),
        weight_defect("embedding stored with its scale", scale("embed_tokens.weight", 8)),
        runtime_defect(
            "soft-cap of the scores forgotten on rank 1",
            inject.drop_score_softcap_on_last_rank,
            "scores far below the cap of 50: the difference is about as large as the tolerance",
        ),
        runtime_defect("soft-cap of the logits forgotten on rank 1", inject.drop_logit_softcap_on_last_rank),
    ),
    *defects_of(
        "olmo2",
        weight_defect(
            "q_norm of two heads exchanged in one layer",
            transform("layers.3.self_attn.q_norm.weight", exchange_rows(0, 1, 16)),
        ),
    ),
    *defects_of("cohere", config_defect("logit_scale 0.0625->1", set_config("logit_scale", 1.0))),
    *defects_of(
        "phi", config_defect("partial rotary 0.5->0.25", set_config("rope_parameters.partial_rotary_factor", 0.25))
    ),
    *defects_of(
        "opt",
        weight_defect("positions two too early", transform("embed_positions.weight", roll(-2))),
        weight_defect(
            "positions after the inputs reversed",
            transform("embed_positions.weight", transform_rows(40, None, flip(0))),
            _UNREACHED_POSITIONS,
        ),
        runtime_defect("positions begin at 1 on rank 1", inject.shift_positions_on_last_rank),
    ),
    *defects_of("roberta", config_defect("pad_token_id 1->0", set_config("pad_token_id", 0))),
    *defects_of(
        "t5",
        weight_defect(
            "relative positions of encoder and decoder exchanged",
            exchange(
                "encoder.block.0.layer.0.SelfAttention.relative", "decoder.block.0.layer.0.SelfAttention.relative"
            ),
        ),
        weight_defect(
            "relative positions of the furthest exchanged",
            transform("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", exchange_rows(14, 15)),
            "no two tokens of the inputs are that far apart",
        ),
    ),
    *defects_of(
        "bigvocab",
        weight_defect(
            "one word of the embedding x2",
            transform("embed_tokens.weight", transform_rows(70_001, 70_002, lambda row: row * 2)),
            "the word is not among the inputs, and its gradient is zero on both sides",
        ),
        weight_defect(
            "one word of the head x2", transform("lm_head.weight", transform_rows(70_001, 70_002, lambda row: row * 2))
        ),
    ),
]

_EXPERTS = [
    *defects_of(
        "mixtral",
        weight_defect(
            "expert 0 of layers 2 and 3 exchanged",
            exchange("layers.2.block_sparse_moe.experts.0.", "layers.3.block_sparse_moe.experts.0."),
        ),
        weight_defect(
            "w1 and w3 exchanged in one expert",
            exchange("layers.3.block_sparse_moe.experts.0.w1.", "layers.3.block_sparse_moe.experts.0.w3."),
        ),
        weight_defect(
            "router of one layer begins at expert 1", transform("layers.3.block_sparse_moe.gate.weight", roll(1))
        ),
        runtime_defect("sum of the experts forgotten in one layer", inject.skip_expert_all_reduce),
        runtime_defect("w2 of the other rank in one layer", inject.exchange_expert_down_shards),
        runtime_defect("gradient of the routing not summed in one layer", inject.skip_router_gradient_all_reduce),
        runtime_defect("tokens go to the next expert on rank 1", inject.route_to_next_expert_on_last_rank),
    ),
    *defects_of(
        "qwen2_moe",
        weight_defect("gate of the shared expert zeroed", zero("shared_expert_gate.weight")),
        weight_defect(
            "gate and up of the shared expert exchanged in one layer",
            exchange("layers.3.mlp.shared_expert.gate_proj.", "layers.3.mlp.shared_expert.up_proj."),
        ),
    ),
    *defects_of("qwen3_moe", config_defect("experts of a token 2->3", set_config("num_experts_per_tok", 3))),
]

_IMAGES = [
    *defects_of(
        "llava",
        weight_defect("positions of the tower one too late", transform("position_embedding.weight", roll(1))),
        weight_defect(
            "patches with their channels last", transform("patch_embedding.weight", misread_order(0, 2, 3, 1))
        ),
        runtime_defect("tokens of an image from its end", inject.reverse_image_tokens),
        runtime_defect(
            "output of the tower summed over ranks that all have it",
            inject.all_reduce_tower_output("multi_modal_projector"),
        ),
        runtime_defect("no gradient reaches the tower", inject.detach_tower_output("multi_modal_projector.linear_1")),
    ),
    *defects_of(
        "qwen3_vl",
        weight_defect(
            "patches with frames before channels", transform("patch_embed.proj.weight", misread_order(0, 2, 1, 3, 4))
        ),
        weight_defect(
            "one position of the tower zeroed",
            transform("pos_embed.weight", transform_rows(54, 55, torch.zeros_like)),
            "the image of the inputs has 4 x 6 patches, whose positions are taken from others",
        ),
        runtime_defect("deepstack in the opposite order", inject.reverse_deepstack),
    ),
]

_FSDP: dict[str, Any] = {"tp": 1, "dp_shard": 2}
_RUNTIME = [
    *defects_of(
        "llama",
        runtime_defect("loss summed over ranks that all have it", inject.scale_logit_gradient),
        runtime_defect("gradient of the head not summed", inject.skip_head_gradient_all_reduce),
        runtime_defect("causal mask missing in one layer", inject.drop_causal_mask),
        runtime_defect("scores scaled by the heads of one rank", inject.scale_scores_by_local_width),
        runtime_defect("heads of rank 1 reversed in one layer", inject.reverse_heads_on_last_rank),
        runtime_defect("values of the other rank in one layer", inject.exchange_value_shards),
        runtime_defect("rotary table of rank 1 in bfloat16", inject.round_rope_on_last_rank),
        runtime_defect("one MLP in bfloat16", inject.round_module_to_bfloat16("layers.3.mlp")),
        runtime_defect("last norm in bfloat16", inject.round_module_to_bfloat16("model.norm")),
        runtime_defect("dropout left on behind one o_proj", inject.enable_dropout),
        runtime_defect("residual of one layer added on every rank", inject.add_residual_twice),
        runtime_defect("last norm skipped on rank 1", inject.skip_final_norm_on_last_rank),
        runtime_defect("norms trained on a part of the sequence", inject.train_norms_on_local_sequence),
        runtime_defect("embedding not trained on rank 1", inject.detach_embedding_on_last_rank),
        runtime_defect(
            "recomputed otherwise under activation checkpointing",
            inject.change_recomputed_output,
            activation_checkpointing="full",
        ),
        runtime_defect("FSDP2 sums gradients, dp_shard 2", inject.sum_fsdp_gradients, **_FSDP),
        runtime_defect("FSDP2 does not reduce one layer, dp_shard 2", inject.skip_fsdp_layer_reduction, **_FSDP),
    ),
    *defects_of("llama_tied", runtime_defect("tied embedding trained without its head", inject.detach_tied_head)),
    *defects_of("bigvocab", runtime_defect("logits of the ranks in the opposite order", inject.exchange_logit_shards)),
    *defects_of(
        "mistral4",
        runtime_defect("window one longer in one layer", inject.widen_sliding_window),
        runtime_defect("window ignored in all layers", inject.drop_sliding_window),
    ),
    *defects_of("bloom", runtime_defect("ALiBi slopes of the other rank", inject.exchange_alibi_slopes)),
    *defects_of(
        "qwen3", runtime_defect("queries normalized as keys in one layer", inject.normalize_queries_with_key_norm)
    ),
    *defects_of(
        "qwen3_next",
        runtime_defect(
            "A_log in bfloat16 in one layer", inject.round_parameter_to_bfloat16("layers.2.linear_attn", "A_log")
        ),
    ),
    *defects_of(
        "gemma3", runtime_defect("rotary table of windows in all layers", inject.use_window_rope_in_all_layers)
    ),
    *defects_of(
        "gemma3n",
        runtime_defect("keys and values shared with another kind of layer", inject.share_keys_of_wrong_layer_type),
    ),
]

# Defects that the inputs of a run, or its single step, may not exercise.
_NOT_EXERCISED = [
    *defects_of(
        "llama",
        weight_defect(
            "embedding of the first word of a text x2",
            transform("embed_tokens.weight", transform_rows(1, 2, lambda row: row * 2)),
            "special tokens are not among the inputs",
        ),
        config_defect("eos_token_id 2->5", set_config("eos_token_id", 5), "noted: generating alone reads it"),
        runtime_defect("padding ignored", not_exercised.drop_attention_mask),
        runtime_defect("positions wrap around at 64", not_exercised.wrap_positions, "the inputs are shorter"),
        runtime_defect("second step computes otherwise", not_exercised.scale_later_passes, "one step is run"),
        runtime_defect(
            "last norm in the dtype of its input",
            not_exercised.compute_norm_in_input_dtype,
            "both sides compute in float32, where it is the same",
        ),
    ),
    *defects_of(
        "mixtral",
        config_defect(
            "router_aux_loss_coef 0.001->0.1",
            set_config("router_aux_loss_coef", 0.1),
            "noted: the loss that is compared is that of the words",
        ),
        runtime_defect(
            "experts drop tokens from the 17th on", not_exercised.limit_expert_capacity, "no expert has that many"
        ),
    ),
    *defects_of(
        "qwen2_5_vl",
        runtime_defect("height and width of images exchanged", not_exercised.exchange_image_height_and_width),
    ),
]

RARE_DEFECTS = [*_FUSED_PROJECTIONS, *_HEADS_AND_NORMS, *_EXPERTS, *_IMAGES, *_RUNTIME, *_NOT_EXERCISED]
