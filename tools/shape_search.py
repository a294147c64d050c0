"""Find an expression over integers of a config that gives the size of a dimension under every config that was tried.

In this module, a row is an int64 array with the value of a key or of an expression under each config.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

_MAX_KEYS = 5  # keys that one size may depend on
_CONSTANTS = (2, 3, 4)  # constants that are terms of an expression; a factor or summand of it may be any number


class Search:
    """Search for expressions over some keys, whose values are known for each config.

    A size depends on a key if it differs from the first config when that key alone differs. So one size depends on few
    keys, and all expressions over these up to a certain length can be tried, short ones first.
    """

    def __init__(self, values: Mapping[str, Sequence[int]]) -> None:
        """Store the values of the keys.

        Args:
            values: Value of each key under each config; the first config is the one that the others change.
        """
        self._rows = {key: np.array(row, dtype=np.int64) for key, row in values.items()}
        self._expressions_of_keys: dict[tuple[str, ...], list[dict[bytes, str]]] = {}

    def find(self, sizes: Sequence[int]) -> str | None:
        """Return the expression of a size; None if no short expression gives it under all configs.

        Args:
            sizes: The size under each config.
        """
        target = np.array(sizes, dtype=np.int64)
        if (target == target[0]).all():
            return str(int(target[0]))
        keys = self._keys_that_change(target)
        if keys is None or not 0 < len(keys) <= _MAX_KEYS:
            return None
        return self._find_over(keys, target)

    def _keys_that_change(self, target: np.ndarray) -> tuple[str, ...] | None:
        """Return the keys each of which alone changes the size; None if the size changes although no key does."""
        found = set()
        first = {key: row[0] for key, row in self._rows.items()}
        for index in range(1, len(target)):
            changed_keys = [key for key, row in self._rows.items() if row[index] != first[key]]
            if target[index] != target[0]:
                if not changed_keys:
                    return None
                if len(changed_keys) == 1:
                    found.add(changed_keys[0])
        return tuple(sorted(found))

    def _find_over(self, keys: tuple[str, ...], target: np.ndarray) -> str | None:
        """Return the shortest expression over `keys` that gives the size under all configs; None if there is none."""
        target_bytes = target.tobytes()
        levels = self._expressions(keys)
        for level in levels:
            if target_bytes in level:
                return level[target_bytes]
        for expression in self._scaled_or_shifted(levels, target):
            return expression
        if len(keys) > 1:
            return self._find_sum_or_product(levels, target)
        return None

    def _expressions(self, keys: tuple[str, ...]) -> list[dict[bytes, str]]:
        """Return the expressions of one term, of two, and for up to four keys of three.

        Returns:
            For each number of terms: bytes of the row -> expression. Of the expressions with the same row only the
            first is there.
        """
        if keys not in self._expressions_of_keys:
            num_configs = len(self._rows[keys[0]])
            single_keys = [(self._rows[key], key) for key in keys]
            terms = [*single_keys, *((np.full(num_configs, number), str(number)) for number in _CONSTANTS)]
            known: dict[bytes, str] = {row.tobytes(): key for row, key in single_keys}
            levels = [dict(known)]
            shorter = single_keys
            for _ in range(2 if len(keys) <= 4 else 1):
                level: dict[bytes, str] = {}
                longer = []
                for row, expression in _combined(shorter, terms):
                    row_bytes = row.tobytes()
                    if row_bytes not in known:
                        known[row_bytes] = level[row_bytes] = expression
                        longer.append((row, expression))
                levels.append(level)
                shorter = longer
            self._expressions_of_keys[keys] = levels
        return self._expressions_of_keys[keys]

    def _scaled_or_shifted(self, levels: list[dict[bytes, str]], target: np.ndarray) -> Iterator[str]:
        """Yield the expressions of the levels, times a constant, plus a constant, or both, that give the size."""
        for level in levels:
            for row_bytes, expression in level.items():
                row = np.frombuffer(row_bytes, dtype=np.int64)
                if (row == 0).any():
                    continue
                if target[0] % row[0] == 0 and (row * (factor := target[0] // row[0]) == target).all():
                    yield f"{factor} * {_bracketed(expression)}"
                if (target - row == (offset := target[0] - row[0])).all():
                    yield f"{expression} + {offset}" if offset > 0 else f"{expression} - {-offset}"
                if len(level) < 64 and (row != row[0]).any():
                    yield from _affine(row, expression, target)

    def _find_sum_or_product(self, levels: list[dict[bytes, str]], target: np.ndarray) -> str | None:
        """Return the sum or product of two expressions that gives the size; None if there is none."""
        known = {row_bytes: expression for level in levels for row_bytes, expression in level.items()}
        for level in levels[:2] + levels[2:]:
            for row_bytes, expression in level.items():
                row = np.frombuffer(row_bytes, dtype=np.int64)
                difference = (target - row).tobytes()
                if difference in known:
                    return f"{expression} + {known[difference]}"
                if (row > 0).all() and (target % row == 0).all() and (quotient := (target // row).tobytes()) in known:
                    return f"{_bracketed(expression)} * {_bracketed(known[quotient])}"
        return None


def _affine(row: np.ndarray, expression: str, target: np.ndarray) -> Iterator[str]:
    """Yield `factor * expression + offset` if it gives the size for a positive factor."""
    index = int(np.argmax(row != row[0]))
    rise, run = int(target[index] - target[0]), int(row[index] - row[0])
    if rise % run:
        return
    factor = rise // run
    offset = int(target[0]) - factor * int(row[0])
    if factor > 0 and (row * factor + offset == target).all():
        yield f"{factor} * {_bracketed(expression)} {'+' if offset > 0 else '-'} {abs(offset)}"


def _combined(
    expressions: Sequence[tuple[np.ndarray, str]], terms: Sequence[tuple[np.ndarray, str]]
) -> Iterator[tuple[np.ndarray, str]]:
    """Yield every expression combined with every term by one operator, each with its row."""
    for a, x in expressions:
        for b, y in terms:
            yield a * b, f"{_bracketed(x)} * {_bracketed(y)}"
            if (b > 0).all():
                yield a // b, f"{_bracketed(x)} // {_bracketed(y)}"
            yield a + b, f"{x} + {y}"
            if (a > b).all():
                yield a - b, f"{x} - {_bracketed(y)}"
            if (a > 0).all() and not y.isdecimal():
                yield b // a, f"{_bracketed(y)} // {_bracketed(x)}"


def _bracketed(expression: str) -> str:
    return f"({expression})" if " " in expression else expression
