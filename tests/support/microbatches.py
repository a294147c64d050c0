"""Microbatches of a recipe with no, one or several images (or audio clips)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from tests.support.models import EVERY, Inputs

# None in the first microbatch, one in the next, three in the last. An audio-only encoder always has a clip.
NONE_ONE_THREE, ONE_ONE_THREE = (1, 2, 2, 2), (0, 1, 2, 2, 2)

_PER_TOKEN_INPUTS = ("token_type_ids", "mm_token_type_ids", "attention_mask")
_LAST_TEXT_TOKEN = 90  # tokens above this stand for images and audio

MULTIMODAL = tuple(
    name for name, recipe in EVERY.items() if any(each.is_floating_point() for each in recipe.inputs().values())
)


def image_microbatches(name: str) -> tuple[int, ...]:
    """Return `image_indices` for `microbatches`: no, one and three images; one, one and three without text input."""
    return NONE_ONE_THREE if "input_ids" in EVERY[name].inputs() else ONE_ONE_THREE


def microbatches(name: str, count: int, image_indices: Sequence[int] | None = None) -> list[Inputs]:
    """Return microbatches of a recipe, each with different tokens.

    Args:
        name: Name of the recipe.
        count: Number of microbatches.
        image_indices: Index of a microbatch for each image or audio clip [default: one per microbatch]. In microbatches
            without one, its placeholder tokens are replaced by text tokens.
    """
    found = []
    for index in range(count):
        images = 1 if image_indices is None else image_indices.count(index)
        batch = dict(several(name, images) if images > 1 else EVERY[name].inputs())
        if not images:
            per_token = {key: torch.zeros_like(batch[key]) for key in _PER_TOKEN_INPUTS if key in batch}
            batch = {
                "input_ids": torch.where(batch["input_ids"] > _LAST_TEXT_TOKEN, 7, batch["input_ids"]),
                **per_token,
            }
        for key, value in batch.items():
            if value.is_floating_point():
                batch[key] = value * (1 + index / 8)
            elif key.endswith("input_ids"):
                batch[key] = torch.where(value > _LAST_TEXT_TOKEN, value, (value * 5 + 7 * index) % 80 + 3)
        found.append(batch)
    return found


@cache
def several(name: str, count: int) -> Inputs:
    """Put `count` images in each row; if the class does not support it, return `count` rows with one image each."""
    one = EVERY[name].inputs()
    parts = [{key: _changed(value, index) for key, value in one.items()} for index in range(count)]
    rows = {key: torch.cat([part[key] for part in parts]) for key in one}
    if "input_ids" not in one:
        return rows
    text = {key for key, value in one.items() if value.shape == one["input_ids"].shape}
    together = {key: torch.cat([part[key] for part in parts], int(key in text)) for key in one}
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            EVERY[name].model().float().eval()(**together)
    except (IndexError, RuntimeError, ValueError):
        return rows
    return together


def kinds(batches: Sequence[Inputs]) -> list[Inputs]:
    """Return one microbatch for each set of arguments."""
    return list({tuple(sorted(batch)): batch for batch in reversed(batches)}.values())


def _changed(value: torch.Tensor, index: int) -> torch.Tensor:
    """Return another image of the same shape; other inputs do not change."""
    return value * (1 + index / 16) if value.is_floating_point() else value
