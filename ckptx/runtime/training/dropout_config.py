"""Find and set the dropout probabilities in a model config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptx.errors import UsageError

_DROPOUT_ENDINGS = ("dropout", "_pdrop", "dropout_prob", "dropout_rate", "dropout_p")
_EXCLUDED_WORDS = ("layerdrop", "drop_path", "classifier", "summary", "num_", "layer_dropout")


def find_dropout_keys(config: Any) -> list[tuple[tuple[str, ...], str]]:
    """Return (path of the nested config, key) of each dropout probability; the path of the whole config is ().

    Probabilities with which whole layers are dropped, and dropout of classifier heads, are left out.
    """
    keys: list[tuple[tuple[str, ...], str]] = []

    def visit(nested_config: Any, path: tuple[str, ...]) -> None:
        for key, value in vars(nested_config).items():
            if _is_dropout(key, value):
                keys.append((path, key))
            elif hasattr(value, "attribute_map"):  # a nested config
                visit(value, (*path, key))

    visit(config, ())
    return keys


def has_dropout(config: Mapping[str, Any]) -> bool:
    """Return True if a config.json sets a dropout probability above zero, in nested configs too."""
    return any(
        has_dropout(value) if isinstance(value, Mapping) else _is_dropout(key, value) and value > 0
        for key, value in config.items()
    )


def set_dropout(config: Any, probability: float) -> None:
    """Set the dropout probabilities that `find_dropout_keys` finds, in place.

    Args:
        config: A `PreTrainedConfig`.
        probability: New value of all of them.

    Raises:
        UsageError: `probability` is not zero, and the config has no dropout key.
    """
    keys = find_dropout_keys(config)
    if probability and not keys:
        raise UsageError(f"training.dropout: {type(config).__name__} has no dropout key; set training.dropout to null")
    for path, key in keys:
        nested_config = config
        for name in path:
            nested_config = getattr(nested_config, name)
        setattr(nested_config, key, probability)


def _is_dropout(key: str, value: Any) -> bool:
    is_number = isinstance(value, float | int) and not isinstance(value, bool)
    return is_number and key.endswith(_DROPOUT_ENDINGS) and not any(word in key for word in _EXCLUDED_WORDS)
