"""Digests of values in a pickle: equal values have equal digests.

The order of dicts and sets, and the sharing of objects, do not affect a digest. The digest of a value is computed from
its type and the digests of its children; those of a dict or set are sorted. A cycle has no such order, so its values
are digested by color refinement, as in the minimization of an automaton: each value starts with the same color, and is
recolored by the colors of its children until the number of colors stops growing. Two values then have the same digest
if no sequence of references distinguishes them. No function is recursive, so the depth of a value is not limited.

Types are significant: 1, 1.0 and True are different values, and so are a list and a tuple. Floats are compared by their
bits.
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
from ckptx.robustness_suite.pickle_normalizer import Array, Dictionary, Storage, Tensor

_MAX_SCALAR_BYTES = 32  # longer scalars are replaced by their digest
_MAX_VISITED_VALUES = 1 << 21  # values visited while cycles are refined, in one file
_PLAIN_TYPES = frozenset({type(None), bool, int, float, str})
_NORMALIZED_TYPES = _PLAIN_TYPES | {list, tuple, bytearray, PickledSet, GlobalName}
_SCALAR_TYPES = _PLAIN_TYPES | {bytes, bytearray}


class EmbeddedPickle(NamedTuple):
    """A pickle inside a bytes object.

    Attributes:
        value: Value that the inner pickle contains.
    """

    value: Any


class _CompositeValue(NamedTuple):
    """A value that is not a scalar, split into its parts.

    Attributes:
        header: Type of the value, and data that is not a child value, such as the digest of a tensor.
        ordered: Children whose order is significant.
        unordered: Groups of children whose order is not significant: items of a dict or a set.
    """

    header: str
    ordered: Sequence[Any] = ()
    unordered: Sequence[tuple[Any, ...]] = ()


class ValueDigests:
    """Digests of the values of one file."""

    def __init__(
        self, subject: str, normalize: Callable[[Any], Any], describe: Callable[[Storage | Tensor], str]
    ) -> None:
        """Prepare digests; each is computed on request and cached.

        Args:
            subject: Subject of error messages.
            normalize: Returns the normal form of a value; the same object for the same value.
            describe: Returns a description, with a digest, of the bytes of a storage or the elements of a tensor.
        """
        self._subject, self._normalize, self._describe = subject, normalize, describe
        self._encodings: dict[int, bytes] = {}
        self._ids = ObjectIds()
        self._visited_values = 0

    def hex_digest(self, value: Any) -> str:
        """Return the digest of a value, in hex.

        Raises:
            InputError: The value contains too many cycles, or a damaged tensor.
        """
        return tagged_digest("value", self.encode(value)).hex()[2:]

    def encode(self, value: Any) -> bytes:
        """Return the encoding of a value within the digest of its parent: a short scalar itself, else a digest.

        Raises:
            InputError: See `hex_digest`.
        """
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
        """Encode all values below `root` that reach no cycle.

        Returns:
            The ids of the values that reach a cycle, which have no encoding yet; and the parts of all visited values,
            by id.
        """
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
        """Return the encoding of a value that reaches a cycle, by color refinement.

        The encoding is not cached: a cached one would hide the cycle from the parents of the value.

        Args:
            root: Value to encode.
            unresolved: Ids of the values that reach a cycle.
            parts: Parts of the visited values, by id.

        Raises:
            InputError: There are too many values in cycles.
        """
        colors = dict.fromkeys(unresolved, tagged_digest("cycle"))
        count = 1
        while True:
            self._visited_values += len(unresolved) + sum(
                len(parts[each].ordered) + len(parts[each].unordered) for each in unresolved
            )
            if self._visited_values > _MAX_VISITED_VALUES:
                raise InputError(f"{self._subject}: contains reference cycles that are too large to compare")
            encodings = _ChainedEncodings(colors, self._encodings)
            refined = {
                each: tagged_digest("cycle", colors[each], self._digest_composite(parts[each], encodings))
                for each in unresolved
            }
            colors, previous_count, count = refined, count, len({*refined.values()})
            if count == previous_count:
                return tagged_digest("cycle", colors[id(root)], *sorted({*colors.values()}))

    def _children(self, parts: _CompositeValue) -> Iterator[Any]:
        """Yield the children of a value that are not scalars, in normal form."""
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
        parts: list[bytes] = []
        for value in values:
            normalized = value if type(value) in _NORMALIZED_TYPES else self._normalize(value)
            encoding = _encode_scalar(normalized)
            if encoding is None:
                encoding = encodings[id(normalized)]
            parts += len(encoding).to_bytes(4, "little"), encoding
        return b"".join(parts)

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
    """Lookup of encodings in one table, then in another."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: dict[int, bytes], second: dict[int, bytes]) -> None:
        self._first, self._second = first, second

    def __getitem__(self, key: int) -> bytes:
        encoding = self._first.get(key)
        return self._second[key] if encoding is None else encoding


def tagged_digest(kind: str, *parts: bytes) -> bytes:
    """Return a digest of 16 bytes behind a `#`, with which no encoding of a scalar begins.

    Args:
        kind: Type of the value, so that values of different types have different digests.
        parts: Encodings of its parts, in order.
    """
    digest = blake2b(kind.encode("utf-8", "surrogatepass"), digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return b"#" + digest.digest()


def _encode_scalar(value: Any) -> bytes | None:
    """Return a scalar as bytes, the first of which identifies its type; None if the value is not a scalar."""
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
