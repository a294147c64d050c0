"""Optimizer state of a DCP: the parameter that each tensor and object belongs to, for any trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from ckptx.errors import UnsupportedError
from ckptx.mapping.names import is_optimizer, pattern_of


@dataclass(frozen=True, slots=True)
class StateName:
    """Name of optimizer state, split around the name of its parameter.

    Attributes:
        name: Stored name, exactly as in the checkpoint.
        parameter: Name of its parameter in the view.
        prefix: Text before the name of the parameter.
        name_in_state: Name of the parameter as it occurs in `name`.
        suffix: Text after the name of the parameter.
    """

    name: str
    parameter: str
    prefix: str
    name_in_state: str
    suffix: str

    def name_for(self, name_in_state: str) -> str:
        """Return the name of the same state of another parameter."""
        return f"{self.prefix}{name_in_state}{self.suffix}"


@dataclass(slots=True)
class ParameterIndex:
    """Index that finds the parameter in the name of a state.

    Attributes:
        parameter_names: Every form of a parameter name (in the view, stored, without prefix) -> its name in the view.
    """

    parameter_names: Mapping[str, str]
    # Pattern of a state's name -> index of the first component of the parameter name in it, and index after the last.
    _known_spans: dict[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, stored_names: Mapping[str, str], prefix: str = "") -> ParameterIndex:
        """Create the index of a model.

        Args:
            stored_names: Parameter name in the view -> stored name.
            prefix: Prefix of the stored names of the model, which names of its optimizer state may lack.
        """
        names = {stored.removeprefix(prefix): name for name, stored in stored_names.items()} if prefix else {}
        names |= {name: name for name in stored_names}
        names |= {stored: name for name, stored in stored_names.items()}
        return cls(names)

    def find(self, name: str) -> StateName | None:
        """Split the name of a state around the longest parameter name in it that does not begin the name.

        None if it contains no such parameter name.
        """
        parts = name.split(".")
        known = self._known_spans.get(pattern_of(name))
        if known is not None:
            found = self._match_span(name, parts, *known)
            if found is not None:
                return found
        for length in range(len(parts) - 1, 0, -1):
            for begin in range(1, len(parts) - length + 1):
                found = self._match_span(name, parts, begin, begin + length)
                if found is not None:
                    self._known_spans[pattern_of(name)] = begin, begin + length
                    return found
        return None

    def _match_span(self, name: str, parts: list[str], begin: int, end: int) -> StateName | None:
        name_in_state = ".".join(parts[begin:end])
        parameter = self.parameter_names.get(name_in_state)
        if parameter is None:
            return None
        before = "".join(f"{part}." for part in parts[:begin])
        return StateName(name, parameter, before, name_in_state, "".join(f".{part}" for part in parts[end:]))


def refuse_indexed_state(names: Iterable[str], parameters: ParameterIndex, where: str) -> None:
    """Refuse state that is keyed by parameter index, which is ambiguous once a mesh splits the parameters.

    A number after `state` is not an index if a name of a parameter begins with it, such as `0.weight` of a Sequential.

    Args:
        names: Names in the checkpoint.
        parameters: Index of the parameters of the model.
        where: Location of the checkpoint, for the error message.

    Raises:
        UnsupportedError: A state is keyed by an index.
    """
    for name in names:
        parts = name.split(".")
        if not is_optimizer(name) or not any(
            part == "state" and following.isdecimal() for part, following in pairwise(parts)
        ):
            continue
        found = parameters.find(name)
        if found is None or not found.prefix.endswith("state.") or found.name_in_state.isdecimal():
            raise UnsupportedError(
                f'{where}: optimizer state "{name}" is keyed by the index of a parameter instead of its name; save it '
                "with torch's get_optimizer_state_dict, or pass --optimizer drop"
            )
