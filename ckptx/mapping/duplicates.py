"""Two names on disk for one tensor of the model: a checkpoint that was saved twice, in an old naming and a new one."""

from __future__ import annotations

from collections.abc import Iterable

from ckptx.mapping.destinations import Destination, named
from ckptx.mapping.names import LEGACY_LEAVES
from ckptx.mapping.rules import NameRules


def second_namings(rules: NameRules, names: Iterable[str]) -> dict[str, str]:
    """Names that load into a tensor of the model that another name loads into, and that other name.

    The name that the model itself has is the one that counts, else the first. Parts that are put together into one
    tensor have places of their own in it and are no two names.

    Args:
        rules: Between the names on disk and those of the model.
        names: On disk.
    """
    modern = {name: _modern(name) for name in names}
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
    return {name: _last(found, kept) for name, kept in found.items()}


def _last(found: dict[str, str], name: str) -> str:
    while name in found:
        name = found[name]
    return name


def _modern(name: str) -> str:
    for old, new in LEGACY_LEAVES.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _keys(rules: NameRules, place: Destination | str) -> Iterable[object]:
    """The destination of a name: a tensor of the model, or a place in one that is made of several."""
    if isinstance(place, str):
        return (place,)
    conversion = rules.conversions[place.conversion]
    if len(conversion.sources) == len(conversion.targets) == 1 and not conversion.ops:
        return (named(conversion.targets[0], place.fixed, place.at),)
    return (place,)
