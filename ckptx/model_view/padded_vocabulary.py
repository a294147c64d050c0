"""Find a vocabulary of another size: embedding and output head have more or fewer rows than `vocab_size`.

Trainers pad the vocabulary so that TP divides it. The tensors then match a config in which only `vocab_size` differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ckptx.mapping.config_edits import apply_edits
from ckptx.model_view.config_match import ConfigMatch, OtherVocabulary

_KEY = "vocab_size"


def find_other_vocabulary(
    match: ConfigMatch, config: Mapping[str, Any], match_with: Callable[[dict[str, Any]], ConfigMatch]
) -> OtherVocabulary | None:
    """Return the vocabulary of another size if it is the only cause of all mismatches, else None.

    Args:
        match: Result of the check against `config`.
        config: Contents of `config.json`.
        match_with: Function that checks the same tensors against another config.
    """
    sizes = {_differing_rows(each.shape, each.expected) for each in match.mismatches}
    size = sizes.pop() if len(sizes) == 1 else None
    if size is None:
        return None
    rows, vocab_size = size
    keys = [key for key, value in _vocab_sizes(config) if value == vocab_size]
    # Several keys usually repeat one size: try to change all of them, then each one alone.
    for candidate in (keys, *([key] for key in keys)):
        vocabulary = OtherVocabulary(vocab_size, rows, tuple(candidate))
        if not match_with(apply_edits(dict(config), vocabulary.edits())).mismatches:
            return vocabulary
    return None


def _differing_rows(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> tuple[int, int] | None:
    """Return the found and the expected size of the dim that differs; None unless exactly one does.

    It is dim 0 of embeddings, output heads and their biases, and dim 1 of BART's `final_logits_bias`.
    """
    if len(shape) != len(expected):
        return None
    differing = [
        (found, size) for found, size in zip(shape, expected, strict=True) if size is not None and found != size
    ]
    return differing[0] if len(differing) == 1 else None


def _vocab_sizes(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and the value of each `vocab_size` in a config and its sub-configs."""
    for key, value in config.items():
        if isinstance(value, Mapping) and key.endswith("config"):
            yield from _vocab_sizes(value, f"{path}{key}.")
        elif key == _KEY:
            yield f"{path}{key}", value
