"""Find and set the dropout probabilities in a model config."""

from __future__ import annotations

from typing import Any

from ckptx.errors import UsageError

_DROPOUT = ("dropout", "_pdrop", "dropout_prob", "dropout_rate", "dropout_p")
_OTHERS = ("layerdrop", "drop_path", "classifier", "summary", "num_", "layer_dropout")


def dropouts_of(config: Any) -> list[tuple[tuple[str, ...], str]]:
    """Return the path of the nested config and the key of each dropout probability."""
    found: list[tuple[tuple[str, ...], str]] = []

    def walk(part: Any, path: tuple[str, ...]) -> None:
        for key, value in vars(part).items():
            is_share = isinstance(value, float | int) and not isinstance(value, bool)
            if is_share and key.endswith(_DROPOUT) and not any(word in key for word in _OTHERS):
                found.append((path, key))
            elif hasattr(value, "attribute_map"):
                walk(value, (*path, key))

    walk(config, ())
    return found


def set_dropout(config: Any, share: float) -> None:
    """Set all dropout probabilities, in place.

    Raises:
        UsageError: `share` is not zero, and the config has no dropout key.
    """
    places = dropouts_of(config)
    if share and not places:
        raise UsageError(f"training.dropout: {type(config).__name__} has no dropout key; set training.dropout to null")
    for path, key in places:
        part = config
        for step in path:
            part = getattr(part, step)
        setattr(part, key, share)
