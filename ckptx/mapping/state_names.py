"""Optimizer state of a DCP: which tensors and objects belong to which parameter, whatever trainer wrote them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from ckptx.errors import UnsupportedError
from ckptx.mapping.names import is_optimizer, pattern_of


@dataclass(frozen=True, slots=True)
class State:
    """One name of optimizer state.

    Attributes:
        name: On disk.
        parameter: The model's tensor it belongs to, as the view calls it.
        before: What stands before the name of the parameter.
        name_in_state: The name of the parameter as it stands there.
        after: What stands behind it.
    """

    name: str
    parameter: str
    before: str
    name_in_state: str
    after: str

    def of(self, name_in_state: str) -> str:
        """The name of the same state of another parameter."""
        return f"{self.before}{name_in_state}{self.after}"


@dataclass(slots=True)
class Owners:
    """Finds the parameter inside the name of a state.

    Attributes:
        names: Every naming of a parameter's name -> the view's name of it.
    """

    names: Mapping[str, str]
    _spans: dict[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, on_disk: Mapping[str, str], prefix: str = "") -> Owners:
        """Of parameters by the view's name -> name on disk; the longest naming is found first.

        Args:
            on_disk: The names.
            prefix: What names of the model begin with on disk, and those of its state do not; wrappers they share.
        """
        names = {disk.removeprefix(prefix): name for name, disk in on_disk.items()} if prefix else {}
        names |= {name: name for name in on_disk}
        names |= {disk: name for name, disk in on_disk.items()}
        return cls(names)

    def find(self, name: str) -> State | None:
        """The state that `name` is, or None when no parameter is named in it."""
        parts = name.split(".")
        known = self._spans.get(pattern_of(name))
        if known is not None:
            found = self._at(name, parts, *known)
            if found is not None:
                return found
        for length in range(len(parts) - 1, 0, -1):
            for begin in range(1, len(parts) - length + 1):
                found = self._at(name, parts, begin, begin + length)
                if found is not None:
                    self._spans[pattern_of(name)] = begin, begin + length
                    return found
        return None

    def _at(self, name: str, parts: list[str], begin: int, end: int) -> State | None:
        name_in_state = ".".join(parts[begin:end])
        parameter = self.names.get(name_in_state)
        if parameter is None:
            return None
        before = "".join(f"{part}." for part in parts[:begin])
        return State(name, parameter, before, name_in_state, "".join(f".{part}" for part in parts[end:]))


def refuse_indices(names: Iterable[str], where: str) -> None:
    """Optimizers that count parameters (0, 1, ...) do not say which is which once a mesh splits them.

    Raises:
        UnsupportedError: A state is keyed by an index.
    """
    for name in names:
        parts = name.split(".")
        if is_optimizer(name) and any(part == "state" and following.isdecimal() for part, following in pairwise(parts)):
            raise UnsupportedError(
                f'{where}: optimizer state "{name}" is keyed by the index of a parameter, needed its name; save it '
                "with torch's get_optimizer_state_dict, or pass --optimizer drop"
            )
