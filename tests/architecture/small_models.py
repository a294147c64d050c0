"""Small models with weights of their own, for tests against transformers."""

from __future__ import annotations

import json
from typing import Any

import torch
from transformers import PreTrainedModel

from ckptx.architecture.introspection import meta_model

# Small in every size, and no two sizes the same.
TEXT: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 20, "moe_intermediate_size": 6, "num_hidden_layers": 2, "vocab_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "num_experts": 3, "num_local_experts": 3,
    "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
MLA = {
    "q_lora_rank": 8,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 5,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
SMALL: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": TEXT,
    "Qwen3MoeForCausalLM": TEXT,
    "DeepseekV3ForCausalLM": {**TEXT, **MLA},
    "GPTNeoXForCausalLM": TEXT,
    "PhimoeForCausalLM": TEXT,
    "Qwen3NextForCausalLM": {
        **TEXT,
        "shared_expert_intermediate_size": 6,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "LlavaForConditionalGeneration": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "clip_vision_model", **VISION},
    },
    "Gemma3ForConditionalGeneration": {"text_config": TEXT, "vision_config": VISION},
    "Qwen2_5_VLForConditionalGeneration": {
        "text_config": {**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 2, 2]}},
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "num_heads": 2,
            "intermediate_size": 12,
            "out_hidden_size": 24,
        },
    },
    "Qwen3VLMoeForConditionalGeneration": {
        "text_config": TEXT,
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "num_heads": 2,
            "intermediate_size": 12,
            "out_hidden_size": 24,
            "deepstack_visual_indexes": [0],
        },
    },
}


def small_model(class_name: str, **config: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model with random values in every tensor, and the contents of its `config.json`."""
    cls: Any = meta_model.find_class(class_name)
    built = cls.config_class(**config)
    torch.manual_seed(0)
    model: PreTrainedModel = cls(built)
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.copy_(torch.randn_like(value))
    return model, json.loads(built.to_json_string())
