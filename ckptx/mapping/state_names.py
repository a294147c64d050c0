"""Optimizer state of a DCP: the parameter that each tensor and object belongs to, for any trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from ckptx.errors import UnsupportedError
from ckptx.mapping.names import is_optimizer, pattern_of


@dataclass(frozen=True, slots=True)
class State:
    """Name of optimizer state, split around the name of its parameter.

    Attributes:
        name: Name on disk.
        parameter: Name in the view of the parameter it belongs to.
        before: Text before the name of the parameter.
        name_in_state: Name of the parameter as it occurs in `name`.
        after: Text after the name of the parameter.
    """

    name: str
    parameter: str
    before: str
    name_in_state: str
    after: str

    def of(self, name_in_state: str) -> str:
        """Return the name of the same state of another parameter."""
        return f"{self.before}{name_in_state}{self.after}"


@dataclass(slots=True)
class Owners:
    """Index that finds the parameter in the name of a state.

    Attributes:
        names: Every spelling of a parameter name -> its name in the view.
    """

    names: Mapping[str, str]
    _spans: dict[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, on_disk: Mapping[str, str], prefix: str = "") -> Owners:
        """Create the index of a model.

        Args:
            on_disk: Parameter name in the view -> name on disk.
            prefix: Prefix of model names on disk that names of their state may lack.
        """
        names = {disk.removeprefix(prefix): name for name, disk in on_disk.items()} if prefix else {}
        names |= {name: name for name in on_disk}
        names |= {disk: name for name, disk in on_disk.items()}
        return cls(names)

    def find(self, name: str) -> State | None:
        """Return the state with this name, by the longest parameter name in it; None if it contains none."""
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
    """Refuse state that is keyed by parameter index, which is ambiguous once a mesh splits the parameters.

    Raises:
        UnsupportedError: A state is keyed by an index.
    """
    for name in names:
        parts = name.split(".")
        if is_optimizer(name) and any(part == "state" and following.isdecimal() for part, following in pairwise(parts)):
            raise UnsupportedError(
                f'{where}: optimizer state "{name}" is keyed by the index of a parameter instead of its name; save it '
                "with torch's get_optimizer_state_dict, or pass --optimizer drop"
            )
