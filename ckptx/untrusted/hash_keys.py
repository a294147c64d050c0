"""Use untrusted numbers as keys of dicts and members of sets without hash flooding.

Hashes of strings are unpredictable. Hashes of numbers, and of tuples of them, are not: a checkpoint can contain numbers
that share a hash or collide in the table of a dict, so that each lookup visits all previous entries. Three rules keep
the work proportional to the size of the input:

1. Tuples of numbers are made unique by `UniqueTuples`, which refuses more than `_MAX_PER_HASH` with the same hash.
2. A dict of such tuples has keys of `salted_key`, or tuples that begin with the name of a tensor or a dtype.
3. A key of many tuples is a bytes object, made by `packed_key`, or by `identity_key` if they are unique objects.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Hashable, Iterable
from itertools import chain
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

SALT = int.from_bytes(os.urandom(7), "little")  # random for each process, so that hashes of salted keys are, too
_MAX_PER_HASH = 16  # tuples with one hash


class HashFlood(ValueError):
    """Too many tuples share a hash: an attack, because by chance hardly two of a billion tuples do."""


class UniqueTuples(Generic[T]):
    """Store of one object per distinct tuple, because a checkpoint repeats a few of them many thousand times."""

    __slots__ = ("_count_by_hash", "_values")

    def __init__(self) -> None:
        self._values: dict[tuple[int, T], T] = {}
        self._count_by_hash: dict[int, int] = {}

    def get(self, value: T) -> T | None:
        """Return the stored value that equals `value`, a tuple of numbers or of such tuples; None if there is none."""
        return self._values.get((SALT, value))

    def add(self, value: T) -> T:
        """Store a value for which `get` returned None.

        Raises:
            HashFlood: Too many stored values have the hash of this one.
        """
        key = SALT, value
        salted_hash = hash(key)
        count = self._count_by_hash[salted_hash] = self._count_by_hash.get(salted_hash, 0) + 1
        if count > _MAX_PER_HASH:
            raise HashFlood(f"more than {_MAX_PER_HASH} shapes or offsets share a hash, which no real writer produces")
        self._values[key] = value
        return value


def salted_key(value: T) -> tuple[int, T]:
    """Return a dict key for a tuple from `UniqueTuples`, with a hash that a checkpoint cannot predict."""
    return SALT, value


def packed_key(ndim: int, *tuples: Iterable[int]) -> bytes:
    """Return a dict key for tuples of `ndim` nonnegative integers of at most 64 bits each."""
    return array("Q", chain((ndim,), *tuples)).tobytes()


def identity_key(values: Iterable[object]) -> bytes:
    """Return a dict key that is equal for the same sequence of objects, which must outlive the key."""
    return array("Q", map(id, values)).tobytes()
