"""Tiny models of popular classes that have no recipe, with the initial values of the class."""

from __future__ import annotations

from typing import Any

import torch
import transformers

# Sizes, under all keys of these classes; classes with other keys have small defaults.
_TEXT: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_VISION = {
    "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
_SHARED = {
    "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"], "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 64,
    "n_mamba_heads": 8,
}  # fmt: skip
_MAMBA = {**_TEXT, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4}

LANGUAGE = (
    "AfmoeForCausalLM", "ApertusForCausalLM", "ArceeForCausalLM", "BartForCausalLM", "BioGptForCausalLM",
    "BitNetForCausalLM", "BloomForCausalLM", "CodeGenForCausalLM", "Cohere2ForCausalLM", "CwmForCausalLM",
    "DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM", "DiffLlamaForCausalLM", "Dots1ForCausalLM",
    "Ernie4_5ForCausalLM", "Ernie4_5_MoeForCausalLM", "Exaone4ForCausalLM", "FalconH1ForCausalLM",
    "FalconMambaForCausalLM", "FlexOlmoForCausalLM", "GPTBigCodeForCausalLM", "GPTJForCausalLM",
    "GPTNeoXForCausalLM", "GemmaForCausalLM", "Glm4MoeLiteForCausalLM", "GlmForCausalLM",
    "GlmMoeDsaForCausalLM", "GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM", "HeliumForCausalLM",
    "HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM", "JambaForCausalLM", "JetMoeForCausalLM",
    "KimiLinearForCausalLM", "Lfm2ForCausalLM", "Llama4ForCausalLM", "LongcatFlashForCausalLM",
    "MambaForCausalLM", "MiniMaxForCausalLM", "MiniMaxM2ForCausalLM", "Ministral3ForCausalLM",
    "MinistralForCausalLM", "MllamaForCausalLM", "MptForCausalLM", "NemotronForCausalLM",
    "NemotronHForCausalLM", "Olmo3ForCausalLM", "OlmoForCausalLM", "OlmoHybridForCausalLM", "OlmoeForCausalLM",
    "PersimmonForCausalLM", "PhimoeForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM",
    "RecurrentGemmaForCausalLM", "RwkvForCausalLM", "SeedOssForCausalLM", "SmolLM3ForCausalLM",
    "SolarOpenForCausalLM", "StableLmForCausalLM", "VaultGemmaForCausalLM", "XGLMForCausalLM",
)  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {**_MAMBA, "attn_layer_indices": [1]},
    "GraniteMoeHybridForCausalLM": {**_MAMBA, "layer_types": ["mamba", "attention"]},
    "LlavaNextForConditionalGeneration": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_VISION, "model_type": "clip_vision_model"},
    },
    "LlavaOnevisionForConditionalGeneration": {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
    },
    "MBartForConditionalGeneration": {
        "vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    },
    "MT5ForConditionalGeneration": {
        "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    },
    "SmolVLMForConditionalGeneration": {
        "text_config": {**_TEXT, "model_type": "llama"}, "vision_config": _VISION, "scale_factor": 1,
    },
    "Zamba2ForCausalLM": {**_SHARED, "num_mem_blocks": 2, "use_shared_attention_adapter": True, "adapter_rank": 4},
    "ZambaForCausalLM": {**_SHARED, "attention_head_dim": 16},
}  # fmt: skip


def build(class_name: str) -> Any:
    """Build a tiny model of a class, with the initial weights of the class."""
    torch.manual_seed(0)
    cls = getattr(transformers, class_name)
    return cls(cls.config_class(**OTHERS.get(class_name, _TEXT)))
