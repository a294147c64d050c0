"""The models in the names of a checkpoint: a trainer may keep several, each below a prefix of its own.

A trained model beside its moving average, a teacher, a reference policy or a critic has the names of one architecture
several times. Which one is meant, nothing in the names says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from ckptx.mapping.names import LEGACY_LEAVES, Roles, is_of_state, is_trainer_state, pattern_of

_MOST_COMPONENTS = 3  # of a prefix, where the architecture is unknown


@dataclass(frozen=True, slots=True)
class KnownNames:
    """The names of an architecture.

    Attributes:
        patterns: Every name, indices replaced by `*`.
        base_prefix: The name of the base model inside the class; names may come with or without it.
        optional: Patterns that a complete model may lack, as those of tied tensors.
        layers: Path of each list of layers -> the number of layers, where the config gives it.
    """

    patterns: frozenset[str]
    base_prefix: str = ""
    optional: frozenset[str] = frozenset()
    layers: Mapping[str, int] = field(default_factory=dict)
    _known: dict[str, bool] = field(default_factory=dict, compare=False, repr=False)

    @property
    def spellings(self) -> frozenset[str]:
        """The patterns, with and without the prefix of the base model."""
        lead = f"{self.base_prefix}."
        return self.patterns | {each.removeprefix(lead) for each in self.patterns if self.base_prefix}

    def spelling(self, name: str) -> str | None:
        """The name as the architecture has it, None when it is none of its names."""
        for old, new in LEGACY_LEAVES.items():
            if name.endswith(old):
                name = name.removesuffix(old) + new
        pattern = pattern_of(name)
        known = self._known.get(pattern)
        if known is None:
            parts = pattern.split(".")
            below = any(".".join(parts[:end]) + ".**" in self.patterns for end in range(1, len(parts)))
            known = self._known[pattern] = pattern in self.patterns or below
        return name if known else None

    def is_required(self, name: str) -> bool:
        """True for a name that every complete model has."""
        if pattern_of(name) in self.optional:
            return False
        for path, count in self.layers.items():
            index = name.removeprefix(f"{path}.").partition(".")[0] if name.startswith(f"{path}.") else ""
            if index.isdecimal() and int(index) >= count:
                return False
        return True


class OtherModel(NamedTuple):
    """Names of the architecture below another prefix than that of the model.

    Attributes:
        prefix: Prefix of the names.
        names: They, with the prefix.
        is_complete: No name that the model has and needs is missing.
    """

    prefix: str
    names: tuple[str, ...]
    is_complete: bool

    @property
    def description(self) -> str:
        """A phrase for messages."""
        return f"{'second model' if self.is_complete else 'part of a second model'} {below(self.prefix)}"


class Models(NamedTuple):
    """The model of a checkpoint, and what else its names hold.

    Attributes:
        roles: Role of each name; `other` has all names that belong to neither the model nor the optimizer.
        others: Further models, complete or in part.
        twins: Name outside of the prefix -> the name of the model that is called the same without the prefix.
    """

    roles: Roles
    others: tuple[OtherModel, ...] = ()
    twins: Mapping[str, str] = MappingProxyType({})

    @property
    def complete(self) -> tuple[str, ...]:
        """The prefixes of all complete models, that of the model first; one where there is no second model."""
        return (self.roles.prefix, *(each.prefix for each in self.others if each.is_complete))


def below(prefix: str) -> str:
    """Return the location of a model's names, for messages."""
    return f'under "{prefix}"' if prefix else "without a prefix"


def find_models(roles: Roles, known: KnownNames | None, *, is_given: bool) -> Models:
    """Looks for further models in the names of a checkpoint.

    Args:
        roles: Roles of the names, by the prefix that was given or found.
        known: The names of the architecture; None when it is unknown, or its names are.
        is_given: The prefix was given: names outside of it that are called like names below it are meant to be left.
    """
    outside = [name for name in roles.other if not is_trainer_state(name)]
    found = _other_copies(roles, outside) if known is None else _other_models(roles, outside, known)
    models = _settled(roles, found)
    if is_given or not roles.prefix:
        return models
    model = models.roles.model
    left = (name for name in models.roles.other if not is_trainer_state(name))
    return models._replace(twins={name: model[name] for name in left if name in model})


def _other_copies(roles: Roles, outside: Iterable[str]) -> list[OtherModel]:
    """Names that are those of the model below another prefix, where nothing else is known."""
    if not roles.prefix:
        return []

    def depths(name: str) -> tuple[int, ...]:
        parts = name.split(".")
        return tuple(at for at in range(len(parts)) if ".".join(parts[at:]) in roles.model)

    found = _grouped((name, depths(name)) for name in outside)
    return [OtherModel(prefix, names, len(names) == len(roles.model)) for prefix, names in found.items()]


def _other_models(roles: Roles, outside: Iterable[str], known: KnownNames) -> list[OtherModel]:
    """Names of the architecture that are not those of the model."""
    own = {short: spelled for short in roles.model if (spelled := known.spelling(short)) is not None}
    rest = [*outside, *(full for short, full in roles.model.items() if short not in own)]
    if not own or not rest:
        return []
    required = {name for name in own.values() if known.is_required(name)}
    lead = f"{known.base_prefix}."
    others = []
    for prefix, names in _groups_of_model(rest, known).items():
        if prefix != roles.prefix:
            shorts = [name[len(prefix) :] for name in names]
            there = {known.spelling(short) or known.spelling(lead + short) for short in shorts}
            others.append(OtherModel(prefix, names, bool(required) and required <= there))
    return others


def _settled(roles: Roles, found: Iterable[OtherModel]) -> Models:
    """Takes other models out of the model, and copies of its names that are state out of them.

    What has names of the architecture below the prefix of the model and is no whole model stays: heads that predict
    further tokens have the names of a layer.
    """
    moments: set[str] = set()
    taken: set[str] = set()
    others = []
    for each in found:
        if each.prefix.startswith(roles.prefix) and not each.is_complete:
            continue
        if is_of_state(each.prefix):
            moments.update(each.names)
        else:
            others.append(each)
            taken.update(each.names)
    if not moments and not taken:
        return Models(roles)
    model, optimizer, other = {}, list(roles.optimizer), []
    for short, name in roles.model.items():
        if name in moments:
            optimizer.append(name)
        elif name in taken:
            other.append(name)
        else:
            model[short] = name
    optimizer += [name for name in roles.other if name in moments]
    other += [name for name in roles.other if name not in moments]
    return Models(Roles(roles.prefix, model, optimizer, other), tuple(sorted(others, key=_order)))


def _order(other: OtherModel) -> tuple[bool, str]:
    return not other.is_complete, other.prefix


def _groups_of_model(names: list[str], known: KnownNames) -> dict[str, tuple[str, ...]]:
    """The names of an architecture by the prefix that leaves them; as it has them, else without its base prefix."""
    lead = f"{known.base_prefix}." if known.base_prefix else None
    exact: dict[str, tuple[int, ...]] = {}
    short: dict[str, tuple[int, ...]] = {}

    def depths(name: str, extra: str) -> tuple[int, ...]:
        parts = pattern_of(name).split(".")
        rests = (extra + ".".join(parts[at:]) for at in range(len(parts)))
        return tuple(at for at, rest in enumerate(rests) if known.spelling(rest) is not None)

    for name in names:
        pattern = pattern_of(name)
        if pattern not in exact:
            exact[pattern] = depths(name, "")
            short[pattern] = () if exact[pattern] or lead is None else depths(name, lead)
    found = _grouped((name, exact[pattern_of(name)]) for name in names)
    for prefix, group in _grouped((name, short[pattern_of(name)]) for name in names).items():
        found[prefix] = (*found.get(prefix, ()), *group)
    return found


def _grouped(places: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, tuple[str, ...]]:
    """Group names by prefix; a name with several prefixes goes to the one that most names have."""
    candidates = {}
    counts: Counter[str] = Counter()
    for name, depths in places:
        if depths:
            parts = name.split(".")
            candidates[name] = ["".join(f"{part}." for part in parts[:depth]) for depth in depths]
            counts.update(candidates[name])
    groups: dict[str, list[str]] = {}
    for name, prefixes in candidates.items():
        groups.setdefault(min(prefixes, key=lambda each: (-counts[each], len(each))), []).append(name)
    return {prefix: tuple(group) for prefix, group in groups.items()}


def repeated_prefixes(names: Iterable[str]) -> tuple[str, ...]:
    """Prefixes that leave the same names, as those of two models of an unknown architecture; none where there are none.

    The first components alone are looked at, and no list of layers is a list of models.
    """
    counts = Counter(pattern_of(name) for name in names)
    found: dict[str, set[tuple[str, int]]] = {}
    for pattern, count in counts.items():
        parts = pattern.split(".")
        for depth in range(1, min(_MOST_COMPONENTS + 1, len(parts))):
            if parts[depth - 1] == "*":
                break
            rest = ".".join(parts[depth:])
            found.setdefault("".join(f"{part}." for part in parts[:depth]), set()).add((rest, count))
    same: dict[frozenset[tuple[str, int]], list[str]] = {}
    for prefix, rests in found.items():
        if len(rests) > 1 and (len(rests) > _MOST_COMPONENTS or any("*" in rest for rest, _ in rests)):
            same.setdefault(frozenset(rests), []).append(prefix)
    repeated = [(len(rests), prefixes) for rests, prefixes in same.items() if len(prefixes) > 1]
    return tuple(sorted(max(repeated)[1])) if repeated else ()
