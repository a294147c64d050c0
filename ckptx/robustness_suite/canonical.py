"""Digests of values in a pickle: equal for equal values, whatever the order of dicts and sets or of what is shared.

The digest of a value is made of its kind and the digests of what it holds; those of a dict and a set are sorted. Values
that refer to themselves have no such digest. Each of them gets a color, which is refined by the colors of what it
holds until no color splits (as in minimizing an automaton): two values have the same digest if nobody who
follows references from them could tell one from the other. Nothing is recursive, so that depth does not matter.

Types count: 1, 1.0 and True are three values, and so are a list and a tuple. Floats count by their bits.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Any, NamedTuple

from ckptx.catalog.object_ids import ObjectIds
from ckptx.errors import InputError
from ckptx.formats.torch_archive.pickle_machine import CallResult, GlobalName, PersistentObject, PickledSet
from ckptx.formats.torch_archive.unpickle import without_garbage_collection
from ckptx.robustness_suite.pickled_kinds import Array, Dictionary, Storage, Tensor

_LONGEST = 32  # bytes of a scalar that stands for itself
_MOST_WORK = 1 << 21  # values looked at for the sake of those that refer to themselves
_NUMBERS_AND_STRINGS = frozenset({type(None), bool, int, float, str})
_WITHOUT_OTHER_MEANING = _NUMBERS_AND_STRINGS | {list, tuple, bytearray, PickledSet, GlobalName}
_SCALARS = _NUMBERS_AND_STRINGS | {bytes, bytearray}


class Nested(NamedTuple):
    """A pickle in bytes.

    Attributes:
        value: The value it stands for.
    """

    value: Any


class _Parts(NamedTuple):
    """A value that is no scalar.

    Attributes:
        head: Its kind, and what in it is no value.
        ordered: Parts whose order counts.
        unordered: Parts whose order does not count: items of a dict, or of a set.
    """

    head: str
    ordered: Sequence[Any] = ()
    unordered: Sequence[tuple[Any, ...]] = ()


class Digests:
    """Digests of the values of one file."""

    def __init__(self, where: str, meaning: Callable[[Any], Any], described: Callable[[Storage | Tensor], str]) -> None:
        """Has none yet.

        Args:
            where: Subject of error messages.
            meaning: Gives the meaning of a value, always the same object for the same value.
            described: Describes the bytes of a storage or the elements of a tensor.
        """
        self._where, self._meaning, self._described = where, meaning, described
        self._codes: dict[int, bytes] = {}
        self._ids = ObjectIds()
        self._work = 0

    def of(self, value: Any) -> str:
        """The digest of a value, in hex.

        Raises:
            InputError: It refers to itself in too many ways, or a tensor in it is damaged.
        """
        return hashed("value", self.code(value)).hex()[2:]

    def code(self, value: Any) -> bytes:
        """Return the code of a value in the digest of another. See `of`."""
        value = self._meaning(value)
        scalar = _scalar(value)
        if scalar is not None:
            return scalar
        if id(value) not in self._codes:
            with without_garbage_collection():
                waiting, parts = self._acyclic(value)
            if waiting:
                return self._cyclic(value, waiting, parts)
        return self._codes[id(value)]

    def _acyclic(self, root: Any) -> tuple[list[int], dict[int, _Parts]]:
        """Finds the codes of what can be reached from a value; gives the rest, which can reach a cycle."""
        parts: dict[int, _Parts] = {}
        holders: dict[int, list[int]] = {}
        missing: dict[int, int] = {}
        stack, ready = [root], []
        while stack:
            node = stack.pop()
            if id(node) in parts:
                continue
            parts[self._ids(node)] = found = self._parts(node)
            below = [child for child in self._children(found) if id(child) not in self._codes]
            if not below:
                ready.append(id(node))
                continue
            missing[id(node)] = len(below)
            for child in below:
                holders.setdefault(id(child), []).append(id(node))
                if id(child) not in parts:
                    stack.append(child)
        while ready:
            done = ready.pop()
            self._codes[done] = self._encoded(parts[done], self._codes)
            for holder in holders.get(done, ()):
                missing[holder] -= 1
                if not missing[holder]:
                    ready.append(holder)
        return [each for each, count in missing.items() if count], parts

    def _cyclic(self, root: Any, waiting: list[int], parts: dict[int, _Parts]) -> bytes:
        """The code of a value that can reach a cycle; not kept, as it would hide the cycle from what holds it."""
        colors = dict.fromkeys(waiting, hashed("cycle"))
        count = 1
        while True:
            self._work += len(waiting) + sum(len(parts[each].ordered) + len(parts[each].unordered) for each in waiting)
            if self._work > _MOST_WORK:
                raise InputError(f"{self._where}: its values refer to each other in circles too long to compare")
            known = _OneOf(colors, self._codes)
            refined = {each: hashed("cycle", colors[each], self._encoded(parts[each], known)) for each in waiting}
            colors, before, count = refined, count, len({*refined.values()})
            if count == before:
                return hashed("cycle", colors[id(root)], *sorted({*colors.values()}))

    def _children(self, parts: _Parts) -> Iterator[Any]:
        """Yield the parts of a value that are no scalars."""
        for value in chain(parts.ordered, chain.from_iterable(parts.unordered)):
            kind = type(value)
            if kind not in _NUMBERS_AND_STRINGS:
                found = value if kind in _WITHOUT_OTHER_MEANING else self._meaning(value)
                if type(found) not in _SCALARS:
                    yield found

    def _encoded(self, parts: _Parts, codes: Any) -> bytes:
        groups = {self._joined(group, codes) for group in parts.unordered}
        return hashed(parts.head, self._joined(parts.ordered, codes), *sorted(groups))

    def _joined(self, values: Iterable[Any], codes: Any) -> bytes:
        found: list[bytes] = []
        for value in values:
            meaning = value if type(value) in _WITHOUT_OTHER_MEANING else self._meaning(value)
            code = _scalar(meaning)
            if code is None:
                code = codes[id(meaning)]
            found += len(code).to_bytes(4, "little"), code
        return b"".join(found)

    def _parts(self, value: Any) -> _Parts:
        if type(value) in (list, tuple):
            return _Parts(type(value).__name__, value)
        if isinstance(value, Dictionary):
            return _Parts(value.kind, value.rest, value.items)
        if isinstance(value, PickledSet):
            return _Parts(value.kind, (), [(each,) for each in value.items])
        if isinstance(value, CallResult):
            lengths = f"{len(value.arguments)} {len(value.items)} {len(value.states)}"
            setters = [each for setter in value.setters for each in (len(setter), *setter)]
            held = (value.function, value.keywords, *value.arguments, *value.items, *value.states, *setters)
            return _Parts(f"{value.kind} {lengths}", held, value.pairs)
        if isinstance(value, GlobalName):
            return _Parts("name", (value.module, value.name))
        if isinstance(value, Array):
            return _Parts("array", (value.kind, value.dtype, value.shape, value.content))
        if isinstance(value, Storage):
            return _Parts(f"storage {value.kind} {self._described(value)}")
        if isinstance(value, Tensor):
            grad = ", requires grad" * value.requires_grad
            return _Parts(f"tensor {value.kind} {self._described(value)}{grad}", value.attributes)
        if isinstance(value, Nested):
            return _Parts("pickle", (value.value,))
        assert isinstance(value, PersistentObject), type(value)
        return _Parts("external", (value.persistent_id,))


class _OneOf:
    """Codes that are found in one of two tables."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: dict[int, bytes], second: dict[int, bytes]) -> None:
        self._first, self._second = first, second

    def __getitem__(self, key: int) -> bytes:
        found = self._first.get(key)
        return self._second[key] if found is None else found


def hashed(kind: str, *parts: bytes) -> bytes:
    """A digest of 16 bytes that starts with a mark, which no scalar begins with."""
    digest = blake2b(kind.encode("utf-8", "surrogatepass"), digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return b"#" + digest.digest()


def _scalar(value: Any) -> bytes | None:
    """A scalar as bytes, of which the first says its type; None of anything else."""
    kind = type(value)
    found: bytes
    if kind is str:
        found = b"s" + value.encode("utf-8", "surrogatepass")
    elif kind is int:
        found = b"i%x" % value
    elif kind is float:
        found = b"f" + struct.pack("<d", value)
    elif kind is bool:
        found = b"T" if value else b"F"
    elif value is None:
        found = b"N"
    elif kind is bytes:
        found = b"b" + value
    elif kind is bytearray:
        found = b"a" + value
    else:
        return None
    return found if len(found) <= _LONGEST else found[:1].upper() + hashed("scalar", found)
