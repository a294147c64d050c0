"""The stack machine that executes pickle opcodes, and the values that it builds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

STOP = ord(".")
# A pickle may have this many containers, and more if it has enough bytes for each.
_MIN_CONTAINER_LIMIT = 1 << 20
_BYTES_PER_CONTAINER = 2  # the shortest container of a real writer: an empty list and its memo opcode


@dataclass(frozen=True, slots=True)
class GlobalName:
    """A class or function.

    Attributes:
        module: Name of the module in Python 3; names of Python 2 are translated.
        name: Qualified name in the module, possibly with dots.
    """

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class PickledDict:
    """A dict, as the list of (key, value) in the order in which they were set; duplicate keys are possible."""

    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items: list[tuple[Any, Any]] = []


class PickledSet:
    """A set or a frozenset, whose items have no order.

    Attributes:
        kind: "set" or "frozenset".
        items: The items; duplicates are possible.
    """

    __slots__ = ("items", "kind")

    def __init__(self, kind: str, items: list[Any]) -> None:
        self.kind, self.items = kind, items


class PersistentObject:
    """An object outside the pickle, by its persistent id."""

    __slots__ = ("persistent_id",)

    def __init__(self, pid: Any) -> None:
        self.persistent_id = pid


class CallResult:
    """The result of a call in a pickle, which is not executed.

    Attributes:
        kind: "call"; "new" for `cls.__new__(cls, ...)`; "code" for an entry of copyreg's extension registry.
        function: The class, function or other value that is called.
        arguments: Positional arguments.
        keywords: Keyword arguments as a `PickledDict`; None if there are none.
        items: Values that were appended or added to the result.
        pairs: Key-value pairs that were set on the result.
        states: States that were set on the result.
        setters: Calls that set the state of the result: the function and its remaining arguments.
    """

    __slots__ = ("arguments", "function", "items", "keywords", "kind", "pairs", "setters", "states")

    def __init__(self, kind: str, function: Any, arguments: tuple[Any, ...], keywords: Any = None) -> None:
        self.kind, self.function, self.arguments, self.keywords = kind, function, arguments, keywords
        self.items: list[Any] = []
        self.pairs: list[tuple[Any, Any]] = []
        self.states: list[Any] = []
        self.setters: list[tuple[Any, ...]] = []

    @property
    def is_unchanged(self) -> bool:
        """Return True if the result was not changed after the call."""
        return not (self.items or self.pairs or self.states or self.setters)


class DamagedPickleError(Exception):
    """A pickle is invalid; the message is the reason."""


class TruncatedPickleError(Exception):
    """A pickle ends before its STOP opcode."""


class PickleMachine:
    """The stack machine of a pickle.

    Attributes:
        data: The bytes that contain the pickle.
        position: Position in `data` of the next byte to interpret.
        stack: Values that were pushed and not popped.
        marks: For each mark, the length of the stack when it was set.
        memo: Memo index -> value.
        dropped: See `PickleGraph`.
        protocol: Protocol of the pickle; 0 if it does not state one.
    """

    def __init__(self, data: bytes, begin: int) -> None:
        self.data, self.position = data, begin
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.dropped: list[Any] = []
        self.protocol = 0
        self._containers = 0
        self._max_containers = max(_MIN_CONTAINER_LIMIT, (len(data) - begin) // _BYTES_PER_CONTAINER)

    def run(self, operations: Sequence[Callable[[PickleMachine], None] | None]) -> None:
        """Interpret opcodes up to STOP.

        Args:
            operations: Operation of each opcode, by its number; None for an invalid opcode.

        Raises:
            DamagedPickleError: The pickle is invalid; operations also raise built-in exceptions, such as KeyError.
            TruncatedPickleError: The data ends before STOP.
        """
        data, size = self.data, len(self.data)
        while self.position < size:
            code = data[self.position]
            self.position += 1
            if code == STOP:
                return
            operation = operations[code]
            if operation is None:
                raise DamagedPickleError(f"opcode 0x{code:02x}")
            operation(self)
        raise TruncatedPickleError

    # ---------------------------------------------------------------------------------------------- bytes and stack

    def take(self, count: int) -> bytes:
        """Consume and return the next `count` bytes."""
        found = self.data[self.position : self.position + count]
        if len(found) < count:
            raise TruncatedPickleError
        self.position += count
        return found

    def unsigned_integer(self, count: int) -> int:
        """Consume the next `count` bytes as an unsigned integer."""
        return int.from_bytes(self.take(count), "little")

    def line(self) -> bytes:
        """Consume the next line, and return it without its newline."""
        end = self.data.find(b"\n", self.position)
        if end < 0:
            raise TruncatedPickleError
        found = self.data[self.position : end]
        self.position = end + 1
        return found

    def pop(self) -> Any:
        """Pop the top of the stack, which must be above the last mark."""
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise DamagedPickleError("a value is missing")
        return self.stack.pop()

    def top(self) -> Any:
        """Return the top of the stack without popping it."""
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise DamagedPickleError("a value is missing")
        return self.stack[-1]

    def pop_to_mark(self) -> list[Any]:
        """Pop the last mark and the values above it, and return the values."""
        if not self.marks:
            raise DamagedPickleError("a mark is missing")
        begin = self.marks.pop()
        found = self.stack[begin:]
        del self.stack[begin:]
        return found

    def push_container(self, value: Any) -> None:
        """Push a list, dict or set. Their number is limited, because each takes many times its one byte of input."""
        self._containers += 1
        if self._containers > self._max_containers:
            raise DamagedPickleError(f"{self._containers:,} containers in {len(self.data):,} bytes")
        self.stack.append(value)
