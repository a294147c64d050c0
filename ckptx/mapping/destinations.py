"""Destinations of tensors in conversions; quantization scales follow their weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ckptx.mapping.name_index import fill_pattern
from ckptx.mapping.names import pattern_of
from ckptx.mapping.ops import Conversion
from ckptx.mapping.quantization_scales import find_parent

# Key of a run of a conversion: its application to the tensors that it converts together, such as the experts of one
# layer. It has the index of the conversion and the indices that these tensors share.
RunKey = tuple[int, tuple[int, ...]]


class Destination(NamedTuple):
    """Place of a tensor in one run of a conversion, see `RunKey`: among its sources, or among its targets.

    Attributes:
        conversion: Index of the conversion.
        shared_indices: Indices that the whole run shares, such as its layer.
        pattern_index: Index of the pattern: among the sources for the name of a tensor to convert, among the targets
            for the name of a converted one.
        list_index: Position in a module list; 0 outside of one.
    """

    conversion: int
    shared_indices: tuple[int, ...]
    pattern_index: int
    list_index: int = 0

    @property
    def run_key(self) -> RunKey:
        """Return the key of the tensors that are converted together: `conversion` and `shared_indices`."""
        return self[:2]


def name_in_run(pattern: str, shared_indices: tuple[int, ...], list_index: int) -> str:
    """Return the name that a pattern gives in a run, with the indices of the run for its stars, then `list_index`.

    A pattern without a star for `list_index` is not that of a module list, and ignores it.
    """
    return fill_pattern(
        pattern, shared_indices if pattern.count("*") == len(shared_indices) else (*shared_indices, list_index)
    )


class ResolvedNames(NamedTuple):
    """Destinations of names.

    Attributes:
        destinations: Name -> destination in a conversion, or new name; None if no rule knows it.
        unconvertible: Runs whose tensors keep their names, because their quantization scales cannot be converted.
    """

    destinations: dict[str, Destination | str | None]
    unconvertible: set[RunKey]


def add_scale_destinations(
    destinations: dict[str, Destination | str | None],
    conversions: Sequence[Conversion],
    find_destination: Callable[[str], Destination | str | None],
    name_at: Callable[[Destination], str],
    is_possible: Callable[[str], bool] = lambda weight: True,
) -> ResolvedNames:
    """Add destinations for names that no rule knows but that belong to a weight, such as scales.

    Args:
        destinations: Destination of each name; None if no rule knows it.
        conversions: Conversions that destinations refer to.
        find_destination: Function that returns the destination of a weight, which need not be in the checkpoint.
        name_at: Function that returns the new name of the weight at a destination.
        is_possible: Function that returns False for a pattern if no weight with this pattern has a destination.

    Returns:
        The same `destinations`, changed in place, and the runs that cannot be converted. A name that belongs to no
        weight, or does not change, keeps the destination None.
    """
    resolved = ResolvedNames(destinations, set())
    renamed_scales = []
    belongs_to_weight: dict[str, bool] = {}  # by pattern
    for name in [name for name, destination in destinations.items() if destination is None]:
        pattern = pattern_of(name)
        if pattern not in belongs_to_weight:
            belongs_to_weight[pattern] = find_parent(pattern, is_possible) is not None
        if not belongs_to_weight[pattern]:
            continue
        parent = find_parent(name, lambda weight: find_destination(weight) is not None)
        weight_destination = None if parent is None else find_destination(parent.weight)
        if parent is None or weight_destination is None:
            continue
        new_name = parent.renamed_scale(
            name, name_at(weight_destination) if isinstance(weight_destination, Destination) else weight_destination
        )
        if isinstance(weight_destination, Destination) and (
            new_name is None or _changes_tensors(conversions[weight_destination.conversion])
        ):
            resolved.unconvertible.add(weight_destination.run_key)
        else:
            renamed_scales.append((name, new_name, weight_destination))
    for name, new_name, weight_destination in renamed_scales:
        if (
            new_name is not None
            and new_name != name
            and not (
                isinstance(weight_destination, Destination) and weight_destination.run_key in resolved.unconvertible
            )
        ):
            destinations[name] = new_name
    return resolved


def _changes_tensors(conversion: Conversion) -> bool:
    return any(op.kind != "same" for op in conversion.ops)


def target_name_at(conversions: Sequence[Conversion], destination: Destination) -> str:
    """Return the name of the target with the same index as the source of the run that `destination` stands for.

    If there is no such target, because several sources become one tensor, it is the name of the first target.
    """
    targets = conversions[destination.conversion].targets
    return name_in_run(
        targets[destination.pattern_index if destination.pattern_index < len(targets) else 0],
        destination.shared_indices,
        destination.list_index,
    )
