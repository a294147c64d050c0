"""Load the pickles in torch checkpoints without running any code that they refer to.

A pickle is a program. Four checks keep it harmless:

1. Opcodes. A scan before loading allows only the opcodes of torch's writers, and checks every length and memo index
   against the size of the data: CPython's unpickler would allocate 64 GiB for one damaged memo index. Numbers have at
   most 64 bits, and the number of empty containers, which take one byte here and seventy in memory, is limited.
2. Names. A global is looked up in a table; any other name is refused with an error, or becomes a stand-in that is an
   inert value (`unknown_objects`). The table never contains the real class, only a stand-in that records its arguments.
3. Stand-ins. They are immutable (`BUILD` could otherwise set attributes on a class), so one file cannot influence how
   the next one is read.
4. Keys. No tuple is ever hashed, compared or printed: one with 70 levels that each contain the previous level twice
   takes 300 bytes and would take years; one nested 100,000 deep overflows the C stack; and numbers can be chosen so
   that the hashes of all tuples of them are equal. So every dict is a `SafeDict`, which refuses such keys. Hashes of
   strings are unpredictable. At most a handful of 64-bit numbers share a hash, but they can be chosen to collide in the
   table of a dict. So only a small dict may have numbers beyond 2**20, or a repeated one.

Any failure is raised as a `CkptxError`, after work proportional to the size of the data.
"""

from __future__ import annotations

import gc
import io
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import repeat, starmap
from typing import Any, NamedTuple, NoReturn, TypeGuard

from ckptx.catalog.dtype import DTYPES_BY_STORAGE_CLASS, DTYPES_BY_TORCH_NAME, DType
from ckptx.errors import CkptxError, InputError
from ckptx.untrusted.limits import MAX_DIMS, find_shape_fault

Globals = Mapping[tuple[str, str], object]  # (module, name) -> stand-in
UnknownName = Callable[[str, str], object]  # (module, name) -> stand-in

# Opcodes without an argument, and those with an argument of a fixed number of bytes.
_NO_ARGUMENT = re.escape(b"(N)]taesubR0\x81\x85\x86\x87\x88\x89\x90\x93\x94Q")
_WITH_ARGUMENT = rb"[Khq\x80].|M..|[Jj]....|[G\x95]........"
# Everything between two strings in one match; bounded, because the regex engine keeps a record per repetition.
_FIXED_OPCODES = re.compile(rb"[%b]*(?:(?:%b)[%b]*){0,4096}" % (_NO_ARGUMENT, _WITH_ARGUMENT, _NO_ARGUMENT), re.DOTALL)

# Opcodes that create a dict, a set or a frozenset -> the opcodes that replace them.
_REPLACED_OPCODES = {0x7D: 0x97, 0x8F: 0x97, 0x91: ord("t")}
_LENGTH_1_OPCODES = frozenset(b"\x8cC")  # SHORT_BINUNICODE, SHORT_BINBYTES
_LENGTH_4_OPCODES = frozenset(b"XB")  # BINUNICODE, BINBYTES
_GLOBAL, _LONG_BINPUT, _STOP, _LONG1 = b"cr.\x8a"
_MAX_INTEGER_BYTES = 8
# A pickle may have this many empty containers, and more if it has enough bytes for each.
_MIN_CONTAINER_LIMIT = 1 << 20
# A dict with at least so many keys refuses numbers beyond `_MAX_KEY`, and a number that it already has.
_MAX_UNCHECKED_KEYS = 1000
_MAX_KEY = 1 << 20  # the parameters of an optimizer are numbered from 0 on
_BYTES_PER_CONTAINER = 4
_MAX_DTYPE_LENGTH = 40  # characters

# A dtype that ckptx does not know is allowed here and refused later, in an error that names its tensor.
_DTYPE_NAME = re.compile(r"(?:bfloat|complex|float|bits|q?u?int|bool)\w*")


class ReadOnlyClass(type):
    """Metaclass of stand-in classes, on which a pickle cannot set attributes."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise pickle.UnpicklingError(f"attempt to change {cls.__name__}.{name}")


class Symbol(str):
    """A value represented only by its dotted name: `torch.bfloat16`, `torch.strided`."""

    __slots__ = ()


class Call:
    """Immutable stand-in for a function that calls a function of ckptx with the pickled arguments."""

    __slots__ = ("_function",)
    _function: Callable[..., object]

    def __init__(self, function: Callable[..., object]) -> None:
        object.__setattr__(self, "_function", function)

    def __call__(self, *arguments: object) -> object:
        return self._function(*arguments)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise pickle.UnpicklingError("attempt to change a function")


class EnumClass(Call):
    """Stand-in for an enum: a function of the value or name of a member."""

    __slots__ = ()


def describe_refused_name(name: str) -> str:
    """Describe a class or function to which a pickle must not refer, for error messages."""
    return f"refers to {name}, which is not allowed in a checkpoint; nothing was executed"


def _enum_member(enum_class: object, name: object) -> object:
    """Stand in for `getattr`, which may only look up a member of an enum."""
    if not (isinstance(enum_class, EnumClass) and isinstance(name, str)):
        raise InputError(f"{describe_refused_name('builtins.getattr')}; save only tensors and plain values")
    return enum_class(name)


# Python 3.11.0 to 3.11.3 pickles an enum member as `getattr` of its class and name; other versions as a call of the
# class with its value.
MEMBER_BY_NAME: Globals = {
    ("builtins", "getattr"): Call(_enum_member),
    ("__builtin__", "getattr"): Call(_enum_member),
}


class SafeDict(dict[Any, Any], metaclass=ReadOnlyClass):
    """Stand-in for dicts and sets, ordered or not; attributes such as `_metadata` of a state dict are dropped."""

    __slots__ = ()

    def __setitem__(self, key: object, value: object) -> None:
        if type(key) is not str:
            self._check_key(key)
        dict.__setitem__(self, key, value)

    def _check_key(self, key: object) -> None:
        if isinstance(key, tuple):
            raise pickle.UnpicklingError("a tuple as a dict key, which torch never writes")
        if isinstance(key, int | float) and len(self) >= _MAX_UNCHECKED_KEYS:
            if not -_MAX_KEY <= key <= _MAX_KEY:
                raise pickle.UnpicklingError(
                    f"a dict with more than {_MAX_UNCHECKED_KEYS} keys and large numbers among them"
                )
            if key in self:
                raise pickle.UnpicklingError(f"duplicate dict key {key}")

    def add(self, item: object) -> None:
        """Add an item, for the opcode that fills a set."""
        self[item] = None

    def __setstate__(self, state: object) -> None:
        pass


type.__setattr__(SafeDict, "__name__", "dict")  # for error messages


def _ordered_dict(pairs: object = ()) -> SafeDict:
    """Stand in for `collections.OrderedDict`, which may be called with its items."""
    result = SafeDict()
    if not isinstance(pairs, tuple | list):
        raise pickle.UnpicklingError("an OrderedDict of items that are not pairs")
    for pair in pairs:
        key, value = pair
        result[key] = value
    return result


ORDERED_DICT = Call(_ordered_dict)


def load(
    data: bytes,
    allowed: Globals,
    where: str,
    persistent: Callable[[object], object] | None = None,
    unknown: UnknownName | None = None,
) -> Any:
    """Return the object tree of a pickle, with stand-ins for classes and functions.

    Args:
        data: The whole pickle; bytes after its end are ignored, as in torch.
        allowed: Stand-in of each (module, name) that may occur. Torch dtypes are always allowed, as `Symbol`.
        where: Subject of error messages.
        persistent: Returns the stand-in for a persistent id (a storage of a torch archive); None if none may occur.
        unknown: Returns the stand-in for the module and name of any other class or function; None if none may occur.

    Raises:
        InputError: The pickle is damaged, or refers to something that is not allowed. Nothing was executed.
    """
    checked = _scan(data, where)
    try:
        with without_garbage_collection():
            return _Unpickler(checked, allowed, persistent, unknown).load()
    except CkptxError as error:
        raise type(error)(f"{where}: {error}") from None
    except Exception as error:  # A damaged pickle can raise any class.
        raise InputError(
            f"{where}: damaged pickle ({_describe_error(error)}); nothing was executed; copy or download it again"
        ) from None


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector, because collections cost five times as much as creating very many objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Peekable(io.BytesIO):
    """BytesIO with `peek`, which lets the unpickler read ahead instead of reading each opcode separately.

    `io.BufferedReader` has `peek`, too, but allocates the requested number of bytes before checking that they exist.
    """

    def peek(self, size: int) -> bytes:
        """Return the next bytes without consuming them."""
        position = self.tell()
        data = self.read(size)
        self.seek(position)
        return data


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        data: bytes | bytearray,
        allowed: Globals,
        persistent: Callable[[object], object] | None,
        unknown: UnknownName | None,
    ) -> None:
        # An endless supply of new dicts, for the opcodes that `_scan` put in place of those for dicts and sets.
        super().__init__(_Peekable(data), buffers=starmap(SafeDict, repeat(())))
        self._allowed = allowed
        self._persistent = persistent
        self._unknown = unknown

    def find_class(self, module: str, name: str) -> Any:
        found = self._allowed.get((module, name))
        if found is not None:
            return found
        if module == "torch" and len(name) <= _MAX_DTYPE_LENGTH and _DTYPE_NAME.fullmatch(name):
            return Symbol(f"torch.{name}")
        if self._unknown is not None:
            return self._unknown(module, name)
        raise InputError(f"{describe_refused_name(f'{module[:80]}.{name[:80]}')}; save only tensors and plain values")

    def persistent_load(self, pid: object) -> Any:
        if self._persistent is None:
            raise InputError("refers to an object outside the pickle, which is not allowed here; copy it again")
        return self._persistent(pid)


def _scan(data: bytes, where: str) -> bytearray:
    """Refuse opcodes that torch never writes, lengths or memo indices beyond the data, and too many containers.

    Returns:
        The data with opcodes replaced so that dicts and sets are created as `SafeDict`: the opcode for "next
        out-of-band buffer" replaces those for an empty dict or set. A frozenset becomes a tuple.
    """
    size = len(data)
    empty = sum(map(data.count, (b"}", b"]", b"\x8f")))
    if empty > _MIN_CONTAINER_LIMIT and empty > size // _BYTES_PER_CONTAINER:
        raise InputError(
            f"{where}: damaged pickle ({empty:,} containers in {size:,} bytes); nothing was executed; copy or download "
            "it again"
        )
    match = _FIXED_OPCODES.match
    checked = bytearray(data)
    position = 0
    try:
        while True:
            skipped = match(data, position)
            assert skipped is not None  # the pattern matches the empty string
            end = skipped.end()
            code = data[end]
            if code in _REPLACED_OPCODES:
                checked[end] = _REPLACED_OPCODES[code]
                position = end + 1
            elif code == _LONG1:
                length = data[end + 1]
                position = end + 2 + length
                if length > _MAX_INTEGER_BYTES and (length > _MAX_INTEGER_BYTES + 1 or data[position - 1]):
                    raise InputError(
                        f"{where}: damaged pickle (number of {length} bytes at byte {end}); nothing was executed; copy "
                        "or download it again"
                    )
            elif code in _LENGTH_1_OPCODES:
                position = end + 2 + data[end + 1]
            elif code in _LENGTH_4_OPCODES:
                position = end + 5 + int.from_bytes(data[end + 1 : end + 5], "little")
            elif code == _GLOBAL:
                position = data.index(b"\n", data.index(b"\n", end) + 1) + 1
            elif code == _LONG_BINPUT and int.from_bytes(data[end + 1 : end + 5], "little") < size:
                position = end + 5
            elif code == _STOP:
                return checked
            elif end == position:
                raise InputError(
                    f"{where}: damaged pickle (opcode 0x{code:02x} at byte {end}); nothing was executed; copy or "
                    "download it again"
                )
            else:
                position = end
    except (IndexError, ValueError):
        raise InputError(
            f"{where}: pickle ends before its end mark at byte {size}; it is truncated, copy it again"
        ) from None


def _describe_error(error: Exception) -> str:
    text = str(error).replace("\n", " ")
    return f"{type(error).__name__}: {text[:120]}" if text else type(error).__name__


class StorageRef(NamedTuple):
    """A storage of a torch archive: record `data/<key>`.

    Attributes:
        key: Name of the record.
        dtype: Dtype of the elements; None for an untyped storage.
        numel: Number of elements, or of bytes for an untyped storage.
    """

    key: str
    dtype: DType | None
    numel: int

    @property
    def nbytes(self) -> int:
        """Return the size of the storage in bytes, according to the pickle."""
        return self.numel * (self.dtype.itemsize if self.dtype else 1)


class TensorRef(NamedTuple):
    """A tensor of a torch archive: a strided view of a storage.

    Attributes:
        storage: Storage of its elements.
        dtype: Dtype of its elements.
        offset: Index of the first element in the storage, in torch elements.
        shape: Shape in torch elements.
        strides: Strides in torch elements.
        flags: Names of flags that change the values, such as "conj" and "neg".
    """

    storage: StorageRef
    dtype: DType
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    flags: tuple[str, ...]


class UnsupportedObject(NamedTuple):
    """A torch object that ckptx does not convert.

    Attributes:
        kind: Description for messages, such as "sparse tensor".
    """

    kind: str


def load_torch(data: bytes, where: str, allowed: Globals | None = None, unknown: UnknownName | None = None) -> Any:
    """Read the object tree of a `data.pkl`, with `TensorRef`, `StorageRef` and `UnsupportedObject` for torch objects.

    Args:
        data: The pickle.
        where: Subject of error messages.
        allowed: Stand-in of each name that may occur; None means `TORCH_GLOBALS`.
        unknown: See `load`.

    Raises:
        InputError: See `load`; also tensors with an invalid shape, strides or storage.
    """
    return load(data, TORCH_GLOBALS if allowed is None else allowed, where, _storage_stand_in, unknown)


def _layout_stand_in(name: object) -> Symbol:
    if not isinstance(name, str):  # any other value would be printed, at any depth of nesting
        raise InputError("has a tensor layout that is not a string; the file is damaged, copy it again")
    return Symbol(name[:40])


LAYOUT_STAND_IN = Call(_layout_stand_in)


def _storage_stand_in(pid: object) -> StorageRef | UnsupportedObject:
    """Return the stand-in for a persistent id of torch: ("storage", class, key, device, number of elements)."""
    if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage"):
        raise InputError(
            "refers to an object outside the pickle that is not a storage; the file is damaged, copy it again"
        )
    _, kind, key, _, numel = pid
    if not (isinstance(kind, Symbol) and isinstance(key, str) and _is_count(numel)):
        raise InputError("describes a storage with values of the wrong type; the file is damaged, copy it again")
    name = kind.rpartition(".")[2]
    if name == "UntypedStorage":
        return StorageRef(key, None, numel)
    dtype = DTYPES_BY_STORAGE_CLASS.get(name)
    return StorageRef(key, dtype, numel) if dtype else UnsupportedObject(f"tensor over {name[:40]}")


def _is_count(value: object) -> bool:
    """Return True for an integer from 0 to 2**63 - 1."""
    return type(value) is int and 0 <= value < 1 << 63


def is_shape(value: object) -> TypeGuard[tuple[int, ...]]:
    """Return True for a tuple of at most `MAX_DIMS` integers from 0 to 2**63 - 1."""
    return type(value) is tuple and len(value) <= MAX_DIMS and all(map(_is_count, value))


def _make_tensor(
    storage: object, offset: object, shape: object, strides: object, dtype: DType | None, flags: object
) -> TensorRef | UnsupportedObject:
    """Return the stand-in for a tensor after checking the pickled arguments of torch's rebuild function."""
    if isinstance(storage, UnsupportedObject):
        return storage
    if not isinstance(storage, StorageRef) or dtype is None:
        raise InputError("describes a tensor without a storage or dtype; the file is damaged, copy it again")
    if not (_is_count(offset) and is_shape(shape) and is_shape(strides)):
        raise InputError("describes a tensor with values of the wrong type; the file is damaged, copy it again")
    assert isinstance(offset, int)
    if len(shape) != len(strides):
        raise InputError(
            f"describes a tensor with {len(shape)} dims and {len(strides)} strides; the file is damaged, copy it again"
        )
    if (fault := find_shape_fault(shape)) is not None:
        raise InputError(f"describes a tensor with {fault}; the file is damaged, copy it again")
    names = tuple(str(name)[:40] for name, is_set in flags.items() if is_set)[:4] if isinstance(flags, dict) else ()
    return TensorRef(storage, dtype, offset, shape, strides, names)


def _rebuild_v2(
    storage: object,
    offset: object,
    shape: object,
    strides: object,
    grad: object,
    hooks: object,
    flags: object = None,
) -> TensorRef | UnsupportedObject:
    dtype = storage.dtype if isinstance(storage, StorageRef) else None
    return _make_tensor(storage, offset, shape, strides, dtype, flags)


def _rebuild_v3(
    storage: object,
    offset: object,
    shape: object,
    strides: object,
    grad: object,
    hooks: object,
    dtype: object,
    flags: object = None,
) -> TensorRef | UnsupportedObject:
    if not isinstance(dtype, Symbol):
        raise InputError("describes a tensor without a dtype; the file is damaged, copy it again")
    known = DTYPES_BY_TORCH_NAME.get(dtype.removeprefix("torch."))
    return (
        _make_tensor(storage, offset, shape, strides, known, flags)
        if known
        else UnsupportedObject(f"tensor of dtype {dtype}")
    )


def _parameter(data: object, grad: object, hooks: object, state: object = None) -> object:
    return data


def rebuild_from_type(function: object, kind: object, arguments: object, state: object) -> object:
    """Stand in for torch's `_rebuild_from_type_v2`, which rebuilds a tensor with Python attributes or of a subclass.

    The attributes are dropped; a tensor of a subclass becomes an `UnsupportedObject`.
    """
    if kind in _PLAIN_TENSORS and function in _REBUILD_FUNCTIONS and isinstance(arguments, tuple):
        assert isinstance(function, Call)
        return function(*arguments)
    return UnsupportedObject(f"tensor of subclass {kind}" if isinstance(kind, Symbol) else "tensor of a subclass")


def _unsupported(kind: str) -> Call:
    return Call(lambda *_: UnsupportedObject(kind))


_REBUILD_FUNCTIONS = (Call(_rebuild_v2), Call(_rebuild_v3))
_PLAIN_TENSORS = (
    Symbol("torch.Tensor"),
    Symbol("torch.nn.parameter.Parameter"),
    Symbol("torch.nn.parameter.Buffer"),
)

TORCH_GLOBALS: Globals = {
    ("torch._utils", "_rebuild_tensor_v2"): _REBUILD_FUNCTIONS[0],
    ("torch._utils", "_rebuild_tensor_v3"): _REBUILD_FUNCTIONS[1],
    ("torch._utils", "_rebuild_parameter"): Call(_parameter),
    ("torch._utils", "_rebuild_parameter_with_state"): Call(_parameter),
    ("torch._utils", "_rebuild_sparse_tensor"): _unsupported("sparse tensor"),
    ("torch._utils", "_rebuild_qtensor"): _unsupported("quantized tensor"),
    ("torch._utils", "_rebuild_nested_tensor"): _unsupported("nested tensor"),
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): _unsupported("meta tensor without bytes"),
    ("torch._utils", "_rebuild_wrapper_subclass"): _unsupported("tensor of a subclass"),
    ("torch._utils", "_rebuild_device_tensor_from_numpy"): _unsupported("tensor pickled through numpy"),
    ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): _unsupported("tensor of another device"),
    ("torch._tensor", "_rebuild_from_type_v2"): Call(rebuild_from_type),
    ("torch.serialization", "_get_layout"): LAYOUT_STAND_IN,
    ("torch", "Size"): tuple,
    ("torch", "device"): Call(lambda *_: Symbol("torch.device")),
    ("torch", "per_tensor_affine"): Symbol("torch.per_tensor_affine"),
    ("torch", "per_channel_affine"): Symbol("torch.per_channel_affine"),
    ("torch", "Tensor"): _PLAIN_TENSORS[0],
    ("torch.nn.parameter", "Parameter"): _PLAIN_TENSORS[1],
    ("torch.nn.parameter", "Buffer"): _PLAIN_TENSORS[2],
    ("torch.distributed.tensor", "DTensor"): Symbol("torch.distributed.tensor.DTensor"),
    ("torch.storage", "UntypedStorage"): Symbol("torch.UntypedStorage"),
    **{
        ("torch", name): Symbol(f"torch.{name}")
        for name in (
            *DTYPES_BY_STORAGE_CLASS,
            "QInt8Storage",
            "QUInt8Storage",
            "QInt32Storage",
            "QUInt4x2Storage",
            "UntypedStorage",
        )
    },
    ("collections", "OrderedDict"): ORDERED_DICT,
}
