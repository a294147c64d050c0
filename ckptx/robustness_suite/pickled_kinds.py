"""Gives the objects in a pickle their meaning: what torch, numpy and Python write in several ways for one value.

A pickle says how to build a value, and there are several ways: bytes are a call that encodes a string up to protocol 2,
an array in Fortran order has its elements in another order, a tensor is a view of a storage. Each becomes one of the
classes below; what is none of them stays as it was read, a `Made`, and is compared by how it is built.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from collections.abc import Mapping as Table
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ckptx.catalog.dtype import DTYPES_BY_STORAGE_CLASS, DTYPES_BY_TORCH_NAME, DType
from ckptx.catalog.entry import Record
from ckptx.catalog.object_ids import ObjectIds
from ckptx.errors import InputError
from ckptx.formats.torch_archive.pickle_machine import CallResult, GlobalName, PersistentObject, PickledDict, PickledSet
from ckptx.formats.torch_archive.unpickle import StorageRef, TensorRef
from ckptx.untrusted.limits import DIMS, shape_fault

_DEPTH = 16  # calls inside each other, as of a parameter of a tensor of a storage in bytes
_EXPANDED = 16  # times the bytes of its storage that a tensor may have, to be compared by its elements
_SMALL = 1 << 28  # bytes
_BUILTINS = "builtins"
_ARRAY_MODULES = ("numpy._core.multiarray", "numpy.core.multiarray")
_BUFFER_MODULES = ("numpy._core.numeric", "numpy.core.numeric")
_DTYPE = GlobalName("numpy", "dtype")
_NUMBER = re.compile(r"([iufcmMU])([0-9]{1,4})")
_TENSOR_TYPE = "torch.Tensor"
_PARAMETER_TYPE = "torch.nn.parameter.Parameter"


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage of torch.

    Attributes:
        kind: Its class.
        ref: Its key, dtype and length.
        record: Position of its bytes in the file; None if they are in memory.
        data: Its bytes, where they are in memory.
    """

    kind: str
    ref: StorageRef
    record: Record | None = None
    data: bytes | None = None


@dataclass(frozen=True, slots=True)
class Tensor:
    """A dense tensor.

    Attributes:
        ref: Elements of the storage that belong to the tensor.
        storage: Has its bytes.
        kind: Its class.
        requires_grad: The flag that was pickled.
        attributes: Hooks and Python attributes, where it has any.
    """

    ref: TensorRef
    storage: Storage
    kind: str = _TENSOR_TYPE
    requires_grad: bool = False
    attributes: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Array:
    """An array of numpy.

    Attributes:
        kind: Its class, any value.
        dtype: Any value.
        shape: Any value.
        content: Elements in row-major order: bytes, or a list of objects.
    """

    kind: Any
    dtype: Any
    shape: Any
    content: Any


class Dictionary(NamedTuple):
    """A dict, ordered or not, or a defaultdict.

    Attributes:
        kind: "dict", or the name of its class.
        items: Keys and values.
        rest: Its factory and attributes, where it has any.
    """

    kind: str
    items: list[tuple[Any, Any]]
    rest: tuple[Any, ...] = ()


class Kinds:
    """Finds the meaning of what was read from one file."""

    def __init__(self, where: str, records: Table[str, Record], load_storage: Callable[[bytes], Any]) -> None:
        """Remembers where storages are.

        Args:
            where: Subject of error messages.
            records: The storages of the file by key.
            load_storage: Reads a storage that was pickled in bytes; gives None for other bytes.
        """
        self._where, self._records, self._load_storage = where, records, load_storage
        self._found: dict[int, Any] = {}
        self._depth = 0
        self._ids = ObjectIds()

    def of(self, value: Any) -> Any:
        """Return the meaning of a value, or the value itself if it has none."""
        if not isinstance(value, (CallResult, PickledDict, PersistentObject)):
            return value
        found = self._found.get(self._ids(value))
        if found is None:
            if self._depth >= _DEPTH:
                return value
            self._depth += 1
            found = self._made(value) if isinstance(value, CallResult) else self._other(value)
            self._depth -= 1
            self._found[self._ids(value)] = found
        return found

    def _other(self, value: PickledDict | PersistentObject) -> Any:
        if isinstance(value, PickledDict):
            return Dictionary("dict", value.items)
        described = described_storage(value.persistent_id)
        if described is None:
            return value
        kind, ref = described
        record = self._records.get(ref.key)
        if record is None:
            raise InputError(
                f"{self._where}: the storage {ref.key[:40]!r} is missing; the file is damaged, copy it again"
            )
        if ref.numel < 0:  # of a dtype that ckptx does not know
            return Storage(kind, StorageRef(ref.key, None, record.nbytes), record)
        if record.nbytes != ref.nbytes:
            raise InputError(
                f"{self._where}: the storage {ref.key[:40]!r} has {record.nbytes} bytes, and its description says "
                f"{ref.nbytes}; the file is damaged, copy it again"
            )
        return Storage(kind, ref, record)

    def _made(self, made: CallResult) -> Any:
        function = made.function
        if made.kind == "call" and isinstance(function, GlobalName):
            find = _FUNCTIONS.get(function)
            found = None if find is None or made.keywords is not None else find(self, made)
            return made if found is None else found
        return made

    # ----------------------------------------------------------------------------------------------------- Python

    def _bytes(self, made: CallResult) -> Any:
        if not made.arguments:
            return b""
        if len(made.arguments) == 2 and made.arguments[1] == "latin1" and isinstance(made.arguments[0], str):
            return _encoded(made.arguments[0])
        return None

    def _bytearray(self, made: CallResult) -> Any:
        if not made.is_unchanged:
            return None
        if not made.arguments:
            return bytearray()
        first = self.of(made.arguments[0])
        if len(made.arguments) == 2 and made.arguments[1] == "latin-1" and isinstance(first, str):
            first = _encoded(first)
        elif len(made.arguments) != 1:
            return None
        return bytearray(first) if type(first) is bytes else None

    def _group(self, made: CallResult) -> Any:
        items = made.arguments[0] if len(made.arguments) == 1 else None
        if not made.is_unchanged or type(items) is not list:
            return None
        assert isinstance(made.function, GlobalName)
        return PickledSet(made.function.name, items)

    def _ordered_dict(self, made: CallResult) -> Any:
        first = made.arguments[0] if len(made.arguments) == 1 else []
        if len(made.arguments) > 1 or made.items or made.setters or not _is_pairs(first):
            return None
        items = [(each[0], each[1]) for each in first] + made.pairs
        return Dictionary("dict", items, tuple(filter(None, map(self._attributes, made.states))))

    def _attributes(self, state: Any) -> Any:
        """The attributes of an ordered dict without the versions of modules, which torch adds to a state dict."""
        if not isinstance(state, PickledDict):
            return (state,)
        rest = PickledDict()
        rest.items = [(key, value) for key, value in state.items if key != "_metadata"]
        return rest if rest.items else None

    def _default_dict(self, made: CallResult) -> Any:
        if len(made.arguments) > 1 or made.items or made.setters:
            return None
        return Dictionary("collections.defaultdict", made.pairs, (made.arguments, made.states))

    def _reconstructed(self, made: CallResult) -> Any:
        """An object at protocol 0 and 1, as later protocols write it."""
        if len(made.arguments) != 3 or made.arguments[1:] != (GlobalName(_BUILTINS, "object"), None):
            return None
        found = CallResult("new", made.arguments[0], ())
        found.items, found.pairs, found.states, found.setters = made.items, made.pairs, made.states, made.setters
        return found

    # ------------------------------------------------------------------------------------------------------ torch

    def _tensor_v2(self, made: CallResult) -> Any:
        return self._tensor(made, None) if 6 <= len(made.arguments) <= 7 else None

    def _tensor_v3(self, made: CallResult) -> Any:
        if not 7 <= len(made.arguments) <= 8 or not isinstance(made.arguments[6], GlobalName):
            return None
        name = made.arguments[6]
        return self._tensor(
            made, DTYPES_BY_TORCH_NAME.get(name.name) if name.module == "torch" else None, has_dtype=True
        )

    def _tensor(self, made: CallResult, dtype: DType | None, has_dtype: bool = False) -> Any:
        storage, offset, shape, strides, requires_grad, hooks = made.arguments[:6]
        shape, strides = self._sizes(shape), self._sizes(strides)
        storage = self.of(storage)
        if not made.is_unchanged or any(self._is_filled(each) for each in made.arguments[6 + has_dtype :]):
            return None
        if not isinstance(storage, Storage) or not _is_count(offset) or shape is None or strides is None:
            return None
        dtype = dtype if has_dtype else storage.ref.dtype
        if dtype is None or type(requires_grad) is not bool or len(shape) != len(strides):
            return None
        if len(shape) > DIMS or shape_fault(shape) is not None:
            return None
        if prod(shape) * dtype.itemsize > max(_SMALL, _EXPANDED * storage.ref.nbytes):
            return None
        found = Tensor(TensorRef(storage.ref, dtype, offset, shape, strides, ()), storage, requires_grad=requires_grad)
        return self._with(found, hooks)

    def _parameter(self, made: CallResult) -> Any:
        if not 3 <= len(made.arguments) <= 4 or not made.is_unchanged:
            return None
        data, requires_grad, *attributes = made.arguments
        data = self.of(data)
        if not isinstance(data, Tensor) or type(requires_grad) is not bool:
            return None
        return self._with(replace(data, kind=_PARAMETER_TYPE, requires_grad=requires_grad), *attributes)

    def _of_type(self, made: CallResult) -> Any:
        """A tensor of a subclass, or with attributes."""
        if len(made.arguments) != 4 or type(made.arguments[2]) is not tuple or not made.is_unchanged:
            return None
        function, kind, arguments, state = made.arguments
        inner = self.of(CallResult("call", function, arguments)) if isinstance(function, GlobalName) else None
        if not isinstance(inner, Tensor) or not isinstance(kind, GlobalName):
            return None
        name = _TENSOR_TYPE if kind == GlobalName("torch._tensor", "Tensor") else str(kind)
        return self._with(replace(inner, kind=name), state)

    def _with(self, tensor: Tensor, *attributes: Any) -> Tensor:
        filled = tuple(each for each in attributes if self._is_filled(each))
        return replace(tensor, attributes=(*tensor.attributes, *filled))

    def _is_filled(self, value: Any) -> bool:
        """False of None and of empty containers, as hooks and attributes mostly are."""
        found = self.of(value)
        if isinstance(found, Dictionary):
            return bool(found.items or found.rest)
        return not (found is None or (type(found) in (tuple, list) and not found))

    def _sizes(self, value: Any) -> tuple[int, ...] | None:
        if (
            isinstance(value, CallResult)
            and value.function == GlobalName("torch", "Size")
            and len(value.arguments) == 1
        ):
            value = value.arguments[0]
        return value if type(value) is tuple and len(value) <= DIMS and all(map(_is_count, value)) else None

    def _storage_in_bytes(self, made: CallResult) -> Any:
        data = self.of(made.arguments[0]) if len(made.arguments) == 1 else None
        return self._load_storage(data) if type(data) is bytes and made.is_unchanged else None

    # ------------------------------------------------------------------------------------------------------ numpy

    def _array(self, made: CallResult) -> Any:
        if len(made.states) != 1 or made.items or made.pairs or made.setters or len(made.arguments) != 3:
            return None
        state = made.states[0]
        if type(state) is not tuple or len(state) != 5:
            return None
        _, shape, dtype, is_fortran, content = state
        content = self.of(content)
        if type(content) is bytes:
            content = _row_major(content, shape) if is_fortran is True else content
        elif type(content) is not list or type(is_fortran) is not bool:
            return None
        return None if content is None else self._native(Array(made.arguments[0], dtype, shape, content))

    def _array_of_buffer(self, made: CallResult) -> Any:
        if len(made.arguments) != 4 or made.arguments[3] not in ("C", "F") or not made.is_unchanged:
            return None
        content, dtype, shape, order = made.arguments
        content = self.of(content)
        if type(content) not in (bytes, bytearray):
            return None
        content = _row_major(bytes(content), shape) if order == "F" else bytes(content)
        return None if content is None else self._native(Array(GlobalName("numpy", "ndarray"), dtype, shape, content))

    def _native(self, array: Array) -> Array:
        """An array of numbers in big-endian order as numpy has it after loading: in little-endian order."""
        dtype = self.of(array.dtype)
        if not (isinstance(dtype, CallResult) and dtype.function == _DTYPE and type(array.content) is bytes):
            return array
        code = dtype.arguments[0] if dtype.arguments else None
        state = dtype.states[0] if len(dtype.states) == 1 else None
        if type(code) is not str or type(state) is not tuple or len(state) < 2 or state[1] != ">":
            return array
        found = _NUMBER.fullmatch(code)
        width = (4 if found[1] == "U" else int(found[2]) // (2 if found[1] == "c" else 1)) if found else 0
        if not width or len(array.content) % width:
            return array
        swapped = np.frombuffer(array.content, "u1").reshape(-1, width)[:, ::-1].tobytes()
        native = CallResult(dtype.kind, dtype.function, dtype.arguments)
        native.states = [(state[0], "<", *state[2:])]
        return replace(array, dtype=native, content=swapped)


def described_storage(pid: Any) -> tuple[str, StorageRef] | None:
    """The class, and the description, of the storage that a persistent id of torch names; None where it names none.

    A storage of an unknown dtype has no length here.
    """
    if (
        type(pid) is not tuple
        or not 5 <= len(pid) <= 6
        or pid[0] != "storage"
        or (len(pid) == 6 and pid[5] is not None)
    ):
        return None
    _, kind, key, _, numel = pid[:5]
    if not (isinstance(kind, GlobalName) and type(key) is str and _is_count(numel)):
        return None
    if kind.name == "UntypedStorage":  # which torch has as one of bytes after loading
        return "torch.ByteStorage", StorageRef(key, None, numel)
    dtype = DTYPES_BY_STORAGE_CLASS.get(kind.name)
    return str(kind), StorageRef(key, dtype, numel if dtype else -1)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _encoded(text: str) -> bytes | None:
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        return None


def _is_pairs(value: Any) -> bool:
    return type(value) in (list, tuple) and all(type(each) in (list, tuple) and len(each) == 2 for each in value)


def _row_major(content: bytes, shape: Any) -> bytes | None:
    """The elements of an array in Fortran order, in row-major order; None where they do not fit the shape."""
    if type(shape) is not tuple or len(shape) > 32 or not all(map(_is_count, shape)):
        return None
    count = prod(shape)
    if not count or len(content) % count or not content:
        return content if not count and not content else None
    elements = np.frombuffer(content, f"V{len(content) // count}")
    return elements.reshape(shape, order="F").tobytes(order="C")


_FUNCTIONS: dict[GlobalName, Callable[[Kinds, CallResult], Any]] = {
    GlobalName("_codecs", "encode"): Kinds._bytes,
    GlobalName(_BUILTINS, "bytes"): Kinds._bytes,
    GlobalName(_BUILTINS, "bytearray"): Kinds._bytearray,
    GlobalName(_BUILTINS, "set"): Kinds._group,
    GlobalName(_BUILTINS, "frozenset"): Kinds._group,
    GlobalName("collections", "OrderedDict"): Kinds._ordered_dict,
    GlobalName("collections", "defaultdict"): Kinds._default_dict,
    GlobalName("copyreg", "_reconstructor"): Kinds._reconstructed,
    GlobalName("torch._utils", "_rebuild_tensor_v2"): Kinds._tensor_v2,
    GlobalName("torch._utils", "_rebuild_tensor_v3"): Kinds._tensor_v3,
    GlobalName("torch._utils", "_rebuild_parameter"): Kinds._parameter,
    GlobalName("torch._utils", "_rebuild_parameter_with_state"): Kinds._parameter,
    GlobalName("torch._tensor", "_rebuild_from_type_v2"): Kinds._of_type,
    GlobalName("torch.storage", "_load_from_bytes"): Kinds._storage_in_bytes,
    **{GlobalName(module, "_reconstruct"): Kinds._array for module in _ARRAY_MODULES},
    **{GlobalName(module, "_frombuffer"): Kinds._array_of_buffer for module in _BUFFER_MODULES},
}
