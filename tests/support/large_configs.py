"""Configs of public models in their real size, copied from their `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

Settings = dict[str, Any]


def _text(vocab: int, hidden: int, inner: int, layers: int, heads: int, kv: int, **changes: Any) -> Settings:
    return {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, **changes,
    }  # fmt: skip


def _rope(**changes: Any) -> Settings:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, **changes}}


_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_LLAMA3 = _text(
    128256, 8192, 28672, 80, 64, 8, max_position_embeddings=131072, rope_parameters=_LLAMA3_ROPE, bos_token_id=128000,
    eos_token_id=[128001, 128008, 128009],
)  # fmt: skip
_DEEPSEEK_V3 = _text(
    129280, 7168, 18432, 61, 128, 128, moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1,
    num_experts_per_tok=8, n_group=8, topk_group=4, first_k_dense_replace=3, q_lora_rank=1536, kv_lora_rank=512,
    qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, max_position_embeddings=163840,
    rope_parameters={
        "rope_type": "yarn", "rope_theta": 10000, "factor": 40.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
    },
)  # fmt: skip
_PHI3_ROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0 + 0.01 * each for each in range(48)],
    "long_factor": [1.0 + each for each in range(48)], "original_max_position_embeddings": 4096,
}  # fmt: skip
_QWEN2_5_VL = {
    "text_config": _text(
        152064, 8192, 29568, 80, 64, 8, max_window_layers=80, **_rope(mrope_section=[16, 24, 24])
    ),
    "vision_config": {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3456, "num_heads": 16, "out_hidden_size": 8192,
        "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}  # fmt: skip
_QWEN3_VL_VISION = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
    "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24],
}  # fmt: skip
_QWEN3_VL_IDS = {
    "image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
}  # fmt: skip
_BART = {
    "vocab_size": 50265, "d_model": 1024, "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 16,
    "decoder_attention_heads": 16, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096,
}  # fmt: skip
_WHISPER = {
    "vocab_size": 51866, "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32, "encoder_attention_heads": 20,
    "decoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120, "num_mel_bins": 128,
    "max_source_positions": 1500, "max_target_positions": 448, "pad_token_id": 50256, "bos_token_id": 50257,
    "eos_token_id": 50257, "decoder_start_token_id": 50258,
}  # fmt: skip
_SIGLIP = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
    "image_size": 896, "patch_size": 14,
}  # fmt: skip
_MLLAMA = {
    "text_config": _text(
        128256, 8192, 28672, 100, 64, 8, cross_attention_layers=list(range(3, 100, 5)), rope_parameters=_LLAMA3_ROPE,
        bos_token_id=128000, eos_token_id=128001, pad_token_id=128004,
    ),
    "vision_config": {
        "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_global_layers": 8,
        "attention_heads": 16, "image_size": 560, "patch_size": 14, "vision_output_dim": 7680,
        "intermediate_layers_indices": [3, 7, 15, 23, 30],
    },
    "image_token_index": 128256,
}  # fmt: skip
_LLAMA4 = {
    "text_config": _text(
        202048, 5120, 8192, 48, 40, 8, intermediate_size_mlp=16384, head_dim=128, num_local_experts=128,
        num_experts_per_tok=1, interleave_moe_layer_step=2, use_qk_norm=False, bos_token_id=200000,
        eos_token_id=[200001, 200007, 200008], pad_token_id=200018,
    ),
    "vision_config": {
        "hidden_size": 1408, "intermediate_size": 5632, "num_hidden_layers": 34, "num_attention_heads": 16,
        "image_size": 336, "patch_size": 14, "vision_output_dim": 4096, "projector_input_dim": 4096,
        "projector_output_dim": 4096, "pixel_shuffle_ratio": 0.5,
    },
    "image_token_index": 200092,
}  # fmt: skip
_GEMMA4 = _text(
    262144, 5376, 21504, 60, 32, 16, head_dim=256, global_head_dim=512, num_global_key_value_heads=4,
    attention_k_eq_v=True, hidden_size_per_layer_input=0, num_kv_shared_layers=0, sliding_window=1024,
    final_logit_softcapping=30.0,
)  # fmt: skip
_GEMMA4_SMALL = _text(
    262144, 1536, 6144, 35, 8, 1, head_dim=256, global_head_dim=512, hidden_size_per_layer_input=256,
    vocab_size_per_layer_input=262144, num_kv_shared_layers=20, use_double_wide_mlp=True, sliding_window=512,
    final_logit_softcapping=30.0, layer_types=[*["sliding_attention"] * 4, "full_attention"] * 7,
)  # fmt: skip
_GEMMA4_VISION = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "head_dim": 72, "global_head_dim": 72, "patch_size": 16, "pooling_kernel_size": 3,
    "position_embedding_size": 10240, "standardize": True,
}  # fmt: skip
_QWEN3_NEXT = _text(
    151936, 2048, 5120, 48, 16, 2, head_dim=256, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512,
    shared_expert_intermediate_size=512, linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
    linear_value_head_dim=128, **_rope(partial_rotary_factor=0.25),
)  # fmt: skip

# Name -> class of the model, and settings of its config.
LARGE: Mapping[str, tuple[str, Settings]] = {
    "llama-3-70b": ("LlamaForCausalLM", _LLAMA3),
    "qwen3-235b-a22b": (
        "Qwen3MoeForCausalLM",
        _text(
            151936, 4096, 12288, 94, 64, 4, head_dim=128, num_experts=128, num_experts_per_tok=8,
            moe_intermediate_size=1536, norm_topk_prob=True, bos_token_id=151643, eos_token_id=151645,
        ),
    ),
    "deepseek-v3": ("DeepseekV3ForCausalLM", _DEEPSEEK_V3),
    "gemma-3n-e4b": (
        "Gemma3nForCausalLM",
        {
            "num_hidden_layers": 35, "num_kv_shared_layers": 15,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        },
    ),
    "gemma-4-e2b": ("Gemma4ForCausalLM", _GEMMA4_SMALL),
    "qwen2.5-vl-72b": ("Qwen2_5_VLForConditionalGeneration", _QWEN2_5_VL),
    "t5-11b": (
        "T5ForConditionalGeneration",
        {"vocab_size": 32128, "d_model": 1024, "d_kv": 128, "d_ff": 65536, "num_layers": 24, "num_heads": 128},
    ),
    "zamba2-7b": (
        "Zamba2ForCausalLM",
        _text(
            32000, 3584, 14336, 81, 32, 32, n_mamba_heads=112, mamba_ngroups=2, num_mem_blocks=2, use_mem_rope=True,
            use_shared_attention_adapter=False, adapter_rank=128, mamba_d_state=64,
            layers_block_type=[
                *["linear_attention"] * 6, "hybrid", *[*["linear_attention"] * 5, "hybrid"] * 12,
                *["linear_attention"] * 2,
            ],
        ),
    ),
    "bloom-176b": ("BloomForCausalLM", {"vocab_size": 250880, "hidden_size": 14336, "n_layer": 70, "n_head": 112}),
    "gpt-oss-120b": (
        "GptOssForCausalLM",
        _text(201088, 2880, 2880, 36, 64, 8, head_dim=64, num_local_experts=128, num_experts_per_tok=4),
    ),
    # ----------------------------------------------------------------------------------------------- beyond the first
    "mixtral-8x22b": (
        "MixtralForCausalLM", _text(32768, 6144, 16384, 56, 48, 8, num_local_experts=8, num_experts_per_tok=2)
    ),
    "qwen2.5-7b": ("Qwen2ForCausalLM", _text(152064, 3584, 18944, 28, 28, 4, eos_token_id=151645)),
    "gemma-2-27b": (
        "Gemma2ForCausalLM",
        _text(256000, 4608, 36864, 46, 32, 16, head_dim=128, query_pre_attn_scalar=144, sliding_window=4096),
    ),
    "gemma-3-27b": (
        "Gemma3ForConditionalGeneration",
        {
            "text_config": _text(
                262208, 5376, 21504, 62, 32, 16, head_dim=128, query_pre_attn_scalar=168, sliding_window=1024
            ),
            "vision_config": _SIGLIP, "mm_tokens_per_image": 256, "image_token_index": 262144,
            "boi_token_index": 255999, "eoi_token_index": 256000,
        },
    ),
    "gemma-4-31b": ("Gemma4ForCausalLM", _GEMMA4),
    "gemma-4-26b-a4b": (
        "Gemma4ForCausalLM",
        {
            **_GEMMA4, "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30,
            "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2,
            "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
        },
    ),
    "gemma-4-e2b-vision": (
        "Gemma4ForConditionalGeneration",
        {"text_config": _GEMMA4_SMALL, "vision_config": _GEMMA4_VISION, "audio_config": None, "image_token_id": 258880},
    ),
    "qwen3-vl-32b": (
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": _text(151936, 5120, 25600, 64, 64, 8, head_dim=128, **_rope(mrope_section=[24, 20, 20])),
            "vision_config": {**_QWEN3_VL_VISION, "out_hidden_size": 5120}, **_QWEN3_VL_IDS,
        },
    ),
    "qwen3-vl-235b-a22b": (
        "Qwen3VLMoeForConditionalGeneration",
        {
            "text_config": _text(
                151936, 4096, 12288, 94, 64, 4, head_dim=128, num_experts=128, num_experts_per_tok=8,
                moe_intermediate_size=1536, **_rope(mrope_section=[24, 20, 20]),
            ),
            "vision_config": {**_QWEN3_VL_VISION, "out_hidden_size": 4096}, **_QWEN3_VL_IDS,
        },
    ),
    "qwen2-vl-7b": (
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": _text(152064, 3584, 18944, 28, 28, 4, **_rope(mrope_section=[16, 24, 24])),
            "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "num_heads": 16, "mlp_ratio": 4},
            **_QWEN3_VL_IDS,
        },
    ),
    "qwen3-next-80b-a3b": ("Qwen3NextForCausalLM", _QWEN3_NEXT),
    "gpt2-xl": ("GPT2LMHeadModel", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "bart-large": ("BartForConditionalGeneration", _BART),
    "whisper-large-v3": ("WhisperForConditionalGeneration", _WHISPER),
    "llama-3.2-90b-vision": ("MllamaForConditionalGeneration", _MLLAMA),
    "llama-4-maverick": ("Llama4ForConditionalGeneration", _LLAMA4),
    "zamba2-2.7b": (
        "Zamba2ForCausalLM",
        _text(32000, 2560, 10240, 54, 32, 32, n_mamba_heads=80, num_mem_blocks=2, use_shared_attention_adapter=True),
    ),
    "mamba2-8b": (
        "Mamba2ForCausalLM",
        {
            "vocab_size": 256000, "hidden_size": 4096, "num_hidden_layers": 56, "num_heads": 128, "head_dim": 64,
            "n_groups": 8,
        },
    ),
    "mamba-2.8b": ("MambaForCausalLM", {"hidden_size": 2560, "num_hidden_layers": 64}),
    "jamba-1.5-large": (
        "JambaForCausalLM",
        _text(65536, 8192, 24576, 72, 64, 8, num_experts=16, num_experts_per_tok=2, mamba_dt_rank=512),
    ),
    "bamba-9b": (
        "BambaForCausalLM",
        _text(
            128256, 4096, 14336, 32, 32, 8, mamba_n_heads=128, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=128,
            attn_layer_indices=[9, 18, 27], pad_token_id=0,
        ),
    ),
    "falcon-h1-34b": (
        "FalconH1ForCausalLM",
        _text(
            261120, 5120, 21504, 72, 20, 4, head_dim=128, mamba_d_ssm=4096, mamba_n_heads=32, mamba_d_head=128,
            mamba_n_groups=2, mamba_d_state=256, pad_token_id=11, bos_token_id=1, eos_token_id=11,
        ),
    ),
    "nemotron-h-8b": (
        "NemotronHForCausalLM",
        _text(
            131072, 4096, 21504, 52, 32, 8, head_dim=128, mamba_num_heads=128, mamba_head_dim=64, n_groups=8,
            ssm_state_size=128,
            layers_block_type=[*["mamba", "mlp"] * 3, "mamba", "attention", "mlp", *["mamba", "mlp"] * 21, "mamba"],
        ),
    ),
    "granite-4-small": (
        "GraniteMoeHybridForCausalLM",
        _text(
            100352, 4096, 768, 40, 32, 8, num_local_experts=72, num_experts_per_tok=10, shared_intermediate_size=1536,
            mamba_n_heads=128, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=128, embedding_multiplier=12,
            residual_multiplier=0.22, logits_scaling=16, attention_multiplier=0.0078125,
            layer_types=[*["mamba"] * 5, "attention", *["mamba"] * 4] * 4, pad_token_id=100256,
            bos_token_id=100257, eos_token_id=100257,
        ),
    ),
    "granite-3-8b": (
        "GraniteForCausalLM",
        _text(49155, 4096, 12800, 40, 32, 8, embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=16.0),
    ),
    "falcon-7b": (
        "FalconForCausalLM",
        {
            "vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
            "multi_query": True,
        },
    ),
    "falcon-180b": (
        "FalconForCausalLM",
        {
            "vocab_size": 65024, "hidden_size": 14848, "num_hidden_layers": 80, "num_attention_heads": 232,
            "num_kv_heads": 8, "new_decoder_architecture": True,
        },
    ),
    "opt-350m": (
        "OPTForCausalLM",
        {
            "hidden_size": 1024, "num_hidden_layers": 24, "ffn_dim": 4096, "num_attention_heads": 16,
            "word_embed_proj_dim": 512, "do_layer_norm_before": False,
        },
    ),
    "opt-66b": (
        "OPTForCausalLM",
        {
            "hidden_size": 9216, "num_hidden_layers": 64, "ffn_dim": 36864, "num_attention_heads": 72,
            "word_embed_proj_dim": 9216,
        },
    ),
    "phi-3-mini-128k": (
        "Phi3ForCausalLM",
        _text(
            32064, 3072, 8192, 32, 32, 32, rope_parameters=_PHI3_ROPE, max_position_embeddings=131072,
            original_max_position_embeddings=4096, sliding_window=262144,
        ),
    ),
    "phi-2": ("PhiForCausalLM", _text(51200, 2560, 10240, 32, 32, 32, **_rope(partial_rotary_factor=0.4))),
    "command-r-plus": ("CohereForCausalLM", _text(256000, 12288, 33792, 64, 96, 8, use_qk_norm=True)),
    "gpt-neox-20b": (
        "GPTNeoXForCausalLM",
        {
            "vocab_size": 50432, "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64,
            "intermediate_size": 24576,
        },
    ),
    "gpt-j-6b": ("GPTJForCausalLM", {"n_embd": 4096, "n_layer": 28, "n_head": 16, "rotary_dim": 64}),
    "glm-4.5": (
        "Glm4MoeForCausalLM",
        _text(
            151552, 5120, 12288, 92, 96, 8, head_dim=128, n_routed_experts=160, num_experts_per_tok=8,
            moe_intermediate_size=1536, n_shared_experts=1, first_k_dense_replace=3, use_qk_norm=True, n_group=1,
            topk_group=1, attention_bias=True,
        ),
    ),
    "deepseek-v3.2": (
        "DeepseekV32ForCausalLM", {**_DEEPSEEK_V3, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
    ),
    "smollm3-3b": ("SmolLM3ForCausalLM", _text(128256, 2048, 11008, 36, 16, 4)),
    "xglm-7.5b": (
        "XGLMForCausalLM",
        {"vocab_size": 256008, "d_model": 4096, "ffn_dim": 16384, "num_layers": 32, "attention_heads": 32},
    ),
    "llava-1.5-13b": (
        "LlavaForConditionalGeneration",
        {
            "text_config": {"model_type": "llama", **_text(32064, 5120, 13824, 40, 40, 40)},
            "vision_config": {
                "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096,
                "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 336, "patch_size": 14,
                "projection_dim": 768,
            },
            "image_token_index": 32000,
        },
    ),
    "bert-large": (
        "BertForMaskedLM",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    ),
}  # fmt: skip


def large(name: str) -> tuple[Any, Any]:
    """Return the config of a public model, and its class."""
    class_name, settings = LARGE[name]
    cls = getattr(transformers, class_name)
    return cls.config_class(**settings), cls
