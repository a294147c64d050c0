"""Where a tensor goes in a conversion, and what lies beside a quantized weight with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ckptx.mapping.name_index import fill
from ckptx.mapping.names import pattern_of
from ckptx.mapping.ops import Conversion
from ckptx.mapping.quantization_scales import parent_of

# Index of a conversion, and the indices that what goes into it together shares.
Run = tuple[int, tuple[int, ...]]


class Destination(NamedTuple):
    """Where a tensor goes: into one run of a conversion.

    Attributes:
        conversion: Index of the conversion.
        fixed: The indices that the whole run shares: its layer.
        column: Index of the pattern on this side.
        at: Position in a module list, 0 outside of one.
    """

    conversion: int
    fixed: tuple[int, ...]
    column: int
    at: int = 0

    @property
    def run(self) -> Run:
        """What the tensors that go together share: `conversion` and `fixed`."""
        return self[:2]


def named(pattern: str, fixed: tuple[int, ...], at: int) -> str:
    """The name that a pattern of a run stands for; `at` counts for a module list only."""
    return fill(pattern, fixed if pattern.count("*") == len(fixed) else (*fixed, at))


class ResolvedNames(NamedTuple):
    """Places of names, and the runs that stay as they are for the sake of what lies beside their weights."""

    places: dict[str, Destination | str | None]
    unconvertible: set[Run]


def with_scales(
    places: dict[str, Destination | str | None],
    conversions: Sequence[Conversion],
    place_of: Callable[[str], Destination | str | None],
    renamed: Callable[[Destination], str],
    is_possible: Callable[[str], bool] = lambda weight: True,
) -> ResolvedNames:
    """Gives what no rule knows but lies beside a weight a place beside it again.

    Args:
        places: Of all names; None where no rule knows one.
        conversions: What places refer to.
        place_of: Where a weight goes, whether it is there or only what was made of it.
        renamed: The name at a place of a conversion without ops.
        is_possible: False for a pattern of weights that have no place, whatever their numbers.
    """
    settled = ResolvedNames(places, set())
    found = []
    apart: dict[str, bool] = {}  # by pattern: whether there can be no weight beside its names
    for name in [name for name, place in places.items() if place is None]:
        pattern = pattern_of(name)
        if pattern not in apart:
            apart[pattern] = parent_of(pattern, is_possible) is None
        if apart[pattern]:
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
    """The name at a place of a conversion that only renames, or the first that what is there goes into."""
    targets = conversions[place.conversion].targets
    return named(targets[place.column if place.column < len(targets) else 0], place.fixed, place.at)
