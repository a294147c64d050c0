"""Shrink attention windows so that even a short text is longer than a window.

A layer whose window covers the text computes what a layer without a window does, so its mask would not be tested. Both
sides of a comparison get the same small window; the windows in the configs are compared before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

SHRUNK_WINDOW = 5  # tokens, fewer than half of a text

# Keys of a text config with the number of tokens that a layer attends to. Chunk sizes of kernels are not among them.
_KEYS = (
    "sliding_window", "sliding_window_size", "attention_window_size", "attention_chunk_size", "local_attention",
    "local_attention_window_len", "window_size",
)  # fmt: skip


def find_windows(config: Any) -> dict[str, int]:
    """Return the keys of the windows that `shrink_windows` reduces, with their sizes in the config.

    If several text configs have the same key, the size is that of the last.
    """
    return {key: value for _, key, value in _iter_windows(config)}


def shrink_windows(config: Any) -> None:
    """Reduce windows longer than `SHRUNK_WINDOW` to that size, in place, in every text config of a config."""
    for part, key, _ in _iter_windows(config):
        setattr(part, key, SHRUNK_WINDOW)


def _iter_windows(config: Any) -> Iterator[tuple[Any, str, int]]:
    for part in _iter_text_configs(config):
        for key in _KEYS:
            value = getattr(part, key, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > SHRUNK_WINDOW:
                yield part, key, value


def _iter_text_configs(config: Any) -> Iterator[Any]:
    """Yield the text configs: those of a config and its nested configs that have a vocabulary size."""
    if isinstance(getattr(config, "vocab_size", None), int):
        yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from _iter_text_configs(value)
