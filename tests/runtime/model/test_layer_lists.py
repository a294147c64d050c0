"""Every list of layers of every multimodal class is in a group: held against what the classes themselves have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto import modeling_auto

from ckptx.runtime.model import layers
from ckptx.runtime.model.layers import LayerList, find_layer_lists, layer_groups
from tests.support.corrections import layers_rows
from tests.support.transformers_version import INSTALLED

# Lists of modules that are no layers, by the class of their items: all are small, or are run without gradients.
NO_LAYERS = {
    r"Merger|DownsampleMLP": "an MLP that merges the features of several patches",
    r"^(Encodec|Mimi|Dac|Xcodec|VibeVoiceAcoustic|HifiGan|ELU)": "the convolutions of a codec",
    r"VectorQuantization": "a codebook",
    r"PredictorLayer$|^SqueezeExcitation|^DiffusionHead|DiffusionHeadAda": "what speaks, small or without attention",
    r"^RelativePositionBias": "tables",
    r"^Module$|^Florence2VisionConvEmbed$|ConvLayer$|ConvNormLayer|Conv1d$": "convolutions",
    r"ResNetStage|ResBlock|AMPBlock": "convolutions",
    r"LinkTower": "a norm between two towers",
    r"TimestepEmbedding|Flow|CouplingLayer|^Vits": "what a flow or a denoiser runs once for each of its steps",
    r"^EvollaSequenceAligner|^ModuleList$": "the steps of a resampler, in pairs",
    r"CrossAttention$": "an attention by itself, between two layers of the list beside it",
}  # fmt: skip
# What the default config of a class leaves out or gets wrong.
_SIGLIP = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
CHANGES: dict[str, dict[str, Any]] = {
    "AyaVisionForConditionalGeneration": {"vision_config": {"model_type": "siglip_vision_model", **_SIGLIP}},
}
# Where the layers lie whose group a config cannot tell, for its key has no name of one.
GROUP_OF_KEY = {"text_config": "language", "vision_config": "vision", "audio_config": "audio"}
_KINDS = ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ", "TEXT_TO_WAVEFORM")


def of_transformers() -> list[str]:
    """The classes that transformers itself lists as taking more than text."""
    found: set[str] = set()
    for kind in _KINDS:
        for names in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", {}).values():
            found.update([names] if isinstance(names, str) else names)
    return sorted(found.intersection(dir(transformers)))  # looking at one would import its module


def shrink(config: Any) -> None:
    """Takes layers away where nothing else depends on their number."""
    for key in ("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers"):
        if (
            isinstance(config.__dict__.get(key), int)
            and config.__dict__[key] > 24
            and not config.__dict__.get("layer_types")
        ):
            setattr(config, key, 4)
    for key in getattr(config, "sub_configs", ()):
        if getattr(config, key, None) is not None:
            shrink(getattr(config, key))


def on_meta(cls: type) -> nn.Module:
    """A model of the class, skipping the test where its packages or defaults do not make one."""
    try:
        small = cls.config_class(**CHANGES.get(cls.__name__, {}))
        shrink(small)
        with torch.device("meta"):
            try:
                return cls(small)
            except Exception:  # a class that refuses small sizes is built with its own
                return cls(cls.config_class())
    except Exception as error:  # another release, a tower from a package that is missing, incomplete defaults
        pytest.skip(f"{type(error).__name__}: {error}")


def lists_of_blocks(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.ModuleList]]:
    """Every list with modules in it that have parts, but none inside of a list."""
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        if not isinstance(child, nn.ModuleList):
            yield from lists_of_blocks(child, path)
        elif any(len(list(item.children())) for item in child):
            yield path, child


def group_by_config(model: nn.Module, path: str) -> str | None:
    """The group of a module by the config of the model around it, which is a part of the config of the whole."""
    modules = dict(model.named_modules())
    while path:
        path = path.rpartition(".")[0]
        config = getattr(modules[path], "config", None)
        for key, group in GROUP_OF_KEY.items():
            if config is not None and config is getattr(model.config, key, None):
                return group
    return None


def check(model: nn.Module) -> None:
    """Nothing is left out, nothing twice, and every list is in the group that its config says."""
    groups = find_layer_lists(model)
    group_of = {each.name: group for group, found in groups.items() for each in found}
    assert len(group_of) == sum(map(len, groups.values()))
    for path, blocks in lists_of_blocks(model):
        kinds = {type(item).__name__ for item in blocks}
        reason = [reason for pattern, reason in NO_LAYERS.items() if any(re.search(pattern, kind) for kind in kinds)]
        assert path in group_of or reason, (path, kinds)
    is_pair = model.config.is_encoder_decoder  # both of its stacks are "language", whatever the encoder reads
    for path, group in group_of.items():
        assert group_by_config(model, path) in (None, group) or (is_pair and group == "language"), (path, group)
    found = tuple(f"{layer.name}." for each in layer_groups(model).values() for layer in each)
    for path, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer):
            assert f"{path}.".startswith(found), path


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", layers_rows())
def test_every_list_of_a_class_with_a_row_is_in_its_group(name: str) -> None:
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {INSTALLED} has no {name}")
    model: Any = on_meta(getattr(transformers, name))
    check(model)
    assert len(layer_groups(model)["language"]) == model.config.get_text_config().num_hidden_layers


@pytest.mark.slow
@pytest.mark.parametrize("name", of_transformers())
def test_every_list_of_a_multimodal_class_is_in_its_group(name: str) -> None:
    check(on_meta(getattr(transformers, name)))


def test_a_list_that_no_row_names_is_missed_without_its_form(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_meta(transformers.MllamaForConditionalGeneration)
    check(model)
    monkeypatch.setattr(layers, "_lists_by_structure", lambda root: [])
    with pytest.raises(AssertionError, match=r"vision_model\.global_transformer\.layers"):
        check(model)


def test_a_tower_in_the_wrong_group_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_meta(transformers.GlmOcrForConditionalGeneration)
    check(model)
    monkeypatch.setattr(layers, "_group_from_name", lambda name: "audio")
    with pytest.raises(AssertionError, match=r"model\.language_model\.layers', 'audio'"):
        check(model)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("MllamaForConditionalGeneration", {
            "language": ["model.language_model.layers"],
            "vision": ["model.vision_model.transformer.layers", "model.vision_model.global_transformer.layers"],
            "audio": [],
        }),
        ("Blip2ForConditionalGeneration", {
            "language": ["language_model.model.decoder.layers"],
            "vision": ["vision_model.encoder.layers", "qformer.encoder.layer"],
            "audio": [],
        }),
        ("GraniteSpeechForConditionalGeneration", {
            "language": ["model.language_model.layers"], "vision": [],
            "audio": ["model.encoder.layers", "model.projector.qformer.encoder.layer"],
        }),
        ("IdeficsForVisionText2Text", {
            "language": ["model.layers", "model.gated_cross_attn_layers"],
            "vision": ["model.vision_model.encoder.layers"], "audio": [],
        }),
        ("WhisperForConditionalGeneration", {
            "language": ["model.decoder.layers", "model.encoder.layers"], "vision": [], "audio": [],
        }),
    ],
)  # fmt: skip
def test_lists_by_hand(name: str, wanted: dict[str, list[str]]) -> None:
    found = find_layer_lists(on_meta(getattr(transformers, name)))
    assert {group: sorted(each.name for each in lists) for group, lists in found.items()} == {
        group: sorted(lists) for group, lists in wanted.items()
    }
    assert all(isinstance(each, LayerList) for lists in found.values() for each in lists)
