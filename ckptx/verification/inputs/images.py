"""One image for each row, in the smallest form that the config of a class allows: data, a function per kind of tower.

Here are the classes that take whole images, and the table; those that take patches are in `patches`. Shapes and masks
are those that the processor of the class gives. `n` below is the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt

import torch

from ckptx.verification.inputs import patches
from ckptx.verification.inputs.insert import Batch, Insert, random_of
from ckptx.verification.inputs.spelled import (
    SIDE,
    Config,
    Image,
    Seen,
    channels,
    first_of,
    patches_along,
    square,
    token_of,
)

# ---------------------------------------------------------------------------------- images of the one size of the tower


def _fixed(count: Callable[[Config, int], int]) -> Seen:
    """Classes whose tower has one position for each patch of `image_size`; `pixel_values` is (n, channels, size, size).

    Args:
        count: The tokens of an image, from the config and the patches along one side.
    """

    def image(config: Config, rows: int, generator: torch.Generator) -> Insert:
        token = token_of(config)
        return Insert([token] * count(config, patches_along(config)), token, square(config, rows, generator))

    return image


def _every_patch(config: Config, side: int) -> int:
    return side * side


def _llava(config: Config, rows: int, generator: torch.Generator) -> Insert:
    if str(config["vision_config"].get("model_type")) == "pixtral":
        return _pixtral(1)(config, rows, generator)
    return _fixed(_selected)(config, rows, generator)


def _selected(config: Config, side: int) -> int:
    """All that the tower gives, or all but the first, which is the class token of CLIP; SigLIP has none."""
    has_class = not str(config["vision_config"].get("model_type")).startswith("siglip")
    return side * side + has_class - int(config.get("vision_feature_select_strategy", "default") == "default")


def _downsampled(config: Config, side: int) -> int:
    return int(side // int(config["downsample_factor"])) ** 2


def _halved_twice(config: Config, side: int) -> int:
    """Two convolutions of stride 2 with a border, which round up."""
    return (-(-side // 4)) ** 2


def _gemma3(config: Config, rows: int, generator: torch.Generator) -> Insert:
    token = token_of(config)
    tokens = [int(config["boi_token_index"]), *[token] * int(config["mm_tokens_per_image"])]
    tokens.append(int(config["eoi_token_index"]))
    return Insert(tokens, token, square(config, rows, generator), ("token_type_ids", 1))


def _gemma3n(config: Config, rows: int, generator: torch.Generator) -> Insert | None:
    """The tower is of timm and has no size in its config; its processor makes 768 pixels."""
    if config.get("vision_config") is None:
        return None
    token, count = token_of(config), int(config["vision_soft_tokens_per_image"])
    tokens = [int(config["boi_token_id"]), *[token] * count, int(config["eoi_token_id"])]
    return Insert(tokens, token, {"pixel_values": random_of(generator, rows, 3, 768, 768)})


def _paligemma(config: Config, rows: int, generator: torch.Generator) -> Insert:
    """A prompt without an answer: all of it, the image too, is of type 0 and sees all of itself."""
    return _fixed(_every_patch)(config, rows, generator)._replace(types=("token_type_ids", 0))


def _llama4(config: Config, rows: int, generator: torch.Generator) -> Insert:
    token, ratio = token_of(config), float(config["vision_config"]["pixel_shuffle_ratio"])
    count = round(patches_along(config) ** 2 * ratio**2)
    tokens = [int(config["boi_token_index"]), *[token] * count, int(config["eoi_token_index"])]
    return Insert(tokens, token, square(config, rows, generator))


def _mllama(config: Config, rows: int, generator: torch.Generator) -> Insert:
    """One image of as many tiles as there can be, so that none is of padding.

    It is not put in: text from its token on sees it by cross attention. `pixel_values` is (n, 1, tiles, channels, size,
    size).
    """
    vision, token = config["vision_config"], token_of(config)
    tiles, size = int(vision["max_num_tiles"]), first_of(vision["image_size"])
    shapes = [int(high) * int(wide) for high, wide in vision["supported_aspect_ratios"]]
    tensors = {
        "pixel_values": random_of(generator, rows, 1, tiles, channels(config), size, size),
        "aspect_ratio_ids": torch.full((rows, 1), 1 + shapes.index(max(shapes))),  # 0 is no image
        "aspect_ratio_mask": torch.ones(rows, 1, tiles, dtype=torch.long),
    }

    def seen_by(ids: torch.Tensor) -> Batch:
        after = (ids == token).long().cumsum(1)
        return {"cross_attention_mask": after[:, :, None, None].expand(-1, -1, 1, tiles).contiguous()}

    return Insert([token], token, tensors, row=seen_by)


# --------------------------------------------------------------------- tiles of the size of the tower, and one overview


def _llava_next(config: Config, rows: int, generator: torch.Generator) -> Insert:
    """An image of the smallest size that is offered: an overview, then its tiles, each row of patches with a newline.

    `pixel_values` is (n, 1 + tiles, channels, size, size).
    """
    token, size, side = token_of(config), first_of(config["vision_config"]["image_size"]), patches_along(config)
    height, width = min(config["image_grid_pinpoints"], key=lambda point: (point[0] * point[1], *point))
    high, wide = height // size, width // size
    count = side * side + high * side * (wide * side + 1)
    tensors = {
        "pixel_values": random_of(generator, rows, 1 + high * wide, channels(config), size, size),
        "image_sizes": torch.tensor([[height, width]] * rows),
    }
    return Insert([token] * count, token, tensors)


# -------------------------------------------------------------------------------------------------- images of any size


def _pixtral(merge: int) -> Seen:
    """Classes with the tower of Pixtral, `merge` patches along a side for one token, 0 for what the config says."""

    def image(config: Config, rows: int, generator: torch.Generator) -> Insert:
        token = token_of(config)
        size = first_of(config["vision_config"]["patch_size"]) * (merge or int(config["spatial_merge_size"])) * SIDE
        tensors = {
            "pixel_values": random_of(generator, rows, channels(config), size, size),
            "image_sizes": torch.tensor([[size, size]] * rows),
        }
        return Insert([token] * SIDE**2, token, tensors)

    return image


def _internvl(config: Config, rows: int, generator: torch.Generator) -> Insert:
    """Positions are interpolated. One token is `1 / downsample_ratio` patches high and wide."""
    patch, token = config["vision_config"]["patch_size"], token_of(config)
    high, wide = patch if isinstance(patch, list | tuple) else (patch, patch)
    side = round(SIDE / float(config["downsample_ratio"]))
    pixels = random_of(generator, rows, channels(config), high * side, wide * side)
    is_whole = config.get("vision_feature_select_strategy", "default") != "default"
    return Insert([token] * (SIDE**2 + is_whole), token, {"pixel_values": pixels})


def _step3p7(config: Config, rows: int, generator: torch.Generator) -> Insert:
    """Positions are interpolated; two convolutions of stride 2 make one token of four patches along a side."""
    token, size = token_of(config), first_of(config["vision_config"]["patch_size"]) * 4 * SIDE
    return Insert([token] * SIDE**2, token, {"pixel_values": random_of(generator, rows, channels(config), size, size)})


def _aria(config: Config, rows: int, generator: torch.Generator) -> Insert:
    """A number of queries for each number of patches: the image with the fewest."""
    queries = {int(patches): int(count) for patches, count in config["projector_patch_to_query_dict"].items()}
    token, fewest = token_of(config), min(queries)
    size = isqrt(fewest) * first_of(config["vision_config"]["patch_size"])
    tensors = {
        "pixel_values": random_of(generator, rows, channels(config), size, size),
        "pixel_mask": torch.ones(rows, size, size, dtype=torch.bool),
    }
    return Insert([token] * queries[fewest], token, tensors)


def _idefics(count: Callable[[Config], int], side: Callable[[Config], int]) -> Seen:
    """Classes that take (n, images, channels, height, width) and a mask of pixels.

    Args:
        count: The tokens of an image.
        side: The patches along a side of the smallest image.
    """

    def image(config: Config, rows: int, generator: torch.Generator) -> Insert:
        token, size = token_of(config), first_of(config["vision_config"]["patch_size"]) * side(config)
        tensors = {
            "pixel_values": random_of(generator, rows, 1, channels(config), size, size),
            "pixel_attention_mask": torch.ones(rows, 1, size, size, dtype=torch.long),
        }
        return Insert([token] * count(config), token, tensors)

    return image


_idefics2 = _idefics(lambda config: int(config["perceiver_config"]["resampler_n_latents"]), lambda config: SIDE)
_idefics3 = _idefics(lambda config: SIDE**2, lambda config: int(config["scale_factor"]) * SIDE)


IMAGES: dict[str, Image] = {
    "aria": _aria,
    "aya_vision": _fixed(_downsampled),
    "cohere2_vision": _fixed(_downsampled),
    "deepseek_vl": _fixed(_every_patch),
    "ernie4_5_vl_moe": patches.ernie,
    "exaone4_5": patches.untyped_grid,
    "gemma3": _gemma3,
    "gemma3n": _gemma3n,
    "gemma4": patches.gemma4(pooled_in_model=True),
    "gemma4_unified": patches.gemma4(pooled_in_model=False),
    "glm46v": patches.grid,
    "glm4v": patches.grid,
    "glm4v_moe": patches.grid,
    "got_ocr2": _fixed(_halved_twice),
    "idefics2": _idefics2,
    "idefics3": _idefics3,
    "inkling_mm_model": patches.inkling,
    "internvl": _internvl,
    "janus": _fixed(_every_patch),
    "kimi_k25": patches.kimi,
    "lfm2_vl": patches.lfm2,
    "lighton_ocr": _pixtral(0),
    "llama4": _llama4,
    "llava": _llava,
    "llava_next": _llava_next,
    "llava_next_video": _llava_next,
    "llava_onevision": _llava_next,
    "minimax_m3_vl": patches.untyped_grid,
    "mistral3": _pixtral(0),
    "mllama": _mllama,
    "muse_spark": patches.muse,
    "paligemma": _paligemma,
    "qwen2_5_omni_thinker": patches.untyped_grid,
    "qwen2_5_vl": patches.grid,
    "qwen2_vl": patches.grid,
    "qwen3_5": patches.grid,
    "qwen3_5_moe": patches.grid,
    "qwen3_omni_moe_thinker": patches.untyped_grid,
    "qwen3_vl": patches.grid,
    "qwen3_vl_moe": patches.grid,
    "smolvlm": _idefics3,
    "step3p7": _step3p7,
    "video_llama_3": patches.video_llama,
    "vipllava": _fixed(_every_patch),
}
