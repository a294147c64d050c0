"""Models in a checkpoint: a trainer may store several, each under its own prefix.

With a moving average, a teacher, a reference policy or a critic, a checkpoint has the names of one architecture several
times. The names alone do not tell which model the user wants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from ckptx.mapping.names import Roles, is_state_prefix, is_trainer_state, pattern_of, replace_legacy_leaf

# For an unknown architecture: maximum number of components of a prefix, and minimum number of names under a prefix
# without a list of layers.
_MAX_PREFIX_COMPONENTS = 3
_MIN_NAMES_WITHOUT_LAYERS = 4


@dataclass(frozen=True, slots=True)
class KnownNames:
    """Names of an architecture.

    Attributes:
        patterns: Every name, with indices replaced by `*`; `a.**` stands for every name under `a`.
        base_prefix: Name of the base model inside the class, such as `model`, without a dot; disk names may omit it.
            Empty if there is none.
        optional_patterns: Patterns that a complete model may lack, such as those of tied tensors.
        layer_counts: Path of each list of layers -> number of layers in the config.
    """

    patterns: frozenset[str]
    base_prefix: str = ""
    optional_patterns: frozenset[str] = frozenset()
    layer_counts: Mapping[str, int] = field(default_factory=dict)
    _is_known: dict[str, bool] = field(default_factory=dict, compare=False, repr=False)

    @property
    def disk_patterns(self) -> frozenset[str]:
        """Return the patterns, with and without the prefix of the base model."""
        prefix = f"{self.base_prefix}."
        return self.patterns | {each.removeprefix(prefix) for each in self.patterns if self.base_prefix}

    def known_name(self, name: str) -> str | None:
        """Return the name in the spelling of the architecture; None if it is not one of its names."""
        name = replace_legacy_leaf(name)
        pattern = pattern_of(name)
        known = self._is_known.get(pattern)
        if known is None:
            parts = pattern.split(".")
            is_inside = any(".".join(parts[:end]) + ".**" in self.patterns for end in range(1, len(parts)))
            known = self._is_known[pattern] = pattern in self.patterns or is_inside
        return name if known else None

    def is_required(self, name: str) -> bool:
        """Return True for a name that every complete model has."""
        if pattern_of(name) in self.optional_patterns:
            return False
        for path, count in self.layer_counts.items():
            index = name.removeprefix(f"{path}.").partition(".")[0] if name.startswith(f"{path}.") else ""
            if index.isdecimal() and int(index) >= count:
                return False
        return True


class OtherModel(NamedTuple):
    """Names under another prefix than that of the model.

    After the prefix, they are names of its architecture; for an unknown one, the same names as those of the model.

    Attributes:
        prefix: Prefix of the names, such as `ema.`; empty for none.
        names: Names with the prefix.
        is_complete: True if no required name of the model is missing.
    """

    prefix: str
    names: tuple[str, ...]
    is_complete: bool

    @property
    def description(self) -> str:
        """Return a phrase for messages."""
        return f"{'second model' if self.is_complete else 'part of a second model'} {describe_prefix(self.prefix)}"


class Models(NamedTuple):
    """Model of a checkpoint, and other models in it.

    Attributes:
        roles: Role of each name; its `other` includes the names of other models.
        others: Other models, complete or partial.
        duplicates: Name without the prefix of the model -> stored name of the model tensor that has this name once the
            prefix is removed: `norm.weight` -> `model.norm.weight`.
    """

    roles: Roles
    others: tuple[OtherModel, ...] = ()
    duplicates: Mapping[str, str] = MappingProxyType({})

    @property
    def complete_prefixes(self) -> tuple[str, ...]:
        """Return the prefixes of all complete models, that of the model first."""
        return (self.roles.prefix, *(each.prefix for each in self.others if each.is_complete))


def describe_prefix(prefix: str) -> str:
    """Return the location of a model's names, for messages."""
    return f'under "{prefix}"' if prefix else "without a prefix"


def find_models(roles: Roles, known: KnownNames | None, *, is_user_prefix: bool) -> Models:
    """Return the model of a checkpoint, without the names of other models, and these other models.

    Args:
        roles: Roles of the names under the prefix that was given or detected.
        known: Names of the architecture; None if they are unknown.
        is_user_prefix: True if the user gave the prefix, so that equal names outside of it are not duplicates of those
            under it.
    """
    outside = [name for name in roles.other if not is_trainer_state(name)]
    candidates = _other_copies(roles, outside) if known is None else _other_models(roles, outside, known)
    models = _separate_models(roles, candidates)
    if is_user_prefix or not roles.prefix:
        return models
    model = models.roles.model
    remaining = (name for name in models.roles.other if not is_trainer_state(name))
    return models._replace(duplicates={name: model[name] for name in remaining if name in model})


def _other_copies(roles: Roles, outside: Iterable[str]) -> list[OtherModel]:
    """Return models whose names equal those of the model under another prefix, for an unknown architecture."""
    if not roles.prefix:
        return []

    def prefix_lengths(name: str) -> tuple[int, ...]:
        """Return the numbers of leading components after which a name of the model follows."""
        parts = name.split(".")
        return tuple(at for at in range(len(parts)) if ".".join(parts[at:]) in roles.model)

    groups = _group_by_prefix((name, prefix_lengths(name)) for name in outside)
    return [OtherModel(prefix, names, len(names) == len(roles.model)) for prefix, names in groups.items()]


def _other_models(roles: Roles, outside: Iterable[str], known: KnownNames) -> list[OtherModel]:
    """Return models of the architecture under other prefixes."""
    model_names = {short: spelled for short in roles.model if (spelled := known.known_name(short)) is not None}
    candidates = [*outside, *(full for short, full in roles.model.items() if short not in model_names)]
    if not model_names or not candidates:
        return []
    required = {name for name in model_names.values() if known.is_required(name)}
    base_prefix = f"{known.base_prefix}."
    others = []
    for prefix, names in _group_by_model_prefix(candidates, known).items():
        if prefix != roles.prefix:
            short_names = [name[len(prefix) :] for name in names]
            present = {known.known_name(short) or known.known_name(base_prefix + short) for short in short_names}
            others.append(OtherModel(prefix, names, bool(required) and required <= present))
    return others


def _separate_models(roles: Roles, candidates: Iterable[OtherModel]) -> Models:
    """Separate the names of other models from those of the model.

    Names of a candidate whose prefix is one of state, such as `optim.`, become optimizer state. An incomplete model
    under the prefix of the model stays part of it: MTP heads have the names of a layer.

    Args:
        roles: Roles of the names before the separation.
        candidates: Models under other prefixes, or copies of the names of the model in optimizer state.
    """
    state_names: set[str] = set()
    other_names: set[str] = set()
    others = []
    for each in candidates:
        if each.prefix.startswith(roles.prefix) and not each.is_complete:
            continue
        if is_state_prefix(each.prefix):
            state_names.update(each.names)
        else:
            others.append(each)
            other_names.update(each.names)
    if not state_names and not other_names:
        return Models(roles)
    model, optimizer, other = {}, list(roles.optimizer), []
    for short, name in roles.model.items():
        if name in state_names:
            optimizer.append(name)
        elif name in other_names:
            other.append(name)
        else:
            model[short] = name
    optimizer += [name for name in roles.other if name in state_names]
    other += [name for name in roles.other if name not in state_names]
    return Models(Roles(roles.prefix, model, optimizer, other), tuple(sorted(others, key=_sort_key)))


def _sort_key(other: OtherModel) -> tuple[bool, str]:
    return not other.is_complete, other.prefix


def _group_by_model_prefix(names: list[str], known: KnownNames) -> dict[str, tuple[str, ...]]:
    """Group names by the prefix before a name of the architecture, which may lack its base prefix."""
    base_prefix = f"{known.base_prefix}." if known.base_prefix else None
    exact_lengths: dict[str, tuple[int, ...]] = {}  # pattern -> numbers of components that may be the prefix
    lengths_before_base: dict[str, tuple[int, ...]] = {}  # the same for names without the base prefix

    def prefix_lengths(name: str, added_prefix: str) -> tuple[int, ...]:
        """Return the numbers of leading components after which, with `added_prefix`, a name of the model follows."""
        parts = pattern_of(name).split(".")
        rests = (added_prefix + ".".join(parts[at:]) for at in range(len(parts)))
        return tuple(at for at, rest in enumerate(rests) if known.known_name(rest) is not None)

    for name in names:
        pattern = pattern_of(name)
        if pattern not in exact_lengths:
            lengths = exact_lengths[pattern] = prefix_lengths(name, "")
            lengths_before_base[pattern] = () if lengths or base_prefix is None else prefix_lengths(name, base_prefix)
    groups = _group_by_prefix((name, exact_lengths[pattern_of(name)]) for name in names)
    for prefix, group in _group_by_prefix((name, lengths_before_base[pattern_of(name)]) for name in names).items():
        groups[prefix] = (*groups.get(prefix, ()), *group)
    return groups


def _group_by_prefix(names_with_lengths: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, tuple[str, ...]]:
    """Group names by prefix; a name with several prefixes goes to the one that most names have.

    Args:
        names_with_lengths: Names, each with the numbers of leading components that may be its prefix.
    """
    candidates = {}
    counts: Counter[str] = Counter()
    for name, lengths in names_with_lengths:
        if lengths:
            parts = name.split(".")
            candidates[name] = ["".join(f"{part}." for part in parts[:length]) for length in lengths]
            counts.update(candidates[name])
    groups: dict[str, list[str]] = {}
    for name, prefixes in candidates.items():
        groups.setdefault(min(prefixes, key=lambda each: (-counts[each], len(each))), []).append(name)
    return {prefix: tuple(group) for prefix, group in groups.items()}


def find_repeated_prefixes(names: Iterable[str]) -> tuple[str, ...]:
    """Return the prefixes of the largest models with equal names, for an unknown architecture; empty if there are none.

    Only the first components are considered, and a list of layers is not a list of models.
    """
    counts = Counter(pattern_of(name) for name in names)
    names_by_prefix: dict[str, set[tuple[str, int]]] = {}
    for pattern, count in counts.items():
        parts = pattern.split(".")
        for length in range(1, min(_MAX_PREFIX_COMPONENTS + 1, len(parts))):
            if parts[length - 1] == "*":
                break
            rest = ".".join(parts[length:])
            names_by_prefix.setdefault("".join(f"{part}." for part in parts[:length]), set()).add((rest, count))
    prefixes_by_names: dict[frozenset[tuple[str, int]], list[str]] = {}
    for prefix, rests in names_by_prefix.items():
        if len(rests) > 1 and (len(rests) >= _MIN_NAMES_WITHOUT_LAYERS or any("*" in rest for rest, _ in rests)):
            prefixes_by_names.setdefault(frozenset(rests), []).append(prefix)
    repeated = [(len(rests), prefixes) for rests, prefixes in prefixes_by_names.items() if len(prefixes) > 1]
    return tuple(sorted(max(repeated)[1])) if repeated else ()
