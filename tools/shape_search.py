"""Find an expression over integers that gives the same sizes under every config that was tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

_MAX_KEYS = 5  # keys that one size may depend on
_CONSTANTS = (2, 3, 4)  # constants in expressions of several terms


class Search:
    """Search for expressions over some keys, whose values are known for each config.

    A size depends on the keys that change it when only they change. So one size depends on few keys, and all
    expressions over these up to a certain length can be tried, short ones first.
    """

    def __init__(self, values: Mapping[str, Sequence[int]]) -> None:
        """Store the values of the keys.

        Args:
            values: Value of each key under each config; the first config is the one that the others change.
        """
        self._values = {key: np.array(row, dtype=np.int64) for key, row in values.items()}
        self._levels: dict[tuple[str, ...], list[dict[bytes, str]]] = {}

    def find(self, sizes: Sequence[int]) -> str | None:
        """Return the expression of a size; None if no short expression gives it under all configs."""
        target = np.array(sizes, dtype=np.int64)
        if (target == target[0]).all():
            return str(int(target[0]))
        keys = self._keys_that_change(target)
        if keys is None or not 0 < len(keys) <= _MAX_KEYS:
            return None
        return self._find_over(keys, target)

    def _keys_that_change(self, target: np.ndarray) -> tuple[str, ...] | None:
        """Return the keys that change the size when only they change; None if it changes without any key."""
        found = set()
        first = {key: row[0] for key, row in self._values.items()}
        for at in range(1, len(target)):
            moved = [key for key, row in self._values.items() if row[at] != first[key]]
            if target[at] != target[0]:
                if not moved:
                    return None
                if len(moved) == 1:
                    found.add(moved[0])
        return tuple(sorted(found))

    def _find_over(self, keys: tuple[str, ...], target: np.ndarray) -> str | None:
        """Return the shortest expression over `keys` that gives the size under all configs; None if there is none."""
        goal = target.tobytes()
        levels = self._expressions(keys)
        for level in levels:
            if goal in level:
                return level[goal]
        for text in self._scaled_or_shifted(levels, target):
            return text
        if len(keys) > 1:
            return self._find_sum_or_product(levels, target)
        return None

    def _expressions(self, keys: tuple[str, ...]) -> list[dict[bytes, str]]:
        """Return the expressions of up to three terms, by their values under all configs, without duplicates."""
        if keys not in self._levels:
            length = len(self._values[keys[0]])
            ones = [(self._values[key], key) for key in keys]
            small = [*ones, *((np.full(length, number), str(number)) for number in _CONSTANTS)]
            known: dict[bytes, str] = {row.tobytes(): text for row, text in ones}
            levels = [dict(known)]
            before = ones
            for _ in range(2 if len(keys) <= 4 else 1):
                made: dict[bytes, str] = {}
                rows = []
                for row, text in _combined(before, small):
                    code = row.tobytes()
                    if code not in known:
                        known[code] = made[code] = text
                        rows.append((row, text))
                levels.append(made)
                before = rows
            self._levels[keys] = levels
        return self._levels[keys]

    def _scaled_or_shifted(self, levels: list[dict[bytes, str]], target: np.ndarray) -> Iterator[str]:
        """Yield the expressions that, multiplied by a constant or plus a constant, give the size."""
        for level in levels:
            for code, text in level.items():
                row = np.frombuffer(code, dtype=np.int64)
                if (row == 0).any():
                    continue
                if target[0] % row[0] == 0 and (row * (factor := target[0] // row[0]) == target).all():
                    yield f"{factor} * {_bracketed(text)}"
                if (target - row == (more := target[0] - row[0])).all():
                    yield f"{text} + {more}" if more > 0 else f"{text} - {-more}"
                if len(level) < 64 and (row != row[0]).any():
                    yield from _affine(row, text, target)

    def _find_sum_or_product(self, levels: list[dict[bytes, str]], target: np.ndarray) -> str | None:
        """Return the sum or product of two expressions that gives the size."""
        known = {code: text for level in levels for code, text in level.items()}
        for level in levels[:2] + levels[2:]:
            for code, text in level.items():
                row = np.frombuffer(code, dtype=np.int64)
                rest = (target - row).tobytes()
                if rest in known:
                    return f"{text} + {known[rest]}"
                if (row > 0).all() and (target % row == 0).all() and (rest := (target // row).tobytes()) in known:
                    return f"{_bracketed(text)} * {_bracketed(known[rest])}"
        return None


def _affine(row: np.ndarray, text: str, target: np.ndarray) -> Iterator[str]:
    """Yield `a * row + b` if it gives the size."""
    at = int(np.argmax(row != row[0]))
    rise, run = int(target[at] - target[0]), int(row[at] - row[0])
    if rise % run:
        return
    factor = rise // run
    more = int(target[0]) - factor * int(row[0])
    if factor > 0 and (row * factor + more == target).all():
        yield f"{factor} * {_bracketed(text)} {'+' if more > 0 else '-'} {abs(more)}"


def _combined(
    first: Sequence[tuple[np.ndarray, str]], second: Sequence[tuple[np.ndarray, str]]
) -> Iterator[tuple[np.ndarray, str]]:
    for a, x in first:
        for b, y in second:
            yield a * b, f"{_bracketed(x)} * {_bracketed(y)}"
            if (b > 0).all():
                yield a // b, f"{_bracketed(x)} // {_bracketed(y)}"
            yield a + b, f"{x} + {y}"
            if (a > b).all():
                yield a - b, f"{x} - {_bracketed(y)}"
            if (a > 0).all() and not y.isdecimal():
                yield b // a, f"{_bracketed(y)} // {_bracketed(x)}"


def _bracketed(text: str) -> str:
    return f"({text})" if " " in text else text
