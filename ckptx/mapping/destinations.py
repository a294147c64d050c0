"""Destinations of tensors in conversions; quantization scales follow their weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ckptx.mapping.name_index import fill
from ckptx.mapping.names import pattern_of
from ckptx.mapping.ops import Conversion
from ckptx.mapping.quantization_scales import parent_of

# Index of a conversion, and the indices that the tensors it combines share.
Run = tuple[int, tuple[int, ...]]


class Destination(NamedTuple):
    """Destination of a tensor in one run of a conversion.

    Attributes:
        conversion: Index of the conversion.
        fixed: Indices that the whole run shares, such as its layer.
        column: Index of the pattern among the sources or targets.
        at: Position in a module list; 0 outside of one.
    """

    conversion: int
    fixed: tuple[int, ...]
    column: int
    at: int = 0

    @property
    def run(self) -> Run:
        """Return the key of the tensors that are converted together: `conversion` and `fixed`."""
        return self[:2]


def named(pattern: str, fixed: tuple[int, ...], at: int) -> str:
    """Return the name that a pattern gives in a run; `at` is ignored outside of a module list."""
    return fill(pattern, fixed if pattern.count("*") == len(fixed) else (*fixed, at))


class ResolvedNames(NamedTuple):
    """Destinations of names, and the runs that are kept because their quantization scales cannot be converted."""

    places: dict[str, Destination | str | None]
    unconvertible: set[Run]


def with_scales(
    places: dict[str, Destination | str | None],
    conversions: Sequence[Conversion],
    place_of: Callable[[str], Destination | str | None],
    renamed: Callable[[Destination], str],
    is_possible: Callable[[str], bool] = lambda weight: True,
) -> ResolvedNames:
    """Add destinations for names that no rule knows but that belong to a weight, such as scales.

    Args:
        places: Destination of each name; None if no rule knows it.
        conversions: Conversions that destinations refer to.
        place_of: Function that returns the destination of a weight, which need not be in the checkpoint.
        renamed: Function that returns the name at a destination of a conversion without ops.
        is_possible: Function that returns False for a pattern of weights without destination, whatever their indices.
    """
    settled = ResolvedNames(places, set())
    found = []
    is_separate: dict[str, bool] = {}  # pattern -> True if its names belong to no weight
    for name in [name for name, place in places.items() if place is None]:
        pattern = pattern_of(name)
        if pattern not in is_separate:
            is_separate[pattern] = parent_of(pattern, is_possible) is None
        if is_separate[pattern]:
            continue
        parent = parent_of(name, lambda weight: place_of(weight) is not None)
        weight = None if parent is None else place_of(parent.weight)
        if parent is None or weight is None:
            continue
        new = parent.beside(name, renamed(weight) if isinstance(weight, Destination) else weight)
        if isinstance(weight, Destination) and (new is None or _is_rebuilt(conversions[weight.conversion])):
            settled.unconvertible.add(weight.run)
        else:
            found.append((name, new, weight))
    for name, new, weight in found:
        if (
            new is not None
            and new != name
            and not (isinstance(weight, Destination) and weight.run in settled.unconvertible)
        ):
            places[name] = new
    return settled


def _is_rebuilt(conversion: Conversion) -> bool:
    return any(op.kind != "same" for op in conversion.ops)


def renamed_at(conversions: Sequence[Conversion], place: Destination) -> str:
    """Return the target name of a destination, the first if its column has none of its own."""
    targets = conversions[place.conversion].targets
    return named(targets[place.column if place.column < len(targets) else 0], place.fixed, place.at)
