"""Find the rule by which layers share modules, and check it on models with other lists of layer types."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

from ckptx.architecture.architecture import Architecture, TiePair
from ckptx.architecture.introspection import meta_model
from ckptx.architecture.introspection.meta_model import ConfigBuilder
from ckptx.architecture.shared_layers import SharedLayers
from ckptx.architecture.tie_declarations import existing_pairs, flatten_chains

Values = dict[str, Any]
Pairs = dict[str, str]

_COUNT = "num_hidden_layers"
_LAYERS = (3, 1, 1, 1, 2, 1)  # numbers of layers of another type before each layer that shares
_LISTS = ("wwwww", ".w.w", "..ww.w..w.w.w", "w....", "...w.ww.")  # "w" is a layer that shares its modules


def is_numbered(pair: TiePair) -> bool:
    """Return True if a tie is between numbered layers."""
    return any(part.isdigit() for name in pair.namings[0] for part in name.split("."))


def derive_shared_layers(cls: Any, build: ConfigBuilder, known: Architecture) -> tuple[SharedLayers, Values] | None:
    """Return the rule of a class and a config with few layers; None if its ties do not follow such a rule.

    Args:
        cls: The model class.
        build: Its config class as a function of a dict.
        known: The class under its defaults, with every tie.
    """
    pairs = [pair for pair in known.ties if is_numbered(pair)]
    paths_of_pairs = [_paths_before_numbers(pair) for pair in pairs]
    flags, paths = {pair.flag for pair in pairs}, set(paths_of_pairs)
    if None in paths or len(paths) != 1 or len(flags) != 1 or any(pair.is_primary for pair in pairs):
        return None
    config = build({}).to_dict()
    for kinds, kind in _lists(config, pairs, paths_of_pairs[0] or ()):
        probe = _Probe(
            cls, build, SharedLayers(paths_of_pairs[0] or (), kinds, kind, _COUNT, "", 1, {}, pairs[0].flag), config
        )
        found = probe.rule()
        if found is not None and set(found.ties(config)) == set(pairs) and probe.agrees_with_models(found):
            return found, probe.base
    return None


class _Probe:
    """Experiments with one class and one key that lists the type of each layer."""

    def __init__(self, cls: Any, build: ConfigBuilder, bare: SharedLayers, config: Values) -> None:
        self.cls, self.build, self.bare, self.config = cls, build, bare, config
        self.other = next(each for each in config[bare.kinds] if each != bare.kind)
        self.base = self.config_with_layers("".join("." * count + "w" for count in _LAYERS))

    def config_with_layers(self, text: str, **changes: Any) -> Values:
        """Return config values with one layer per character; "w" is a layer that shares its modules."""
        kinds = [self.bare.kind if each == "w" else self.other for each in text]
        return {self.bare.kinds: kinds, _COUNT: len(kinds), **changes}

    def rule(self) -> SharedLayers | None:
        """Derive the rule from the effects of the base config and of each of its switches and numbers."""
        plain = self.pairs(self.base)
        if not plain:
            return None
        names = dict.fromkeys(self.names(plain), "")
        for key in sorted(key for key, value in self.config.items() if value is False and not key.startswith("_")):
            pairs = self.pairs({**self.base, key: True})
            if pairs:
                names.update(dict.fromkeys(self.names(pairs) - set(names), key))
        for key in sorted(key for key, value in self.config.items() if type(value) is int):
            pairs = self.pairs({**self.base, key: self.config[key] + 1})
            if pairs and len(pairs) < len(plain):
                return self._with(names, key)
        return self._with(names, "")

    def _with(self, names: dict[str, str], period: str) -> SharedLayers:
        bare, default = self.bare, self.config[period] if period else 1
        return SharedLayers(bare.paths, bare.kinds, bare.kind, bare.count, period, default, names, bare.flag)

    def agrees_with_models(self, rule: SharedLayers) -> bool:
        """Return True if the rule gives the ties for every list, period and set of switches that is tried."""
        switches = sorted({key for key in rule.names.values() if key})
        for text, period, value in product(_LISTS, (1, 2, 3) if rule.period else (1,), (False, True)):
            values = self.config_with_layers(
                text, **dict.fromkeys(switches, value), **({rule.period: period} if rule.period else {})
            )
            pairs, rule_pairs = self.pairs(values), dict(pair.namings[0] for pair in rule.ties(values))
            # a class may reject a list without shared layers
            if not rule.covers(values) or (pairs != rule_pairs and (pairs is not None or rule_pairs)):
                return False
        return True

    def pairs(self, values: Values) -> Pairs | None:
        """Return target -> source of every tie between layers; None if the model cannot be built."""
        try:
            model = meta_model.build_with_all_ties(self.cls, self.build(copy.deepcopy(values)))
        except Exception:  # any error of the class means that no checkpoint has such a config
            return None
        names = {name: value.shape for name, value in model.state_dict(keep_vars=True).items()}
        declared = existing_pairs(model.all_tied_weights_keys, names)
        same = {target: source for target, source in declared.items() if names[target] == names[source]}
        lead = f"{self.bare.paths[0]}."
        return {target: source for target, source in flatten_chains(same).items() if target.startswith(lead)}

    def names(self, pairs: Pairs) -> set[str]:
        """Return the patterns below a layer; a number that takes the index of every shared layer becomes a star."""
        lead = f"{self.bare.paths[0]}."
        places = {str(at) for at in range(len(_LAYERS))}
        tails = {target.removeprefix(lead).partition(".")[2] for target in pairs}
        starred: dict[str, set[str]] = {}
        for tail in tails:
            parts = tail.split(".")
            at = next((at for at, part in enumerate(parts) if part.isdigit()), None)
            if at is not None:
                starred.setdefault(".".join((*parts[:at], "*", *parts[at + 1 :])), set()).add(parts[at])
        stars = {pattern for pattern, found in starred.items() if found == places}
        covered = {pattern.replace("*", place) for pattern in stars for place in places}
        return stars | (tails - covered)


def _paths_before_numbers(pair: TiePair) -> tuple[str, ...] | None:
    """Return the path before the first number in every naming; None unless both names differ only in that number."""
    paths = []
    for names in pair.namings:
        both = [name.split(".") for name in names]
        at = [next((at for at, part in enumerate(parts) if part.isdigit()), None) for parts in both]
        if at[0] is None or at[0] != at[1] or _without_index(both[0], at[0]) != _without_index(both[1], at[0]):
            return None
        paths.append(".".join(both[0][: at[0]]))
    return tuple(paths)


def _without_index(parts: list[str], at: int) -> list[str]:
    return [*parts[:at], *parts[at + 1 :]]


def _lists(config: Values, pairs: Iterable[TiePair], paths: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield the keys of the config that list a kind for every layer, with the kind of the tied layers."""
    lead = f"{paths[0]}."
    tied = {int(name.removeprefix(lead).split(".")[0]) for pair in pairs for name in pair.namings[0]}
    for key, value in sorted(config.items()):
        if isinstance(value, list) and len(value) == config.get(_COUNT) and len({*map(str, value)}) > 1:
            found = {value[at] for at in tied}
            if len(found) == 1 and isinstance(kind := found.pop(), str):
                yield key, kind
