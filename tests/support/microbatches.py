"""Microbatches of a recipe that have no image (or sound), one, or several."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from tests.support.models import EVERY, Inputs

# None in the first microbatch, one in the next, three in the last. An encoder that only listens always has a sound.
NONE_ONE_THREE, ONE_ONE_THREE = (1, 2, 2, 2), (0, 1, 2, 2, 2)

_ABOUT_TOKENS = ("token_type_ids", "mm_token_type_ids", "attention_mask")
_LAST_WORD = 90  # tokens above stand for images and sounds

MULTIMODAL = tuple(
    name for name, recipe in EVERY.items() if any(each.is_floating_point() for each in recipe.inputs().values())
)


def pictures_of(name: str) -> tuple[int, ...]:
    """For `microbatches`: no image, one, and three; one at least of what is all that a recipe takes."""
    return NONE_ONE_THREE if "input_ids" in EVERY[name].inputs() else ONE_ONE_THREE


def microbatches(name: str, count: int, pictured: Sequence[int] | None = None) -> list[Inputs]:
    """Microbatches of a recipe, each with other tokens.

    Args:
        name: Of the recipe.
        count: Of microbatches.
        pictured: The numbers of those with an image or a sound, as often as they have one; by default each has one. In
            those without, tokens that stand for one are others.
    """
    found = []
    for index in range(count):
        pictures = 1 if pictured is None else pictured.count(index)
        batch = dict(several(name, pictures) if pictures > 1 else EVERY[name].inputs())
        if not pictures:
            about = {key: torch.zeros_like(batch[key]) for key in _ABOUT_TOKENS if key in batch}
            batch = {"input_ids": torch.where(batch["input_ids"] > _LAST_WORD, 7, batch["input_ids"]), **about}
        for key, value in batch.items():
            if value.is_floating_point():
                batch[key] = value * (1 + index / 8)
            elif key.endswith("input_ids"):
                batch[key] = torch.where(value > _LAST_WORD, value, (value * 5 + 7 * index) % 80 + 3)
        found.append(batch)
    return found


@cache
def several(name: str, count: int) -> Inputs:
    """So many images in each row; where the class does not take them so, as many rows with one each."""
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
    """One batch of each kind of arguments."""
    return list({tuple(sorted(batch)): batch for batch in reversed(batches)}.values())


def _changed(value: torch.Tensor, index: int) -> torch.Tensor:
    """Another image of the same form; all else is as it is."""
    return value * (1 + index / 16) if value.is_floating_point() else value
