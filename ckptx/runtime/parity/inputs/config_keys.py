"""What the configs of classes that look have in common: the names of tokens and sizes of an image."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ckptx.runtime.parity.inputs.multimodal import Batch, MultimodalInput, random_of

Config = Mapping[str, Any]
Seen = Callable[[Config, int, torch.Generator], MultimodalInput]
# With the settings of its row; None for a config without the tower.
Form = Callable[..., MultimodalInput | None]

SIDE = 2  # tokens that an image is high, where the class takes images of any size
WIDE = SIDE + 1  # and wide, so that the two cannot be exchanged


def token_of(config: Config) -> int:
    """The token that the features of an image replace; classes have one name or the other for it."""
    for key in ("image_token_id", "image_token_index"):
        if isinstance(config.get(key), int):
            return int(config[key])
    raise KeyError("image_token_id")


def between(config: Config, tokens: list[int]) -> list[int]:
    """The tokens of an image with those for its begin and end, where the config has them."""
    for kind in ("vision", "image"):
        ends = [config.get(f"{kind}_{end}_token_id") for end in ("start", "end")]
        if all(isinstance(end, int) for end in ends):
            return [int(ends[0] or 0), *tokens, int(ends[1] or 0)]
    return tokens


def first_of(size: Any) -> int:
    """A size that may be given as height and width."""
    return int(size[0] if isinstance(size, list | tuple) else size)


def channels(config: Config) -> int:
    vision = config["vision_config"]
    return int(vision.get("in_channels", vision.get("in_chans", vision.get("num_channels", 3))))


def patches_along(config: Config) -> int:
    """Patches along one side of an image of the tower's size."""
    vision = config["vision_config"]
    return first_of(vision["image_size"]) // first_of(vision["patch_size"])


def square(config: Config, rows: int, generator: torch.Generator) -> Batch:
    size = first_of(config["vision_config"]["image_size"])
    return {"pixel_values": random_of(generator, rows, channels(config), size, size)}
