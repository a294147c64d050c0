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

_MAX_SCALAR_BYTES = 32  # bytes of a scalar that stands for itself
_MAX_VISITED_VALUES = 1 << 21  # values looked at for the sake of those that refer to themselves
_PLAIN_TYPES = frozenset({type(None), bool, int, float, str})
_NORMALIZED_TYPES = _PLAIN_TYPES | {list, tuple, bytearray, PickledSet, GlobalName}
_SCALAR_TYPES = _PLAIN_TYPES | {bytes, bytearray}


class EmbeddedPickle(NamedTuple):
    """A pickle in bytes.

    Attributes:
        value: The value it stands for.
    """

    value: Any


class _CompositeValue(NamedTuple):
    """A value that is no scalar.

    Attributes:
        header: Its kind, and what in it is no value.
        ordered: Parts whose order counts.
        unordered: Parts whose order does not count: items of a dict, or of a set.
    """

    header: str
    ordered: Sequence[Any] = ()
    unordered: Sequence[tuple[Any, ...]] = ()


class ValueDigests:
    """Digests of the values of one file."""

    def __init__(
        self, subject: str, normalize: Callable[[Any], Any], describe: Callable[[Storage | Tensor], str]
    ) -> None:
        """Has none yet.

        Args:
            subject: Subject of error messages.
            normalize: Gives the meaning of a value, always the same object for the same value.
            describe: Describes the bytes of a storage or the elements of a tensor.
        """
        self._subject, self._normalize, self._describe = subject, normalize, describe
        self._encodings: dict[int, bytes] = {}
        self._ids = ObjectIds()
        self._visited_values = 0

    def hex_digest(self, value: Any) -> str:
        """The digest of a value, in hex.

        Raises:
            InputError: It refers to itself in too many ways, or a tensor in it is damaged.
        """
        return tagged_digest("value", self.encode(value)).hex()[2:]

    def encode(self, value: Any) -> bytes:
        """Return the code of a value in the digest of another. See `of`."""
        value = self._normalize(value)
        scalar = _encode_scalar(value)
        if scalar is not None:
            return scalar
        if id(value) not in self._encodings:
            with without_garbage_collection():
                unresolved, parts = self._encode_acyclic(value)
            if unresolved:
                return self._encode_cyclic(value, unresolved, parts)
        return self._encodings[id(value)]

    def _encode_acyclic(self, root: Any) -> tuple[list[int], dict[int, _CompositeValue]]:
        """Finds the codes of what can be reached from a value; gives the rest, which can reach a cycle."""
        parts: dict[int, _CompositeValue] = {}
        parents: dict[int, list[int]] = {}
        missing_children: dict[int, int] = {}
        stack, ready = [root], []
        while stack:
            node = stack.pop()
            if id(node) in parts:
                continue
            parts[self._ids(node)] = composite = self._split_value(node)
            children = [child for child in self._children(composite) if id(child) not in self._encodings]
            if not children:
                ready.append(id(node))
                continue
            missing_children[id(node)] = len(children)
            for child in children:
                parents.setdefault(id(child), []).append(id(node))
                if id(child) not in parts:
                    stack.append(child)
        while ready:
            encoded = ready.pop()
            self._encodings[encoded] = self._digest_composite(parts[encoded], self._encodings)
            for parent in parents.get(encoded, ()):
                missing_children[parent] -= 1
                if not missing_children[parent]:
                    ready.append(parent)
        return [each for each, count in missing_children.items() if count], parts

    def _encode_cyclic(self, root: Any, unresolved: list[int], parts: dict[int, _CompositeValue]) -> bytes:
        """The code of a value that can reach a cycle; not kept, as it would hide the cycle from what holds it."""
        colors = dict.fromkeys(unresolved, tagged_digest("cycle"))
        count = 1
        while True:
            self._visited_values += len(unresolved) + sum(
                len(parts[each].ordered) + len(parts[each].unordered) for each in unresolved
            )
            if self._visited_values > _MAX_VISITED_VALUES:
                raise InputError(f"{self._subject}: its values refer to each other in circles too long to compare")
            encodings = _ChainedEncodings(colors, self._encodings)
            refined = {
                each: tagged_digest("cycle", colors[each], self._digest_composite(parts[each], encodings))
                for each in unresolved
            }
            colors, previous_count, count = refined, count, len({*refined.values()})
            if count == previous_count:
                return tagged_digest("cycle", colors[id(root)], *sorted({*colors.values()}))

    def _children(self, parts: _CompositeValue) -> Iterator[Any]:
        """Yield the parts of a value that are no scalars."""
        for value in chain(parts.ordered, chain.from_iterable(parts.unordered)):
            value_type = type(value)
            if value_type not in _PLAIN_TYPES:
                normalized = value if value_type in _NORMALIZED_TYPES else self._normalize(value)
                if type(normalized) not in _SCALAR_TYPES:
                    yield normalized

    def _digest_composite(self, parts: _CompositeValue, encodings: Any) -> bytes:
        groups = {self._join_encodings(group, encodings) for group in parts.unordered}
        return tagged_digest(parts.header, self._join_encodings(parts.ordered, encodings), *sorted(groups))

    def _join_encodings(self, values: Iterable[Any], encodings: Any) -> bytes:
        pieces: list[bytes] = []
        for value in values:
            normalized = value if type(value) in _NORMALIZED_TYPES else self._normalize(value)
            encoding = _encode_scalar(normalized)
            if encoding is None:
                encoding = encodings[id(normalized)]
            pieces += len(encoding).to_bytes(4, "little"), encoding
        return b"".join(pieces)

    def _split_value(self, value: Any) -> _CompositeValue:
        if type(value) in (list, tuple):
            return _CompositeValue(type(value).__name__, value)
        if isinstance(value, Dictionary):
            return _CompositeValue(value.kind, value.attributes, value.items)
        if isinstance(value, PickledSet):
            return _CompositeValue(value.kind, (), [(each,) for each in value.items])
        if isinstance(value, CallResult):
            lengths = f"{len(value.arguments)} {len(value.items)} {len(value.states)}"
            setters = [each for setter in value.setters for each in (len(setter), *setter)]
            ordered = (value.function, value.keywords, *value.arguments, *value.items, *value.states, *setters)
            return _CompositeValue(f"{value.kind} {lengths}", ordered, value.pairs)
        if isinstance(value, GlobalName):
            return _CompositeValue("name", (value.module, value.name))
        if isinstance(value, Array):
            return _CompositeValue("array", (value.kind, value.dtype, value.shape, value.elements))
        if isinstance(value, Storage):
            return _CompositeValue(f"storage {value.kind} {self._describe(value)}")
        if isinstance(value, Tensor):
            grad = ", requires grad" * value.requires_grad
            return _CompositeValue(f"tensor {value.kind} {self._describe(value)}{grad}", value.attributes)
        if isinstance(value, EmbeddedPickle):
            return _CompositeValue("pickle", (value.value,))
        assert isinstance(value, PersistentObject), type(value)
        return _CompositeValue("external", (value.persistent_id,))


class _ChainedEncodings:
    """Codes that are found in one of two tables."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: dict[int, bytes], second: dict[int, bytes]) -> None:
        self._first, self._second = first, second

    def __getitem__(self, key: int) -> bytes:
        found = self._first.get(key)
        return self._second[key] if found is None else found


def tagged_digest(kind: str, *parts: bytes) -> bytes:
    """A digest of 16 bytes that starts with a mark, which no scalar begins with."""
    digest = blake2b(kind.encode("utf-8", "surrogatepass"), digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return b"#" + digest.digest()


def _encode_scalar(value: Any) -> bytes | None:
    """A scalar as bytes, of which the first says its type; None of anything else."""
    value_type = type(value)
    encoding: bytes
    if value_type is str:
        encoding = b"s" + value.encode("utf-8", "surrogatepass")
    elif value_type is int:
        encoding = b"i%x" % value
    elif value_type is float:
        encoding = b"f" + struct.pack("<d", value)
    elif value_type is bool:
        encoding = b"T" if value else b"F"
    elif value is None:
        encoding = b"N"
    elif value_type is bytes:
        encoding = b"b" + value
    elif value_type is bytearray:
        encoding = b"a" + value
    else:
        return None
    return encoding if len(encoding) <= _MAX_SCALAR_BYTES else encoding[:1].upper() + tagged_digest("scalar", encoding)
