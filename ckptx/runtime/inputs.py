"""Inputs for a model from its config alone: the same on every machine, so that two models can be compared.

Text is random tokens. Models that look at images get one image per row, and the tokens that stand for it, in the
smallest form their config allows; of other multimodal models the text part is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch

Batch = dict[str, torch.Tensor]

_LENGTH = 12  # tokens of text in a row
_FIRST = 3  # the ids before are those of padding, begin and end in most vocabularies


class Inputs(NamedTuple):
    """What to run a model on.

    Attributes:
        batch: Arguments of `forward`, the first dim of each text tensor is the batch.
        labels: What the logits are held against, (batch, length); -100 where they do not count.
        sees_images: Whether images are in it.
    """

    batch: Batch
    labels: torch.Tensor
    sees_images: bool


def inputs_for(config: Mapping[str, Any], *, rows: int = 2, seed: int = 0) -> Inputs:
    """Inputs for a model with this `config.json`.

    Args:
        config: As a mapping.
        rows: Rows of the batch.
        seed: Other seeds give other tokens and pixels.
    """
    generator = torch.Generator().manual_seed(seed)
    text = text_config(config)
    special = {value for key, value in _numbers(config) if key.endswith(("_token_id", "_token_index"))}
    vocabulary = [token for token in range(_FIRST, int(text["vocab_size"])) if token not in special]
    allowed = torch.tensor(vocabulary[: 1 << 16])
    ids = allowed[torch.randint(0, len(allowed), (rows, _LENGTH), generator=generator)]
    if config.get("is_encoder_decoder"):
        target = allowed[torch.randint(0, len(allowed), (rows, _LENGTH), generator=generator)]
        return Inputs({"input_ids": ids, "decoder_input_ids": target}, target, False)
    see = _IMAGES.get(str(config.get("model_type")))
    if see is None:
        return Inputs({"input_ids": ids}, ids.clone(), False)
    image = see(config, rows, generator)
    middle = torch.tensor(image.tokens).expand(rows, -1)
    ids = torch.cat([ids[:, :2], middle, ids[:, 2:]], 1)
    is_image = ids == image.placeholder
    batch = {"input_ids": ids, **image.tensors}
    if image.types is not None:
        batch[image.types] = is_image.int()
    return Inputs(batch, ids.masked_fill(is_image, -100), True)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model."""
    for key in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(key), Mapping):
            return {**config, **config[key]}
    thinker = config.get("thinker_config")
    return text_config(thinker) if isinstance(thinker, Mapping) else config


class _Image(NamedTuple):
    """An image of every row: the tokens around and for it, the tensors, and the name of the tensor of token types."""

    tokens: list[int]
    placeholder: int
    tensors: Batch
    types: str | None = None


def _pixels(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def _gemma3(config: Mapping[str, Any], rows: int, generator: torch.Generator) -> _Image:
    vision, token = config["vision_config"], int(config.get("image_token_index", config.get("image_token_id", 0)))
    size = int(vision["image_size"])
    tokens = [int(config["boi_token_index"]), *[token] * int(config["mm_tokens_per_image"])]
    tokens.append(int(config["eoi_token_index"]))
    return _Image(tokens, token, {"pixel_values": _pixels(generator, rows, 3, size, size)}, "token_type_ids")


def _gemma4(config: Mapping[str, Any], rows: int, generator: torch.Generator) -> _Image:
    vision, token = config["vision_config"], int(config["image_token_id"])
    pool, patch = int(vision["pooling_kernel_size"]), int(vision["patch_size"])
    side = 2 * pool  # patches; pooled to four tokens
    grid = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="xy"), -1)
    pixels = _pixels(generator, rows, side * side, 3 * patch * patch).sigmoid()
    positions = grid.reshape(1, side * side, 2).expand(rows, -1, -1).contiguous()
    tokens = [int(config["boi_token_id"]), *[token] * 4, int(config["eoi_token_id"])]
    tensors = {"pixel_values": pixels, "image_position_ids": positions}
    return _Image(tokens, token, tensors, "mm_token_type_ids")


def _qwen_vl(config: Mapping[str, Any], rows: int, generator: torch.Generator) -> _Image:
    vision, token = config["vision_config"], int(config["image_token_id"])
    patch, merge = int(vision.get("patch_size", 14)), int(vision.get("spatial_merge_size", 2))
    frames = int(vision.get("temporal_patch_size", 2))
    side = 2 * merge
    width = int(vision.get("in_channels", vision.get("in_chans", 3))) * frames * patch * patch
    tensors = {
        "pixel_values": _pixels(generator, rows * side * side, width),
        "image_grid_thw": torch.tensor([[1, side, side]] * rows),
    }
    tokens = [int(config["vision_start_token_id"]), *[token] * 4, int(config["vision_end_token_id"])]
    return _Image(tokens, token, tensors, "mm_token_type_ids")


def _llava(config: Mapping[str, Any], rows: int, generator: torch.Generator) -> _Image:
    vision, token = config["vision_config"], int(config.get("image_token_index", config.get("image_token_id", 0)))
    size, patch = int(vision["image_size"]), int(vision["patch_size"])
    count = prod((size // patch,) * 2) + (config.get("vision_feature_select_strategy") == "full")
    return _Image([token] * count, token, {"pixel_values": _pixels(generator, rows, 3, size, size)})


def _mistral3(config: Mapping[str, Any], rows: int, generator: torch.Generator) -> _Image:
    vision, token = config["vision_config"], int(config.get("image_token_index", config.get("image_token_id", 0)))
    size = int(vision["patch_size"]) * int(config["spatial_merge_size"]) * 2
    tensors = {
        "pixel_values": _pixels(generator, rows, 3, size, size),
        "image_sizes": torch.tensor([[size, size]] * rows),
    }
    return _Image([token] * 4, token, tensors)


_IMAGES: dict[str, Callable[[Mapping[str, Any], int, torch.Generator], _Image]] = {
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "llava": _llava,
    "mistral3": _mistral3,
    "qwen2_5_vl": _qwen_vl,
    "qwen2_vl": _qwen_vl,
    "qwen3_vl": _qwen_vl,
    "qwen3_vl_moe": _qwen_vl,
}


def _numbers(config: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Every whole number in a config, with its key."""
    found = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            found += _numbers(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            found.append((key, value))
    return found
