"""Find the rule by which layers share modules (`SharedLayers`), and check it on models with other layer types.

The rule is derived from meta models: from the ties of a base config with few layers, and from those with one boolean or
one number of it changed.
"""

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

Values = dict[str, Any]  # arguments of a config class
Pairs = dict[str, str]  # name of a tied tensor -> name of the tensor whose storage it uses

_COUNT_KEY = "num_hidden_layers"
_NUM_LAYERS_BETWEEN = (3, 1, 1, 1, 2, 1)  # numbers of layers of another type before each layer that shares modules
_TRIAL_LAYERS = ("wwwww", ".w.w", "..ww.w..w.w.w", "w....", "...w.ww.")  # "w" is a layer that shares its modules


def is_numbered(pair: TiePair) -> bool:
    """Return True if a tie is between names with an index, such as those of layers."""
    return any(part.isdigit() for name in pair.namings[0] for part in name.split("."))


def derive_shared_layers(
    cls: Any, build_config: ConfigBuilder, known: Architecture
) -> tuple[SharedLayers, Values] | None:
    """Return the rule of a class and a config, as a dict, with few layers; None if its ties follow no such rule.

    Args:
        cls: The model class.
        build_config: Builds a config of the class from a dict.
        known: The class under its defaults, with every tie.
    """
    pairs = [pair for pair in known.ties if is_numbered(pair)]
    paths_of_pairs = [_paths_before_numbers(pair) for pair in pairs]
    flags, paths = {pair.flag for pair in pairs}, set(paths_of_pairs)
    if None in paths or len(paths) != 1 or len(flags) != 1 or any(pair.is_primary for pair in pairs):
        return None
    config = build_config({}).to_dict()
    for kinds_key, kind in _layer_type_keys(config, pairs, paths_of_pairs[0] or ()):
        draft = SharedLayers(paths_of_pairs[0] or (), kinds_key, kind, _COUNT_KEY, "", 1, {}, pairs[0].flag)
        probe = _Probe(cls, build_config, draft, config)
        rule = probe.rule()
        if rule is not None and set(rule.ties(config)) == set(pairs) and probe.agrees_with_models(rule):
            return rule, probe.base
    return None


class _Probe:
    """Derive the rule of one class for one key that lists the type of each layer.

    Args:
        cls: The model class.
        build_config: Builds a config of the class from a dict.
        draft: The rule without `period` and `names`, which are derived.
        config: The default config as a dict.
    """

    def __init__(self, cls: Any, build_config: ConfigBuilder, draft: SharedLayers, config: Values) -> None:
        self.cls, self.build_config, self.draft, self.config = cls, build_config, draft, config
        self.other_kind = next(each for each in config[draft.kinds_key] if each != draft.kind)
        self.base = self.config_with_layers("".join("." * count + "w" for count in _NUM_LAYERS_BETWEEN))

    def config_with_layers(self, layers: str, **changes: Any) -> Values:
        """Return a config, as a dict, with one layer per character; "w" is a layer that shares its modules."""
        kinds = [self.draft.kind if each == "w" else self.other_kind for each in layers]
        return {self.draft.kinds_key: kinds, _COUNT_KEY: len(kinds), **changes}

    def rule(self) -> SharedLayers | None:
        """Derive the rule; return None if the base config ties no layers.

        A boolean that adds ties enables their names. The first number that, increased by one, removes ties is the
        period.
        """
        base_pairs = self.pairs(self.base)
        if not base_pairs:
            return None
        names = dict.fromkeys(self.names(base_pairs), "")
        for key in sorted(key for key, value in self.config.items() if value is False and not key.startswith("_")):
            pairs = self.pairs({**self.base, key: True})
            if pairs:
                names.update(dict.fromkeys(self.names(pairs) - set(names), key))
        for key in sorted(key for key, value in self.config.items() if type(value) is int):
            pairs = self.pairs({**self.base, key: self.config[key] + 1})
            if pairs and len(pairs) < len(base_pairs):
                return self._completed(names, key)
        return self._completed(names, "")

    def _completed(self, names: dict[str, str], period_key: str) -> SharedLayers:
        """Return the draft with names and period, as in `SharedLayers`."""
        draft, default = self.draft, self.config[period_key] if period_key else 1
        return SharedLayers(
            draft.paths, draft.kinds_key, draft.kind, draft.count_key, period_key, default, names, draft.flag
        )

    def agrees_with_models(self, rule: SharedLayers) -> bool:
        """Return True if the rule gives the ties of the models with other layers, periods and booleans."""
        switches = sorted({key for key in rule.names.values() if key})
        for layers, period, value in product(_TRIAL_LAYERS, (1, 2, 3) if rule.period_key else (1,), (False, True)):
            values = self.config_with_layers(
                layers, **dict.fromkeys(switches, value), **({rule.period_key: period} if rule.period_key else {})
            )
            pairs, rule_pairs = self.pairs(values), dict(pair.namings[0] for pair in rule.ties(values))
            # a class may reject a list without shared layers
            if not rule.covers(values) or (pairs != rule_pairs and (pairs is not None or rule_pairs)):
                return False
        return True

    def pairs(self, values: Values) -> Pairs | None:
        """Return the ties between layers of the model of a config; None if it cannot be built."""
        try:
            model = meta_model.build_with_tie_flags_set(self.cls, self.build_config(copy.deepcopy(values)))
        except Exception:  # any error of the class means that no checkpoint has such a config
            return None
        shapes = {name: value.shape for name, value in model.state_dict(keep_vars=True).items()}
        declared = existing_pairs(model.all_tied_weights_keys, shapes)
        same_shape = {target: source for target, source in declared.items() if shapes[target] == shapes[source]}
        prefix = f"{self.draft.paths[0]}."
        return {target: source for target, source in flatten_chains(same_shape).items() if target.startswith(prefix)}

    def names(self, pairs: Pairs) -> set[str]:
        """Return the names of tied tensors below a layer, as patterns.

        A number that takes every position among the layers that share modules (0, 1, ...) becomes a star.
        """
        prefix = f"{self.draft.paths[0]}."
        positions = {str(position) for position in range(len(_NUM_LAYERS_BETWEEN))}
        names = {target.removeprefix(prefix).partition(".")[2] for target in pairs}
        numbers_by_pattern: dict[str, set[str]] = {}
        for name in names:
            parts = name.split(".")
            index = next((index for index, part in enumerate(parts) if part.isdigit()), None)
            if index is not None:
                pattern = ".".join((*parts[:index], "*", *parts[index + 1 :]))
                numbers_by_pattern.setdefault(pattern, set()).add(parts[index])
        patterns = {pattern for pattern, numbers in numbers_by_pattern.items() if numbers == positions}
        covered_names = {pattern.replace("*", position) for pattern in patterns for position in positions}
        return patterns | (names - covered_names)


def _paths_before_numbers(pair: TiePair) -> tuple[str, ...] | None:
    """Return the path before the first number in each naming; None if its two names differ in more than this number."""
    paths = []
    for names in pair.namings:
        parts, other_parts = (name.split(".") for name in names)
        index, other_index = (
            next((index for index, part in enumerate(each) if part.isdigit()), None) for each in (parts, other_parts)
        )
        if index is None or index != other_index or _without_item(parts, index) != _without_item(other_parts, index):
            return None
        paths.append(".".join(parts[:index]))
    return tuple(paths)


def _without_item(items: list[str], index: int) -> list[str]:
    return [*items[:index], *items[index + 1 :]]


def _layer_type_keys(config: Values, pairs: Iterable[TiePair], paths: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield the keys of the config that list a kind for every layer, if all tied layers have one kind, with this kind.

    Args:
        config: The default config as a dict.
        pairs: Ties between layers.
        paths: Paths of the list of layers, as in `SharedLayers`.
    """
    prefix = f"{paths[0]}."
    tied_layers = {int(name.removeprefix(prefix).split(".")[0]) for pair in pairs for name in pair.namings[0]}
    for key, value in sorted(config.items()):
        if isinstance(value, list) and len(value) == config.get(_COUNT_KEY) and len({*map(str, value)}) > 1:
            kinds = {value[layer] for layer in tied_layers}
            if len(kinds) == 1 and isinstance(kind := kinds.pop(), str):
                yield key, kind
