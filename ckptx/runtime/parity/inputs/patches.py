"""One image per sequence, for classes whose processor splits images into patches: a function for each form.

`n` below is the batch size. An image is wider than high if the class allows that.
"""

from __future__ import annotations

import torch

from ckptx.runtime.parity.inputs.config_keys import (
    IMAGE_HEIGHT,
    IMAGE_WIDTH,
    Config,
    add_boundary_tokens,
    count_channels,
    find_image_token,
    first_size,
)
from ckptx.runtime.parity.inputs.multimodal import MultimodalInput, make_random_tensor


def flat(config: Config, batch_size: int, generator: torch.Generator) -> MultimodalInput:
    """Make patches as for Qwen2-VL and its successors: those of all images in one dim, and the grid of each image.

    `pixel_values` is (n * patches, channels * frames * patch * patch): an image counts as a video with equal frames.
    The class finds images by the type of each token. If layers attend to windows, the image has more than one window.
    """
    vision, token = config["vision_config"], find_image_token(config)
    patch, merge = int(vision.get("patch_size", 14)), int(vision.get("spatial_merge_size", 2))
    height = max(IMAGE_HEIGHT, int(vision.get("window_size") or 0) // (patch * merge) + 1)  # in tokens
    width = height + 1
    patches = height * width * merge * merge
    patch_numel = count_channels(config) * int(vision.get("temporal_patch_size", 2)) * patch * patch
    tensors = {
        "pixel_values": make_random_tensor(generator, batch_size * patches, patch_numel),
        "image_grid_thw": torch.tensor([[1, height * merge, width * merge]] * batch_size),
    }
    return MultimodalInput(
        add_boundary_tokens(config, [token] * (height * width)), token, tensors, ("mm_token_type_ids", 1)
    )


def flat_untyped(config: Config, batch_size: int, generator: torch.Generator) -> MultimodalInput:
    """Make `flat` patches for classes that find images without token types."""
    return flat(config, batch_size, generator)._replace(token_types=None)


def flat_for_experts(config: Config, batch_size: int, generator: torch.Generator) -> MultimodalInput:
    """Make patches for Ernie 4.5 VL, which have no frames, because the projector pairs an image with itself.

    Its tokens, and those for begin and end, go to experts of their own.
    """
    vision = {**config["vision_config"], "temporal_patch_size": 1}
    insert = flat({**config, "vision_config": vision}, batch_size, generator)
    image_tokens = torch.tensor(insert.tokens)
    return insert._replace(
        make_text_arguments=lambda ids: {"moe_mm_token_type_ids": torch.isin(ids, image_tokens).long()}
    )


def flat_renamed(config: Config, batch_size: int, generator: torch.Generator) -> MultimodalInput:
    """Make patches for Muse Spark: the form of Qwen2-VL with other names for the sizes."""
    vision = config["vision_config"]
    renamed = {"spatial_merge_size": vision["merge_size"], "temporal_patch_size": vision["patch_temporal"]}
    return flat_untyped({**config, "vision_config": {**vision, **renamed}}, batch_size, generator)


def large(config: Config, batch_size: int, generator: torch.Generator) -> MultimodalInput:
    """Make large patches, each one a token: (n * patches, frames, patch, patch, channels)."""
    vision, token = config["vision_config"], find_image_token(config)
    patch, frames = int(vision["patch_size"]), int(vision["temporal_patch_size"])
    pixels = make_random_tensor(generator, batch_size * IMAGE_HEIGHT, frames, patch, patch, count_channels(config))
    return MultimodalInput(
        [int(config["image_bos_token_id"]), *[token] * IMAGE_HEIGHT], token, {"pixel_values": pixels}
    )


def square(config: Config, batch_size: int, generator: torch.Generator) -> MultimodalInput:
    """Make square patches, (n * patches, channels, patch, patch)."""
    vision, token = config["vision_config"], find_image_token(config)
    patch = first_size(vision["patch_size"])
    height, width = (
        int(merged) * side
        for merged, side in zip(vision["merge_kernel_size"], (IMAGE_HEIGHT, IMAGE_WIDTH), strict=True)
    )
    tensors = {
        "pixel_values": make_random_tensor(
            generator, batch_size * height * width, count_channels(config), patch, patch
        ),
        "image_grid_thw": torch.tensor([[1, height, width]] * batch_size),
    }
    return MultimodalInput([token] * (IMAGE_HEIGHT * IMAGE_WIDTH), token, tensors)


def flat_unmerged(config: Config, batch_size: int, generator: torch.Generator) -> MultimodalInput:
    """Make patches that are not merged into tokens, (n * patches, channels * patch * patch); those of videos are."""
    patch, token = int(config["vision_config"]["patch_size"]), find_image_token(config)
    tensors = {
        "pixel_values": make_random_tensor(
            generator, batch_size * IMAGE_HEIGHT * IMAGE_WIDTH, count_channels(config) * patch * patch
        ),
        "image_grid_thw": torch.tensor([[1, IMAGE_HEIGHT, IMAGE_WIDTH]] * batch_size),
        "image_merge_sizes": torch.ones(batch_size, dtype=torch.long),
    }
    return MultimodalInput([token] * (IMAGE_HEIGHT * IMAGE_WIDTH), token, tensors)


def padded(config: Config, batch_size: int, generator: torch.Generator) -> MultimodalInput:
    """Make patches for a class that pads all images to one number of patches; here all have that number.

    `pixel_values` is (n, patches, channels * patch * patch).
    """
    patch, merged = int(config["vision_config"]["patch_size"]), int(config["downsample_factor"])
    height, width, token = merged * IMAGE_HEIGHT, merged * IMAGE_WIDTH, find_image_token(config)
    tensors = {
        "pixel_values": make_random_tensor(
            generator, batch_size, height * width, count_channels(config) * patch * patch
        ),
        "spatial_shapes": torch.tensor([[height, width]] * batch_size),
        "pixel_attention_mask": torch.ones(batch_size, height * width, dtype=torch.long),
    }
    return MultimodalInput([token] * (IMAGE_HEIGHT * IMAGE_WIDTH), token, tensors)


def placed(
    config: Config, batch_size: int, generator: torch.Generator, *, pooled_in_model: bool
) -> MultimodalInput | None:
    """Make patches with values from 0 to 1, (n, patches, 3 * patch * patch), and the position of each.

    Args:
        config: Config of the class; the result is None if it has no tower.
        batch_size: Batch size.
        generator: Generator of the pixels.
        pooled_in_model: True if the tower merges several patches into a token; otherwise the processor has done so.
    """
    if config.get("vision_config") is None:
        return None
    vision, token = config["vision_config"], find_image_token(config)
    patch, pool = int(vision["patch_size"]), int(vision["pooling_kernel_size"])
    if not pooled_in_model:
        patch, pool = patch * pool, 1
    height, width = IMAGE_HEIGHT * pool, IMAGE_WIDTH * pool
    positions = torch.stack(torch.meshgrid(torch.arange(width), torch.arange(height), indexing="xy"), -1)
    tensors = {
        "pixel_values": make_random_tensor(generator, batch_size, height * width, 3 * patch * patch).sigmoid(),
        "image_position_ids": positions.reshape(1, height * width, 2).expand(batch_size, -1, -1).contiguous(),
    }
    tokens = [int(config["boi_token_id"]), *[token] * (IMAGE_HEIGHT * IMAGE_WIDTH)]
    tokens.append(int(config.get("eoi_token_id", config.get("eoi_token_index", token))))
    return MultimodalInput(tokens, token, tensors, ("mm_token_type_ids", 1))
