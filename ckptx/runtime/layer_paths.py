"""Where the multimodal classes of transformers keep their layers: data, one row per class.

A text-only class is not here, its stacks are in the table of architectures. That table knows the decoder of a
multimodal class too, but no tower, for only a decoder is split over pipeline stages. What is neither here nor there is
found by its form (see `layers`); a row is what makes it an error when a decoder is not where it should be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn


class LayerPaths(NamedTuple):
    """The lists of layers of a class, by group.

    Each group holds alternatives, FQNs under which one release of transformers or another, or one kind of tower or
    another, keeps the same list. The first that is there is meant, so that a list with two names counts once.
    """

    language: tuple[str, ...]
    vision: tuple[str, ...] = ()
    audio: tuple[str, ...] = ()


_DECODER = ("model.language_model.layers", "language_model.model.layers")
_TOWER = (
    "model.vision_tower.encoder.layers",
    "model.vision_tower.vision_model.encoder.layers",
    "model.vision_tower.transformer.layers",  # Pixtral
    "model.vision_tower.encoder.layer",  # InternVL
    "model.vision_tower.layers",
    "model.vision_tower.blocks",
    "vision_tower.vision_model.encoder.layers",
)
_EARS = ("model.audio_tower.layers", "audio_tower.layers")

# A dense or sparse decoder behind a tower, the form that Llava set.
_LLAVA = LayerPaths(_DECODER, _TOWER)
_QWEN_VL = LayerPaths((*_DECODER, "model.layers"), ("model.visual.blocks", "visual.blocks"))
_IDEFICS = LayerPaths(
    ("model.text_model.layers", "model.language_model.layers"),
    ("model.vision_model.encoder.layers", "model.vision_model.transformer.layers"),
)
_VISION_MODEL = LayerPaths(_DECODER, ("model.vision_model.encoder.layers", "model.vision_model.layers"))
_LISTENER = LayerPaths(_DECODER, audio=(*_EARS, "model.encoder.layers"))
_OMNI = LayerPaths(_DECODER, ("model.visual.blocks", "visual.blocks"), _EARS)

_ROWS: tuple[tuple[LayerPaths, tuple[tuple[str, str], ...]], ...] = (
    (
        _LLAVA,
        (
            ("aria", "Aria"),
            ("aya_vision", "AyaVision"),
            ("cohere2_vision", "Cohere2Vision"),
            ("ernie4_5_vl_moe", "Ernie4_5_VLMoe"),
            ("gemma3", "Gemma3"),
            ("got_ocr2", "GotOcr2"),
            ("internvl", "InternVL"),
            ("kimi_k25", "Kimi_K25"),
            ("lfm2_vl", "Lfm2Vl"),
            ("llava", "Llava"),
            ("llava_next", "LlavaNext"),
            ("llava_next_video", "LlavaNextVideo"),
            ("llava_onevision", "LlavaOnevision"),
            ("minimax_m3_vl", "MiniMaxM3Sparse"),
            ("mistral3", "Mistral3"),
            ("paligemma", "PaliGemma"),
            ("vipllava", "VipLlava"),
        ),
    ),
    (
        LayerPaths(_DECODER, _TOWER, (*_EARS, "model.audio_tower.conformer")),
        (("gemma3n", "Gemma3n"), ("gemma4", "Gemma4")),
    ),
    (LayerPaths(_DECODER), (("gemma4_unified", "Gemma4Unified"),)),  # no tower: patches and frames are embedded
    (
        _QWEN_VL,
        (
            ("exaone4_5", "Exaone4_5_"),
            ("glm46v", "Glm46V"),
            ("glm4v", "Glm4v"),
            ("glm4v_moe", "Glm4vMoe"),
            ("qwen2_vl", "Qwen2VL"),
            ("qwen2_5_vl", "Qwen2_5_VL"),
            ("qwen3_vl", "Qwen3VL"),
            ("qwen3_vl_moe", "Qwen3VLMoe"),
            ("qwen3_5", "Qwen3_5"),
            ("qwen3_5_moe", "Qwen3_5Moe"),
        ),
    ),
    (_IDEFICS, (("idefics2", "Idefics2"), ("idefics3", "Idefics3"), ("smolvlm", "SmolVLM"))),
    (
        _VISION_MODEL,
        (
            ("deepseek_vl", "DeepseekVL"),
            ("janus", "Janus"),
            ("step3p7", "Step3p7"),
            ("video_llama_3", "VideoLlama3"),
        ),
    ),
    (
        LayerPaths(_DECODER, ("model.vision_encoder.transformer.layers",)),
        (("lighton_ocr", "LightOnOcr"),),
    ),
    (
        LayerPaths(_DECODER, ("model.vision_model.transformer.layers",)),
        (("mllama", "Mllama"),),
    ),
    (
        LayerPaths(("language_model.model.layers", "model.language_model.layers"), ("vision_model.model.layers",)),
        (("llama4", "Llama4"),),
    ),
    (
        _LISTENER,
        (
            ("audioflamingo3", "AudioFlamingo3"),
            ("glmasr", "GlmAsr"),
            ("granite_speech", "GraniteSpeech"),
            ("musicflamingo", "MusicFlamingo"),
            ("qwen2_audio", "Qwen2Audio"),
            ("qwen3_asr", "Qwen3ASR"),
            ("voxtral", "Voxtral"),
            ("voxtral_realtime", "VoxtralRealtime"),
        ),
    ),
    (_OMNI, (("qwen2_5_omni", "Qwen2_5OmniThinker"), ("qwen3_omni_moe", "Qwen3OmniMoeThinker"))),
    # towers that do not attend, so that their form says nothing: they fold patches, or are convolutions
    (LayerPaths(_DECODER, ("model.vision_tower.encoder_layers",)), (("inkling", "Inkling"),)),
    (LayerPaths(_DECODER, ("model.vision_tower.layers",), _EARS), (("muse_spark", "MuseSpark"),)),
)

REGISTRY: Mapping[str, LayerPaths] = {
    f"transformers.models.{package}.modeling_{package}.{stem}ForConditionalGeneration": paths
    for paths, classes in _ROWS
    for package, stem in classes
}


def class_key(cls: type) -> str:
    """The name of a class in `REGISTRY`.

    Not the class itself: a mixin put over it with `type(...)` makes another object that keeps both attributes. Not
    the bare name either: remote code may have a class of the same one.
    """
    return f"{cls.__module__}.{cls.__qualname__}"


def registered_paths(model: nn.Module) -> LayerPaths | None:
    """The row of a model's class, or of the nearest class that it was derived from (as FSDP2 derives one)."""
    return next((REGISTRY[key] for key in map(class_key, type(model).__mro__) if key in REGISTRY), None)
