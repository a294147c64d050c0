"""Images made up from a config: each class that looks takes them, sees them, and is trained by them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from ckptx.architecture.model_files import read_index
from ckptx.runtime.parallel.tensor_parallel.loss import causal_lm_loss
from ckptx.runtime.parity.inputs.batch import Inputs, make_inputs
from tests.support.corrections import layers_rows, model_types_with_inputs
from tests.support.models import EVERY, randomize
from tests.support.slow import slow_but
from tests.support.transformers_version import INSTALLED, IS_TABLES_VERSION
from tests.support.vision_models import TINY, tiny

# Model type -> the recipe that has it.
RECIPES = {
    "gemma3": "gemma3-vlm", "gemma4": "gemma4-vlm", "llava": "llava", "mistral3": "mistral3", "paligemma": "paligemma",
    "qwen2_5_vl": "qwen2.5-vl", "qwen3_vl": "qwen3-vl",
}  # fmt: skip
EYES = (*RECIPES, *TINY)

# Cannot be run here, each with the reason.
CANNOT = {"gemma3n": "its tower is a model of timm, which is no dependency"}

# Each form once; the rest share the function of one of these.
FAST = {
    "aria", "cohere2_vision", "ernie4_5_vl_moe", "gemma3", "gemma4", "gemma4_unified", "got_ocr2", "idefics2",
    "idefics3", "internvl", "janus", "kimi_k25", "lfm2_vl", "llama4", "llava", "llava_next", "minimax_m3_vl",
    "mistral3", "mllama", "paligemma", "qwen2_5_vl", "qwen3_5", "step3p7", "video_llama_3",
}  # fmt: skip

_POST = r"model\.vision_tower\.post_layernorm\."  # a norm behind the layer whose output the class takes
_POOLING = r"model\.vision_tower\.head\."  # pools all patches into one vector, for classes that compare images
# Parameters, not of the language model, that no image trains: patterns by model type.
UNTRAINED: Mapping[str, str] = {
    "aria": _POST,
    "aya_vision": _POST,
    "gemma3": _POOLING,
    "janus": r"model\.(vqmodel|generation_\w+)\.",  # they draw
    "llava": rf"{_POST}|model\.vision_tower\.encoder\.layers\.1\.",  # it takes the output of the last layer but one
    "llava_next": _POST,
    "llava_next_video": _POST,
    "llava_onevision": _POST,
    "paligemma": _POOLING,
    "vipllava": _POST,
}

# Sizes of released models, in towers of two narrow layers.
RELEASED: Mapping[str, dict[str, Any]] = {
    "aria": {
        "vision_config": {"image_size": 980, "patch_size": 14},
        "projector_patch_to_query_dict": {1225: 128, 4900: 256}, "max_value_projector_patch_to_query_dict": 256,
    },
    "aya_vision": {"vision_config": {"image_size": 364, "patch_size": 14}},
    "cohere2_vision": {"vision_config": {"image_size": 512, "patch_size": 16}},
    "deepseek_vl": {"vision_config": {"image_size": 384, "patch_size": 16}},
    "got_ocr2": {"vision_config": {"image_size": 1024, "patch_size": 16, "window_size": 14}},
    "idefics2": {"vision_config": {"image_size": 980, "patch_size": 14}},
    "idefics3": {"vision_config": {"image_size": 364, "patch_size": 14}},
    "internvl": {"vision_config": {"image_size": [448, 448], "patch_size": [14, 14]}},
    "janus": {"vision_config": {"image_size": 384, "patch_size": 16, "num_image_tokens": 576}},
    "kimi_k25": {"vision_config": {"patch_size": 14, "pos_emb_height": 64, "pos_emb_width": 64, "pos_emb_time": 4}},
    "lfm2_vl": {"vision_config": {"patch_size": 16, "num_patches": 256}},
    "llama4": {"vision_config": {"image_size": 336, "patch_size": 14}},
    "llava_next": {
        "vision_config": {"image_size": 336, "patch_size": 14},
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    },
    "llava_onevision": {
        "vision_config": {"image_size": 384, "patch_size": 14},
        "image_grid_pinpoints": [[384 * high, 384 * wide] for high in range(1, 7) for wide in range(1, 7)],
    },
    "mllama": {
        "vision_config": {
            "image_size": 560, "patch_size": 14, "max_num_tiles": 4,
            "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
        },
    },
    "smolvlm": {"vision_config": {"image_size": 512, "patch_size": 16}, "scale_factor": 4},
    "step3p7": {"vision_config": {"image_size": 728, "patch_size": 14, "max_position_embeddings": 2704}},
    "vipllava": {"vision_config": {"image_size": 336, "patch_size": 14}},
}  # fmt: skip


def looking(model_type: str, **changes: Any) -> nn.Module:
    """A tiny model with random weights, in fp32."""
    torch.manual_seed(0)
    made = EVERY[RECIPES[model_type]].model() if model_type in RECIPES else tiny(model_type, **changes)
    model: nn.Module = randomize(made).eval()
    return model


def config_of(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = model.config.to_dict()  # type: ignore[operator, union-attr]
    return found


def logits(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    found: torch.Tensor = model(**batch).logits
    return found


def rows_that_change(model: nn.Module, inputs: Inputs) -> list[bool]:
    """For each row, whether its logits are others when the image of the last row is another."""
    pixels = inputs.batch["pixel_values"].clone()
    half = len(pixels) // 2  # two rows, in order
    pixels[half:] = pixels[half:].flip(-1) * 0.5 + 0.2
    with torch.no_grad():
        before, after = logits(model, inputs.batch), logits(model, inputs.batch | {"pixel_values": pixels})
    assert before.isfinite().all()
    return [not torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(before, after, strict=True)]


def untrained(model: nn.Module, inputs: Inputs) -> set[str]:
    """Parameters of tower and projector that get no gradient, or only zeros."""
    model.zero_grad()
    causal_lm_loss(logits(model, inputs.batch), inputs.labels).backward()
    is_other = re.compile(r"(^|\.)(language_model|text_model|lm_head|audio_\w+)\.").search
    return {
        name
        for name, parameter in model.named_parameters()
        if not is_other(name) and (parameter.grad is None or not parameter.grad.any())
    }


@pytest.mark.parametrize("model_type", slow_but(EYES, FAST))
def test_the_image_of_a_row_changes_its_logits_and_trains_tower_and_projector(model_type: str) -> None:
    model = looking(model_type)
    inputs = make_inputs(config_of(model))
    assert "images" in inputs.kinds and "images" not in inputs.missing
    if model_type == "minimax_m3_vl" and not IS_TABLES_VERSION:
        pytest.skip(f"in transformers {INSTALLED} its tower looks from each image at those of other rows")
    assert rows_that_change(model, inputs) == [False, True]
    found = untrained(model, inputs)
    assert not {name for name in found if not re.match(UNTRAINED.get(model_type, "$never"), name)}
    assert bool(found) == (model_type in UNTRAINED)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", RELEASED)
def test_sizes_of_released_models(model_type: str) -> None:
    small = config_of(tiny(model_type))
    changes = {**RELEASED[model_type]}
    changes["vision_config"] = {**small["vision_config"], **changes["vision_config"]}
    model = looking(model_type, **changes)
    inputs = make_inputs(config_of(model))
    assert rows_that_change(model, inputs) == [False, True]


def test_every_registered_class_with_a_tower_has_an_image() -> None:
    types = set()
    for name, paths in layers_rows().items():
        if not hasattr(transformers, name):
            types.add(str(read_index()["classes"][name]))
            continue
        config_class = getattr(transformers, name).config_class
        if paths.vision or config_class.model_type == "gemma4_unified":
            types.add(config_class.model_type)
    assert types == model_types_with_inputs("images") == {*EYES, *CANNOT}


def test_arguments_as_long_as_a_row_know_where_the_image_is() -> None:
    """Ernie's experts for images, and what text sees in Mllama, which puts nothing in."""
    config = config_of(looking("ernie4_5_vl_moe"))
    batch = make_inputs(config).batch
    assert batch["moe_mm_token_type_ids"].tolist() == [[0] * 2 + [1] * 8 + [0] * 10] * 2
    assert batch["mm_token_type_ids"].tolist() == [[0] * 3 + [1] * 6 + [0] * 11] * 2
    mask = make_inputs(config_of(looking("mllama"))).batch["cross_attention_mask"]
    assert mask[0, :, 0].tolist() == [[0, 0]] * 2 + [[1, 1]] * 11


@pytest.mark.parametrize("model_type", ["gemma4", "gemma4_unified"])
def test_a_config_without_a_tower_gets_no_image(model_type: str) -> None:
    inputs = make_inputs({**config_of(looking(model_type)), "vision_config": None})
    assert inputs.kinds == ("text",)
    assert set(inputs.batch) == {"input_ids"}


def test_other_seeds_give_other_pixels_and_the_same_places() -> None:
    config = config_of(looking("lfm2_vl"))
    first, again, other = make_inputs(config), make_inputs(config), make_inputs(config, seed=1)
    assert all(torch.equal(first.batch[name], again.batch[name]) for name in first.batch)
    assert not torch.equal(first.batch["pixel_values"], other.batch["pixel_values"])
    assert torch.equal(first.labels == -100, other.labels == -100)
    assert torch.equal(first.batch["spatial_shapes"], other.batch["spatial_shapes"])


@pytest.mark.parametrize("model_type", ["llava", "qwen2_5_vl", "idefics3"])
def test_what_json_makes_of_a_config_gives_the_same_image(model_type: str) -> None:
    config = config_of(looking(model_type))
    read = json.loads(json.dumps(config))
    for name, tensor in make_inputs(config).batch.items():
        assert torch.equal(make_inputs(read).batch[name], tensor), name


def test_llava_with_other_vision_towers() -> None:
    """Pixtral takes images of any size with their sizes; SigLIP has no class token."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    config = config_of(looking("llava"))
    pixtral = config_of(looking("mistral3"))["vision_config"]
    siglip = config_of(looking("llava_onevision"))["vision_config"]
    for vision, strategy, count in ((pixtral, "full", 6), (siglip, "full", 4), (siglip, "default", 3)):
        changed = {**config, "vision_config": vision, "vision_feature_select_strategy": strategy}
        torch.manual_seed(0)
        model = LlavaForConditionalGeneration(LlavaConfig.from_dict(changed)).eval()
        randomize(model)
        inputs = make_inputs(config_of(model))
        assert int((inputs.labels[0] == -100).sum()) == count
        assert rows_that_change(model, inputs) == [False, True]


def test_the_checks_find_a_blind_model_and_an_image_of_the_wrong_size() -> None:
    model = looking("llava")
    inputs = make_inputs(config_of(model))
    wrong = inputs.batch["pixel_values"][:, :, :8]
    with pytest.raises(ValueError, match="size"):
        logits(model, inputs.batch | {"pixel_values": wrong})
    model.model.multi_modal_projector.register_forward_hook(lambda module, args, output: output.detach() * 0)  # type: ignore[union-attr, operator]
    assert rows_that_change(model, inputs) == [False, False]
    assert "model.multi_modal_projector.linear_1.weight" in untrained(model, inputs)


def test_the_checks_find_an_image_in_the_wrong_row() -> None:
    model = looking("qwen2_5_vl")
    inputs = make_inputs(config_of(model))
    swapped = inputs._replace(batch={**inputs.batch, "pixel_values": inputs.batch["pixel_values"]})
    visual = model.model.visual  # type: ignore[union-attr]
    visual.patch_embed.register_forward_hook(lambda module, args, output: output.flip(0))  # type: ignore[union-attr, operator]
    assert rows_that_change(model, swapped) == [True, False]
