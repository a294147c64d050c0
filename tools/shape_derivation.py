"""Derive the shapes of a class: build it under configs that differ in their numbers, and solve for the expressions.

Every integer that the class reads while it is built is changed separately, then several at a time. The rule of a
dimension is the first expression over those numbers, from short to long, that gives its size under all of these
configs; nothing is derived from the code or from a name. The other values that the class reads (booleans, strings,
floats, lists) are changed once, too: a name pattern (tensor name with `*` for each index) whose shapes change gets a
condition, and has no rule for configs that do not meet it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from shape_probe import (
    LABELS_KEY,
    KeyPath,
    Observation,
    Probe,
    Shapes,
    Values,
    ValueTrial,
    config_at,
    layer_types_of,
    numbers_of,
)
from shape_search import Search

from ckptx.architecture.expressions import Scope, try_evaluate
from ckptx.architecture.introspection import meta_model
from ckptx.architecture.introspection.meta_model import ConfigBuilder
from ckptx.architecture.shape_rules import Condition, ShapeRules, Switch, as_hashable
from ckptx.mapping.names import pattern_of

_MAX_CONFIGS_WITHOUT_KEY = 24  # configs from which a key is removed
_MAX_CLASS_CONSTANT = 4  # a constant up to this value comes from the class, even if the config has the same number
_LABELS_EXPRESSION = "(num_labels ?? #id2label ?? 2)"


def derive_shapes(cls: Any, build_config: ConfigBuilder, base: Values, tied: Iterable[str]) -> ShapeRules | None:
    """Return the rules of one class; None if no model can be built from `base`.

    Args:
        cls: The model class.
        build_config: Builds a config of the class from a dict.
        base: The config, as a dict, to start from.
        tied: Name patterns of tied tensors; a checkpoint may omit each of them.
    """
    probe = Probe(cls, build_config)
    found = probe.find_start_config(base)
    if found is None:
        return None
    start, read_keys = found
    start_observation = probe.observe(start, frozenset())
    assert start_observation is not None
    number_observations = [start_observation, *probe.vary_numbers(start, read_keys)]
    value_trials = list(probe.vary_other_values(start, read_keys))
    return _Solver(probe, base, start, number_observations, value_trials, frozenset(tied)).rules()


class _Solver:
    """Derive the rules of a class from the shapes of its models.

    Args:
        probe: Builds the class under further configs.
        base: The config, as a dict, to start from.
        start: The start config, see `Probe.find_start_config`.
        number_observations: Observations with other numbers; the first is that of `start`.
        value_trials: Results of `Probe.vary_other_values`.
        tied: Name patterns of tied tensors.
    """

    def __init__(
        self,
        probe: Probe,
        base: Values,
        start: Values,
        number_observations: Sequence[Observation],
        value_trials: Sequence[ValueTrial],
        tied: frozenset[str],
    ) -> None:
        self.probe, self.base, self.start, self.tied = probe, base, start, tied
        self.number_observations, self.value_trials = number_observations, value_trials
        self.start_observation = number_observations[0]
        self.shapes_by_pattern = [_group_by_pattern(observation.shapes) for observation in number_observations]
        start_numbers = self.start_observation.numbers
        # a number that a config class always computes is not read from the file
        computed_keys = {
            key
            for observation in number_observations
            for key in observation.changed_keys
            if observation.numbers.get(key) == start_numbers.get(key)
        }
        changed_keys = set().union(*(observation.changed_keys for observation in number_observations))
        # Dotted keys that an expression may have.
        self.keys = sorted((changed_keys - computed_keys) & start_numbers.keys())
        for observation in number_observations:
            self.keys = [key for key in self.keys if key in observation.numbers]
        derived_keys = {  # their numbers follow from other keys that were set
            key
            for observation in number_observations
            for key in self.keys
            if key not in observation.changed_keys and observation.numbers[key] != start_numbers[key]
        }
        self.keys = [key for key in self.keys if key not in derived_keys]
        self.search = Search(
            {key: [observation.numbers[key] for observation in number_observations] for key in self.keys}
        )
        self._expressions: dict[tuple[int, ...], str | None] = {}  # sizes under all configs -> expression
        # Pattern -> the shapes of its tensors, with an expression per dimension; "" if unknown.
        self.shape_expressions: dict[str, tuple[tuple[str, ...], ...]] = {}

    def rules(self) -> ShapeRules:
        """Return the rules of the class."""
        patterns = sorted(set.intersection(*(set(each) for each in self.shapes_by_pattern)))
        for pattern in patterns:
            found = self._shape_expressions_of(pattern)
            if found:
                self.shape_expressions[pattern] = found
        counts = self._count_expressions(patterns)
        required = frozenset(each for each in patterns if self._has_all_indices(each, counts))
        required -= self._may_be_missing(required)
        conditions = self._conditions(self.shape_expressions, required)
        expressions = {
            expression for shapes in self.shape_expressions.values() for shape in shapes for expression in shape
        } | set(counts.values())
        used_keys = [key for key in self.keys if any(_reads_key(expression, key) for expression in expressions)]
        replacements, defaults, aliases = self._absent_keys_and_aliases(used_keys)
        all_patterns = self._all_patterns()
        return ShapeRules(
            shapes={
                name: tuple(tuple(_substitute(expression, replacements) for expression in shape) for shape in shapes)
                for name, shapes in self.shape_expressions.items()
            },
            counts={path: _substitute(expression, replacements) for path, expression in counts.items()},
            required=required,
            conditions=conditions,
            models=self._sub_model_types(),
            defaults=defaults,
            aliases=aliases,
            switches=self._switches(all_patterns),
            other_patterns=frozenset(all_patterns) - set(self.shape_expressions) - required,
        )

    # -- expressions

    def _expression(self, sizes: Sequence[int]) -> str | None:
        """Return an expression for a size.

        Args:
            sizes: The size under each config of `number_observations`.

        Returns:
            None if no short expression gives the sizes, or if a constant in it may be a number of the config.
        """
        key = tuple(sizes)
        if key not in self._expressions:
            expression = self.search.find(key)
            is_usable = expression is not None and not self._may_be_config_number(expression)
            self._expressions[key] = expression if is_usable else None
        return self._expressions[key]

    def _may_be_config_number(self, expression: str) -> bool:
        """Return True if a constant of the expression may be a number of the config that was not changed."""
        constants = [int(each) for each in re.findall(r"(?<![\w.])[0-9]+(?![\w.])", expression)]
        if expression.isdecimal() and self.probe.unchanged_numbers and int(expression) > _MAX_CLASS_CONSTANT:
            return True
        start_numbers = set(self.start_observation.numbers.values())
        return any(
            (each > 1 and each in self.probe.unchanged_numbers)
            or (each > _MAX_CLASS_CONSTANT and each in start_numbers)
            for each in constants
        )

    def _shape_expressions_of(self, pattern: str) -> tuple[tuple[str, ...], ...]:
        """Return the shapes that tensors of a pattern may have, in the order of the first tensor with each shape.

        Returns:
            An expression per dimension, "" if unknown; no shape at all if the tensors of the pattern have more than
            three shapes, another number of shapes or dimensions under another config, or several shapes of which one
            has an unknown size.
        """
        shapes_by_config = [list(dict.fromkeys(each[pattern].values())) for each in self.shapes_by_pattern]
        num_shapes = len(shapes_by_config[0])
        if num_shapes > 3 or any(len(shapes) != num_shapes for shapes in shapes_by_config):
            return ()
        found = []
        for index in range(num_shapes):
            shapes = [each[index] for each in shapes_by_config]
            if len({len(shape) for shape in shapes}) != 1:
                return ()
            expressions = [self._expression([shape[dim] for shape in shapes]) for dim in range(len(shapes[0]))]
            if num_shapes > 1 and None in expressions:
                return ()
            found.append(tuple(expression or "" for expression in expressions))
        has_expression = any(expression for shape in found for expression in shape)
        return tuple(found) if has_expression or not found[0] else ()

    # -- names

    def _count_expressions(self, patterns: Iterable[str]) -> dict[str, str]:
        """Return an expression for the number of indices of each star, by the path before it, where one is found."""
        paths = {
            ".".join(parts[:index]) for parts in (each.split(".") for each in patterns)
            for index, part in enumerate(parts) if part == "*"
        }  # fmt: skip
        found = {}
        for path in sorted(paths):
            counts = [_count_indices(path, observation.shapes) for observation in self.number_observations]
            expression = self._expression([count or 0 for count in counts]) if all(counts) else None
            if expression:
                found[path] = expression
        return found

    def _has_all_indices(self, pattern: str, counts: Mapping[str, str]) -> bool:
        """Return True if a pattern has, under every config, a tensor for each index of each star.

        Args:
            pattern: The pattern.
            counts: Result of `_count_expressions`; False is returned if it lacks a star of the pattern.
        """
        parts = pattern.split(".")
        paths = [".".join(parts[:index]) for index, part in enumerate(parts) if part == "*"]
        if any(path not in counts for path in paths):
            return False
        for observation, grouped in zip(self.number_observations, self.shapes_by_pattern, strict=True):
            expected_count = 1
            for path in paths:
                expected_count *= _count_indices(path, observation.shapes) or 0
            if len(grouped[pattern]) != expected_count:
                return False
        return True

    def _may_be_missing(self, patterns: Iterable[str]) -> set[str]:
        """Return the patterns that a checkpoint may omit.

        These are buffers, tied names, and keys that transformers lets be missing (`_keys_to_ignore_on_load_missing`).
        """
        model = meta_model.build_on_meta(self.probe.cls, self.probe.build_config(copy.deepcopy(self.start)))
        buffers = {pattern_of(name) for name, _ in model.named_buffers()}
        regexes = [each for each in model._keys_to_ignore_on_load_missing or () if isinstance(each, str)]
        names: dict[str, str] = {}
        for name in self.start_observation.shapes:
            names.setdefault(pattern_of(name), name)
        return {
            each
            for each in patterns
            if each in buffers or each in self.tied or any(re.search(regex, names[each]) for regex in regexes)
        }

    def _conditions(
        self, patterns_with_shapes: Iterable[str], required: frozenset[str]
    ) -> dict[Condition, frozenset[str]]:
        """Return the conditions under which the rules are valid, each with the patterns that depend on it."""
        found: dict[Condition, set[str]] = {}
        patterns = set(patterns_with_shapes) | required
        start_shapes = self.shapes_by_pattern[0]
        for trial in self.value_trials:
            grouped = _group_by_pattern(trial.observation.shapes) if trial.observation is not None else {}
            differing_patterns = {
                each
                for each in patterns
                if each not in grouped
                or list(dict.fromkeys(grouped[each].values())) != list(dict.fromkeys(start_shapes[each].values()))
                or (each in required and grouped[each].keys() != start_shapes[each].keys())
            }
            if differing_patterns:
                condition = _condition(".".join(trial.path), trial.start_value, trial.other_value)
                found.setdefault(condition, set()).update(differing_patterns)
        for key, layer_types in layer_types_of(self.probe.build_config(copy.deepcopy(self.start))).items():
            patterns_with_index = {each for each in patterns if "*" in each}
            if patterns_with_index:
                found.setdefault(Condition(key, "among", tuple(layer_types)), set()).update(patterns_with_index)
        return {condition: frozenset(names) for condition, names in sorted(found.items(), key=str)}

    def _all_patterns(self) -> set[str]:
        """Return the patterns of the start config, and of the base config, which has all layers."""
        full = self.probe.observe(self.base, frozenset())
        shapes = {**self.start_observation.shapes, **(full.shapes if full is not None else {})}
        return set(map(pattern_of, shapes))

    def _switches(self, all_patterns: Collection[str]) -> dict[Switch, frozenset[str]]:
        """Return the switches of the class, each with the patterns that it adds or removes.

        Args:
            all_patterns: Result of `_all_patterns`; a switch that adds one of them "may add" its patterns.
        """
        found: dict[Switch, set[str]] = {}
        start_patterns = set(map(pattern_of, self.start_observation.shapes))
        for path, start_value, other_value, observation, companions in self.value_trials:
            patterns = set(map(pattern_of, observation.shapes)) if observation is not None else start_patterns
            added, removed = patterns - start_patterns, start_patterns - patterns
            key, value = ".".join(path), as_hashable(start_value)
            if added:
                effect = "adds" if self._is_default(path, value) else "adds where given"
                found.setdefault(Switch(key, effect, value, companions), set()).update(added)
            # Whether a number removes a layer of some kind depends on how many layers there are.
            if not companions and removed and (other_value is None or isinstance(other_value, bool | str)):
                found.setdefault(Switch(key, "removes", as_hashable(other_value)), set()).update(removed)
        for switch in [each for each in found if each.companions]:
            # patterns that the key adds without companions belong to the switch without companions
            found[switch] -= found.get(switch._replace(companions=()), set())
            if not found[switch]:
                del found[switch]
        for switch in [each for each in found if each.effect != "removes"]:
            if type(switch.value) is int or found[switch] & all_patterns:
                found[switch._replace(effect="may add")] = found.pop(switch)
        return {switch: frozenset(names) for switch, names in sorted(found.items(), key=str)}

    def _is_default(self, path: KeyPath, value: Any) -> bool:
        """Return True if the config class that has the key, of a sub-config or of the root, has this default for it."""
        try:
            owner = config_at(self.probe.build_config(copy.deepcopy(self.start)), path[:-1])
            return bool(as_hashable(vars(type(owner)()).get(path[-1])) == value)
        except Exception:  # a class that cannot be built without arguments has no defaults
            return False

    def _sub_model_types(self) -> dict[str, str]:
        """Return the model type of each sub-config that the config class declares as `AutoConfig`, by its key."""
        config = self.probe.build_config(copy.deepcopy(self.start))
        found = {}
        for key, config_class in sorted(getattr(config, "sub_configs", {}).items()):
            sub_config = getattr(config, key, None)
            if config_class.__name__ == "AutoConfig" and sub_config is not None:
                found[key] = str(sub_config.model_type)
        return found

    # -- keys

    def _absent_keys_and_aliases(
        self, used_keys: Sequence[str]
    ) -> tuple[dict[str, str], dict[str, int], dict[str, str]]:
        """Find out which values absent keys have, and under which other names a config may have a key.

        Args:
            used_keys: Dotted keys that expressions read.

        Returns:
            Key -> expression that replaces it, for keys whose value, if absent, depends on other keys; key of a
            sub-config -> number, for keys with a fixed default; key -> alias.
        """
        config = self.probe.build_config(copy.deepcopy(self.start))
        replacements: dict[str, str] = {}
        defaults: dict[str, int] = {}
        aliases: dict[str, str] = {}
        changes_of_configs = [
            {
                tuple(key.split(".")): observation.numbers[key]
                for key in observation.changed_keys
                if key in observation.numbers
            }
            for observation in self.number_observations
        ]
        for key in used_keys:
            if key == LABELS_KEY:
                replacements[key] = _LABELS_EXPRESSION
                continue
            path = tuple(key.split("."))
            owner = config_at(config, path[:-1])
            alias_names = [name for name, mapped in getattr(owner, "attribute_map", {}).items() if mapped == path[-1]]
            if alias_names:
                aliases[key] = alias_names[0]
            configs_without_key = list(self._values_if_absent(path, changes_of_configs))
            values = [value for _, value in configs_without_key]
            if not configs_without_key or None in values:
                continue
            if len(set(values)) == 1:
                if len(path) > 1:
                    defaults[key] = values[0]
            else:
                other_keys = [
                    each
                    for each in self.keys
                    if each != key and all(each in numbers for numbers, _ in configs_without_key)
                ]
                search = Search({each: [numbers[each] for numbers, _ in configs_without_key] for each in other_keys})
                expression = search.find(tuple(values))
                if expression:
                    replacements[key] = f"({key} ?? {expression})"
        # An expression for an absent key may read keys that no other expression reads, and that may be absent, too.
        for key in [key for key in self.keys if key not in used_keys]:
            if any(_reads_key(expression, key) for expression in replacements.values()):
                for _, value in self._values_if_absent(tuple(key.split(".")), [{}]):
                    if value is not None and "." in key:
                        defaults.setdefault(key, value)
        return replacements, defaults, aliases

    def _values_if_absent(
        self, path: KeyPath, changes_of_configs: Sequence[Mapping[KeyPath, int]]
    ) -> Iterator[tuple[Mapping[str, int], int | None]]:
        """Yield the numbers of configs from which a key was removed, each with the value that the key then has.

        Args:
            path: Path of the key.
            changes_of_configs: Other numbers of each config by path. A config that differs from the start config in
                one key only is left out if this key is in another sub-config than `path`.
        """
        changes_of_same_config = [
            each for each in changes_of_configs if len(each) != 1 or next(iter(each))[:-1] == path[:-1]
        ][:_MAX_CONFIGS_WITHOUT_KEY]
        for values, config in self.probe.configs_without_key(self.start, path, changes_of_same_config):
            if path in self.probe.undeclared_keys:
                yield numbers_of(config), self._equivalent_value(path, values)
            else:
                value = vars(config_at(config, path[:-1])).get(path[-1])
                yield numbers_of(config), value if type(value) is int else None

    def _equivalent_value(self, path: KeyPath, values: Values) -> int | None:
        """Return the value of an undeclared key that gives the same shapes as the model without it.

        Args:
            path: Path of the key.
            values: The config, as a dict without the key.

        Returns:
            None if the model cannot be built, or no expression that reads the key gives a value. Expressions are taken
            as linear in the key.
        """
        observation = self.probe.observe(values, frozenset())
        key = ".".join(path)
        if observation is None:
            return None
        for pattern, shapes in self.shape_expressions.items():
            for dim, expression in enumerate(shapes[0]) if len(shapes) == 1 else ():
                tensors = _group_by_pattern(observation.shapes).get(pattern) if _reads_key(expression, key) else None
                if tensors is None:
                    continue
                size = next(iter(tensors.values()))[dim]
                size_at_1, size_at_2 = (
                    try_evaluate(expression, Scope(_nested_dict({**observation.numbers, key: value}))) or 0
                    for value in (1, 2)
                )
                slope = size_at_2 - size_at_1
                if slope and (size - size_at_1) % slope == 0:
                    return 1 + (size - size_at_1) // slope
        return None


def _nested_dict(numbers: Mapping[str, int]) -> Values:
    """Return numbers by dotted key as a nested dict."""
    config: Values = {}
    for key, value in numbers.items():
        node = config
        *path, last = key.split(".")
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return config


def _condition(key: str, start_value: Any, other_value: Any) -> Condition:
    """Return a condition that the start config meets and the config with the other value does not."""
    if other_value is None or (other_value == 0 and type(other_value) is int and start_value != 1):
        return Condition(key, "set", ())
    value = list(start_value) if isinstance(start_value, tuple) else start_value
    return Condition(key, "is", (value,) if not isinstance(value, list) else (tuple(value),))


def _group_by_pattern(shapes: Shapes) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return pattern -> tensor name -> shape."""
    grouped: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        grouped.setdefault(pattern_of(name), {})[name] = shape
    return grouped


def _count_indices(path: str, names: Iterable[str]) -> int | None:
    """Return the number of indices after a path with stars.

    Returns:
        None if there are none, the indices have gaps, or they differ between the modules that the path matches.
    """
    depth = path.count(".") + 1
    indices: dict[str, set[int]] = {}  # by path with the indices of its stars
    for name in names:
        parts = name.split(".")
        if len(parts) > depth and parts[depth].isdecimal() and pattern_of(".".join(parts[:depth])) == path:
            indices.setdefault(".".join(parts[:depth]), set()).add(int(parts[depth]))
    sets = list(indices.values())
    if not sets or any(each != sets[0] for each in sets) or sets[0] != set(range(len(sets[0]))):
        return None
    return len(sets[0])


def _reads_key(expression: str, key: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", expression) is not None


def _substitute(expression: str, replacements: Mapping[str, str]) -> str:
    """Replace the keys of an expression that have a replacement."""
    return re.sub(r"[A-Za-z_][\w.]*", lambda match: replacements.get(match[0], match[0]), expression)
