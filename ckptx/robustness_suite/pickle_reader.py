"""Read pickles of any trainer as named values; nothing in them is imported or executed.

`pickle_graph` parses a pickle, `pickle_normalizer` normalizes the objects of torch, numpy and Python, and
`value_digests` computes digests. This module opens a file and splits its value into leaves, each with the name for its
comparison.

A digest depends on values only, not on the order of dict keys or set elements (which differs between processes), or on
whether equal objects are shared.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import Chunk, Record, TensorEntry
from ckptx.catalog.object_ids import ObjectIds
from ckptx.catalog.region import full_region
from ckptx.errors import CkptxError, InputError
from ckptx.formats.torch_archive.archive import locate_tensor, open_archive
from ckptx.formats.torch_archive.pickle_graph import read_graph
from ckptx.formats.torch_archive.pickle_machine import CallResult, GlobalName
from ckptx.formats.torch_archive.unpickle import StorageRef
from ckptx.robustness_suite.legacy_archive import is_legacy, read_legacy
from ckptx.robustness_suite.pickle_normalizer import Array, Dictionary, PickleNormalizer, Storage, Tensor
from ckptx.robustness_suite.tensor_digests import TensorDigests
from ckptx.robustness_suite.value_digests import EmbeddedPickle, ValueDigests, tagged_digest
from ckptx.storage.files import FilePool
from ckptx.untrusted.limits import MAX_JSON_DEPTH, MAX_NAME_LENGTH, MAX_PICKLE_BYTES

_PICKLE_START = re.compile(rb"\x80[\x02-\x05].", re.DOTALL)
_INTEGER_TEXT = re.compile(r"-?[0-9]+")
_MIN_VALUE_LIMIT = 1 << 12  # a pickle may have at least so many values, as one object may be referenced often
_MAX_DISPLAY_LENGTH = 60  # characters, or values in a list; longer values are replaced by their digest
_KEY_DIGEST_LENGTH = 8  # hex digits of the digest of a key in a name
_MAX_INT_BITS = 256  # larger integers are replaced by their digest
_PLAIN_TYPES = {type(None), bool, int, float}
_NAN_BYTES = struct.pack("<d", float("nan"))


class ContainerInfo(NamedTuple):
    """Properties of a container that the names of its parts do not show, such as the class of a dict.

    Attributes:
        description: Text that is compared.
    """

    description: str


class Leaf(NamedTuple):
    """A part of a value that is compared.

    Attributes:
        path: Words of the name, one for each level.
        value: Value, not normalized, or the `ContainerInfo` of a container.
        sort_key: Encodings of the keys on the path, which distinguish keys with the same word.
    """

    path: tuple[str, ...]
    value: Any
    sort_key: tuple[bytes, ...]


class PickleReader:
    """Reader of an archive of `torch.save` or a plain pickle, in a file or a part of it.

    Attributes:
        subject: Subject of error messages.
        root_value: Value of the whole pickle, not normalized.
    """

    def __init__(
        self,
        files: FilePool,
        file: str,
        subject: str,
        tensors: TensorDigests,
        offset: int = 0,
        nbytes: int | None = None,
    ) -> None:
        """Parse the pickle.

        Args:
            files: Pool that opens the file.
            file: Name of the file in the pool.
            subject: Subject of error messages.
            tensors: Computes the digests of tensors in the file.
            offset: Position of the archive in the file, in bytes.
            nbytes: Length of the archive in bytes; None for the rest of the file.

        Raises:
            InputError: The file is damaged, too large, or neither an archive nor a pickle.
            UnsupportedError: The kind of archive is not supported, such as TorchScript.
        """
        self.subject, self._file, self._tensors = subject, file, tensors
        self._embedded: dict[int, Any] = {}
        self._ids = ObjectIds()
        self._dropped_calls: tuple[Any, ...] = ()
        length = files.size(file) - offset if nbytes is None else nbytes
        records: dict[str, Record] = {}
        head = files.read_up_to(file, offset, min(length, 16))
        if is_legacy(head):
            data = files.read(file, offset, min(length, MAX_PICKLE_BYTES))
            self.root_value, records = read_legacy(data, length, subject, offset)
            self._max_values = max(_MIN_VALUE_LIMIT, len(data))
        elif head.startswith(b"PK\3\4") or not is_pickle(files, file, offset, length):
            archive = open_archive(partial(files.read, file), offset, length, subject, self._load)
            self.root_value, records = archive
        elif length > MAX_PICKLE_BYTES:
            raise InputError(
                f"{subject}: has a pickle of {length:,} bytes; at most {MAX_PICKLE_BYTES:,} are read; "
                "write a smaller one"
            )
        else:
            self.root_value = self._load(files.read(file, offset, length), subject)
        self._remaining_bytes = 4 * self._max_values  # limit for pickles inside bytes objects, which may be nested
        self._normalizer = PickleNormalizer(subject, records, self._read_embedded_storage)
        self._digests = ValueDigests(subject, self.normalize, self._describe_contents)

    def _load(self, data: bytes, subject: str) -> Any:
        self._max_values = max(_MIN_VALUE_LIMIT, len(data))
        graph = read_graph(data, subject)
        self._dropped_calls = graph.dropped
        return graph.value

    # ----------------------------------------------------------------------------------------------------- normal forms

    def normalize(self, value: Any) -> Any:
        """Return the normal form of a value, see `pickle_normalizer`; bytes that contain a pickle become its value.

        Data loaders store their state as such bytes. The bytes themselves cannot be compared: pickles of equal values
        differ if one shares objects and the other does not.
        """
        normalized = self._normalizer.normalize(value)
        if type(normalized) is not bytes or normalized[:1] != b"\x80" or normalized[-1:] != b".":
            return normalized
        if not _PICKLE_START.match(normalized):
            return normalized
        key = self._ids(normalized)
        if key not in self._embedded:
            self._embedded[key] = self._read_embedded(normalized)
        return self._embedded[key]

    def _read_embedded(self, data: bytes) -> Any:
        self._remaining_bytes -= len(data)
        if self._remaining_bytes < 0:
            return data
        try:
            graph = read_graph(data, self.subject)
        except InputError:
            return data
        return data if graph.end < len(data) or graph.dropped else EmbeddedPickle(graph.value)

    def _read_embedded_storage(self, data: bytes) -> Storage | None:
        """Return the storage in a legacy archive, as plain pickles of tensors contain; None for other bytes."""
        self._remaining_bytes -= len(data)
        if not is_legacy(data[:16]) or self._remaining_bytes < 0:
            return None
        try:
            value, records = read_legacy(data, len(data), self.subject, 0)
            storage = PickleNormalizer(self.subject, records, lambda _: None).normalize(value)
        except CkptxError:
            return None
        if not isinstance(storage, Storage) or storage.record is None:
            return None
        begin = storage.record.offset
        return Storage(storage.kind, storage.ref, None, data[begin : begin + storage.record.nbytes])

    # ------------------------------------------------------------------------------------------------------- leaves

    def leaves(self) -> Iterator[Leaf]:
        """Yield the leaves: all values that are not split into parts.

        Dicts are split, and so are lists and tuples that contain a dict or tensor, unless they are empty, deeper than
        `MAX_JSON_DEPTH`, part of themselves, or known not to be split. If a split container has properties that the
        names of its parts do not show, a `ContainerInfo` is yielded, too.

        Raises:
            InputError: There are too many values, or a name is too long.
        """
        count, undivided_ids = 0, set[int]()
        if self._dropped_calls:
            yield Leaf(("calls without result",), list(self._dropped_calls), ())
        pending: list[tuple[Leaf, frozenset[int]]] = [(Leaf((), self.root_value, ()), frozenset())]
        while pending:
            leaf, ancestors = pending.pop()
            descriptions = []
            node = self.normalize(leaf.value)
            while isinstance(node, EmbeddedPickle):
                descriptions.append("pickle in bytes")
                node = self.normalize(node.value)
            is_undivided = id(node) in undivided_ids or id(node) in ancestors or len(leaf.path) >= MAX_JSON_DEPTH
            children = [] if is_undivided else list(self._children(leaf, node))
            if not children:
                if id(node) not in ancestors:
                    undivided_ids.add(id(node))  # a long list that is referenced often is searched once
                yield leaf
                continue
            count += len(children)
            longest = max(len(each.path[-1]) for each in children)
            if count > self._max_values or longest > MAX_NAME_LENGTH:
                reason = f"a name of {longest:,} characters" if longest > MAX_NAME_LENGTH else "more values than bytes"
                raise InputError(
                    f"{self.subject}: contains {reason}; it is damaged, or not the state of a training run"
                )
            descriptions += self._describe_container(node)
            if descriptions:
                yield leaf._replace(value=ContainerInfo(": ".join(descriptions)))
            ancestors |= {id(node)}
            pending.extend((each, ancestors) for each in reversed(children))

    def dict_items(self, value: Any) -> list[tuple[Any, Any]]:
        """Return the items of a dict; empty if the value is not a dict."""
        normalized = self.normalize(value)
        return normalized.items if isinstance(normalized, Dictionary) else []

    def _children(self, leaf: Leaf, node: Any) -> Iterator[Leaf]:
        if isinstance(node, Dictionary):
            texts = [self._key_text(key) for key, _ in node.items]
            counts = Counter(texts)
            for (key, value), text in zip(node.items, texts, strict=True):
                word = f'"{text}"' if counts[text] > 1 and type(key) is str else text
                yield Leaf((*leaf.path, word), value, (*leaf.sort_key, self._digests.encode(key)))
        elif type(node) in (list, tuple) and any(map(self._has_parts, node)):
            for index, value in enumerate(node):
                yield Leaf((*leaf.path, str(index)), value, (*leaf.sort_key, index.to_bytes(8, "big")))

    def _has_parts(self, value: Any) -> bool:
        return type(value) not in _PLAIN_TYPES and isinstance(self.normalize(value), Dictionary | Tensor)

    def _describe_container(self, node: Any) -> Iterator[str]:
        """Yield properties that names do not show: the class of a dict or list, and keys that are not plain words."""
        if not isinstance(node, Dictionary):
            yield f"{type(node).__name__} of {len(node):,}"
            return
        if node.kind != "dict" or node.attributes:
            yield f"{node.kind} {self._digests.hex_digest(node.attributes)}"
        unusual_keys = sorted(self._digests.encode(key) for key, _ in node.items if not _is_plain_key(key))
        if unusual_keys:
            yield f"dict with other keys than words and whole numbers {tagged_digest('keys', *unusual_keys).hex()[2:]}"

    def _key_text(self, key: Any) -> str:
        """Return the word for a dict key in a name: a string or integer itself, other keys with their type."""
        normalized = self.normalize(key)
        if type(normalized) is str:
            return normalized
        if type(normalized) is int and normalized.bit_length() <= _MAX_INT_BITS:
            return str(normalized)
        if (
            normalized is None
            or type(normalized) in (bool, float)
            or (type(normalized) is bytes and len(normalized) <= _MAX_DISPLAY_LENGTH)
        ):
            return f"{normalized!r} ({type(normalized).__name__})"
        return f"{self._kind_text(normalized)} {self._digests.hex_digest(normalized)[:_KEY_DIGEST_LENGTH]}"

    # ------------------------------------------------------------------------------------------------------- values

    def value_text(self, value: Any) -> str:
        """Return a value as a string that is equal only for equal values: a short value itself, else type and digest.

        Raises:
            InputError: A tensor in the value is damaged.
        """
        if isinstance(value, ContainerInfo):
            return value.description
        normalized = self.normalize(value)
        if _is_displayed(normalized):
            return repr(normalized)
        if (
            type(normalized) in (list, tuple)
            and len(normalized) <= _MAX_DISPLAY_LENGTH
            and all(map(_is_displayed, normalized))
        ):
            text = repr(normalized) if {*map(type, normalized)} <= _PLAIN_TYPES else ""
            if text and len(text) <= _MAX_DISPLAY_LENGTH:
                return text
        return f"{self._kind_text(normalized)} {self._digests.hex_digest(value)}"

    def _kind_text(self, value: Any) -> str:
        """Return the type of a value in words."""
        if isinstance(value, Dictionary):
            return value.kind
        if isinstance(value, CallResult):
            return (
                f"object of {value.function!s:.{_MAX_DISPLAY_LENGTH}}"
                if isinstance(value.function, GlobalName)
                else "object"
            )
        if isinstance(value, GlobalName):
            return f"name {value!s:.{_MAX_DISPLAY_LENGTH}}"
        if isinstance(value, (Array, Tensor, Storage)):
            return type(value).__name__.lower()
        return "pickle" if isinstance(value, EmbeddedPickle) else str(getattr(value, "kind", type(value).__name__))

    def read_tensor(self, name: str, value: Any) -> tuple[TensorEntry, bytes | None, str] | None:
        """Return the entry of a tensor, its bytes and a description of its attributes; None if it is not a tensor.

        The bytes are in row-major order; None if they are in the file, at the position in the entry.

        Args:
            name: Name of the tensor, for the entry and error messages.
            value: Value of a leaf.

        Raises:
            InputError: The tensor exceeds its storage.
        """
        tensor = self.normalize(value)
        if not isinstance(tensor, Tensor):
            return None
        entry, data = self._tensor_entry(name, tensor)
        kind = f", {tensor.kind.rpartition('.')[2]}" * (tensor.kind != "torch.Tensor")
        grad = ", requires grad" * tensor.requires_grad
        attributes = f", attributes {self._digests.hex_digest(tensor.attributes)}" if tensor.attributes else ""
        return entry, data, kind + grad + attributes

    def _tensor_entry(self, name: str, tensor: Tensor) -> tuple[TensorEntry, bytes | None]:
        storage = tensor.storage
        record = storage.record or Record(0, storage.ref.nbytes, None)
        location = locate_tensor(tensor.ref, {storage.ref.key: record}, f'{self.subject}: tensor "{name}"')
        shape = location.dtype.from_torch_elements(location.torch_shape)
        chunk = Chunk(
            full_region(shape), self._file, location.data_offset, location.nbytes, location.strides, location.record
        )
        entry = TensorEntry(name, location.dtype, shape, (chunk,))
        if storage.data is None:
            return entry, None
        data = storage.data[location.data_offset : location.data_offset + location.nbytes]
        if location.strides is not None and data:
            width = location.dtype.itemsize
            elements = np.frombuffer(data, f"V{width}")
            strides = tuple(width * stride for stride in location.strides)
            data = np.lib.stride_tricks.as_strided(elements, tensor.ref.shape, strides).tobytes()
        return entry, data

    def _describe_contents(self, value: Storage | Tensor) -> str:
        if isinstance(value, Tensor):
            return self._tensors.describe(*self._tensor_entry("in an object", value))
        ref = StorageRef(value.ref.key, None, value.ref.nbytes)
        record = value.record or Record(0, ref.nbytes, None)
        chunk = Chunk(full_region((ref.nbytes,)), self._file, record.offset, record.nbytes, None, value.record)
        return self._tensors.describe(
            TensorEntry("a storage", DTYPES_BY_NAME["U8"], (ref.nbytes,), (chunk,)), value.data
        )


def is_pickle(files: FilePool, file: str, offset: int, length: int) -> bool:
    """Return True if a range of a file begins like a pickle of protocol 2 or later, or is one of protocol 0 or 1.

    Protocols 0 and 1 have no magic number, so such a range is parsed.
    """
    if length < 2:
        return False
    head, last = files.read_up_to(file, offset, 4), files.read_up_to(file, offset + length - 1, 1)
    if head[:1] == b"\x80":
        return True
    if last != b"." or length > MAX_PICKLE_BYTES or head.startswith(b"PK"):
        return False
    try:
        return read_graph(files.read(file, offset, length), file).end == length
    except CkptxError:
        return False


def digest_if_long(text: str) -> str:
    """Return a string, or its digest if it is long."""
    return (
        text
        if len(text) <= _MAX_DISPLAY_LENGTH
        else f"text {tagged_digest('text', text.encode('utf-8', 'surrogatepass')).hex()[2:]}"
    )


def _is_displayed(value: Any) -> bool:
    """Return True for a scalar with a short `repr` that determines its bits, unlike that of a NaN with a payload."""
    if type(value) is float:
        return value == value or struct.pack("<d", value) == _NAN_BYTES
    if type(value) is int:
        return value.bit_length() <= _MAX_INT_BITS
    return value is None or type(value) is bool or (type(value) is str and len(value) <= _MAX_DISPLAY_LENGTH)


def _is_plain_key(key: Any) -> bool:
    """Return True for a key that its word in a name determines: an integer, or a string that is no integer or path."""
    return type(key) is int or (type(key) is str and key != "" and "." not in key and not _INTEGER_TEXT.fullmatch(key))
