"""The stack machine that pickles are programs of, and the values that it builds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

STOP = ord(".")
_FEW_CONTAINERS = 1 << 20
_BYTES_PER_CONTAINER = 2  # an empty list and its entry in the memo are the shortest that a writer makes


@dataclass(frozen=True, slots=True)
class Name:
    """A class or function.

    Attributes:
        module: Name of the module in Python 3, also if the pickle has that of Python 2.
        name: May have dots.
    """

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Mapping:
    """A dict: its items in the order in which they were set."""

    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items: list[tuple[Any, Any]] = []


class PickledSet:
    """A set or a frozenset, whose items have no order.

    Attributes:
        kind: "set" or "frozenset".
        items: May have the same one twice.
    """

    __slots__ = ("items", "kind")

    def __init__(self, kind: str, items: list[Any]) -> None:
        self.kind, self.items = kind, items


class External:
    """An object outside the pickle, by its persistent id."""

    __slots__ = ("pid",)

    def __init__(self, pid: Any) -> None:
        self.pid = pid


class CallResult:
    """The result of a call that a pickle asks for.

    Attributes:
        how: "call"; "new" for `cls.__new__(cls, ...)`; "code" for an entry of copyreg's extension registry.
        function: The class or function, or any value that is called.
        arguments: By position.
        keywords: A Mapping, or None.
        items: Values that were appended later, as to a list, or added, as to a set.
        pairs: Items that were set later, as in a dict.
        states: Each state that was set later.
        setters: Each function that was called later to set a state, with its other arguments.
    """

    __slots__ = ("arguments", "function", "how", "items", "keywords", "pairs", "setters", "states")

    def __init__(self, how: str, function: Any, arguments: tuple[Any, ...], keywords: Any = None) -> None:
        self.how, self.function, self.arguments, self.keywords = how, function, arguments, keywords
        self.items: list[Any] = []
        self.pairs: list[tuple[Any, Any]] = []
        self.states: list[Any] = []
        self.setters: list[tuple[Any, ...]] = []

    @property
    def is_untouched(self) -> bool:
        """True when nothing was done to it after the call."""
        return not (self.items or self.pairs or self.states or self.setters)


class Damaged(Exception):
    """The reason why a pickle cannot be read."""


class Truncated(Exception):
    """A pickle ends before its opcode for the end."""


class Machine:
    """The stack machine of a pickle."""

    def __init__(self, data: bytes, begin: int) -> None:
        self.data, self.at = data, begin
        self.stack: list[Any] = []
        self.marks: list[int] = []  # positions in the stack
        self.memo: dict[int, Any] = {}
        self.dropped: list[Any] = []
        self.protocol = 0
        self._containers, self._most = 0, max(_FEW_CONTAINERS, (len(data) - begin) // _BYTES_PER_CONTAINER)

    def run(self, operations: Sequence[Callable[[Machine], None] | None]) -> None:
        """Interprets opcodes up to the one for the end.

        Args:
            operations: Operation of each opcode, by its number; None for one that does not exist.
        """
        data, size = self.data, len(self.data)
        while self.at < size:
            code = data[self.at]
            self.at += 1
            if code == STOP:
                return
            operation = operations[code]
            if operation is None:
                raise Damaged(f"opcode 0x{code:02x}")
            operation(self)
        raise Truncated

    # ---------------------------------------------------------------------------------------------- bytes and stack

    def take(self, count: int) -> bytes:
        """The next bytes."""
        found = self.data[self.at : self.at + count]
        if len(found) < count:
            raise Truncated
        self.at += count
        return found

    def number(self, count: int) -> int:
        """The next bytes as an unsigned number."""
        return int.from_bytes(self.take(count), "little")

    def line(self) -> bytes:
        """The next bytes up to the end of a line."""
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise Truncated
        found = self.data[self.at : end]
        self.at = end + 1
        return found

    def pop(self) -> Any:
        """The value on top of the stack, which must be above the last mark."""
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise Damaged("a value is missing")
        return self.stack.pop()

    def top(self) -> Any:
        """The value on top of the stack, which stays there."""
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise Damaged("a value is missing")
        return self.stack[-1]

    def pop_to_mark(self) -> list[Any]:
        """The values above the last mark, which is removed."""
        if not self.marks:
            raise Damaged("a mark is missing")
        begin = self.marks.pop()
        found = self.stack[begin:]
        del self.stack[begin:]
        return found

    def contain(self, value: Any) -> None:
        """Pushes an empty container, which takes many times the byte that it was read from."""
        self._containers += 1
        if self._containers > self._most:
            raise Damaged(f"{self._containers:,} containers in {len(self.data):,} bytes")
        self.stack.append(value)
