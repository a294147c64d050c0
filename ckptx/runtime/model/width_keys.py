"""Config keys of all classes by what they hold: hidden sizes, heads, experts, vocabularies, and derived values.

`shrink_config` uses them to make a small model of the same class.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Values = dict[str, Any]  # keys and values of a config

# The width of the residual stream. In a config with several of these keys, the first is that of its layers: in a tower
# with an `embed_dim`, `hidden_size` is the width of the language model.
HIDDEN_SIZE_KEYS = ("embed_dim", "d_model", "n_embd", "model_dim", "emb_dim", "dim", "hidden_dim", "hidden_size")

# Numbers of heads, and of groups that heads are divided into.
HEAD_COUNT_KEYS = {
    "num_attention_heads", "num_key_value_heads", "num_heads", "n_head", "n_heads", "num_kv_heads", "n_head_kv",
    "encoder_attention_heads", "decoder_attention_heads", "encoder_num_attention_heads", "decoder_num_attention_heads",
    "encoder_num_key_value_heads", "decoder_num_key_value_heads", "attention_heads", "kv_n_heads",
    "num_global_key_value_heads", "swa_num_attention_heads", "swa_num_key_value_heads", "num_query_groups",
    "linear_num_key_heads", "linear_num_value_heads", "linear_num_heads", "index_n_heads", "indexer_n_heads",
    "indexer_kv_heads", "conf_num_attention_heads", "resampler_n_heads", "cross_num_attention_heads",
    "cross_num_key_value_heads", "num_attention_heads_per_layer", "num_key_value_heads_per_layer",
    "num_sliding_attention_heads", "mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "mamba_n_groups",
    "mamba_ngroups", "n_groups", "audio_num_heads",
}  # fmt: skip

# Widths of one head, or of a part of it.
HEAD_DIM_KEYS = {
    "head_dim", "d_kv", "global_head_dim", "swa_head_dim", "qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "index_head_dim",
    "indexer_head_dim", "rotary_dim", "head_size", "attention_head_size", "resampler_head_dim", "cross_head_dim",
    "mamba_head_dim", "mamba_d_head", "mamba_headdim", "dim_head",
}  # fmt: skip
ROPE_COUNT_KEYS = ("mrope_section",)  # numbers of frequencies per section, which add up to half the width of a head
ROPE_FACTOR_KEYS = ("short_factor", "long_factor")  # one number for each frequency

FEED_FORWARD_KEYS = {
    "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size",
    "moe_shared_expert_intermediate_size", "shared_experts_intermediate_size", "intermediate_size_mlp",
    "dense_intermediate_size", "prefix_dense_intermediate_size", "expert_ffn_hidden_size", "ffn_hidden_size",
    "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "encoder_intermediate_size", "decoder_intermediate_size", "d_ff",
    "dim_ff", "n_inner", "d_inner", "mlp_dim", "share_expert_dim", "moe_hidden_size", "moe_latent_size",
    "encoder_linear_units", "decoder_linear_units", "alignment_intermediate_size", "projection_intermediate_size",
}  # fmt: skip

# Widths of bottlenecks: adapters, latent attention, time steps.
LOW_RANK_KEYS = {
    "q_lora_rank", "kv_lora_rank", "o_lora_rank", "laurel_rank", "adapter_rank", "lora_rank", "embedding_rank",
    "gated_norm_rank", "hc_lowrank", "time_step_rank", "mamba_dt_rank", "attention_rank", "moe_lora_rank",
}  # fmt: skip
STATE_SIZE_KEYS = {"state_size", "ssm_state_size", "mamba_d_state", "d_state"}

# Widths of tables with a row for each token and layer, which with a large vocabulary are most of a model.
PER_LAYER_EMBEDDING_KEYS = {"hidden_size_per_layer_input", "ple_embed_dim"}

# Rows of tables that tokens are hashed into.
HASH_BUCKET_KEYS = {"encoder_hash_byte_group_vocab", "num_hash_buckets", "ngram_vocab_size_base"}

EXPERT_COUNT_KEYS = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}
TOP_K_KEYS = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts", "top_k",
    "experts_per_token", "num_selected_experts",
)  # fmt: skip

# Widths of inputs and outputs between towers and decoder. A value that equals a hidden size is reduced like that hidden
# size; any other is reduced on its own.
PROJECTION_KEYS = {
    "out_hidden_size", "projection_dim", "projector_input_dim", "projector_output_dim", "vision_output_dim",
    "output_proj_dims", "output_dim", "encoder_hidden_size", "cross_attention_hidden_size", "embedding_size",
    "word_embed_proj_dim", "projection_size", "projector_hidden_size", "pooler_hidden_size", "text_hidden_size",
    "mm_embed_dim", "lm_hidden_size", "audio_hidden_size",
}  # fmt: skip
# Other keys with these endings may hold a hidden size, unless they contain one of NON_WIDTH_WORDS.
WIDTH_ENDINGS = ("_size", "_dim", "_dims", "_width")
NON_WIDTH_WORDS = (
    "vocab_size",
    "patch_size",
    "image_size",
    "kernel_size",
    "window",
    "chunk_size",
    "block_size",
    "pool_size",
)

VOCABULARY_KEYS = ("vocab_size", "vocab_size_per_layer_input")
EXTRA_TOKENS = 64  # tokens of a shortened vocabulary beyond the largest token id in the config


def _expanded_size(values: Values) -> int:
    """Return the width of the expanded stream of a state-space model; raise TypeError without a key for the factor."""
    return int(values.get("expand", values.get("mamba_expand")) * values["hidden_size"])


# Values that a config class derives from other keys. If the formula gives the original value, `shrink_config` sets the
# key from it in the shrunk config, too.
DERIVED_VALUES: tuple[tuple[str, Callable[[Values], Any]], ...] = (
    ("intermediate_size", _expanded_size),
    ("intermediate_size", lambda values: int(values["hidden_size"] / values["pixel_shuffle_ratio"] ** 2)),
    ("time_step_rank", lambda values: math.ceil(values["hidden_size"] / 16)),
    ("mamba_dt_rank", lambda values: math.ceil(values["hidden_size"] / 16)),
    ("head_dim", lambda values: _expanded_size(values) / values["num_heads"]),
    ("mamba_head_dim", lambda values: _expanded_size(values) / values["mamba_num_heads"]),
    ("mamba_d_head", lambda values: _expanded_size(values) / values["mamba_n_heads"]),
    ("mamba_headdim", lambda values: _expanded_size(values) / values["n_mamba_heads"]),
    ("mamba_d_ssm", lambda values: values["mamba_n_heads"] * values["mamba_d_head"]),
    ("attention_hidden_size", lambda values: 2 * values["hidden_size"]),
    ("attention_head_dim", lambda values: values["attention_hidden_size"] / values["num_attention_heads"]),
    ("kv_channels", lambda values: values["hidden_size"] / values["num_attention_heads"]),
    ("qk_head_dim", lambda values: values["qk_nope_head_dim"] + values["qk_rope_head_dim"]),
    ("vision_output_dim", lambda values: values["hidden_size"] * (1 + len(values["intermediate_layers_indices"]))),
)  # fmt: skip
