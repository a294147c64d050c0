"""Ids of objects that cannot be mistaken for those of others."""

from __future__ import annotations


class ObjectIds:
    """`id` for keys of a cache: each object that it was asked about lives as long as this does.

    An id belongs to an object only while that lives; the next object in the same memory has it, too. So a cache by
    `id` that outlives its keys gives one object what it knows of another.

        ids, known = ObjectIds(), {}
        known[ids(blocks), dtype] = ...
    """

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: dict[int, object] = {}

    def __call__(self, value: object) -> int:
        """Return the id of an object, and keep the object."""
        key = id(value)
        self._held[key] = value
        return key
