"""Config keys that vision models share: tokens and sizes of an image."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ckptx.runtime.parity.inputs.multimodal import Batch, MultimodalInput, make_random_tensor

Config = Mapping[str, Any]
ImageForm = Callable[[Config, int, torch.Generator], MultimodalInput]  # takes config, batch size, generator
# Also takes `InputCorrection.settings`; returns None for a config without the tower.
Form = Callable[..., MultimodalInput | None]

IMAGE_HEIGHT = 2  # height of an image in tokens, for classes that take any size
IMAGE_WIDTH = IMAGE_HEIGHT + 1  # width, different so that swapped sizes are detected


def find_image_token(config: Config) -> int:
    """Return the placeholder token that image features replace; its key depends on the class.

    Raises:
        KeyError: The config names none.
    """
    for key in ("image_token_id", "image_token_index"):
        if isinstance(config.get(key), int):
            return int(config[key])
    raise KeyError("image_token_id")


def add_boundary_tokens(config: Config, tokens: list[int]) -> list[int]:
    """Return the tokens of an image between its begin and end tokens, if the config has them."""
    for kind in ("vision", "image"):
        boundary_tokens = [config.get(f"{kind}_{end}_token_id") for end in ("start", "end")]
        if all(isinstance(end, int) for end in boundary_tokens):
            return [int(boundary_tokens[0] or 0), *tokens, int(boundary_tokens[1] or 0)]
    return tokens


def first_size(size: Any) -> int:
    """Return a size that a config gives as one number, or the first of its (height, width)."""
    return int(size[0] if isinstance(size, list | tuple) else size)


def count_channels(config: Config) -> int:
    """Return the number of channels of an image; 3 unless the config of the tower has one of the usual keys."""
    vision = config["vision_config"]
    return int(vision.get("in_channels", vision.get("in_chans", vision.get("num_channels", 3))))


def count_patches_per_side(config: Config) -> int:
    """Return the number of patches along one side of an image of the tower's size."""
    vision = config["vision_config"]
    return first_size(vision["image_size"]) // first_size(vision["patch_size"])


def make_square_image(config: Config, batch_size: int, generator: torch.Generator) -> Batch:
    """Return one image of the tower's size per sequence: `pixel_values` of shape (batch, channels, size, size)."""
    size = first_size(config["vision_config"]["image_size"])
    return {"pixel_values": make_random_tensor(generator, batch_size, count_channels(config), size, size)}
