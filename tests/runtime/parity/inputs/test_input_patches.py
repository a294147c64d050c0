"""One image for each row, cut into patches: shapes, grids, places and tokens, computed by hand from small configs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from ckptx.runtime.parity.inputs import patches
from ckptx.runtime.parity.inputs.multimodal import MultimodalInput

ROWS = 3
TOKEN = 90
SIX = [TOKEN] * 6  # two tokens high, three wide


def seen(form: Any, vision: dict[str, Any], seed: int = 0, **config: Any) -> MultimodalInput:
    given = {"image_token_id": TOKEN, "vision_config": vision, **config}
    made: MultimodalInput = form(given, ROWS, torch.Generator().manual_seed(seed))
    assert made.placeholder == TOKEN
    assert torch.equal(
        made.tensors["pixel_values"], form(given, ROWS, torch.Generator().manual_seed(seed))[2]["pixel_values"]
    )
    assert made.tensors["pixel_values"].unique().numel() > made.tensors["pixel_values"].numel() // 2
    return made


def shape_of(insert: MultimodalInput) -> tuple[int, ...]:
    return tuple(insert.tensors["pixel_values"].shape)


def test_a_grid_has_the_patches_of_all_images_in_one_dim() -> None:
    vision = {"patch_size": 4, "spatial_merge_size": 3, "temporal_patch_size": 5, "in_channels": 2}
    found = seen(patches.flat, vision, vision_start_token_id=70, vision_end_token_id=71)
    assert found.tokens == [70, *SIX, 71]
    assert shape_of(found) == (ROWS * 54, 2 * 5 * 4 * 4)
    assert found.tensors["image_grid_thw"].tolist() == [[1, 6, 9]] * ROWS
    assert found.token_types == ("mm_token_type_ids", 1)
    plain = seen(patches.flat_untyped, vision)
    assert (plain.tokens, plain.token_types) == (SIX, None)


def test_an_image_covers_more_than_one_window() -> None:
    """112 pixels of patches of 14, two of which are merged: 4 tokens."""
    vision = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112}
    found = seen(patches.flat, vision)
    assert (len(found.tokens), found.tensors["image_grid_thw"].tolist()) == (5 * 6, [[1, 10, 12]] * ROWS)


def test_what_a_config_leaves_out_is_as_in_qwen2_vl() -> None:
    found = seen(patches.flat, {})
    assert shape_of(found) == (ROWS * 24, 3 * 2 * 14 * 14)


def test_ernie_has_no_frames_and_sends_all_of_an_image_to_experts_of_its_own() -> None:
    vision = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    found = seen(patches.flat_for_experts, vision, image_start_token_id=70, image_end_token_id=71)
    assert shape_of(found) == (ROWS * 24, 3 * 4 * 4)
    assert found.make_text_arguments is not None
    types = found.make_text_arguments(torch.tensor([[5, 70, TOKEN, 71, 6]]))["moe_mm_token_type_ids"]
    assert (types.tolist(), types.dtype) == ([[0, 1, 1, 1, 0]], torch.int64)


def test_muse_spells_it_otherwise() -> None:
    found = seen(patches.flat_renamed, {"patch_size": 4, "merge_size": 3, "patch_temporal": 1})
    assert (shape_of(found), found.token_types) == ((ROWS * 54, 3 * 4 * 4), None)


def test_inkling_has_a_token_for_each_patch() -> None:
    found = seen(patches.large, {"patch_size": 4, "temporal_patch_size": 2}, image_bos_token_id=70)
    assert found.tokens == [70, TOKEN, TOKEN]
    assert shape_of(found) == (ROWS * 2, 2, 4, 4, 3)


def test_kimi_merges_otherwise_along_height_and_width() -> None:
    found = seen(patches.square, {"patch_size": [4, 4], "merge_kernel_size": [2, 3]})
    assert found.tokens == SIX
    assert shape_of(found) == (ROWS * 36, 3, 4, 4)
    assert found.tensors["image_grid_thw"].tolist() == [[1, 4, 9]] * ROWS


def test_video_llama_merges_nothing() -> None:
    found = seen(patches.flat_unmerged, {"patch_size": 4})
    assert (found.tokens, shape_of(found)) == (SIX, (ROWS * 6, 48))
    assert found.tensors["image_grid_thw"].tolist() == [[1, 2, 3]] * ROWS
    assert found.tensors["image_merge_sizes"].tolist() == [1] * ROWS


def test_lfm2_has_a_dim_for_images() -> None:
    found = seen(patches.padded, {"patch_size": 4}, downsample_factor=3)
    assert (found.tokens, shape_of(found)) == (SIX, (ROWS, 54, 48))
    assert found.tensors["spatial_shapes"].tolist() == [[6, 9]] * ROWS
    mask = found.tensors["pixel_attention_mask"]
    assert (tuple(mask.shape), bool(mask.all())) == ((ROWS, 54), True)


GEMMA4 = {"patch_size": 4, "pooling_kernel_size": 3}


@pytest.mark.parametrize(("pooled_in_model", "high", "width"), [(True, 6, 48), (False, 2, 3 * 12 * 12)])
def test_gemma4_says_where_each_patch_is(pooled_in_model: bool, high: int, width: int) -> None:
    found = seen(partial(patches.placed, pooled_in_model=pooled_in_model), GEMMA4, boi_token_id=70, eoi_token_id=71)
    assert (found.tokens, found.token_types) == ([70, *SIX, 71], ("mm_token_type_ids", 1))
    wide = high * 3 // 2
    pixels, places = found.tensors["pixel_values"], found.tensors["image_position_ids"]
    assert tuple(pixels.shape) == (ROWS, high * wide, width)
    assert float(pixels.min()) > 0 and float(pixels.max()) < 1
    assert places[ROWS - 1].tolist() == [[x, y] for y in range(high) for x in range(wide)]
    assert len(places) == ROWS


def test_gemma4_has_another_name_for_its_end() -> None:
    found = seen(partial(patches.placed, pooled_in_model=True), GEMMA4, boi_token_id=70, eoi_token_index=72)
    assert found.tokens == [70, *SIX, 72]
