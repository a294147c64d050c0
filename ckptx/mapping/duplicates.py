"""Two names on disk for one model tensor, as in a checkpoint with an old and a new naming."""

from __future__ import annotations

from collections.abc import Iterable

from ckptx.mapping.destinations import Destination, named
from ckptx.mapping.names import LEGACY_LEAVES
from ckptx.mapping.rules import NameRules


def second_namings(rules: NameRules, names: Iterable[str]) -> dict[str, str]:
    """Map each second name on disk of a model tensor to the name that is kept.

    The model's own name is kept, else the first. Parts of one combined tensor are different tensors, not two names.

    Args:
        rules: Rules between names on disk and model names.
        names: Names on disk.
    """
    modern = {name: _current_name(name) for name in names}
    places = rules.places(dict.fromkeys(modern.values()))
    owner: dict[object, str] = {}
    found: dict[str, str] = {}
    for name, spelled in modern.items():
        place = places[spelled]
        for key in () if place is None else _keys(rules, place):
            kept = owner.setdefault(key, name)
            if kept != name and name not in found:
                if place == name and places[modern[kept]] != kept:
                    owner[key], kept, name = name, name, kept
                found[name] = kept
    return {name: _final_name(found, kept) for name, kept in found.items()}


def _final_name(found: dict[str, str], name: str) -> str:
    while name in found:
        name = found[name]
    return name


def _current_name(name: str) -> str:
    for old, new in LEGACY_LEAVES.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _keys(rules: NameRules, place: Destination | str) -> Iterable[object]:
    """Return the destination of a name: a tensor of the model, or a position in a combined one."""
    if isinstance(place, str):
        return (place,)
    conversion = rules.conversions[place.conversion]
    if len(conversion.sources) == len(conversion.targets) == 1 and not conversion.ops:
        return (named(conversion.targets[0], place.fixed, place.at),)
    return (place,)
