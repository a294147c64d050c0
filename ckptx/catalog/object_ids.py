"""Object ids that stay unique, for keys of caches."""

from __future__ import annotations


class ObjectIds:
    """Return the `id` of objects, and keep the objects alive, so that ids are valid keys of a cache.

    An id is unique only while its object lives; a later object in the same memory has the same id. So a cache by `id`
    that outlives its keys could return the value for another object.

        ids, known = ObjectIds(), {}
        known[ids(blocks), dtype] = ...
    """

    __slots__ = ("_objects",)

    def __init__(self) -> None:
        self._objects: dict[int, object] = {}

    def __call__(self, value: object) -> int:
        """Return the id of an object, and keep the object alive."""
        key = id(value)
        self._objects[key] = value
        return key
