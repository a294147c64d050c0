"""One image per sequence, of the smallest size that the config of a class allows: a function for each form.

A form is a layout of the image inputs. This module has the forms of whole images and the table of all forms; those of
patches are in `patches`. The section `inputs` in the corrections of a class names its form. Shapes and masks are those
that the processor of the class returns. `n` below is the batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isqrt

import torch

from ckptx.architecture.correction_types import TowerCorrection
from ckptx.architecture.corrections import corrections_of
from ckptx.runtime.parity.inputs import patches
from ckptx.runtime.parity.inputs.config_keys import (
    IMAGE_HEIGHT,
    IMAGE_WIDTH,
    Config,
    Form,
    ImageForm,
    count_channels,
    count_patches_per_side,
    find_image_token,
    first_size,
    make_square_image,
)
from ckptx.runtime.parity.inputs.multimodal import Batch, MultimodalInput, make_random_tensor

# ------------------------------------------------------------------------------------- images of the tower's fixed size


def _fixed_form(count: Callable[[Config, int], int]) -> ImageForm:
    """Return the form of towers that take only images of `image_size`; pixels are (n, channels, size, size).

    Args:
        count: Returns the number of tokens of an image, given the config and the number of patches along one side.
    """

    def image(config: Config, batch_size: int, generator: torch.Generator) -> MultimodalInput:
        token = find_image_token(config)
        return MultimodalInput(
            [token] * count(config, count_patches_per_side(config)),
            token,
            make_square_image(config, batch_size, generator),
        )

    return image


def _count_every_patch(config: Config, side: int) -> int:
    return side * side


def _make_image_for_any_tower(config: Config, batch_size: int, generator: torch.Generator) -> MultimodalInput:
    """Make an image for Llava, whose tower may be of any model type; the corrections of that type decide its form."""
    if any(row.any_size for row in _tower_rows(config)):
        return _make_image_of_any_size(1, config, batch_size, generator)
    return _fixed_form(_count_selected)(config, batch_size, generator)


def _tower_rows(config: Config) -> tuple[TowerCorrection, ...]:
    """Return the corrections of the tower's model type; empty for a tower like CLIP's."""
    return corrections_of(str(config["vision_config"].get("model_type"))).as_tower


def _count_selected(config: Config, side: int) -> int:
    """Return the number of tokens of an image.

    By default, the class drops the first feature, which is the class token of CLIP; other towers may have none.
    """
    has_class_token = all(row.class_token for row in _tower_rows(config))
    return side * side + has_class_token - int(config.get("vision_feature_select_strategy", "default") == "default")


def _count_downsampled(config: Config, side: int) -> int:
    return int(side // int(config["downsample_factor"])) ** 2


def _count_halved_twice(config: Config, side: int) -> int:
    """Return the tokens after two padded stride-2 convolutions, which round up."""
    return (-(-side // 4)) ** 2


def _make_pooled_image(config: Config, batch_size: int, generator: torch.Generator) -> MultimodalInput:
    token = find_image_token(config)
    tokens = [int(config["boi_token_index"]), *[token] * int(config["mm_tokens_per_image"])]
    tokens.append(int(config["eoi_token_index"]))
    return MultimodalInput(tokens, token, make_square_image(config, batch_size, generator), ("token_type_ids", 1))


def _make_image_for_timm(config: Config, batch_size: int, generator: torch.Generator) -> MultimodalInput | None:
    """Make an image of 768 pixels, as the processor does: timm towers have no image size in the config."""
    if config.get("vision_config") is None:
        return None
    token, count = find_image_token(config), int(config["vision_soft_tokens_per_image"])
    tokens = [int(config["boi_token_id"]), *[token] * count, int(config["eoi_token_id"])]
    return MultimodalInput(tokens, token, {"pixel_values": make_random_tensor(generator, batch_size, 3, 768, 768)})


def _make_prompt(config: Config, batch_size: int, generator: torch.Generator) -> MultimodalInput:
    """Make a prompt without an answer: all tokens, including image tokens, have type 0 and attend to each other."""
    return _fixed_form(_count_every_patch)(config, batch_size, generator)._replace(token_types=("token_type_ids", 0))


def _make_shuffled_image(config: Config, batch_size: int, generator: torch.Generator) -> MultimodalInput:
    token, ratio = find_image_token(config), float(config["vision_config"]["pixel_shuffle_ratio"])
    count = round(count_patches_per_side(config) ** 2 * ratio**2)
    tokens = [int(config["boi_token_index"]), *[token] * count, int(config["eoi_token_index"])]
    return MultimodalInput(tokens, token, make_square_image(config, batch_size, generator))


def _make_cross_attended_tiles(config: Config, batch_size: int, generator: torch.Generator) -> MultimodalInput:
    """Make one image with the largest number of tiles, so that no tile is padding.

    The image has no tokens in the text, which attends to it from its placeholder on. `pixel_values` is (n, 1, tiles,
    channels, size, size).
    """
    vision, token = config["vision_config"], find_image_token(config)
    tiles, size = int(vision["max_num_tiles"]), first_size(vision["image_size"])
    tile_counts = [int(rows) * int(columns) for rows, columns in vision["supported_aspect_ratios"]]
    tensors = {
        "pixel_values": make_random_tensor(generator, batch_size, 1, tiles, count_channels(config), size, size),
        "aspect_ratio_ids": torch.full((batch_size, 1), 1 + tile_counts.index(max(tile_counts))),  # 0 is no image
        "aspect_ratio_mask": torch.ones(batch_size, 1, tiles, dtype=torch.long),
    }

    def make_cross_attention_mask(ids: torch.Tensor) -> Batch:
        after = (ids == token).long().cumsum(1)
        return {"cross_attention_mask": after[:, :, None, None].expand(-1, -1, 1, tiles).contiguous()}

    return MultimodalInput([token], token, tensors, make_text_arguments=make_cross_attention_mask)


# ------------------------------------------------------------------------------ tiles of the tower's size, one overview


def _make_tiles(config: Config, batch_size: int, generator: torch.Generator) -> MultimodalInput:
    """Make an image of the smallest size offered: an overview and its tiles, each row of patches with a newline.

    `pixel_values` is (n, 1 + tiles, channels, size, size).
    """
    token, size, side = (
        find_image_token(config),
        first_size(config["vision_config"]["image_size"]),
        count_patches_per_side(config),
    )
    height, width = min(config["image_grid_pinpoints"], key=lambda point: (point[0] * point[1], *point))
    tiles_high, tiles_wide = height // size, width // size
    count = side * side + tiles_high * side * (tiles_wide * side + 1)
    tensors = {
        "pixel_values": make_random_tensor(
            generator, batch_size, 1 + tiles_high * tiles_wide, count_channels(config), size, size
        ),
        "image_sizes": torch.tensor([[height, width]] * batch_size),
    }
    return MultimodalInput([token] * count, token, tensors)


# -------------------------------------------------------------------------------------------------- images of any size


def _make_image_with_size(config: Config, batch_size: int, generator: torch.Generator) -> MultimodalInput:
    """Make an image and its size, for Pixtral and similar towers; `spatial_merge_size` patches per side are a token."""
    return _make_image_of_any_size(int(config["spatial_merge_size"]), config, batch_size, generator)


def _make_image_of_any_size(merge: int, config: Config, batch_size: int, generator: torch.Generator) -> MultimodalInput:
    """Make an image of which `merge` patches per side are one token."""
    token, size = find_image_token(config), first_size(config["vision_config"]["patch_size"]) * merge
    height, width = size * IMAGE_HEIGHT, size * IMAGE_WIDTH
    tensors = {
        "pixel_values": make_random_tensor(generator, batch_size, count_channels(config), height, width),
        "image_sizes": torch.tensor([[height, width]] * batch_size),
    }
    return MultimodalInput([token] * (IMAGE_HEIGHT * IMAGE_WIDTH), token, tensors)


def _make_downsampled_image(config: Config, batch_size: int, generator: torch.Generator) -> MultimodalInput:
    """Make an image for interpolated positions; a token is `1 / downsample_ratio` patches high and wide."""
    patch, token = config["vision_config"]["patch_size"], find_image_token(config)
    patch_height, patch_width = patch if isinstance(patch, list | tuple) else (patch, patch)
    side = round(IMAGE_HEIGHT / float(config["downsample_ratio"]))
    pixels = make_random_tensor(generator, batch_size, count_channels(config), patch_height * side, patch_width * side)
    keeps_class_token = config.get("vision_feature_select_strategy", "default") != "default"
    return MultimodalInput([token] * (IMAGE_HEIGHT**2 + keeps_class_token), token, {"pixel_values": pixels})


def _make_folded_image(config: Config, batch_size: int, generator: torch.Generator) -> MultimodalInput:
    """Make an image for interpolated positions; two stride-2 convolutions make a token of four patches per side."""
    token, size = find_image_token(config), first_size(config["vision_config"]["patch_size"]) * 4 * IMAGE_HEIGHT
    return MultimodalInput(
        [token] * IMAGE_HEIGHT**2,
        token,
        {"pixel_values": make_random_tensor(generator, batch_size, count_channels(config), size, size)},
    )


def _make_image_for_queries(config: Config, batch_size: int, generator: torch.Generator) -> MultimodalInput:
    """Make the image with the fewest patches, for a fixed number of queries per number of patches."""
    queries = {int(patches): int(count) for patches, count in config["projector_patch_to_query_dict"].items()}
    token, fewest = find_image_token(config), min(queries)
    size = isqrt(fewest) * first_size(config["vision_config"]["patch_size"])
    tensors = {
        "pixel_values": make_random_tensor(generator, batch_size, count_channels(config), size, size),
        "pixel_mask": torch.ones(batch_size, size, size, dtype=torch.bool),
    }
    return MultimodalInput([token] * queries[fewest], token, tensors)


def _masked_form(count: Callable[[Config], int], side: Callable[[Config], int]) -> ImageForm:
    """Return the form of classes that take (n, images, channels, height, width) and a pixel mask.

    Args:
        count: Returns the number of tokens of an image, given the config.
        side: Returns the number of patches along one side of the smallest image, given the config.
    """

    def image(config: Config, batch_size: int, generator: torch.Generator) -> MultimodalInput:
        token, size = find_image_token(config), first_size(config["vision_config"]["patch_size"]) * side(config)
        tensors = {
            "pixel_values": make_random_tensor(generator, batch_size, 1, count_channels(config), size, size),
            "pixel_attention_mask": torch.ones(batch_size, 1, size, size, dtype=torch.long),
        }
        return MultimodalInput([token] * count(config), token, tensors)

    return image


_make_resampled_image = _masked_form(
    lambda config: int(config["perceiver_config"]["resampler_n_latents"]), lambda config: IMAGE_HEIGHT
)
_make_masked_shuffled_image = _masked_form(
    lambda config: IMAGE_HEIGHT**2, lambda config: int(config["scale_factor"]) * IMAGE_HEIGHT
)


# Functions by the name that the corrections of a model type use. If the tower of the class is optional, the function
# returns None for a config without it.
FORMS: Mapping[str, Form] = {
    "any_size_downsampled": _make_downsampled_image,
    "any_size_folded": _make_folded_image,
    "any_size_with_sizes": _make_image_with_size,
    "fixed_downsampled": _fixed_form(_count_downsampled),
    "fixed_every_patch": _fixed_form(_count_every_patch),
    "fixed_halved_twice": _fixed_form(_count_halved_twice),
    "fixed_pooled": _make_pooled_image,
    "fixed_prompt": _make_prompt,
    "fixed_shuffled": _make_shuffled_image,
    "flat_patches": patches.flat,
    "flat_patches_for_experts": patches.flat_for_experts,
    "flat_patches_renamed": patches.flat_renamed,
    "flat_patches_unmerged": patches.flat_unmerged,
    "flat_patches_untyped": patches.flat_untyped,
    "large_patches": patches.large,
    "masked_resampled": _make_resampled_image,
    "masked_shuffled": _make_masked_shuffled_image,
    "of_any_tower": _make_image_for_any_tower,
    "of_timm": _make_image_for_timm,
    "padded_patches": patches.padded,
    "placed_patches": patches.placed,
    "queries_by_patches": _make_image_for_queries,
    "square_patches": patches.square,
    "tiles": _make_tiles,
    "tiles_cross_attended": _make_cross_attended_tiles,
}
