"""Pickles of any trainer as values without code: what they name is recorded, and nothing of it is imported or run.

The unpickler of `formats.torch_archive` keeps a pickle from doing anything (see there). A conversion refuses the names
it has no use for; here each gets a stand-in that remembers what it was called with and what was put into it, so that
any state can be told from any other: arrays of numpy, enumerations, classes that are not even installed.

A digest speaks of values alone. The order of the keys of a dict, that of a set (which differs from process to process),
what was written once and referred to, and how often, do not enter it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import blake2b
from typing import Any

from ckptx.catalog.dtype import BY_NAME
from ckptx.catalog.entry import Chunk, Record, TensorEntry
from ckptx.catalog.region import whole
from ckptx.errors import InputError
from ckptx.formats.torch_archive.archive import open_archive, place_tensor
from ckptx.formats.torch_archive.unpickle import Dict, Refused, Sealed, TensorRef, load_recorded
from ckptx.storage.files import FilePool
from ckptx.untrusted.limits import JSON_DEPTH, NAME_LENGTH, PICKLE_BYTES

_UNORDERED = {f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("set", "frozenset")}
_LIKE_A_PICKLE = re.compile(rb"\x80[\x02-\x05].")
_DEFAULTDICT = "collections.defaultdict"
_FEW = 1 << 12  # values of a pickle that nobody counts: one written once may be referred to often
_SHOWN = 60  # characters of a text that is given as it is
_PLAIN = {type(None), bool, int, float}
_NUMBERS = {"F32": "f", "F64": "d", "I64": "q", "I32": "i", "BOOL": "?"}

Digest = Callable[[TensorEntry], str]


class Recorded(metaclass=Sealed):
    """Stands in for something of a class: what it was made with, its state, and its items."""

    __slots__ = ("items", "made_with", "state")
    name = ""
    items: list[Any]
    made_with: tuple[object, ...]
    state: object

    def __new__(cls, *arguments: object, **_: object) -> Recorded:
        made = object.__new__(cls)
        made.made_with, made.state, made.items = arguments, None, []
        return made

    def __setstate__(self, state: object) -> None:
        self.state = state

    def append(self, item: object) -> None:
        """Of a list."""
        self.items.append(item)

    def extend(self, items: list[object]) -> None:
        """Of a list."""
        self.items.extend(items)

    def add(self, item: object) -> None:
        """Of a set."""
        self.items.append(item)

    def __setitem__(self, key: object, value: object) -> None:
        self.items.append((key, value))


class Reader:
    """Reads pickles of one file: an archive of `torch.save` at a position, or a pickle that is all of the file."""

    def __init__(self, files: FilePool, file: str, where: str, offset: int = 0, nbytes: int | None = None) -> None:
        """Reads it.

        Args:
            files: Has the file.
            file: Its name.
            where: Subject of error messages.
            offset: Where the archive begins.
            nbytes: Its length; the rest of the file by default.

        Raises:
            InputError: It is damaged, too large, nested too deep, or neither of the two.
            UnsupportedError: An archive of a kind that is not read.
        """
        self.where, self._file = where, file
        self._records: dict[str, Record] = {}
        self._named: dict[tuple[str, str], type[Recorded]] = {}
        self._digests: dict[int, str] = {}
        self._opened: dict[int, Any] = {}
        length = files.size(file) - offset if nbytes is None else nbytes
        self._most = 0
        if files.read_up_to(file, offset, 1) == b"\x80" and files.read_up_to(file, offset, 4)[2:] != b"\x8a\x0a":
            if length > PICKLE_BYTES:
                raise InputError(f"{where}: a pickle of {length} bytes, allowed at most {PICKLE_BYTES}")
            self.tree = self._load(files.read(file, offset, length), where)
        else:
            found = open_archive(partial(files.read, file), offset, length, where, self._load)
            self.tree, self._records = found

    def _load(self, data: bytes, where: str) -> Any:
        self._most = max(_FEW, len(data))
        return load_recorded(data, self._stand_in, where)

    def _stand_in(self, module: str, name: str) -> type[Recorded]:
        if (module, name) not in self._named:
            described: dict[str, Any] = {"__slots__": (), "name": f"{module}.{name}"}
            self._named[module, name] = Sealed("Recorded", (Recorded,), described)  # type: ignore[assignment]
        return self._named[module, name]

    def leaves(self) -> Iterator[tuple[tuple[str, ...], Any]]:
        """The values by path: what is no dict, and no list or tuple with a dict or tensor in it.

        Raises:
            InputError: There are too many, or it is nested too deep, as what holds itself is.
        """
        found, whole_ones = 0, set[int]()
        waiting: list[tuple[tuple[str, ...], Any]] = [((), self.tree)]
        while waiting:
            path, node = waiting.pop()
            node = self._inside(node)
            below = [] if id(node) in whole_ones else list(_below(node))
            if not below:
                whole_ones.add(id(node))  # a long list that is referred to often is looked through once
                yield path, node
                continue
            found += len(below)
            longest = max(len(key) for key, _ in below)
            if len(path) >= JSON_DEPTH or found > self._most or longest > NAME_LENGTH:
                said = f"a name of {longest:,} characters" if longest > NAME_LENGTH else f"{JSON_DEPTH} levels or more"
                said = "more values than bytes" if found > self._most else said
                raise InputError(f"{self.where}: holds {said}; it is damaged, or no state of a training run")
            waiting.extend(((*path, key), value) for key, value in reversed(below))

    def _inside(self, value: Any) -> Any:
        """What is pickled in bytes, as loaders have their state; anything else as it is.

        The bytes of equal values differ: what one object was when it was written first is two after it was read.
        """
        data = _bytes_of(value)
        if data is None or not (_LIKE_A_PICKLE.match(data) and data.endswith(b".")):
            return value
        if id(value) not in self._opened:
            try:
                self._opened[id(value)] = load_recorded(data, self._stand_in, self.where)
            except InputError:
                self._opened[id(value)] = value
        return self._opened[id(value)]

    def entry(self, name: str, tensor: TensorRef | Refused) -> TensorEntry:
        """Where the bytes of a tensor are.

        Raises:
            InputError: It leaves its storage.
            UnsupportedError: A kind of tensor that is not read.
        """
        found = place_tensor(tensor, self._records, f'{self.where}: tensor "{name}"')
        shape = found.shape
        if found.dtype.pack > 1 and shape:
            shape = (*shape[:-1], shape[-1] * found.dtype.pack)
        chunk = Chunk(whole(shape), self._file, found.data_offset, found.nbytes, found.strides, found.record)
        return TensorEntry(name, found.dtype, shape, (chunk,))

    def said(self, name: str, value: Any, digest: Digest) -> str:
        """A value as a text: itself where it is short, else a digest; the same for equal values.

        Raises:
            InputError: It is nested too deep, or a tensor in it is damaged.
        """
        if value is None or type(value) in (bool, int, float) or (type(value) is str and len(value) <= _SHOWN):
            return repr(value)
        if type(value) in (list, tuple) and len(value) <= _SHOWN and {*map(type, value)} <= _PLAIN:
            return short(repr(value))
        return self._digest(name, value, digest, 0)

    def _digest(self, name: str, value: Any, digest: Digest, depth: int) -> str:
        if value is None or type(value) in (bool, int, float):
            return repr(value)
        if id(value) in self._digests:
            return self._digests[id(value)]
        if depth > JSON_DEPTH:
            raise InputError(f'{self.where}: "{name}" is nested deeper than {JSON_DEPTH} levels; it is damaged')
        of = partial(self._digest, name, digest=digest, depth=depth + 1)
        if isinstance(value, TensorRef | Refused):
            made = digest(self.entry(name, value))
        elif isinstance(value, str):
            made = _hash("text", value.encode("utf-8", "surrogatepass"))
        elif isinstance(value, bytes | bytearray):
            inside = self._inside(value)
            made = _hash("bytes", value) if inside is value else _hash("pickle", of(inside))
        elif isinstance(value, dict):
            made = _hash("dict", *sorted(f"{of(key)}: {of(item)}" for key, item in dict.items(value)))
        elif isinstance(value, list | tuple):
            made = _hash(type(value).__name__, *map(of, value))
        elif isinstance(value, Recorded):
            made = self._of_recorded(value, of)
        elif isinstance(value, Sealed):
            made = f"class {getattr(value, 'name', value.__name__)}"
        else:
            made = type(value).__name__
        self._digests[id(value)] = made
        return made

    def _of_recorded(self, value: Recorded, of: Callable[[Any], str]) -> str:
        inside = self._inside(value)
        if inside is not value:
            return _hash("pickle", of(inside))
        if value.name in _UNORDERED and len(value.made_with) == 1 and isinstance(value.made_with[0], list | tuple):
            return _hash("dict", *sorted(f"{of(each)}: None" for each in value.made_with[0]))
        pairs = [of(each) for each in value.items]
        if all(isinstance(each, tuple) for each in value.items):
            pairs.sort()  # of a dict
        return _hash(value.name, *map(of, value.made_with), of(value.state), *pairs)


def _below(node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Dict):
        yield from ((str(key), value) for key, value in dict.items(node))
    elif isinstance(node, Recorded) and node.name == _DEFAULTDICT and all(type(each) is tuple for each in node.items):
        yield from ((str(key), value) for key, value in node.items)
    elif type(node) in (list, tuple) and any(isinstance(each, dict | TensorRef | Refused) for each in node):
        yield from ((str(index), value) for index, value in enumerate(node))


def _bytes_of(value: Any) -> bytes | None:
    """Bytes, also as protocol 2 writes them: a call that encodes a text; None of anything else."""
    if isinstance(value, Recorded) and value.name == "_codecs.encode" and len(value.made_with) == 2:
        text, encoding = value.made_with
        if isinstance(text, str) and encoding == "latin1":
            try:
                return text.encode("latin1")
            except UnicodeEncodeError:
                return None
    return value if type(value) is bytes else None


def _hash(kind: str, *parts: str | bytes | bytearray) -> str:
    digest = blake2b(kind.encode("utf-8", "surrogatepass"), digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def short(text: str) -> str:
    """A text as it is, or its digest where it is long."""
    return text if len(text) <= _SHOWN else _hash("text", text)


def number_of(entry: TensorEntry, files: FilePool) -> str | None:
    """The only element of a tensor as a text, of the dtypes that counters have; None of another tensor."""
    kind = _NUMBERS.get(entry.dtype.name)
    if kind is None or entry.numel != 1 or len(entry.chunks) != 1:
        return None
    chunk = entry.chunks[0]
    assert BY_NAME[entry.dtype.name] is entry.dtype
    return repr(struct.unpack(f"<{kind}", files.read(chunk.file, chunk.offset, entry.nbytes))[0])
