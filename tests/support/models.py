"""Tiny models of real transformers classes with random weights, which the oracle tests convert.

Every parameter and persistent buffer is random, so that a tensor that is missing, exchanged or not loaded changes the
logits.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

from tests.support.transformers_version import READS_SHARDED_FILES
from tests.support.vision_models import tiny

VOCAB = 101  # a prime number

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """A tiny model.

    Attributes:
        model: Function that builds the model.
        inputs: Function that returns inputs that reach every tower.
        dtype: Dtype of the parameters.
        aliases: Tied name -> stored name with its bytes, both as in the checkpoint; written by hand from the class,
            without ckptx.
        shard: `max_shard_size` of `save_pretrained`.
        add: Tensors to write in addition to `save_pretrained`: name -> (stored name, True to copy its values).
    """

    model: Callable[[], Any]
    inputs: Callable[[], Inputs]
    dtype: torch.dtype = torch.bfloat16
    aliases: Mapping[str, str] = field(default_factory=dict)
    shard: str = "40KB"
    add: Mapping[str, tuple[str, bool]] = field(default_factory=dict)


def tokens() -> Inputs:
    """Return token ids of shape (2, 7)."""
    return {"input_ids": torch.arange(3, 17).reshape(2, 7)}


def encoder_decoder_tokens() -> Inputs:
    return {**tokens(), "decoder_input_ids": torch.arange(20, 30).reshape(2, 5)}


def randomize(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Fill every tensor of the state dict with random values in place; tied tensors stay tied."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            values = torch.randn(tensor.shape, generator=generator) * 0.3
            if name.endswith(("running_var", "input_max", "output_max")):
                values = values.abs() + 1
            elif name.endswith(("input_min", "output_min")):
                values = -values.abs() - 1
            tensor.copy_(values)
        elif tensor.dtype is torch.int64 and not name.endswith("position_ids"):
            tensor.copy_(torch.randint(0, 3, tensor.shape, generator=generator))
    return model


def build(recipe: Recipe) -> Any:
    """Build the model of a recipe with random weights, in the dtype of the recipe."""
    torch.manual_seed(0)
    model = recipe.model()
    model = (
        model.float() if recipe.dtype is torch.float32 else model.bfloat16()
    )  # `to` would convert complex buffers to real ones
    return randomize(model).eval()


def write(recipe: Recipe, path: Path) -> None:
    """Write the HF checkpoint of a recipe with `save_pretrained`, then the tensors of `add`."""
    build(recipe).save_pretrained(path, max_shard_size=recipe.shard)
    for name, (stored, equal) in recipe.add.items():
        add_tensor(path, name, stored, equal)


def add_tensor(path: Path, name: str, stored: str, equal: bool) -> None:
    """Write one more tensor to the file with `stored`, as a trainer that saves tied weights twice does."""
    import json

    index = path / "model.safetensors.index.json"
    file = path / "model.safetensors"
    if index.exists():
        listed = json.loads(index.read_text())
        file = path / listed["weight_map"][stored]
        listed["weight_map"][name] = file.name
        index.write_text(json.dumps(listed, indent=2, sort_keys=True) + "\n")
    tensors = read_file(file)
    copy = tensors[stored].clone()
    tensors[name] = copy if equal else copy.flip(0).contiguous()
    save_file(tensors, file, {"format": "pt"})
    file.chmod(0o644)


def read_file(file: Path) -> dict[str, torch.Tensor]:
    with safe_open(file, "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (a file cannot be iterated over)


def read_hf(path: Path) -> dict[str, torch.Tensor]:
    """Read every tensor of an HF directory, with the safetensors library only."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= read_file(file)
    return tensors


def consolidate_shards(path: Path) -> Path:
    """Merge sharded safetensors with torch into a file in a new directory next to them."""
    out = path.with_name(f"{path.name} consolidated")
    out.mkdir()
    shards = sorted(path.glob("shard-*.safetensors"))
    names = sorted({name for file in shards for name in read_file(file)})
    consolidate_safetensors_files(str(path), str(out), dict.fromkeys(names, 1))
    (file,) = out.glob("*.safetensors")
    file.rename(out / "model.safetensors")
    shutil.copy(path / "config.json", out)
    return out


def load(path: Path, dtype: torch.dtype | str = "auto") -> Any:
    """Call `from_pretrained` on a directory, and check that it has exactly the tensors of the class.

    Sharded safetensors are first merged with torch if the installed transformers cannot read them.
    """
    if not READS_SHARDED_FILES and any(path.glob("shard-*.safetensors")):
        path = consolidate_shards(path)
    config = transformers.AutoConfig.from_pretrained(path)
    cls = getattr(transformers, config.architectures[0])
    model, info = cls.from_pretrained(path, dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"], info["missing_keys"]
    assert not info["unexpected_keys"], info["unexpected_keys"]
    assert not info["mismatched_keys"], info["mismatched_keys"]
    return model.eval()


def outputs(model: Any, inputs: Inputs) -> list[torch.Tensor]:
    """Return the outputs of the model as tensors."""
    dtype = next(p.dtype for p in model.parameters())
    moved = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    with torch.no_grad():
        found = model(**moved, use_cache=False) if "decoder_input_ids" not in moved else model(**moved)
    return [value for value in (found.get(name) for name in _OUTPUTS) if value is not None]


_OUTPUTS = ("logits", "prediction_logits", "seq_relationship_logits", "last_hidden_state")


def assert_same_outputs(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    """Check that outputs are equal bit for bit, finite and not constant."""
    assert len(a) == len(b) > 0
    for first, second in zip(a, b, strict=True):
        assert torch.isfinite(first).all()
        assert first.float().std() > 0
        assert torch.equal(first, second)


# --------------------------------------------------------------------------------------------------------------------
# Recipes: `RECIPES` are converted in every test run, `WIDE` in the large matrix

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 97, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LAYER_TYPES = ["sliding_attention", "full_attention"]


def _plain(name: str, **changes: Any) -> Callable[[], Any]:
    """Build a model whose config has the keys of Llama."""

    def make() -> Any:
        cls = getattr(transformers, name)
        return cls(cls.config_class(**{**_TEXT, **changes}))

    return make


def llama(**changes: Any) -> Any:
    return _plain("LlamaForCausalLM", **changes)()


def _gemma3_text(**changes: Any) -> dict[str, Any]:
    return {**_TEXT, "head_dim": 8, "sliding_window": 4, "layer_types": _LAYER_TYPES, **changes}


def gemma3_vlm(**changes: Any) -> Any:
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
        "image_size": 16, "patch_size": 4,
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=_gemma3_text(), vision_config=vision, mm_tokens_per_image=4, image_token_index=99,
        boi_token_index=97, eoi_token_index=98, **changes,
    )  # fmt: skip
    return transformers.Gemma3ForConditionalGeneration(config)


def gemma3_vlm_inputs() -> Inputs:
    ids = torch.tensor([[5, 97, 99, 99, 99, 99, 98, 6, 7]])
    return {"input_ids": ids, "token_type_ids": (ids == 99).long(), "pixel_values": _pixels(1, 3, 16, 16)}


def _pixels(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def gemma4_text(**changes: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "head_dim": 8, "global_head_dim": 8, "sliding_window": 4, "layer_types": _LAYER_TYPES,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 0,
        "num_global_key_value_heads": 2,
    }  # fmt: skip
    return {**_TEXT, **plain, **changes}


def gemma4(**changes: Any) -> Callable[[], Any]:
    def make() -> Any:
        return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**gemma4_text(**changes)))

    return make


_GEMMA4_MOE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}
_GEMMA4_PLE = {"hidden_size_per_layer_input": 8}


def gemma4_vlm(audio: Any = None) -> Any:
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 8, "global_head_dim": 8, "patch_size": 4, "pooling_kernel_size": 2,
        "position_embedding_size": 16, "default_output_length": 4, "standardize": True,
    }  # fmt: skip
    config = transformers.Gemma4Config(
        text_config=gemma4_text(**_GEMMA4_PLE, pad_token_id=0), vision_config=vision, audio_config=audio,
        image_token_id=99, boi_token_id=97, eoi_token_id=98, video_token_id=96, audio_token_id=95, boa_token_id=94,
        eoa_token_index=93,
    )  # fmt: skip
    return transformers.Gemma4ForConditionalGeneration(config)


def gemma4_vlm_inputs() -> Inputs:
    ids = torch.tensor([[5, 97, 99, 99, 99, 99, 98, 6, 7]])
    positions = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1).reshape(1, 16, 2)
    return {
        "input_ids": ids, "mm_token_type_ids": (ids == 99).long(),
        "pixel_values": _pixels(1, 16, 48).sigmoid(), "image_position_ids": positions,
    }  # fmt: skip


def gemma4_audio() -> Any:
    audio = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "subsampling_conv_channels": [8, 4],
        "output_proj_dims": 24,
    }  # fmt: skip
    return gemma4_vlm(audio)


def gemma4_audio_inputs() -> Inputs:
    image = gemma4_vlm_inputs()
    ids = torch.tensor([[5, 97, 99, 99, 99, 99, 98, 6, 94, 95, 95, 93, 7]])
    return {
        **image, "input_ids": ids, "mm_token_type_ids": (ids == 99).long(),
        "input_features": _pixels(1, 8, 8), "input_features_mask": torch.ones(1, 8, dtype=torch.bool),
    }  # fmt: skip


def qwen2_5_vl(**changes: Any) -> Any:
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16, "fullatt_block_indexes": [1],
    }  # fmt: skip
    text = {**_TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=99, video_token_id=98, vision_start_token_id=96,
        vision_end_token_id=97, **changes,
    )  # fmt: skip
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen2_5_vl_inputs() -> Inputs:
    ids = torch.tensor([[5, 96, 99, 99, 99, 99, 97, 6, 7]])
    return {
        "input_ids": ids, "mm_token_type_ids": (ids == 99).int(),
        "pixel_values": _pixels(16, 3 * 2 * 4 * 4), "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }  # fmt: skip


def gpt2(**changes: Any) -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2,
        **changes,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def gpt_neox() -> Any:
    config = transformers.GPTNeoXConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=97,
        max_position_embeddings=64,
    )  # fmt: skip
    return transformers.GPTNeoXForCausalLM(config)


_MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24}
_QWEN3_MOE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1,
    "norm_topk_prob": True, "head_dim": 8,
}  # fmt: skip
_DEEPSEEK_V3 = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
    "n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "num_key_value_heads": 4, "n_shared_experts": 1,
}  # fmt: skip


def t5(**changes: Any) -> Any:
    plain: dict[str, Any] = {
        "vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 97, "num_layers": 2, "num_decoder_layers": 2,
        "num_heads": 4, "decoder_start_token_id": 0,
    }  # fmt: skip
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**{**plain, **changes}))


def t5_v1_1() -> Any:
    """Build T5 v1.1, which has a separate output head although its config class ties it."""
    model = t5(feed_forward_proj="gated-gelu")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    return model


def bert(name: str) -> Callable[[], Any]:
    def make() -> Any:
        config = transformers.BertConfig(
            vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=97,
            max_position_embeddings=32,
        )  # fmt: skip
        return getattr(transformers, name)(config)

    return make


def mamba() -> Any:
    config = transformers.MambaConfig(
        vocab_size=VOCAB, hidden_size=32, state_size=4, num_hidden_layers=2, time_step_rank=3, pad_token_id=None
    )
    return transformers.MambaForCausalLM(config)


def whisper() -> Any:
    config = transformers.WhisperConfig(
        vocab_size=VOCAB, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=16,
        max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def whisper_inputs() -> Inputs:
    return {"input_features": _pixels(1, 8, 32), "decoder_input_ids": torch.arange(3, 8)[None]}


_AUDIO_TOKENS = torch.tensor([[5, 99, 99, 99, 99, 6, 7]])


def qwen2_audio() -> Any:
    audio = {
        "num_mel_bins": 8, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
        "max_source_positions": 16,
    }  # fmt: skip
    config = transformers.Qwen2AudioConfig(text_config={**_TEXT}, audio_config=audio, audio_token_index=99)
    return transformers.Qwen2AudioForConditionalGeneration(config)


def qwen2_audio_inputs() -> Inputs:
    mask = (torch.arange(32) < 16).long()[None]
    return {"input_ids": _AUDIO_TOKENS, "input_features": _pixels(1, 8, 32), "feature_attention_mask": mask}


def voxtral() -> Any:
    audio = {
        "num_mel_bins": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "max_source_positions": 16,
    }  # fmt: skip
    config = transformers.VoxtralConfig(text_config={**_TEXT, "head_dim": 8}, audio_config=audio, audio_token_id=99)
    return transformers.VoxtralForConditionalGeneration(config)


def llava() -> Any:
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8,
        projection_dim=32,
    )  # fmt: skip
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**_TEXT), vision_config=vision, image_token_index=99, image_seq_length=4
    )
    return transformers.LlavaForConditionalGeneration(config)


def llava_inputs() -> Inputs:
    return {"input_ids": torch.tensor([[5, 99, 99, 99, 99, 6, 7]]), "pixel_values": _pixels(1, 3, 16, 16)}


def bloom() -> Any:
    config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4)
    return transformers.BloomForCausalLM(config)


_LM_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_HEAD = {_LM_HEAD: _EMBEDDING}
_NESTED_HEAD = {"language_model.lm_head.weight": "language_model.model.embed_tokens.weight"}
_TIED = _plain("LlamaForCausalLM", tie_word_embeddings=True)
_T5 = {"encoder.embed_tokens.weight": "shared.weight", "decoder.embed_tokens.weight": "shared.weight"}
_BERT = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}

RECIPES: dict[str, Recipe] = {
    "llama-tied": Recipe(_TIED, tokens, aliases=_HEAD),
    "llama-untied": Recipe(llama, tokens),
    "llama-both-equal": Recipe(_TIED, tokens, aliases=_HEAD, add={_LM_HEAD: (_EMBEDDING, True)}),
    "llama-both-different": Recipe(_TIED, tokens, add={_LM_HEAD: (_EMBEDDING, False)}),
    "llama-fp32": Recipe(_TIED, tokens, dtype=torch.float32, aliases=_HEAD, shard="5GB"),
    "qwen2": Recipe(_plain("Qwen2ForCausalLM", tie_word_embeddings=True), tokens, aliases=_HEAD),
    "qwen3": Recipe(_plain("Qwen3ForCausalLM", head_dim=8), tokens),
    "gemma2": Recipe(
        _plain("Gemma2ForCausalLM", head_dim=8, sliding_window=4, layer_types=_LAYER_TYPES), tokens, aliases=_HEAD
    ),
    "gemma3": Recipe(_plain("Gemma3ForCausalLM", **_gemma3_text()), tokens, aliases=_HEAD),
    "gemma3-vlm": Recipe(gemma3_vlm, gemma3_vlm_inputs, aliases=_NESTED_HEAD),
    "gemma4": Recipe(gemma4(), tokens, aliases=_HEAD),
    "gemma4-moe": Recipe(gemma4(**_GEMMA4_MOE), tokens, aliases=_HEAD),
    "gemma4-ple": Recipe(gemma4(**_GEMMA4_PLE), tokens, aliases=_HEAD),
    "gemma4-shared-kv": Recipe(
        gemma4(**_GEMMA4_PLE, num_hidden_layers=4, num_kv_shared_layers=2, layer_types=_LAYER_TYPES * 2),
        tokens, aliases=_HEAD,
    ),
    "gemma4-vlm": Recipe(
        gemma4_vlm, gemma4_vlm_inputs, aliases={"lm_head.weight": "model.language_model.embed_tokens.weight"}
    ),
    "qwen2.5-vl": Recipe(
        lambda: qwen2_5_vl(tie_word_embeddings=True), qwen2_5_vl_inputs, aliases=_HEAD
    ),
    "qwen2.5-vl-untied": Recipe(qwen2_5_vl, qwen2_5_vl_inputs),
    "phi3": Recipe(_plain("Phi3ForCausalLM"), tokens),
    "gpt2": Recipe(gpt2, tokens, dtype=torch.float32, aliases={"lm_head.weight": "transformer.wte.weight"}),
    "gpt-neox": Recipe(gpt_neox, tokens),
    "mixtral": Recipe(_plain("MixtralForCausalLM", **_MIXTRAL), tokens),
    "qwen3-moe": Recipe(_plain("Qwen3MoeForCausalLM", **_QWEN3_MOE), tokens),
    "deepseek-v3": Recipe(_plain("DeepseekV3ForCausalLM", **_DEEPSEEK_V3), tokens),
    "t5": Recipe(t5, encoder_decoder_tokens, dtype=torch.float32, aliases={"lm_head.weight": "shared.weight", **_T5}),
    "t5-v1.1": Recipe(t5_v1_1, encoder_decoder_tokens, aliases=_T5),
    "bert-mlm": Recipe(bert("BertForMaskedLM"), tokens, dtype=torch.float32, aliases=_BERT),
    "bert-pretraining": Recipe(bert("BertForPreTraining"), tokens, dtype=torch.float32, aliases=_BERT),
    "bert-base": Recipe(bert("BertModel"), tokens, dtype=torch.float32),
    "mamba": Recipe(
        mamba, tokens, dtype=torch.float32, aliases={"lm_head.weight": "backbone.embeddings.weight"}
    ),
    "whisper": Recipe(whisper, whisper_inputs, aliases={"proj_out.weight": "model.decoder.embed_tokens.weight"}),
    "llava": Recipe(llava, llava_inputs),
    "bloom": Recipe(bloom, tokens, aliases={"lm_head.weight": "transformer.word_embeddings.weight"}),
}  # fmt: skip


# Classes of the large matrix: other heads, other ties, other formats on disk.


def _clip_like(**changes: Any) -> dict[str, Any]:
    plain = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    return {**plain, "image_size": 16, "patch_size": 8, **changes}


def _named(config_class: str, model_class: str, **settings: Any) -> Callable[[], Any]:
    def make() -> Any:
        config = getattr(transformers, config_class)(**settings)
        return getattr(transformers, model_class)(config)

    return make


def paligemma() -> Any:
    config = transformers.PaliGemmaConfig(
        text_config={**_TEXT, "model_type": "gemma", "head_dim": 8, "pad_token_id": 0},
        vision_config=_clip_like(model_type="siglip_vision_model", projection_dim=32),
        image_token_index=99, projection_dim=32,
    )  # fmt: skip
    return transformers.PaliGemmaForConditionalGeneration(config)


def mistral3() -> Any:
    vision = {**_clip_like(patch_size=4), "model_type": "pixtral", "head_dim": 8}
    config = transformers.Mistral3Config(
        text_config={**_TEXT, "model_type": "mistral", "head_dim": 8}, vision_config=vision, image_token_index=99,
        spatial_merge_size=2,
    )  # fmt: skip
    return transformers.Mistral3ForConditionalGeneration(config)


def qwen3_vl() -> Any:
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
    }  # fmt: skip
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
    config = transformers.Qwen3VLConfig(
        text_config={**_TEXT, "head_dim": 8, "rope_parameters": rope}, vision_config=vision, image_token_id=99,
        video_token_id=98, vision_start_token_id=96, vision_end_token_id=97, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.Qwen3VLForConditionalGeneration(config)


_IMAGE = torch.tensor([[5, 99, 99, 99, 99, 6, 7]])


def _vision_recipe(model_type: str, inputs: Callable[[], Inputs], **settings: Any) -> Recipe:
    """Return a recipe of a vision model in fp32, because some towers need pixels in the dtype of their parameters."""
    return Recipe(lambda: tiny(model_type), inputs, dtype=torch.float32, **settings)


def _grid() -> Inputs:
    return {
        "input_ids": _IMAGE, "mm_token_type_ids": (_IMAGE == 99).int(), "pixel_values": _pixels(16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }  # fmt: skip


def _tiles() -> Inputs:
    """Return inputs with an image of two tiles, which text attends to from the image token on."""
    ids = torch.tensor([[5, 6, VOCAB, 7, 8]])
    return {
        "input_ids": ids, "pixel_values": _pixels(1, 1, 2, 3, 16, 16), "aspect_ratio_ids": torch.tensor([[2]]),
        "aspect_ratio_mask": torch.ones(1, 1, 2, dtype=torch.long),
        "cross_attention_mask": (ids == VOCAB).long().cumsum(1)[:, :, None, None].expand(-1, -1, 1, 2),
    }  # fmt: skip


def _navit() -> Inputs:
    return {
        "input_ids": _IMAGE, "pixel_values": _pixels(1, 16, 48), "spatial_shapes": torch.tensor([[4, 4]]),
        "pixel_attention_mask": torch.ones(1, 16, dtype=torch.long),
    }  # fmt: skip


def mllama() -> Any:
    """Build a model without global layers, so that layers are counted by `num_hidden_layers` of the config."""
    config = tiny("mllama").config
    config.vision_config.num_global_layers = 0
    return transformers.MllamaForConditionalGeneration(config)


def _one_image(*shape: int) -> Callable[[], Inputs]:
    return lambda: {"input_ids": _IMAGE, "pixel_values": _pixels(*shape)}


_BART: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
}  # fmt: skip
_ROBERTA: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 97,
    "max_position_embeddings": 32,
}  # fmt: skip
_QWEN2_MOE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
}  # fmt: skip
_QWEN3_NEXT = {
    **_QWEN3_MOE, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 24,
}  # fmt: skip


def gemma3n() -> Any:
    """Build four layers with keys and values and two that reuse them; sparse activations, streams, per-layer inputs."""
    config = transformers.Gemma3nTextConfig(
        **{**_TEXT, "num_hidden_layers": 6, "pad_token_id": 0}, head_dim=8, sliding_window=4, num_kv_shared_layers=2,
        layer_types=_LAYER_TYPES * 3, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB - 4,
        laurel_rank=4, altup_num_inputs=3, activation_sparsity_pattern=[0.5, *[0.0] * 5],
    )  # fmt: skip
    return transformers.Gemma3nForCausalLM(config)


WIDE: dict[str, Recipe] = {
    "llama-biased": Recipe(_plain("LlamaForCausalLM", attention_bias=True, mlp_bias=True), tokens),
    "mistral": Recipe(_plain("MistralForCausalLM", head_dim=8), tokens),
    "granite": Recipe(_plain("GraniteForCausalLM", tie_word_embeddings=True), tokens, aliases=_HEAD),
    "cohere": Recipe(_plain("CohereForCausalLM"), tokens, aliases=_HEAD),
    "olmo2": Recipe(_plain("Olmo2ForCausalLM"), tokens),
    "glm4": Recipe(_plain("Glm4ForCausalLM", head_dim=8), tokens),
    "starcoder2": Recipe(_plain("Starcoder2ForCausalLM"), tokens, aliases=_HEAD),
    "qwen2-moe": Recipe(_plain("Qwen2MoeForCausalLM", **_QWEN2_MOE), tokens),
    "qwen3-next": Recipe(_plain("Qwen3NextForCausalLM", **_QWEN3_NEXT), tokens),
    "glm4-moe": Recipe(
        _plain(
            "Glm4MoeForCausalLM", n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=8,
            first_k_dense_replace=1, n_group=1, topk_group=1, n_shared_experts=1, use_qk_norm=True,
        ),
        tokens,
    ),
    "phi": Recipe(_plain("PhiForCausalLM", qk_layernorm=True), tokens),
    "gpt-oss": Recipe(
        _plain(
            "GptOssForCausalLM", num_local_experts=4, num_experts_per_tok=2, head_dim=8, intermediate_size=32,
            layer_types=_LAYER_TYPES, sliding_window=4,
        ),
        tokens,
    ),
    "deepseek-v3-plain-q": Recipe(
        _plain("DeepseekV3ForCausalLM", **{**_DEEPSEEK_V3, "q_lora_rank": None}), tokens
    ),
    "opt": Recipe(
        _named(
            "OPTConfig", "OPTForCausalLM", vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, ffn_dim=97,
            num_attention_heads=4, max_position_embeddings=32, word_embed_proj_dim=16,
        ),
        tokens, aliases={_LM_HEAD: "model.decoder.embed_tokens.weight"},
    ),
    "falcon": Recipe(
        _named(
            "FalconConfig", "FalconForCausalLM", vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2,
            num_attention_heads=4, new_decoder_architecture=True, num_kv_heads=2,
        ),
        tokens, aliases={_LM_HEAD: "transformer.word_embeddings.weight"},
    ),
    "bart": Recipe(
        _named("BartConfig", "BartForConditionalGeneration", **_BART), encoder_decoder_tokens,
        aliases={
            _LM_HEAD: "model.shared.weight", "model.encoder.embed_tokens.weight": "model.shared.weight",
            "model.decoder.embed_tokens.weight": "model.shared.weight",
        },
    ),
    "roberta": Recipe(
        _named("RobertaConfig", "RobertaForMaskedLM", **_ROBERTA), tokens, dtype=torch.float32,
        aliases={
            "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
            "lm_head.decoder.bias": "lm_head.bias",
        },
    ),
    "roberta-classifier": Recipe(
        _named("RobertaConfig", "RobertaForSequenceClassification", **_ROBERTA), tokens, dtype=torch.float32
    ),
    "mamba2": Recipe(
        _named(
            "Mamba2Config", "Mamba2ForCausalLM", vocab_size=VOCAB, hidden_size=32, state_size=8, num_hidden_layers=2,
            num_heads=8, head_dim=8, n_groups=2, chunk_size=4, pad_token_id=None, bos_token_id=1, eos_token_id=2,
        ),
        tokens, dtype=torch.float32,
    ),
    "paligemma": Recipe(
        paligemma,
        lambda: {
            "input_ids": _IMAGE, "token_type_ids": torch.zeros_like(_IMAGE), "pixel_values": _pixels(1, 3, 16, 16),
        },
        aliases=_NESTED_HEAD,
    ),
    "mistral3": Recipe(
        mistral3,
        lambda: {
            "input_ids": _IMAGE, "pixel_values": _pixels(1, 3, 16, 16), "image_sizes": torch.tensor([[16, 16]]),
        },
        aliases=_NESTED_HEAD,
    ),
    "gemma3n": Recipe(gemma3n, tokens, aliases=_HEAD),
    "qwen3-vl": Recipe(
        qwen3_vl, qwen2_5_vl_inputs, aliases={_LM_HEAD: "model.language_model.embed_tokens.weight"}
    ),
    "qwen3-vl-moe": _vision_recipe("qwen3_vl_moe", _grid),
    "gemma4-audio": Recipe(
        gemma4_audio, gemma4_audio_inputs, aliases={_LM_HEAD: "model.language_model.embed_tokens.weight"}
    ),
    "qwen2-audio": Recipe(qwen2_audio, qwen2_audio_inputs),
    "voxtral": Recipe(voxtral, lambda: {"input_ids": _AUDIO_TOKENS, "input_features": _pixels(1, 8, 32)}),
    "glm4v": _vision_recipe("glm4v", _grid),
    "idefics3": _vision_recipe("idefics3", _one_image(1, 1, 3, 32, 32)),
    "internvl": _vision_recipe("internvl", _one_image(1, 3, 32, 32), aliases=_NESTED_HEAD),
    "lfm2-vl": _vision_recipe(
        "lfm2_vl", _navit, aliases={_LM_HEAD: "model.language_model.embed_tokens.weight"}
    ),
    "llama4": _vision_recipe("llama4", _one_image(1, 3, 32, 32)),
    "mllama": Recipe(mllama, _tiles, dtype=torch.float32),
    "qwen3.5": _vision_recipe("qwen3_5", _grid),
}  # fmt: skip

EVERY = RECIPES | WIDE
