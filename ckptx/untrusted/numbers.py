"""Numbers of a checkpoint as keys of dicts and members of sets.

Texts have hashes that nobody can foresee. Those of numbers, and of tuples of them, are known: a checkpoint can choose
numbers that share one, or numbers that lie where a dict looks for another, so that each look-up walks through all that
went before. Three rules keep the work in proportion to the size of what is read:

1. Tuples of numbers are made one object each by `OneOfEach`, which refuses more than a handful that share a hash.
2. A dict of such tuples has keys of `salted`, or keys in which the name of a tensor or a dtype comes first.
3. What would be a key of many tuples is a text of bytes, `packed`.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Hashable, Iterable
from itertools import chain
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

SALT = int.from_bytes(os.urandom(7), "little")
_SHARING = 16


class SharedHash(ValueError):
    """Numbers that were chosen, not measured: chance gives no two of a thousand million tuples one hash."""


class UniqueTuples(Generic[T]):
    """Keeps the first of equal tuples, as a checkpoint repeats a few of them many thousand times."""

    __slots__ = ("_known", "_sharing")

    def __init__(self) -> None:
        self._known: dict[tuple[int, T], T] = {}
        self._sharing: dict[int, int] = {}

    def get(self, value: T) -> T | None:
        """The one kept that is equal to `value`, which is known to be flat: tuples of numbers, or tuples of those."""
        return self._known.get((SALT, value))

    def keep(self, value: T) -> T:
        """Keeps a value that `get` did not find.

        Raises:
            SharedHash: Many of those kept have the hash of this one.
        """
        key = SALT, value
        salted_hash = hash(key)
        sharing = self._sharing[salted_hash] = self._sharing.get(salted_hash, 0) + 1
        if sharing > _SHARING:
            raise SharedHash(f"more than {_SHARING} shapes or offsets that share a hash, as no writer chooses them")
        self._known[key] = value
        return value


def salted(value: T) -> tuple[int, T]:
    """A key for one of the tuples that a `OneOfEach` gave."""
    return SALT, value


def packed(rank: int, *tuples: Iterable[int]) -> bytes:
    """A key for tuples of `rank` numbers of at most 64 bits each."""
    return array("Q", chain((rank,), *tuples)).tobytes()


def identity(values: Iterable[object]) -> bytes:
    """A key for a sequence of objects that are alive as long as the key is: equal when they are the same ones."""
    return array("Q", map(id, values)).tobytes()
