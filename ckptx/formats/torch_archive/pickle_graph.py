"""Parse any pickle as a graph of its values, without importing, calling or hashing anything in it.

`unpickle` runs CPython's unpickler with stand-ins, which is fast and sufficient for a conversion. Comparing the state
of an arbitrary trainer takes more: every way to build an object must be preserved, at every protocol from 0 to 5. So
this module interprets the opcodes itself. Each opcode creates at most one object of a size proportional to the bytes it
was read from, and a dict or a set is a list of its items, so that the work is linear in the size of the pickle.

    None, bool, int, float, str, bytes, bytearray, list, tuple     the Python value
    PickledDict, PickledSet                                        a dict; a set or frozenset
    GlobalName                                                     a class or function, by its module and name
    CallResult                                                     the result of a call, and later changes to it
    PersistentObject                                               a persistent id: a storage of a torch archive

`pickletools` of the standard library documents the opcodes.
"""

from __future__ import annotations

import struct
from _codecs import escape_decode
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable
from typing import Any, NamedTuple

from ckptx.errors import InputError
from ckptx.formats.torch_archive.pickle_machine import (
    CallResult,
    DamagedPickleError,
    GlobalName,
    PersistentObject,
    PickledDict,
    PickledSet,
    PickleMachine,
    TruncatedPickleError,
)
from ckptx.formats.torch_archive.unpickle import without_garbage_collection

_MAX_DECIMAL_DIGITS = 4300  # Python's own limit, because the conversion takes quadratic time
_MAX_PYTHON_2_PROTOCOL = 2  # protocols up to this one are written with the module names of Python 2
_MAX_PROTOCOL = 5


class PickleGraph(NamedTuple):
    """A parsed pickle.

    Attributes:
        value: The pickled value.
        end: Position of the first byte after the pickle.
        dropped: Calls whose results the pickle drops, except those that set the state of an object in it.
    """

    value: Any
    end: int
    dropped: tuple[Any, ...]


def read_graph(data: bytes, where: str, begin: int = 0) -> PickleGraph:
    """Parse the pickle at a position in `data`.

    Args:
        data: The bytes that contain the pickle.
        where: Subject of error messages.
        begin: Position of its first byte in `data`; bytes after its end are ignored.

    Raises:
        InputError: It is damaged or truncated, or refers to out-of-band buffers. Nothing was executed.
    """
    machine = PickleMachine(data, begin)
    try:
        with without_garbage_collection():
            machine.run(_OPERATIONS)
            return PickleGraph(machine.pop(), machine.position, tuple(machine.dropped))
    except TruncatedPickleError:
        raise InputError(
            f"{where}: pickle ends before its end mark at byte {len(data)}; it is truncated, copy it again"
        ) from None
    except (DamagedPickleError, IndexError, KeyError, ValueError, TypeError, AttributeError, struct.error) as error:
        reason = str(error) if isinstance(error, DamagedPickleError) else "invalid opcodes"
        raise InputError(
            f"{where}: damaged pickle ({reason} at byte {machine.position}); nothing was executed"
        ) from None


# ------------------------------------------------------------------------------------------------------------ opcodes


def _constant(value: Any) -> Callable[[PickleMachine], None]:
    return lambda machine: machine.stack.append(value)


def _unsigned(count: int) -> Callable[[PickleMachine], None]:
    """Return the operation of an opcode with an unsigned integer of `count` bytes."""
    return lambda machine: machine.stack.append(machine.unsigned_integer(count))


def _signed(count: int) -> Callable[[PickleMachine], None]:
    """Return the operation of an opcode with a length of `count` bytes and a signed integer of that length."""

    def push(machine: PickleMachine) -> None:
        length = machine.unsigned_integer(count)
        if length >> (8 * count - 1) and count == 4:
            raise DamagedPickleError("a negative length")
        machine.stack.append(int.from_bytes(machine.take(length), "little", signed=True))

    return push


def _length_prefixed(count: int, make: Callable[[bytes], Any]) -> Callable[[PickleMachine], None]:
    """Return the operation of an opcode with a length of `count` bytes, and so many bytes, which `make` converts."""
    return lambda machine: machine.stack.append(make(machine.take(machine.unsigned_integer(count))))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _text_of_python_2(data: bytes) -> str | bytes:
    """Return the value of a Python 2 `str`: a string if it is ASCII, else bytes."""
    return data.decode("ascii") if data.isascii() else data


def _decimal(digits: bytes) -> int:
    if len(digits) > _MAX_DECIMAL_DIGITS:
        raise DamagedPickleError(f"a number of {len(digits):,} digits")
    return int(digits)


def _int(machine: PickleMachine) -> None:
    digits = machine.line()
    machine.stack.append({b"00": False, b"01": True}[digits] if digits in (b"00", b"01") else _decimal(digits))


def _long(machine: PickleMachine) -> None:
    machine.stack.append(_decimal(machine.line().removesuffix(b"L")))


def _string(machine: PickleMachine) -> None:
    quoted = machine.line()
    if len(quoted) < 2 or quoted[:1] != quoted[-1:] or quoted[:1] not in (b"'", b'"'):
        raise DamagedPickleError("a string without quotes")
    machine.stack.append(_text_of_python_2(escape_decode(quoted[1:-1])[0]))


def _bin_int(machine: PickleMachine) -> None:
    machine.stack.append(int.from_bytes(machine.take(4), "little", signed=True))


def _tuple(count: int) -> Callable[[PickleMachine], None]:
    def push(machine: PickleMachine) -> None:
        values = [machine.pop() for _ in range(count)]
        machine.stack.append(tuple(reversed(values)))

    return push


def _dict_from_mark(machine: PickleMachine) -> None:
    result = PickledDict()
    result.items.extend(_to_pairs(machine.pop_to_mark()))
    machine.push_container(result)


def _to_pairs(values: list[Any]) -> list[tuple[Any, Any]]:
    if len(values) % 2:
        raise DamagedPickleError("a key without a value")
    return list(zip(values[::2], values[1::2], strict=True))


def _append(machine: PickleMachine) -> None:
    value = machine.pop()
    _extend(machine.top(), [value])


def _extend(target: Any, values: list[Any]) -> None:
    if type(target) is list:
        target.extend(values)
    elif isinstance(target, (CallResult, PickledSet)):
        target.items.extend(values)
    else:
        raise DamagedPickleError("items for a value that is not a list or set")


def _set_items(target: Any, pairs: list[tuple[Any, Any]]) -> None:
    if isinstance(target, PickledDict):
        target.items.extend(pairs)
    elif isinstance(target, CallResult):
        target.pairs.extend(pairs)
    else:
        raise DamagedPickleError("keys for a value that is not a dict")


def _set_item(machine: PickleMachine) -> None:
    value, key = machine.pop(), machine.pop()
    _set_items(machine.top(), [(key, value)])


def _extend_from_mark(extend: Callable[[Any, list[Any]], None], in_pairs: bool) -> Callable[[PickleMachine], None]:
    def change(machine: PickleMachine) -> None:
        values = machine.pop_to_mark()
        extend(machine.top(), _to_pairs(values) if in_pairs else values)

    return change


def _put(read: Callable[[PickleMachine], int]) -> Callable[[PickleMachine], None]:
    """Return the operation that stores the top of the stack in the memo; `read` consumes the index in the memo."""

    def remember(machine: PickleMachine) -> None:
        machine.memo[read(machine)] = machine.top()

    return remember


def _get(read: Callable[[PickleMachine], int]) -> Callable[[PickleMachine], None]:
    """Return the operation that pushes a value of the memo; `read` consumes its index in the memo."""

    def recall(machine: PickleMachine) -> None:
        machine.stack.append(machine.memo[read(machine)])

    return recall


def _memoize(machine: PickleMachine) -> None:
    machine.memo[len(machine.memo)] = machine.top()


def _pop(machine: PickleMachine) -> None:
    """Drop the top of the stack, a mark or a value.

    A pickler drops the result of a call that sets the state of an object (the sixth item of what `__reduce__` returns).
    """
    if machine.marks and machine.marks[-1] == len(machine.stack):
        machine.marks.pop()
        return
    dropped = machine.pop()
    if isinstance(dropped, CallResult) and dropped.kind == "call":
        target = dropped.arguments[0] if dropped.arguments else None
        if isinstance(target, CallResult):
            target.setters.append((dropped.function, *dropped.arguments[1:]))
        else:
            machine.dropped.append(dropped)


def _pop_to_mark(machine: PickleMachine) -> None:
    machine.pop_to_mark()


def _frame(machine: PickleMachine) -> None:
    """Skip the length of a frame, which has no effect."""
    machine.take(8)


def _global(machine: PickleMachine) -> None:
    machine.stack.append(_global_name(machine, _text(machine.line()), _text(machine.line())))


def _stack_global(machine: PickleMachine) -> None:
    name, module = machine.pop(), machine.pop()
    if type(name) is not str or type(module) is not str:
        raise DamagedPickleError("a name that is not a string")
    machine.stack.append(_global_name(machine, module, name))


def _global_name(machine: PickleMachine, module: str, name: str) -> GlobalName:
    if machine.protocol > _MAX_PYTHON_2_PROTOCOL:
        return GlobalName(module, name)
    found = NAME_MAPPING.get((module, name))
    return GlobalName(*found) if found else GlobalName(IMPORT_MAPPING.get(module, module), name)


def _extension(count: int) -> Callable[[PickleMachine], None]:
    return lambda machine: machine.stack.append(CallResult("code", None, (machine.unsigned_integer(count),)))


def _arguments(value: Any) -> tuple[Any, ...]:
    if type(value) is not tuple:
        raise DamagedPickleError("arguments that are not a tuple")
    return value


def _reduce(machine: PickleMachine) -> None:
    arguments, function = _arguments(machine.pop()), machine.pop()
    machine.stack.append(CallResult("call", function, arguments))


def _new(machine: PickleMachine) -> None:
    arguments, function = _arguments(machine.pop()), machine.pop()
    machine.stack.append(CallResult("new", function, arguments))


def _new_with_keywords(machine: PickleMachine) -> None:
    keywords, arguments, function = machine.pop(), _arguments(machine.pop()), machine.pop()
    machine.stack.append(CallResult("new", function, arguments, keywords))


def _instance(machine: PickleMachine) -> None:
    name = _global_name(machine, _text(machine.line()), _text(machine.line()))
    machine.stack.append(CallResult("call", name, tuple(machine.pop_to_mark())))


def _object(machine: PickleMachine) -> None:
    function, *arguments = machine.pop_to_mark()
    machine.stack.append(CallResult("call", function, tuple(arguments)))


def _build(machine: PickleMachine) -> None:
    state = machine.pop()
    target = machine.top()
    if not isinstance(target, CallResult):
        raise DamagedPickleError("a state for a value that is not an object")
    target.states.append(state)


def _persistent(machine: PickleMachine) -> None:
    machine.stack.append(PersistentObject(_text(machine.line())))


def _persistent_on_stack(machine: PickleMachine) -> None:
    machine.stack.append(PersistentObject(machine.pop()))


def _buffer(machine: PickleMachine) -> None:
    raise DamagedPickleError("a buffer that is not in the file")


def _protocol(machine: PickleMachine) -> None:
    machine.protocol = machine.unsigned_integer(1)
    if machine.protocol > _MAX_PROTOCOL:
        raise DamagedPickleError(f"protocol {machine.protocol}")


def _operations() -> list[Callable[[PickleMachine], None] | None]:
    """Return the operation of each opcode at the index of its number; None for a number without an opcode."""
    operations: list[Callable[[PickleMachine], None] | None] = [None] * 256
    for code, operation in _BY_OPCODE.items():
        operations[code[0]] = operation
    return operations


_BY_OPCODE: dict[bytes, Callable[[PickleMachine], None]] = {
    b"\x80": _protocol,
    b"\x95": _frame,
    b"(": lambda machine: machine.marks.append(len(machine.stack)),
    b"0": _pop,
    b"1": _pop_to_mark,
    b"2": lambda machine: machine.stack.append(machine.top()),
    b"N": _constant(None),
    b"\x88": _constant(True),
    b"\x89": _constant(False),
    b"I": _int,
    b"L": _long,
    b"F": lambda machine: machine.stack.append(float(machine.line())),
    b"J": _bin_int,
    b"K": _unsigned(1),
    b"M": _unsigned(2),
    b"\x8a": _signed(1),
    b"\x8b": _signed(4),
    b"G": lambda machine: machine.stack.append(struct.unpack(">d", machine.take(8))[0]),
    b"S": _string,
    b"T": _length_prefixed(4, _text_of_python_2),
    b"U": _length_prefixed(1, _text_of_python_2),
    b"V": lambda machine: machine.stack.append(machine.line().decode("raw-unicode-escape")),
    b"X": _length_prefixed(4, _text),
    b"\x8c": _length_prefixed(1, _text),
    b"\x8d": _length_prefixed(8, _text),
    b"B": _length_prefixed(4, bytes),
    b"C": _length_prefixed(1, bytes),
    b"\x8e": _length_prefixed(8, bytes),
    b"\x96": _length_prefixed(8, bytearray),
    b"]": lambda machine: machine.push_container([]),
    b"l": lambda machine: machine.push_container(machine.pop_to_mark()),
    b")": _constant(()),
    b"t": lambda machine: machine.stack.append(tuple(machine.pop_to_mark())),
    b"\x85": _tuple(1),
    b"\x86": _tuple(2),
    b"\x87": _tuple(3),
    b"}": lambda machine: machine.push_container(PickledDict()),
    b"d": _dict_from_mark,
    b"\x8f": lambda machine: machine.push_container(PickledSet("set", [])),
    b"\x91": lambda machine: machine.push_container(PickledSet("frozenset", machine.pop_to_mark())),
    b"a": _append,
    b"e": _extend_from_mark(_extend, in_pairs=False),
    b"\x90": _extend_from_mark(_extend, in_pairs=False),
    b"s": _set_item,
    b"u": _extend_from_mark(_set_items, in_pairs=True),
    b"p": _put(lambda machine: _decimal(machine.line())),
    b"q": _put(lambda machine: machine.unsigned_integer(1)),
    b"r": _put(lambda machine: machine.unsigned_integer(4)),
    b"\x94": _memoize,
    b"g": _get(lambda machine: _decimal(machine.line())),
    b"h": _get(lambda machine: machine.unsigned_integer(1)),
    b"j": _get(lambda machine: machine.unsigned_integer(4)),
    b"c": _global,
    b"\x93": _stack_global,
    b"\x82": _extension(1),
    b"\x83": _extension(2),
    b"\x84": _extension(4),
    b"R": _reduce,
    b"\x81": _new,
    b"\x92": _new_with_keywords,
    b"i": _instance,
    b"o": _object,
    b"b": _build,
    b"P": _persistent,
    b"Q": _persistent_on_stack,
    b"\x97": _buffer,
    b"\x98": _buffer,
}


_OPERATIONS = _operations()
