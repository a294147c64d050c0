"""Tiny models of every vision class, for tests of generated images.

Each class has a row with its config, small enough to run in milliseconds, including its tower and projector.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import transformers

Settings = dict[str, Any]

VOCAB = 101

_IDS: Settings = {"image_token_id": 99, "video_token_id": 98}
_INDEX: Settings = {"image_token_index": 99}
_VISION_ENDS: Settings = {"vision_start_token_id": 96, "vision_end_token_id": 97}
_SOUND_ENDS: Settings = {"audio_start_token_id": 93, "audio_end_token_id": 94, "user_token_id": 92}
_IMAGE_ENDS: Settings = {
    "image_start_token_id": 96, "image_end_token_id": 97, "video_start_token_id": 94, "video_end_token_id": 95,
}  # fmt: skip
_ROPE: Settings = {"rope_type": "default", "rope_theta": 1e4}
_MROPE: Settings = {**_ROPE, "mrope_section": [2, 1, 1]}
_SPARSE = ["dense", "sparse"]

# ---------------------------------------------------------------------------------------------------- language models


def _text(model_type: str, **changes: Any) -> Settings:
    return {
        "model_type": model_type, "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 97,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, **changes,
    }  # fmt: skip


_LLAMA = _text("llama")
_EXPERTS: Settings = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
}  # fmt: skip
_ROUTED: Settings = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip
_LATENT: Settings = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
_LINEAR: Settings = {
    "layer_types": ["linear_attention", "full_attention"], "head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
}  # fmt: skip
_GLM_ROPE: Settings = {"rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0, "mrope_section": [2, 1, 1]}}

# ------------------------------------------------------------------------------------------------------------- towers


def _tower(model_type: str, **changes: Any) -> Settings:
    """Return the config of a vision transformer for images of one size with four patches."""
    return {
        "model_type": model_type, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": 16, "patch_size": 8, **changes,
    }  # fmt: skip


_CLIP = _tower("clip_vision_model", projection_dim=32)
_SIGLIP = _tower("siglip_vision_model", vision_use_head=False)
_PIXTRAL = _tower("pixtral", patch_size=4, head_dim=8)
_QWEN: Settings = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
_QWEN_WINDOWS = {**_QWEN, "window_size": 16, "fullatt_block_indexes": [1]}
_QWEN3 = {**_QWEN, "num_position_embeddings": 16}
_DEEPSTACK = {**_QWEN3, "deepstack_visual_indexes": [0]}
_GLM = {**_QWEN, "image_size": 16}
_SOUND: Settings = {
    "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "num_mel_bins": 8,
    "output_dim": 32,
}  # fmt: skip
_NEXT: Settings = {**_INDEX, "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]], "vision_feature_layer": -1}


_GLM4V: Settings = {
    "text_config": _text("glm4v_text", **_GLM_ROPE), "vision_config": _GLM, **_IDS, **_IMAGE_ENDS,
}  # fmt: skip


def _aria() -> Settings:
    return {
        "vision_config": _tower("idefics3_vision", image_size=32), **_INDEX, "projector_patch_to_query_dict": {4: 3},
        "max_value_projector_patch_to_query_dict": 3,
        "text_config": _text(
            "aria_text", moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1, intermediate_size=48, pad_token_id=0
        ),
    }  # fmt: skip


def _gemma4_unified() -> Settings:
    text = _text(
        "gemma4_unified_text", head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"],
        pad_token_id=0,
    )  # fmt: skip
    vision = {
        "patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 32, "mm_posemb_size": 8, "output_proj_dims": 32,
    }  # fmt: skip
    return {"text_config": text, "vision_config": vision, "audio_config": None, **_IDS, **_GEMMA_ENDS}


_GEMMA_ENDS: Settings = {"boi_token_id": 97, "eoi_token_id": 96, "audio_token_id": 95, "boa_token_id": 94}

# Model type -> class, and settings of its config.
_ROWS: Mapping[str, tuple[str, Settings]] = {
    "aria": ("Aria", _aria()),
    "aya_vision": (
        "AyaVision",
        {
            "text_config": _text("cohere2", layer_types=["sliding_attention", "full_attention"], sliding_window=4),
            "vision_config": {**_SIGLIP, "image_size": 32}, **_INDEX, "alignment_intermediate_size": 32,
        },
    ),
    "cohere2_vision": (
        "Cohere2Vision",
        {
            "text_config": _text("cohere2", layer_types=["sliding_attention", "full_attention"], sliding_window=4),
            "vision_config": {**_SIGLIP, "image_size": 32}, "image_token_id": 99, "alignment_intermediate_size": 32,
        },
    ),
    "deepseek_vl": ("DeepseekVL", {"text_config": _LLAMA, "vision_config": _SIGLIP, "image_token_id": 99}),
    "ernie4_5_vl_moe": (
        "Ernie4_5_VLMoe",
        {
            "text_config": _text(
                "ernie4_5_vl_moe_text", moe_intermediate_size=[24, 16], moe_k=2, moe_num_experts=4,
                moe_num_shared_experts=1, mlp_layer_types=_SPARSE,
                rope_parameters={**_ROPE, "mrope_section": [1, 1, 2]},
            ),
            "vision_config": {
                "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 4,
                "spatial_merge_size": 2, "temporal_merge_size": 2,
            },
            **_IDS, **_IMAGE_ENDS,
        },
    ),
    "exaone4_5": (
        "Exaone4_5_",
        {
            "text_config": _text("exaone4", layer_types=["sliding_attention", "full_attention"], sliding_window=4),
            "vision_config": {**_QWEN_WINDOWS, "num_key_value_heads": 2}, **_IDS,
        },
    ),
    "gemma4_unified": ("Gemma4Unified", _gemma4_unified()),
    "glm46v": ("Glm46V", _GLM4V),
    "glm4v": ("Glm4v", _GLM4V),
    "glm4v_moe": (
        "Glm4vMoe",
        {
            "text_config": _text("glm4v_moe_text", **_ROUTED, **_GLM_ROPE), "vision_config": _GLM, **_IDS,
            **_IMAGE_ENDS,
        },
    ),
    "got_ocr2": (
        "GotOcr2",
        {
            "text_config": _text("qwen2"), **_INDEX,
            "vision_config": {
                "hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
                "image_size": 40, "patch_size": 8, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 48,
            },
        },
    ),
    "idefics2": (
        "Idefics2",
        {
            "text_config": _text("mistral", head_dim=8, pad_token_id=0), "image_token_id": 99,
            "vision_config": _tower("idefics2_vision", image_size=32),
            "perceiver_config": {
                "hidden_size": 32, "resampler_n_latents": 3, "resampler_depth": 1, "resampler_n_heads": 4,
                "resampler_head_dim": 8, "num_key_value_heads": 2,
            },
        },
    ),
    "idefics3": (
        "Idefics3",
        {
            "text_config": _text("llama", pad_token_id=0), "image_token_id": 99, "scale_factor": 2,
            "vision_config": _tower("idefics3_vision", image_size=64),
        },
    ),
    "inkling_mm_model": (
        "Inkling",
        {
            "text_config": _text(
                "inkling_text", head_dim=8, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=8,
                sliding_window_size=4, d_rel=4, rel_extent=16, layer_types=["hybrid_sliding", "hybrid"],
                mlp_layer_types=_SPARSE, moe_intermediate_size=24, n_routed_experts=4, num_experts_per_tok=2,
                n_shared_experts=1, logits_mup_width_multiplier=1.0,
            ),
            "audio_config": {"n_mel_bins": 8, "mel_vocab_size": 8},
            "vision_config": {
                "patch_size": 4, "temporal_patch_size": 2, "hidden_size": 32, "num_hidden_layers": 3,
                "num_attention_heads": 4,
            },
            "image_token_id": 99, "audio_token_id": 95, "image_bos_token_id": 96, "audio_bos_token_id": 94,
        },
    ),
    "internvl": (
        "InternVL",
        {
            "text_config": _text("qwen2"), "image_token_id": 99,
            "vision_config": _tower("internvl_vision", image_size=[64, 64], patch_size=[8, 8]),
        },
    ),
    "janus": (
        "Janus",
        {
            "text_config": _LLAMA, "image_token_id": 99,
            "vision_config": _tower("janus_vision_model", projection_dim=32, num_image_tokens=4),
            "vq_config": {
                "embed_dim": 8, "num_embeddings": 16, "latent_channels": 32, "base_channels": 32,
                "channel_multiplier": [1, 1], "num_res_blocks": 1, "num_patches": 2, "projection_dim": 32,
                "image_token_embed_dim": 32,
            },
        },
    ),
    "kimi_k25": (
        "Kimi_K25",
        {
            "text_config": _text("deepseek_v3", **_ROUTED, **_LATENT), **_IDS, **_VISION_ENDS,
            "projection_hidden_size": 32,
            "vision_config": {
                "patch_size": 4, "pos_emb_height": 8, "pos_emb_width": 8, "pos_emb_time": 2, "num_attention_heads": 4,
                "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "merge_kernel_size": [2, 2],
            },
        },
    ),
    "lfm2_vl": (
        "Lfm2Vl",
        {
            "text_config": _text("lfm2", layer_types=["conv", "full_attention"], pad_token_id=0),
            "image_token_id": 99, "projector_hidden_size": 32,
            "vision_config": {
                "model_type": "siglip2_vision_model", "hidden_size": 32, "intermediate_size": 48,
                "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 4, "num_patches": 64,
                "vision_use_head": False,
            },
        },
    ),
    "lighton_ocr": (
        "LightOnOcr",
        {"text_config": _text("qwen3", head_dim=8), "vision_config": _PIXTRAL, "image_token_id": 99},
    ),
    "llama4": (
        "Llama4",
        {
            "text_config": _text(
                "llama4_text", head_dim=8, intermediate_size_mlp=40, num_local_experts=4, num_experts_per_tok=1,
                interleave_moe_layer_step=2, attention_chunk_size=4, no_rope_layers=[1, 0],
            ),
            "vision_config": _tower(
                "llama4_vision_model", intermediate_size=128, pixel_shuffle_ratio=0.5, projector_input_dim=32,
                projector_output_dim=32, vision_output_dim=32, image_size=32,
            ),
            "boi_token_index": 96, "eoi_token_index": 97, **_INDEX,
        },
    ),
    "llava_next": ("LlavaNext", {"text_config": _LLAMA, "vision_config": _CLIP, **_NEXT}),
    "llava_next_video": (
        "LlavaNextVideo", {"text_config": _LLAMA, "vision_config": _CLIP, **_NEXT, "video_token_index": 98}
    ),
    "llava_onevision": (
        "LlavaOnevision",
        {"text_config": _text("qwen2"), "vision_config": _SIGLIP, **_NEXT, "video_token_index": 98},
    ),
    "minimax_m3_vl": (
        "MiniMaxM3Sparse",
        {
            "text_config": _text(
                "minimax_m3_vl_text", head_dim=8, num_experts_per_tok=2, num_local_experts=4,
                dense_intermediate_size=40, shared_intermediate_size=24, intermediate_size=24, rotary_dim=4,
                mlp_layer_types=_SPARSE, layer_types=["full_attention"] * 2,
            ),
            "vision_config": {
                "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                "image_size": 16, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2,
            },
            **_INDEX, "video_token_index": 98, "projector_hidden_size": 32, "merged_hidden_size": 128,
        },
    ),
    "mllama": (
        "Mllama",
        {
            "text_config": _text("mllama_text_model", num_hidden_layers=3, cross_attention_layers=[1], pad_token_id=0),
            "image_token_index": VOCAB,
            "vision_config": {
                "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_global_layers": 1,
                "attention_heads": 4, "image_size": 16, "patch_size": 8, "max_num_tiles": 2,
                "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]], "intermediate_layers_indices": [0],
                "vision_output_dim": 64,
            },
        },
    ),
    "muse_spark": (
        "MuseSpark",
        {
            "text_config": _text(
                "muse_spark_text", head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"],
                moe_intermediate_size=24, num_local_experts=4, num_experts_per_tok=2, moe_hidden_size=16,
                mlp_layer_types=_SPARSE,
            ),
            "vision_config": {
                "patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4, "num_attention_heads": 4,
                "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 16,
            },
            "audio_config": {
                "patch_sizes": [4, 2], "hidden_sizes": [8, 16], "depths": [1, 1], "num_hidden_layers": 2,
                "out_hidden_size": 32,
            },
            "out_hidden_size": 128, "projector_hidden_size": 48, **_IDS, "audio_token_id": 95,
        },
    ),
    "qwen2_5_omni_thinker": (
        "Qwen2_5OmniThinker",
        {
            "text_config": _text("qwen2_5_omni_text", rope_parameters=_MROPE), "audio_config": _SOUND,
            "vision_config": _QWEN_WINDOWS, "image_token_index": 99, "video_token_index": 98, "audio_token_index": 95,
            **_SOUND_ENDS,
        },
    ),
    "qwen2_vl": (
        "Qwen2VL",
        {
            "text_config": _text("qwen2_vl_text", rope_parameters=_MROPE),
            "vision_config": {
                "depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4,
            },
            **_IDS, **_VISION_ENDS,
        },
    ),
    "qwen3_5": (
        "Qwen3_5",
        {"text_config": _text("qwen3_5_text", **_LINEAR), "vision_config": _QWEN3, **_IDS, **_VISION_ENDS},
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {
            "text_config": _text("qwen3_5_moe_text", **_LINEAR, **_EXPERTS), "vision_config": _QWEN3, **_IDS,
            **_VISION_ENDS,
        },
    ),
    "qwen3_omni_moe_thinker": (
        "Qwen3OmniMoeThinker",
        {
            "text_config": _text("qwen3_omni_moe_text", head_dim=8, rope_parameters=_MROPE, **_EXPERTS),
            "audio_config": {**_SOUND, "downsample_hidden_size": 8}, "vision_config": _DEEPSTACK, **_IDS,
            "audio_token_id": 95, **_SOUND_ENDS,
        },
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {
            "text_config": _text("qwen3_vl_moe_text", head_dim=8, rope_parameters=_MROPE, **_EXPERTS),
            "vision_config": _DEEPSTACK, **_IDS, **_VISION_ENDS,
        },
    ),
    "smolvlm": (
        "SmolVLM",
        {
            "text_config": _text("llama", pad_token_id=0), "image_token_id": 99, "scale_factor": 2,
            "vision_config": _tower("smolvlm_vision", image_size=64),
        },
    ),
    "step3p7": (
        "Step3p7",
        {
            "text_config": _text(
                "step3p5", head_dim=8, layer_types=["sliding_attention", "full_attention"], sliding_window=4,
                mlp_layer_types=_SPARSE, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
                share_expert_dim=24, num_sliding_attention_heads=4, query_pre_attn_scalar=8, pad_token_id=0,
            ),
            "vision_config": _tower("step3p5_vision", patch_size=4, image_size=32, max_position_embeddings=64),
            "image_token_id": 99,
        },
    ),
    "video_llama_3": (
        "VideoLlama3",
        {
            "text_config": _text("qwen2"), **_IDS,
            "vision_config": {
                "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                "patch_size": 4,
            },
        },
    ),
    "vipllava": (
        "VipLlava", {"text_config": _LLAMA, "vision_config": _CLIP, **_INDEX, "vision_feature_layers": [-1, 1]}
    ),
}  # fmt: skip


TINY: Sequence[str] = tuple(_ROWS)


def tiny(model_type: str, **changes: Any) -> Any:
    """Build a tiny model of the class with its initial weights; `changes` override top-level keys of its config."""
    stem, settings = _ROWS[model_type]
    cls = getattr(transformers, f"{stem}ForConditionalGeneration")
    return cls(cls.config_class(**copy.deepcopy({**settings, **changes})))
