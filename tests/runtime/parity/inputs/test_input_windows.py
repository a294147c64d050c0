"""Windows that a short text crosses: which keys of which parts of a config are windows."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from ckptx.runtime.parity.inputs.multimodal import TEXT_LENGTH
from ckptx.runtime.parity.inputs.windows import SHRUNK_WINDOW, find_windows, shrink_windows


def test_a_text_crosses_a_small_window_more_than_once() -> None:
    assert 2 * SHRUNK_WINDOW < TEXT_LENGTH


@pytest.mark.parametrize(
    ("config", "key", "before"),
    [
        (transformers.MistralConfig(sliding_window=4096), "sliding_window", 4096),
        (transformers.MistralConfig(sliding_window=SHRUNK_WINDOW + 1), "sliding_window", SHRUNK_WINDOW + 1),
        (transformers.GptOssConfig(), "sliding_window", 128),
        (transformers.ModernBertConfig(), "local_attention", 128),
        (transformers.GPTNeoConfig(), "window_size", 256),
    ],
)
def test_a_window_becomes_small(config: Any, key: str, before: int) -> None:
    assert find_windows(config)[key] == before
    shrink_windows(config)
    assert (getattr(config, key), find_windows(config)) == (SHRUNK_WINDOW, {})


@pytest.mark.parametrize("window", [None, 0, 4, SHRUNK_WINDOW])
def test_a_small_window_and_none_stay(window: int | None) -> None:
    config = transformers.MistralConfig(sliding_window=window)
    shrink_windows(config)
    assert (config.sliding_window, find_windows(config)) == (window, {})


def test_the_text_in_a_multimodal_config_is_meant_and_its_tower_is_not() -> None:
    config = transformers.Qwen2_5_VLConfig(
        text_config={"use_sliding_window": True, "sliding_window": 300}, vision_config={"window_size": 112}
    )
    assert find_windows(config) == {"sliding_window": 300}
    shrink_windows(config)
    assert (config.text_config.sliding_window, config.vision_config.window_size) == (SHRUNK_WINDOW, 112)


def test_what_is_no_config_is_left_alone() -> None:
    config = transformers.LlamaConfig()
    before = config.to_dict()
    shrink_windows(config)
    assert config.to_dict() == before
