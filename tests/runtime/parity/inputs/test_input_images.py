"""One image for each row: shapes, counts of tokens and masks of each form, computed by hand from small configs.

That the classes take them and are trained by them is in `test_images.py`; this is about the numbers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckptx.runtime.parity.inputs.multimodal import MultimodalInput
from tests.support.model_inputs import maker

ROWS = 3
TOKEN = 90
EYES: dict[str, Any] = {"image_size": 24, "patch_size": 4}  # 6 patches along a side
FULL = {"vision_feature_select_strategy": "full"}


def image_of(kind: str, vision: dict[str, Any] | None = None, seed: int = 0, **config: Any) -> MultimodalInput:
    given = {"image_token_id": TOKEN, "vision_config": EYES | (vision or {}), **config}
    made = maker("images", kind)(given, ROWS, torch.Generator().manual_seed(seed))
    assert made is not None
    return made


def shapes_of(insert: MultimodalInput) -> dict[str, tuple[int, ...]]:
    return {name: tuple(each.shape) for name, each in insert.tensors.items()}


# Kind, changes of the eyes, further config; then the tokens of an image and the shapes of what is seen.
PIXELS = (ROWS, 3, 24, 24)
WHOLE: dict[str, tuple[str, dict[str, Any], dict[str, Any], int, tuple[int, ...]]] = {
    "every patch": ("deepseek_vl", {}, {}, 36, PIXELS),
    "every patch, more channels": ("janus", {"num_channels": 5}, {}, 36, (ROWS, 5, 24, 24)),
    "clip without its class": ("llava", {"model_type": "clip"}, {}, 36, PIXELS),
    "clip with its class": ("llava", {"model_type": "clip"}, FULL, 37, PIXELS),
    "siglip, which has none": ("llava", {"model_type": "siglip_vision_model"}, FULL, 36, PIXELS),
    "siglip without its first": ("llava", {"model_type": "siglip_vision_model"}, {}, 35, PIXELS),
    "pixtral behind llava": ("llava", {"model_type": "pixtral"}, {}, 6, (ROWS, 3, 8, 12)),
    "downsampled": ("aya_vision", {}, {"downsample_factor": 2}, 9, PIXELS),
    "downsampled, rounded down": ("cohere2_vision", {}, {"downsample_factor": 4}, 1, PIXELS),
    "two convolutions, rounded up": ("got_ocr2", {}, {}, 4, PIXELS),
    "paligemma": ("paligemma", {}, {}, 36, PIXELS),
    "pixtral, merged": ("mistral3", {}, {"spatial_merge_size": 3}, 6, (ROWS, 3, 24, 36)),
    "internvl": ("internvl", {"patch_size": [4, 2]}, {"downsample_ratio": 0.5}, 4, (ROWS, 3, 16, 8)),
    "internvl with its class": (
        "internvl", {}, {"downsample_ratio": 0.5, **FULL}, 5, (ROWS, 3, 16, 16),
    ),
    "step3": ("step3p7", {}, {}, 4, (ROWS, 3, 32, 32)),
    "aria, the fewest queries": (
        "aria", {}, {"projector_patch_to_query_dict": {"36": 9, "25": 8, 49: 5}}, 8, (ROWS, 3, 20, 20),
    ),
    "idefics2": ("idefics2", {}, {"perceiver_config": {"resampler_n_latents": 7}}, 7, (ROWS, 1, 3, 8, 8)),
    "idefics3": ("idefics3", {}, {"scale_factor": 3}, 4, (ROWS, 1, 3, 24, 24)),
    "wide": ("llava_next", {}, {"image_grid_pinpoints": [[48, 24], [24, 48]]}, 36 + 6 * 13, (ROWS, 3, 3, 24, 24)),
    "tall": ("llava_next", {}, {"image_grid_pinpoints": [[48, 48], [48, 24]]}, 36 + 12 * 7, (ROWS, 3, 3, 24, 24)),
}  # fmt: skip


@pytest.mark.parametrize("case", WHOLE)
def test_tokens_and_pixels_of_whole_images(case: str) -> None:
    kind, vision, config, count, shape = WHOLE[case]
    found = image_of(kind, vision, **config)
    assert (found.tokens, found.placeholder) == ([TOKEN] * count, TOKEN)
    pixels = found.tensors["pixel_values"]
    assert (tuple(pixels.shape), pixels.dtype) == (shape, torch.float32)
    again, other = image_of(kind, vision, **config), image_of(kind, vision, seed=1, **config)
    assert torch.equal(pixels, again.tensors["pixel_values"])
    assert not torch.equal(pixels, other.tensors["pixel_values"])
    assert not torch.equal(pixels[0], pixels[1])


ENDS = {"boi_token_index": 80, "eoi_token_index": 81, "boi_token_id": 82, "eoi_token_id": 83}


def test_gemma_has_begin_and_end_and_types() -> None:
    found = image_of("gemma3", mm_tokens_per_image=3, **ENDS)
    assert (found.tokens, found.placeholder) == ([80, TOKEN, TOKEN, TOKEN, 81], TOKEN)
    assert found.token_types == ("token_type_ids", 1)
    assert shapes_of(found) == {"pixel_values": PIXELS}
    found = image_of("gemma3n", vision_soft_tokens_per_image=2, **ENDS)
    assert (found.tokens, found.placeholder) == ([82, TOKEN, TOKEN, 83], TOKEN)
    assert shapes_of(found) == {"pixel_values": (ROWS, 3, 768, 768)}
    assert image_of("paligemma").token_types == ("token_type_ids", 0)


def test_llama4_shuffles_pixels_into_channels() -> None:
    found = image_of("llama4", {"pixel_shuffle_ratio": 0.5}, **ENDS)
    assert found.tokens == [80, *[TOKEN] * 9, 81]


def test_mllama_sees_all_tiles_from_its_token_on() -> None:
    vision = {"max_num_tiles": 4, "supported_aspect_ratios": [[1, 1], [1, 2], [2, 2], [4, 1]]}
    found = image_of("mllama", vision)
    assert found.tokens == [TOKEN]
    assert shapes_of(found) == {
        "pixel_values": (ROWS, 1, 4, 3, 24, 24), "aspect_ratio_ids": (ROWS, 1), "aspect_ratio_mask": (ROWS, 1, 4),
    }  # fmt: skip
    assert found.tensors["aspect_ratio_ids"].tolist() == [[3]] * ROWS  # the first of 4 tiles; 0 is no image
    assert found.tensors["aspect_ratio_mask"].all()
    assert found.make_text_arguments is not None
    mask = found.make_text_arguments(torch.tensor([[5, TOKEN, 6], [TOKEN, 7, 8]]))["cross_attention_mask"]
    assert mask.shape == (2, 3, 1, 4)
    assert mask[:, :, 0, 0].tolist() == mask[:, :, 0, 3].tolist() == [[0, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize(
    ("kind", "vision", "config", "name", "shape"),
    [
        ("aria", {}, {"projector_patch_to_query_dict": {"25": 8}}, "pixel_mask", (ROWS, 20, 20)),
        ("idefics2", {}, {"perceiver_config": {"resampler_n_latents": 7}}, "pixel_attention_mask", (ROWS, 1, 8, 8)),
    ],
)
def test_masks_let_every_pixel_through(
    kind: str, vision: dict[str, Any], config: dict[str, Any], name: str, shape: tuple[int, ...]
) -> None:
    mask = image_of(kind, vision, **config).tensors[name]
    assert tuple(mask.shape) == shape
    assert mask.all()


def test_sizes_are_those_of_the_image() -> None:
    found = image_of("llava_next", image_grid_pinpoints=[[48, 24], [24, 48]])
    assert found.tensors["image_sizes"].tolist() == [[24, 48]] * ROWS
    assert image_of("mistral3", spatial_merge_size=3).tensors["image_sizes"].tolist() == [[24, 36]] * ROWS


def test_a_config_without_eyes_gets_no_image() -> None:
    for kind in ("gemma3n", "gemma4", "gemma4_unified"):
        assert maker("images", kind)({"image_token_id": TOKEN, "vision_config": None}, ROWS, torch.Generator()) is None
