"""What configs of classes that look have in common, under whatever name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckptx.runtime.parity.inputs.config_keys import (
    add_boundary_tokens,
    count_channels,
    count_patches_per_side,
    find_image_token,
    first_size,
    make_square_image,
)


@pytest.mark.parametrize(
    ("config", "token"),
    [
        ({"image_token_id": 7}, 7), ({"image_token_index": 8}, 8), ({"image_token_id": 0, "image_token_index": 8}, 0),
        ({"image_token_id": None, "image_token_index": 8}, 8),
    ],
)  # fmt: skip
def test_the_token_of_an_image(config: dict[str, Any], token: int) -> None:
    assert find_image_token(config) == token


def test_a_class_without_such_a_token_is_a_gap_in_the_table() -> None:
    with pytest.raises(KeyError, match="image_token_id"):
        find_image_token({"image_token_id": "x"})


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ({}, [9, 9]),
        ({"vision_start_token_id": 1, "vision_end_token_id": 2}, [1, 9, 9, 2]),
        ({"image_start_token_id": 3, "image_end_token_id": 4}, [3, 9, 9, 4]),
        ({"vision_start_token_id": 1, "image_start_token_id": 3, "image_end_token_id": 4}, [3, 9, 9, 4]),
        ({"vision_start_token_id": 0, "vision_end_token_id": 2, "image_end_token_id": 4}, [0, 9, 9, 2]),
        ({"vision_start_token_id": None, "vision_end_token_id": 2}, [9, 9]),
    ],
)
def test_begin_and_end_are_there_together_or_not_at_all(ends: dict[str, Any], expected: list[int]) -> None:
    assert add_boundary_tokens(ends, [9, 9]) == expected


def test_sizes_may_be_one_number_or_height_and_width() -> None:
    assert [first_size(size) for size in (5, [6, 7], (8, 9))] == [5, 6, 8]
    for image, patch in ((15, 4), ([15, 20], [4, 2]), ((15,), 4)):
        assert count_patches_per_side({"vision_config": {"image_size": image, "patch_size": patch}}) == 3


@pytest.mark.parametrize(
    ("vision", "count"),
    [
        ({}, 3),
        ({"num_channels": 1}, 1),
        ({"in_chans": 2, "num_channels": 1}, 2),
        ({"in_channels": 4, "in_chans": 2}, 4),
    ],
)
def test_channels(vision: dict[str, int], count: int) -> None:
    assert count_channels({"vision_config": vision}) == count
    config = {"vision_config": {**vision, "image_size": [6, 6]}}
    assert make_square_image(config, 2, torch.Generator())["pixel_values"].shape == (2, count, 6, 6)
