"""Find model tensors with two stored names, as in a checkpoint with an old and a new naming."""

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
        if destination is None:
            continue
        key = _destination_key(rules, destination)
        kept = first_name.setdefault(key, name)
        if kept == name:
            continue
        is_own_name, is_kept_own_name = destination == name, destinations[current_names[kept]] == kept
        if is_own_name and not is_kept_own_name:  # the model's own name is kept, although the other one came first
            first_name[key] = name
            duplicates[kept] = name
        else:
            duplicates[name] = kept
    return {name: _final_name(duplicates, kept) for name, kept in duplicates.items()}


def _final_name(duplicates: dict[str, str], name: str) -> str:
    """Return the name to keep instead of `name`, which a better name may have replaced later."""
    while name in duplicates:
        name = duplicates[name]
    return name


def _destination_key(rules: NameRules, destination: Destination | str) -> object:
    """Return the key that two names of the same tensor share.

    It is a model name if the tensor is only renamed, else the tensor's place in a conversion: its conversion, layer and
    position among the tensors that are converted together.
    """
    if isinstance(destination, str):
        return destination
    conversion = rules.conversions[destination.conversion]
    if len(conversion.sources) == len(conversion.targets) == 1 and not conversion.ops:  # it only renames one tensor
        return name_in_run(conversion.targets[0], destination.shared_indices, destination.list_index)
    return destination
