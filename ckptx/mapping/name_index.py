"""Index that finds the patterns that a tensor name matches, among hundreds, for tens of thousands of names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from ckptx.mapping.names import pattern_of, split_pattern


class PatternMatch(NamedTuple):
    """Pattern that a name matches.

    Attributes:
        group: Index of its group of patterns.
        pattern_index: Index within the group.
        indices: Numbers that its stars stand for, left to right.
    """

    group: int
    pattern_index: int
    indices: tuple[int, ...]


class _IndexedPattern(NamedTuple):
    """Pattern in the index.

    Attributes:
        group: Index of its group of patterns.
        pattern_index: Index of the pattern within the group.
        numbers: Required value of each index of a name, left to right; None for a star.
    """

    group: int
    pattern_index: int
    numbers: tuple[int | None, ...]


class NameIndex:
    """Index of groups of patterns, such as the sources or targets of conversions.

    A pattern is a name with `*` for each index between dots; it may contain concrete indices, and a `*` within a
    component (`shard_*`).
    """

    def __init__(self, groups: Iterable[Sequence[str]]) -> None:
        self._entries: dict[str, list[_IndexedPattern]] = {}
        # Patterns with a star within a component: regular expression, group, and index in the group.
        self._embedded: list[tuple[re.Pattern[str], int, int]] = []
        for group, patterns in enumerate(groups):
            for pattern_index, pattern in enumerate(patterns):
                parts = pattern.split(".")
                if any("*" in part and part != "*" for part in parts):
                    regex = re.escape(pattern).replace(r"\*", "(0|[1-9][0-9]{0,8})")
                    self._embedded.append((re.compile(regex), group, pattern_index))
                    continue
                numbers = tuple(None if part == "*" else int(part) for part in parts if part == "*" or part.isdigit())
                self._entries.setdefault(pattern_of(pattern), []).append(_IndexedPattern(group, pattern_index, numbers))

    def depends_on_indices(self, name: str) -> bool:
        """Return True if the patterns that `name` matches may depend on its numbers."""
        entries = self._entries.get(pattern_of(name), ())
        return bool(self._embedded) or any(number is not None for entry in entries for number in entry.numbers)

    def may_match(self, name: str) -> bool:
        """Return False if no name with the pattern of `name` matches, whatever its numbers."""
        return bool(self._embedded) or pattern_of(name) in self._entries

    def find(self, name: str) -> Iterator[PatternMatch]:
        """Yield the patterns that `name` matches in the order of groups, those with a star in a component last."""
        pattern, indices = split_pattern(name)
        entries = self._entries.get(pattern)
        if entries:
            for group, pattern_index, numbers in entries:
                if all(number is None or number == index for number, index in zip(numbers, indices, strict=True)):
                    stars = tuple([index for number, index in zip(numbers, indices, strict=True) if number is None])
                    yield PatternMatch(group, pattern_index, stars)
        for regex, group, pattern_index in self._embedded:
            match = regex.fullmatch(name)
            if match:
                yield PatternMatch(group, pattern_index, tuple(int(each) for each in match.groups()))


def indices_of(name: str) -> tuple[int, ...]:
    """Return the indices in a name, left to right."""
    return split_pattern(name)[1]


def fill_pattern(pattern: str, indices: Sequence[int]) -> str:
    """Return the name that a pattern gives with these indices for its stars.

    Example:
        >>> fill_pattern("model.layers.*.mlp.experts.*.up_proj.weight", (3, 17))
        'model.layers.3.mlp.experts.17.up_proj.weight'
    """
    assert pattern.count("*") == len(indices), (pattern, indices)
    return _template(pattern) % tuple(indices)


@lru_cache(maxsize=4096)
def _template(pattern: str) -> str:
    return pattern.replace("%", "%%").replace("*", "%d")
