"""Two stored names for one model tensor, as in a checkpoint with an old and a new naming."""

from __future__ import annotations

from collections.abc import Iterable

from ckptx.mapping.destinations import Destination, name_in_run
from ckptx.mapping.names import replace_legacy_leaf
from ckptx.mapping.rules import NameRules


def find_duplicate_names(rules: NameRules, names: Iterable[str]) -> dict[str, str]:
    """Map each additional stored name of a model tensor to the name to keep.

    That is the model's own name if it is stored, else the first in the order of `names`. Tensors that are combined into
    one model tensor are different tensors, not two names.

    Args:
        rules: Rules between disk names and model names.
        names: Stored names, without prefix and wrappers.
    """
    current_names = {name: replace_legacy_leaf(name) for name in names}
    destinations = rules.destinations(dict.fromkeys(current_names.values()))
    first_name: dict[object, str] = {}
    duplicates: dict[str, str] = {}
    for name, current_name in current_names.items():
        destination = destinations[current_name]
        for key in () if destination is None else _destination_keys(rules, destination):
            kept = first_name.setdefault(key, name)
            if kept != name and name not in duplicates:
                if destination == name and destinations[current_names[kept]] != kept:
                    first_name[key], kept, name = name, name, kept
                duplicates[name] = kept
    return {name: _final_name(duplicates, kept) for name, kept in duplicates.items()}


def _final_name(duplicates: dict[str, str], name: str) -> str:
    """Return the name to keep instead of `name`, which a better name may have replaced later."""
    while name in duplicates:
        name = duplicates[name]
    return name


def _destination_keys(rules: NameRules, destination: Destination | str) -> Iterable[object]:
    """Return the key that two names of the same tensor share: a model name, or a position in a combined tensor."""
    if isinstance(destination, str):
        return (destination,)
    conversion = rules.conversions[destination.conversion]
    if len(conversion.sources) == len(conversion.targets) == 1 and not conversion.ops:
        return (name_in_run(conversion.targets[0], destination.shared_indices, destination.list_index),)
    return (destination,)
