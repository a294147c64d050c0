"""Small models for the injection of defects: classes of transformers with 8 layers and random values.

Matrices have a standard deviation of 0.08, biases of 0.02. Factors and offsets have noise of 0.1 added to their initial
values. A name can override this: "llama init.3 b.02" has matrices with a standard deviation of 0.3.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
import transformers
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]

VOCAB_SIZE = 99
_FACTOR_NOISE = 0.1
_ROPE: Config = {"rope_type": "default", "rope_theta": 1e4}
_TEXT: Config = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_TEXT_WITH_BIASES: Config = {**_TEXT, "attention_bias": True, "mlp_bias": True}
_ALTERNATING = ["sliding_attention", "full_attention"] * 4
_IMAGE_TOKENS: Config = {
    "image_token_id": 97, "video_token_id": 96, "vision_start_token_id": 94, "vision_end_token_id": 95,
}  # fmt: skip


def _text(model_type: str, **changes: Any) -> Config:
    return {**_TEXT, "model_type": model_type, **changes}


def _qwen_tower(**changes: Any) -> Config:
    return {
        "depth": 4, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2, **changes,
    }  # fmt: skip


_COMMON: Config = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4}
_CLIP: Config = {
    "model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "image_size": 16, "patch_size": 8, "projection_dim": 64,
}  # fmt: skip

# Name -> class, and settings of its config.
MODELS: Mapping[str, tuple[str, Config]] = {
    "llama": ("LlamaForCausalLM", _TEXT_WITH_BIASES),
    "llama12": ("LlamaForCausalLM", {**_TEXT, "num_hidden_layers": 12}),
    "llama3rope": (
        "LlamaForCausalLM",
        {
            **_TEXT,
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            },
        },
    ),
    "yarn": (
        "LlamaForCausalLM",
        {
            **_TEXT,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 2048,
            },
        },
    ),
    "llama_tied": ("LlamaForCausalLM", {**_TEXT, "tie_word_embeddings": True}),
    "bigvocab": ("LlamaForCausalLM", {**_TEXT, "vocab_size": 150_016}),
    "mistral4": ("MistralForCausalLM", {**_TEXT, "sliding_window": 4}),
    "mistral4096": ("MistralForCausalLM", {**_TEXT, "sliding_window": 4096}),
    "gptoss128": (
        "GptOssForCausalLM",
        {
            **_TEXT, "head_dim": 16, "sliding_window": 128, "layer_types": _ALTERNATING, "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            **_TEXT, "head_dim": 16, "sliding_window": 4, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            **_TEXT, "head_dim": 16, "sliding_window": 512, "layer_types": _ALTERNATING, "tie_word_embeddings": True,
        },
    ),
    "gemma3n": (
        "Gemma3nForCausalLM",
        {
            **_TEXT, "head_dim": 16, "sliding_window": 4, "layer_types": _ALTERNATING, "num_kv_shared_layers": 4,
            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE, "laurel_rank": 8,
            "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 8, "tie_word_embeddings": True,
            "pad_token_id": 0,
        },
    ),
    "mixtral": ("MixtralForCausalLM", {**_TEXT, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {
            **_TEXT, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96,
            "shared_expert_intermediate_size": 96,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {
            **_TEXT, "head_dim": 16, "num_experts": 32, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
            "norm_topk_prob": True,
        },
    ),
    "qwen3": ("Qwen3ForCausalLM", {**_TEXT, "head_dim": 16}),
    "deepseek": (
        "DeepseekV3ForCausalLM",
        {
            **_TEXT, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2,
            "moe_intermediate_size": 48, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": 32,
            "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
            "n_shared_experts": 1, "routed_scaling_factor": 2.5, "rope_interleave": True,
        },
    ),
    "granite": ("GraniteForCausalLM", {**_TEXT, "embedding_multiplier": 3.0, "residual_multiplier": 1.0}),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        {
            **_TEXT, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 4,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
            "linear_value_head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "mamba": (
        "MambaForCausalLM",
        {
            "vocab_size": VOCAB_SIZE, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 8, "time_step_rank": 4,
            "pad_token_id": None, "tie_word_embeddings": False,
        },
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        {
            "vocab_size": VOCAB_SIZE, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 8, "num_heads": 8,
            "head_dim": 16, "n_groups": 2, "chunk_size": 4, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": _text(
                "qwen3_vl_text", head_dim=16, rope_parameters={**_ROPE, "mrope_section": [4, 2, 2]}
            ),
            "vision_config": _qwen_tower(deepstack_visual_indexes=[1, 2, 3], num_position_embeddings=64),
            **_IMAGE_TOKENS, "tie_word_embeddings": False,
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": _text("qwen2_5_vl_text", rope_parameters={**_ROPE, "mrope_section": [2, 3, 3]}),
            "vision_config": _qwen_tower(window_size=16, fullatt_block_indexes=[1]),
            **_IMAGE_TOKENS, "tie_word_embeddings": False,
        },
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        {
            "text_config": _text("llama"), "vision_config": _CLIP, "image_token_index": 97, "image_seq_length": 4,
            "vision_feature_layer": -1, "tie_word_embeddings": False,
        },
    ),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        {
            **_COMMON, "intermediate_size": 96, "max_position_embeddings": 64, "tie_word_embeddings": False,
            "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
        },
    ),
    "falcon": ("FalconForCausalLM", {**_COMMON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "bloom": ("BloomForCausalLM", {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "n_layer": 8, "n_head": 4}),
    "gpt2": (
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCAB_SIZE, "n_positions": 64, "n_embd": 64, "n_layer": 8, "n_head": 4, "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "phi3": ("Phi3ForCausalLM", {**_TEXT, "original_max_position_embeddings": 8192}),
    "phi": ("PhiForCausalLM", {**_TEXT, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}}),
    "glm4": ("Glm4ForCausalLM", {**_TEXT, "head_dim": 16}),
    "olmo2": ("Olmo2ForCausalLM", _TEXT),
    "cohere": ("CohereForCausalLM", {**_TEXT, "tie_word_embeddings": True}),
    "opt": (
        "OPTForCausalLM",
        {**_COMMON, "ffn_dim": 96, "max_position_embeddings": 64, "word_embed_proj_dim": 64},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCAB_SIZE, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 4, "num_decoder_layers": 4,
            "num_heads": 4, "decoder_start_token_id": 0,
        },
    ),
    "roberta": (
        "RobertaForMaskedLM", {**_COMMON, "intermediate_size": 96, "max_position_embeddings": 64}
    ),
}  # fmt: skip


def write(name: str, dtype: torch.dtype, path: Path) -> None:
    """Write a model as an HF checkpoint.

    Args:
        name: Key of `MODELS`, then standard deviations: "init.3" for matrices, "b.1" for biases.
        dtype: Dtype of all floating-point tensors.
        path: Directory of the checkpoint.
    """
    base, *overrides = name.split()
    deviations = {
        found[1]: float(found[2]) for found in (re.fullmatch(r"([a-z]+)(.*)", part) for part in overrides) if found
    }
    class_name, settings = MODELS[base]
    cls = getattr(transformers, class_name)
    torch.manual_seed(0)
    model = cls(cls.config_class(**json.loads(json.dumps(settings)))).float()
    randomize(model, matrices=deviations.get("init", 0.08), biases=deviations.get("b", 0.02))
    model.save_pretrained(path)
    tensors, config = read(path)
    save(tensors, {**config, "dtype": str(dtype).removeprefix("torch.")}, dtype, path)


def randomize(model: torch.nn.Module, *, matrices: float, biases: float) -> None:
    """Fill all floating-point tensors of the state dict with random values in place; tied tensors stay tied."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("bias"):
            tensor.copy_(noise * biases)
        elif tensor.dim() == 1 or name.endswith("A_log"):
            tensor.add_(noise * _FACTOR_NOISE)
        else:
            tensor.copy_(noise * matrices)


def read(path: Path) -> tuple[Tensors, Config]:
    """Read the tensors of a checkpoint in float32, and its config."""
    tensors = load_file(path / "model.safetensors")
    config: Config = json.loads((path / "config.json").read_text())
    return {name: each.float() if each.is_floating_point() else each for name, each in tensors.items()}, config


def save(tensors: Tensors, config: Config, dtype: torch.dtype, path: Path) -> None:
    """Write a checkpoint with one file, with floating-point tensors rounded to a dtype."""
    path.mkdir(exist_ok=True)
    rounded = {
        name: (each.to(dtype) if each.is_floating_point() else each).contiguous() for name, each in tensors.items()
    }
    save_file(rounded, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def are_equal(a: Path, b: Path) -> bool:
    """Return True if two checkpoints are byte-identical."""
    return all((a / file).read_bytes() == (b / file).read_bytes() for file in ("model.safetensors", "config.json"))
