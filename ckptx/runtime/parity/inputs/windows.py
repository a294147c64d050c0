"""Windows of attention, made so small that a short text crosses them.

A layer whose window is as long as the text computes what a layer without a window does: how it masks was not run then.
Both sides of a comparison get the same small window; that the configs say the same is compared before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

SMALL = 5  # tokens, fewer than half of a text

# Keys of a config of text that say how many tokens a layer sees. Chunks that a kernel merely works in are none.
_KEYS = (
    "sliding_window", "sliding_window_size", "attention_window_size", "attention_chunk_size", "local_attention",
    "local_attention_window_len", "window_size",
)  # fmt: skip


def shrunk(config: Any) -> dict[str, int]:
    """Keys of the windows that `shrink` makes smaller, with what the config says."""
    return {key: value for _, key, value in _found(config)}


def shrink(config: Any) -> None:
    """Makes windows longer than `SMALL` that long, in place, in every part of a `PreTrainedConfig`."""
    for part, key, _ in _found(config):
        setattr(part, key, SMALL)


def _found(config: Any) -> Iterator[tuple[Any, str, int]]:
    for part in _parts(config):
        for key in _KEYS:
            value = getattr(part, key, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > SMALL:
                yield part, key, value


def _parts(config: Any) -> Iterator[Any]:
    """A config and the configs in it, of which those of text say how many words there are."""
    if isinstance(getattr(config, "vocab_size", None), int):
        yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from _parts(value)
