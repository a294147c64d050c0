"""Normalize the objects in a pickle: torch, numpy and Python write one value in several ways.

A pickle contains instructions that build a value. Up to protocol 2, bytes are a call that encodes a string; an array in
Fortran order has its elements in another order; a tensor is a view of a storage. Each is converted to one of the
classes below. Other objects stay as they were parsed, a `CallResult`, and are compared by the calls that build them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
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
from ckptx.untrusted.limits import MAX_DIMS, find_shape_fault

# Nested calls that are normalized, such as a parameter that wraps a tensor with a storage in a bytes object.
_MAX_DEPTH = 16
_MAX_EXPANSION = 16  # a tensor may be this many times larger than its storage, as expanded tensors are
_MAX_SMALL_TENSOR_BYTES = 1 << 28  # up to this size, a tensor may be expanded without limit
_BUILTINS = "builtins"
_ARRAY_MODULES = ("numpy._core.multiarray", "numpy.core.multiarray")
_BUFFER_MODULES = ("numpy._core.numeric", "numpy.core.numeric")
_DTYPE = GlobalName("numpy", "dtype")
_NUMERIC_DTYPE = re.compile(r"([iufcmMU])([0-9]{1,4})")
_TENSOR_TYPE = "torch.Tensor"
_PARAMETER_TYPE = "torch.nn.parameter.Parameter"


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage of torch.

    Attributes:
        kind: Name of the class.
        ref: Key, dtype and length of the storage.
        record: Position of the bytes in the file; None if they are in memory.
        data: Bytes in memory; None if they are in the file.
    """

    kind: str
    ref: StorageRef
    record: Record | None = None
    data: bytes | None = None


@dataclass(frozen=True, slots=True)
class Tensor:
    """A dense tensor.

    Attributes:
        ref: Dtype, offset, shape and strides in the storage.
        storage: Storage with the bytes.
        kind: Name of the class.
        requires_grad: Value of the attribute `requires_grad`.
        attributes: Nonempty hooks and Python attributes, as parsed; () if there are none.
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
        kind: Class, as parsed.
        dtype: Dtype, as parsed.
        shape: Shape, as parsed.
        elements: Elements in row-major order: bytes, or a list of objects.
    """

    kind: Any
    dtype: Any
    shape: Any
    elements: Any


class Dictionary(NamedTuple):
    """A dict, ordered or not, or a defaultdict.

    Attributes:
        kind: "dict", or the name of the class.
        items: Pairs of key and value.
        attributes: Default factory and attributes; empty for none.
    """

    kind: str
    items: list[tuple[Any, Any]]
    attributes: tuple[Any, ...] = ()


class PickleNormalizer:
    """Normalizer of the objects of one file; each object is normalized once."""

    def __init__(self, subject: str, records: Mapping[str, Record], load_storage: Callable[[bytes], Any]) -> None:
        """Prepare to normalize; no object is normalized yet.

        Args:
            subject: Subject of error messages.
            records: Position of each storage in the file, by key.
            load_storage: Function that parses a storage in a bytes object, and returns None for other bytes.
        """
        self._subject, self._records, self._load_storage = subject, records, load_storage
        self._normalized: dict[int, Any] = {}
        self._depth = 0
        self._ids = ObjectIds()

    def normalize(self, value: Any) -> Any:
        """Return the normal form of a value, or the value itself if it has no other form.

        Raises:
            InputError: A storage is missing, or its size differs from its description.
        """
        if not isinstance(value, (CallResult, PickledDict, PersistentObject)):
            return value
        normalized = self._normalized.get(self._ids(value))
        if normalized is None:
            if self._depth >= _MAX_DEPTH:
                return value
            self._depth += 1
            normalized = (
                self._normalize_call(value)
                if isinstance(value, CallResult)
                else self._normalize_mapping_or_storage(value)
            )
            self._depth -= 1
            self._normalized[self._ids(value)] = normalized
        return normalized

    def _normalize_mapping_or_storage(self, value: PickledDict | PersistentObject) -> Any:
        if isinstance(value, PickledDict):
            return Dictionary("dict", value.items)
        storage = parse_storage_id(value.persistent_id)
        if storage is None:
            return value
        kind, ref = storage
        record = self._records.get(ref.key)
        if record is None:
            raise InputError(
                f"{self._subject}: the storage {ref.key[:40]!r} is missing; the file is damaged, copy it again"
            )
        if ref.numel < 0:  # the dtype is unknown
            return Storage(kind, StorageRef(ref.key, None, record.nbytes), record)
        if record.nbytes != ref.nbytes:
            raise InputError(
                f"{self._subject}: the storage {ref.key[:40]!r} has {record.nbytes} bytes, expected {ref.nbytes}; "
                f"the file is damaged, copy it again"
            )
        return Storage(kind, ref, record)

    def _normalize_call(self, call: CallResult) -> Any:
        function = call.function
        if call.kind == "call" and isinstance(function, GlobalName):
            handler = _HANDLERS.get(function)
            normalized = None if handler is None or call.keywords is not None else handler(self, call)
            return call if normalized is None else normalized
        return call

    # Each method `_make_...` returns the normal form of a call, or None if it has none; the call then stays as parsed.
    # ----------------------------------------------------------------------------------------------------- Python

    def _make_bytes(self, call: CallResult) -> Any:
        if not call.arguments:
            return b""
        if len(call.arguments) == 2 and call.arguments[1] == "latin1" and isinstance(call.arguments[0], str):
            return _encode_latin1(call.arguments[0])
        return None

    def _make_bytearray(self, call: CallResult) -> Any:
        if not call.is_unchanged:
            return None
        if not call.arguments:
            return bytearray()
        first = self.normalize(call.arguments[0])
        if len(call.arguments) == 2 and call.arguments[1] == "latin-1" and isinstance(first, str):
            first = _encode_latin1(first)
        elif len(call.arguments) != 1:
            return None
        return bytearray(first) if type(first) is bytes else None

    def _make_set(self, call: CallResult) -> Any:
        items = call.arguments[0] if len(call.arguments) == 1 else None
        if not call.is_unchanged or type(items) is not list:
            return None
        assert isinstance(call.function, GlobalName)
        return PickledSet(call.function.name, items)

    def _make_ordered_dict(self, call: CallResult) -> Any:
        pairs = call.arguments[0] if len(call.arguments) == 1 else []
        if len(call.arguments) > 1 or call.items or call.setters or not _is_pair_list(pairs):
            return None
        items = [(each[0], each[1]) for each in pairs] + call.pairs
        return Dictionary("dict", items, tuple(filter(None, map(self._strip_metadata, call.states))))

    def _strip_metadata(self, state: Any) -> Any:
        """Return attributes of an OrderedDict without `_metadata`, which torch adds to state dicts; None if empty."""
        if not isinstance(state, PickledDict):
            return (state,)
        remaining = PickledDict()
        remaining.items = [(key, value) for key, value in state.items if key != "_metadata"]
        return remaining if remaining.items else None

    def _make_default_dict(self, call: CallResult) -> Any:
        if len(call.arguments) > 1 or call.items or call.setters:
            return None
        return Dictionary("collections.defaultdict", call.pairs, (call.arguments, call.states))

    def _make_reconstructed(self, call: CallResult) -> Any:
        """Return an object of protocol 0 or 1 in the form of later protocols."""
        if len(call.arguments) != 3 or call.arguments[1:] != (GlobalName(_BUILTINS, "object"), None):
            return None
        modern_call = CallResult("new", call.arguments[0], ())
        modern_call.items, modern_call.pairs, modern_call.states, modern_call.setters = (
            call.items,
            call.pairs,
            call.states,
            call.setters,
        )
        return modern_call

    # ------------------------------------------------------------------------------------------------------ torch

    def _make_tensor_v2(self, call: CallResult) -> Any:
        return self._make_tensor(call, None) if 6 <= len(call.arguments) <= 7 else None

    def _make_tensor_v3(self, call: CallResult) -> Any:
        if not 7 <= len(call.arguments) <= 8 or not isinstance(call.arguments[6], GlobalName):
            return None
        name = call.arguments[6]
        return self._make_tensor(
            call, DTYPES_BY_TORCH_NAME.get(name.name) if name.module == "torch" else None, has_dtype=True
        )

    def _make_tensor(self, call: CallResult, dtype: DType | None, has_dtype: bool = False) -> Any:
        storage, offset, shape, strides, requires_grad, hooks = call.arguments[:6]
        shape, strides = self._parse_sizes(shape), self._parse_sizes(strides)
        storage = self.normalize(storage)
        if not call.is_unchanged or any(self._is_nonempty(each) for each in call.arguments[6 + has_dtype :]):
            return None
        if not isinstance(storage, Storage) or not _is_nonnegative_int(offset) or shape is None or strides is None:
            return None
        dtype = dtype if has_dtype else storage.ref.dtype
        if dtype is None or type(requires_grad) is not bool or len(shape) != len(strides):
            return None
        if len(shape) > MAX_DIMS or find_shape_fault(shape) is not None:
            return None
        if prod(shape) * dtype.itemsize > max(_MAX_SMALL_TENSOR_BYTES, _MAX_EXPANSION * storage.ref.nbytes):
            return None
        tensor = Tensor(TensorRef(storage.ref, dtype, offset, shape, strides, ()), storage, requires_grad=requires_grad)
        return self._add_attributes(tensor, hooks)

    def _make_parameter(self, call: CallResult) -> Any:
        if not 3 <= len(call.arguments) <= 4 or not call.is_unchanged:
            return None
        data, requires_grad, *attributes = call.arguments
        data = self.normalize(data)
        if not isinstance(data, Tensor) or type(requires_grad) is not bool:
            return None
        return self._add_attributes(replace(data, kind=_PARAMETER_TYPE, requires_grad=requires_grad), *attributes)

    def _make_tensor_subclass(self, call: CallResult) -> Any:
        """Return a tensor of a subclass, or with attributes."""
        if len(call.arguments) != 4 or type(call.arguments[2]) is not tuple or not call.is_unchanged:
            return None
        function, kind, arguments, state = call.arguments
        tensor = self.normalize(CallResult("call", function, arguments)) if isinstance(function, GlobalName) else None
        if not isinstance(tensor, Tensor) or not isinstance(kind, GlobalName):
            return None
        name = _TENSOR_TYPE if kind == GlobalName("torch._tensor", "Tensor") else str(kind)
        return self._add_attributes(replace(tensor, kind=name), state)

    def _add_attributes(self, tensor: Tensor, *attributes: Any) -> Tensor:
        nonempty = tuple(each for each in attributes if self._is_nonempty(each))
        return replace(tensor, attributes=(*tensor.attributes, *nonempty))

    def _is_nonempty(self, value: Any) -> bool:
        """Return False for None and for empty containers, such as missing hooks and attributes."""
        normalized = self.normalize(value)
        if isinstance(normalized, Dictionary):
            return bool(normalized.items or normalized.attributes)
        return not (normalized is None or (type(normalized) in (tuple, list) and not normalized))

    def _parse_sizes(self, value: Any) -> tuple[int, ...] | None:
        if (
            isinstance(value, CallResult)
            and value.function == GlobalName("torch", "Size")
            and len(value.arguments) == 1
        ):
            value = value.arguments[0]
        return (
            value if type(value) is tuple and len(value) <= MAX_DIMS and all(map(_is_nonnegative_int, value)) else None
        )

    def _make_storage(self, call: CallResult) -> Any:
        data = self.normalize(call.arguments[0]) if len(call.arguments) == 1 else None
        return self._load_storage(data) if type(data) is bytes and call.is_unchanged else None

    # ------------------------------------------------------------------------------------------------------ numpy

    def _make_array(self, call: CallResult) -> Any:
        if len(call.states) != 1 or call.items or call.pairs or call.setters or len(call.arguments) != 3:
            return None
        state = call.states[0]
        if type(state) is not tuple or len(state) != 5:
            return None
        _, shape, dtype, is_fortran, elements = state
        elements = self.normalize(elements)
        if type(elements) is bytes:
            elements = _to_row_major(elements, shape) if is_fortran is True else elements
        elif type(elements) is not list or type(is_fortran) is not bool:
            return None
        return None if elements is None else self._to_little_endian(Array(call.arguments[0], dtype, shape, elements))

    def _make_array_from_buffer(self, call: CallResult) -> Any:
        if len(call.arguments) != 4 or call.arguments[3] not in ("C", "F") or not call.is_unchanged:
            return None
        elements, dtype, shape, order = call.arguments
        elements = self.normalize(elements)
        if type(elements) not in (bytes, bytearray):
            return None
        elements = _to_row_major(bytes(elements), shape) if order == "F" else bytes(elements)
        return (
            None
            if elements is None
            else self._to_little_endian(Array(GlobalName("numpy", "ndarray"), dtype, shape, elements))
        )

    def _to_little_endian(self, array: Array) -> Array:
        """Return a numeric array with its elements in little-endian order; other arrays are not changed."""
        dtype = self.normalize(array.dtype)
        if not (isinstance(dtype, CallResult) and dtype.function == _DTYPE and type(array.elements) is bytes):
            return array
        code = dtype.arguments[0] if dtype.arguments else None
        state = dtype.states[0] if len(dtype.states) == 1 else None
        if type(code) is not str or type(state) is not tuple or len(state) < 2 or state[1] != ">":
            return array
        match = _NUMERIC_DTYPE.fullmatch(code)
        width = (4 if match[1] == "U" else int(match[2]) // (2 if match[1] == "c" else 1)) if match else 0
        if not width or len(array.elements) % width:
            return array
        swapped = np.frombuffer(array.elements, "u1").reshape(-1, width)[:, ::-1].tobytes()
        native = CallResult(dtype.kind, dtype.function, dtype.arguments)
        native.states = [(state[0], "<", *state[2:])]
        return replace(array, dtype=native, elements=swapped)


def parse_storage_id(pid: Any) -> tuple[str, StorageRef] | None:
    """Return class name and description of the storage in a persistent id of torch; None for another id.

    The length of a storage of an unknown dtype is -1.
    """
    if (
        type(pid) is not tuple
        or not 5 <= len(pid) <= 6
        or pid[0] != "storage"
        or (len(pid) == 6 and pid[5] is not None)
    ):
        return None
    _, kind, key, _, numel = pid[:5]
    if not (isinstance(kind, GlobalName) and type(key) is str and _is_nonnegative_int(numel)):
        return None
    if kind.name == "UntypedStorage":  # torch loads it as a storage of bytes
        return "torch.ByteStorage", StorageRef(key, None, numel)
    dtype = DTYPES_BY_STORAGE_CLASS.get(kind.name)
    return str(kind), StorageRef(key, dtype, numel if dtype else -1)


def _is_nonnegative_int(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _encode_latin1(text: str) -> bytes | None:
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        return None


def _is_pair_list(value: Any) -> bool:
    return type(value) in (list, tuple) and all(type(each) in (list, tuple) and len(each) == 2 for each in value)


def _to_row_major(data: bytes, shape: Any) -> bytes | None:
    """Return the bytes of a Fortran-order array in row-major order; None if their number does not match the shape."""
    # 32 is the maximum number of dimensions in numpy 1.
    if type(shape) is not tuple or len(shape) > 32 or not all(map(_is_nonnegative_int, shape)):
        return None
    count = prod(shape)
    if not count or len(data) % count or not data:
        return data if not count and not data else None
    elements = np.frombuffer(data, f"V{len(data) // count}")
    return elements.reshape(shape, order="F").tobytes(order="C")


_HANDLERS: dict[GlobalName, Callable[[PickleNormalizer, CallResult], Any]] = {
    GlobalName("_codecs", "encode"): PickleNormalizer._make_bytes,
    GlobalName(_BUILTINS, "bytes"): PickleNormalizer._make_bytes,
    GlobalName(_BUILTINS, "bytearray"): PickleNormalizer._make_bytearray,
    GlobalName(_BUILTINS, "set"): PickleNormalizer._make_set,
    GlobalName(_BUILTINS, "frozenset"): PickleNormalizer._make_set,
    GlobalName("collections", "OrderedDict"): PickleNormalizer._make_ordered_dict,
    GlobalName("collections", "defaultdict"): PickleNormalizer._make_default_dict,
    GlobalName("copyreg", "_reconstructor"): PickleNormalizer._make_reconstructed,
    GlobalName("torch._utils", "_rebuild_tensor_v2"): PickleNormalizer._make_tensor_v2,
    GlobalName("torch._utils", "_rebuild_tensor_v3"): PickleNormalizer._make_tensor_v3,
    GlobalName("torch._utils", "_rebuild_parameter"): PickleNormalizer._make_parameter,
    GlobalName("torch._utils", "_rebuild_parameter_with_state"): PickleNormalizer._make_parameter,
    GlobalName("torch._tensor", "_rebuild_from_type_v2"): PickleNormalizer._make_tensor_subclass,
    GlobalName("torch.storage", "_load_from_bytes"): PickleNormalizer._make_storage,
    **{GlobalName(module, "_reconstruct"): PickleNormalizer._make_array for module in _ARRAY_MODULES},
    **{GlobalName(module, "_frombuffer"): PickleNormalizer._make_array_from_buffer for module in _BUFFER_MODULES},
}
