"""Read pickles of any trainer as named values: names in them are recorded, and nothing is imported or executed.

`pickle_graph` reads a pickle, `pickled_kinds` gives what torch, numpy and Python write its meaning, and `canonical` has
the digests. Here a file is opened, and its value is divided into parts, each with the name under which it is compared.

A digest depends on values only. The order of the keys of a dict, that of a set (which differs from process to process),
what was written once and referred to, and how often, do not enter it.
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
from ckptx.robustness_suite.canonical import Digests, Nested, hashed
from ckptx.robustness_suite.legacy_archive import is_legacy, read_legacy
from ckptx.robustness_suite.pickled_kinds import Array, Dictionary, Kinds, Storage, Tensor
from ckptx.robustness_suite.tensor_digests import TensorDigests
from ckptx.storage.files import FilePool
from ckptx.untrusted.limits import JSON_DEPTH, NAME_LENGTH, PICKLE_BYTES

_LIKE_A_PICKLE = re.compile(rb"\x80[\x02-\x05].", re.DOTALL)
_LIKE_A_NUMBER = re.compile(r"-?[0-9]+")
_FEW = 1 << 12  # values of a pickle that nobody counts: one written once may be referred to often
_SHOWN = 60  # characters of a value that is shown as it is
_SHORT_KEY = 8  # digits of the digest of a key in a name
_LONGEST_INT = 256  # bits of a number that is shown as it is
_PLAIN = {type(None), bool, int, float}
_NAN = struct.pack("<d", float("nan"))


class ContainerForm(NamedTuple):
    """The way in which a value holds its parts, where the names of the parts do not say it.

    Attributes:
        text: Text that is compared.
    """

    text: str


class Leaf(NamedTuple):
    """A part of a value that is compared.

    Attributes:
        path: Words of its name.
        value: The part, or a `ContainerForm`.
        place: A sort key that no two parts share.
    """

    path: tuple[str, ...]
    value: Any
    place: tuple[bytes, ...]


class Reader:
    """Reads pickles of one file: an archive of `torch.save` at a position, or a pickle that is all of the file."""

    def __init__(
        self,
        files: FilePool,
        file: str,
        where: str,
        tensors: TensorDigests,
        offset: int = 0,
        nbytes: int | None = None,
    ) -> None:
        """Reads it.

        Args:
            files: Has the file.
            file: Its name.
            where: Subject of error messages.
            tensors: Digests of tensors in the file.
            offset: First byte of the archive in the file.
            nbytes: Its length; the rest of the file by default.

        Raises:
            InputError: It is damaged, too large, or neither of the two.
            UnsupportedError: An archive of a kind that is not read.
        """
        self.where, self._file, self._tensors = where, file, tensors
        self._nested: dict[int, Any] = {}
        self._ids = ObjectIds()
        self._dropped: tuple[Any, ...] = ()
        length = files.size(file) - offset if nbytes is None else nbytes
        records: dict[str, Record] = {}
        head = files.read_up_to(file, offset, min(length, 16))
        if is_legacy(head):
            data = files.read(file, offset, min(length, PICKLE_BYTES))
            self.tree, records = read_legacy(data, length, where, offset)
            self._most = max(_FEW, len(data))
        elif head.startswith(b"PK\3\4") or not is_pickle(files, file, offset, length):
            found = open_archive(partial(files.read, file), offset, length, where, self._load)
            self.tree, records = found
        elif length > PICKLE_BYTES:
            raise InputError(
                f"{where}: has a pickle of {length:,} bytes; at most {PICKLE_BYTES:,} are read, write a smaller one"
            )
        else:
            self.tree = self._load(files.read(file, offset, length), where)
        self._left = 4 * self._most  # bytes of pickles in bytes that are read; they may be in each other
        self._kinds = Kinds(where, records, self._storage)
        self._digests = Digests(where, self.meaning, self._described)

    def _load(self, data: bytes, where: str) -> Any:
        self._most = max(_FEW, len(data))
        graph = read_graph(data, where)
        self._dropped = graph.dropped
        return graph.value

    # ------------------------------------------------------------------------------------------------------ meaning

    def meaning(self, value: Any) -> Any:
        """The meaning of a value: see `pickled_kinds`; bytes that are a pickle are what it holds.

        Loaders have their state in such bytes. Those of equal values differ: what one object was when it was written
        first is two after it was read.
        """
        found = self._kinds.of(value)
        if type(found) is not bytes or found[:1] != b"\x80" or found[-1:] != b".":
            return found
        if not _LIKE_A_PICKLE.match(found):
            return found
        key = self._ids(found)
        if key not in self._nested:
            self._nested[key] = self._inside(found)
        return self._nested[key]

    def _inside(self, data: bytes) -> Any:
        self._left -= len(data)
        if self._left < 0:
            return data
        try:
            graph = read_graph(data, self.where)
        except InputError:
            return data
        return data if graph.end < len(data) or graph.dropped else Nested(graph.value)

    def _storage(self, data: bytes) -> Storage | None:
        """A storage that was pickled in bytes, as an archive of its own: tensors in a plain pickle are such."""
        self._left -= len(data)
        if not is_legacy(data[:16]) or self._left < 0:
            return None
        try:
            tree, records = read_legacy(data, len(data), self.where, 0)
            inner = Kinds(self.where, records, lambda _: None).of(tree)
        except CkptxError:
            return None
        if not isinstance(inner, Storage) or inner.record is None:
            return None
        begin = inner.record.offset
        return Storage(inner.kind, inner.ref, None, data[begin : begin + inner.record.nbytes])

    # ------------------------------------------------------------------------------------------------------- leaves

    def leaves(self) -> Iterator[Leaf]:
        """The values by path: what is no dict, and no list or tuple with a dict or tensor in it.

        Raises:
            InputError: There are too many.
        """
        found, whole_ones = 0, set[int]()
        if self._dropped:
            yield Leaf(("calls without result",), list(self._dropped), ())
        waiting: list[tuple[Leaf, frozenset[int]]] = [(Leaf((), self.tree, ()), frozenset())]
        while waiting:
            leaf, above = waiting.pop()
            layouts = []
            node = self.meaning(leaf.value)
            while isinstance(node, Nested):
                layouts.append("pickle in bytes")
                node = self.meaning(node.value)
            is_whole = id(node) in whole_ones or id(node) in above or len(leaf.path) >= JSON_DEPTH
            below = [] if is_whole else list(self._below(leaf, node))
            if not below:
                if id(node) not in above:
                    whole_ones.add(id(node))  # a long list that is referred to often is looked through once
                yield leaf
                continue
            found += len(below)
            longest = max(len(each.path[-1]) for each in below)
            if found > self._most or longest > NAME_LENGTH:
                fault = f"a name of {longest:,} characters" if longest > NAME_LENGTH else "more values than bytes"
                raise InputError(f"{self.where}: holds {fault}; it is damaged, or no state of a training run")
            layouts += self._layout(node)
            if layouts:
                yield leaf._replace(value=ContainerForm(": ".join(layouts)))
            above |= {id(node)}
            waiting.extend((each, above) for each in reversed(below))

    def items_of(self, value: Any) -> list[tuple[Any, Any]]:
        """The items of a dict; none of anything else."""
        found = self.meaning(value)
        return found.items if isinstance(found, Dictionary) else []

    def _below(self, leaf: Leaf, node: Any) -> Iterator[Leaf]:
        if isinstance(node, Dictionary):
            texts = [self._key(key) for key, _ in node.items]
            counts = Counter(texts)
            for (key, value), text in zip(node.items, texts, strict=True):
                shown = f'"{text}"' if counts[text] > 1 and type(key) is str else text
                yield Leaf((*leaf.path, shown), value, (*leaf.place, self._digests.code(key)))
        elif type(node) in (list, tuple) and any(map(self._is_divided, node)):
            for index, value in enumerate(node):
                yield Leaf((*leaf.path, str(index)), value, (*leaf.place, index.to_bytes(8, "big")))

    def _is_divided(self, value: Any) -> bool:
        return type(value) not in _PLAIN and isinstance(self.meaning(value), Dictionary | Tensor)

    def _layout(self, node: Any) -> Iterator[str]:
        """Return what names do not show of a dict or list: its kind, and keys that are no numbers or words."""
        if not isinstance(node, Dictionary):
            yield f"{type(node).__name__} of {len(node):,}"
            return
        if node.kind != "dict" or node.rest:
            yield f"{node.kind} {self._digests.of(node.rest)}"
        unusual = sorted(self._digests.code(key) for key, _ in node.items if not _is_usual(key))
        if unusual:
            yield f"dict with other keys than words and whole numbers {hashed('keys', *unusual).hex()[2:]}"

    def _key(self, key: Any) -> str:
        """The word for a key in a name: a string or a whole number as it is, anything else with its type."""
        found = self.meaning(key)
        if type(found) is str:
            return found
        if type(found) is int and found.bit_length() <= _LONGEST_INT:
            return str(found)
        if found is None or type(found) in (bool, float) or (type(found) is bytes and len(found) <= _SHOWN):
            return f"{found!r} ({type(found).__name__})"
        return f"{self._kind(found)} {self._digests.of(found)[:_SHORT_KEY]}"

    # ------------------------------------------------------------------------------------------------------- values

    def said(self, value: Any) -> str:
        """A value as a text: itself where it is short, else its kind and digest; the same for equal values alone.

        Raises:
            InputError: A tensor in it is damaged.
        """
        if isinstance(value, ContainerForm):
            return value.text
        found = self.meaning(value)
        if _is_shown(found):
            return repr(found)
        if type(found) in (list, tuple) and len(found) <= _SHOWN and all(map(_is_shown, found)):
            text = repr(found) if {*map(type, found)} <= _PLAIN else ""
            if text and len(text) <= _SHOWN:
                return text
        return f"{self._kind(found)} {self._digests.of(value)}"

    def _kind(self, value: Any) -> str:
        """A word or two for the kind of a value."""
        if isinstance(value, Dictionary):
            return value.kind
        if isinstance(value, CallResult):
            return f"object of {value.function!s:.{_SHOWN}}" if isinstance(value.function, GlobalName) else "object"
        if isinstance(value, GlobalName):
            return f"name {value!s:.{_SHOWN}}"
        if isinstance(value, (Array, Tensor, Storage)):
            return type(value).__name__.lower()
        return "pickle" if isinstance(value, Nested) else str(getattr(value, "kind", type(value).__name__))

    def tensor(self, name: str, value: Any) -> tuple[TensorEntry, bytes | None, str] | None:
        """A tensor, its elements where they are in memory, and what else there is to it; None of another value.

        Raises:
            InputError: It leaves its storage.
        """
        found = self.meaning(value)
        if not isinstance(found, Tensor):
            return None
        entry, data = self._entry(name, found)
        kind = f", {found.kind.rpartition('.')[2]}" * (found.kind != "torch.Tensor")
        grad = ", requires grad" * found.requires_grad
        rest = f", attributes {self._digests.of(found.attributes)}" if found.attributes else ""
        return entry, data, kind + grad + rest

    def _entry(self, name: str, tensor: Tensor) -> tuple[TensorEntry, bytes | None]:
        storage = tensor.storage
        record = storage.record or Record(0, storage.ref.nbytes, None)
        found = locate_tensor(tensor.ref, {storage.ref.key: record}, f'{self.where}: tensor "{name}"')
        shape = found.shape
        if found.dtype.pack > 1 and shape:
            shape = (*shape[:-1], shape[-1] * found.dtype.pack)
        chunk = Chunk(full_region(shape), self._file, found.data_offset, found.nbytes, found.strides, found.record)
        entry = TensorEntry(name, found.dtype, shape, (chunk,))
        if storage.data is None:
            return entry, None
        data = storage.data[found.data_offset : found.data_offset + found.nbytes]
        if found.strides is not None and data:
            width = found.dtype.itemsize
            elements = np.frombuffer(data, f"V{width}")
            strides = tuple(width * stride for stride in found.strides)
            data = np.lib.stride_tricks.as_strided(elements, tensor.ref.shape, strides).tobytes()
        return entry, data

    def _described(self, value: Storage | Tensor) -> str:
        if isinstance(value, Tensor):
            return self._tensors.digest(*self._entry("in an object", value))
        ref = StorageRef(value.ref.key, None, value.ref.nbytes)
        record = value.record or Record(0, ref.nbytes, None)
        chunk = Chunk(full_region((ref.nbytes,)), self._file, record.offset, record.nbytes, None, value.record)
        return self._tensors.digest(TensorEntry("a storage", DTYPES_BY_NAME["U8"], (ref.nbytes,), (chunk,)), value.data)


def is_pickle(files: FilePool, file: str, offset: int, length: int) -> bool:
    """True of a file that is a pickle by its first and last bytes.

    One of protocol 0 or 1 has no mark at its begin, so that it is read.
    """
    if length < 2:
        return False
    head, last = files.read_up_to(file, offset, 4), files.read_up_to(file, offset + length - 1, 1)
    if head[:1] == b"\x80":
        return True
    if last != b"." or length > PICKLE_BYTES or head.startswith(b"PK"):
        return False
    try:
        return read_graph(files.read(file, offset, length), file).end == length
    except CkptxError:
        return False


def short(text: str) -> str:
    """A text as it is, or its digest where it is long."""
    return text if len(text) <= _SHOWN else f"text {hashed('text', text.encode('utf-8', 'surrogatepass')).hex()[2:]}"


def _is_shown(value: Any) -> bool:
    """True of a scalar whose `repr` is short and says all of it, as it does not of a NaN with other bits."""
    if type(value) is float:
        return value == value or struct.pack("<d", value) == _NAN
    if type(value) is int:
        return value.bit_length() <= _LONGEST_INT
    return value is None or type(value) is bool or (type(value) is str and len(value) <= _SHOWN)


def _is_usual(key: Any) -> bool:
    """True of a key that its word in a name says completely: a whole number, or a string that is no number or path."""
    return type(key) is int or (type(key) is str and key != "" and "." not in key and not _LIKE_A_NUMBER.fullmatch(key))
