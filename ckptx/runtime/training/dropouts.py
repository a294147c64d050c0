"""How much a model drops at random: the keys of its config that say so."""

from __future__ import annotations

from typing import Any

from ckptx.errors import UsageError

_DROPOUT = ("dropout", "_pdrop", "dropout_prob", "dropout_rate", "dropout_p")
_OTHERS = ("layerdrop", "drop_path", "classifier", "summary", "num_", "layer_dropout")


def dropouts_of(config: Any) -> list[tuple[tuple[str, ...], str]]:
    """Where a config says how much is dropped: the path of a part, and the key; nothing where it never does."""
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
    """Sets all of them, in place.

    Raises:
        UsageError: There is none, and something shall be dropped.
    """
    places = dropouts_of(config)
    if share and not places:
        raise UsageError(
            f"training.dropout: {type(config).__name__} has no key for dropout, needed one; set it to null"
        )
    for path, key in places:
        part = config
        for step in path:
            part = getattr(part, step)
        setattr(part, key, share)
