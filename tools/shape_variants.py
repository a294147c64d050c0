"""Derive the shapes of a class: build it under configs that differ in their numbers, and solve for the expressions.

Every integer that the class reads while it is built is changed separately, then several at a time. A dimension is the
first expression over those numbers, from short to long, that gives its size under all of these configs; nothing is
derived from the code or from a name. The other values that the class reads (booleans, strings, floats, lists) are
changed once, too: a pattern with other shapes then gets a condition, and has no rule where the condition is false.
"""

from __future__ import annotations

import contextlib
import copy
import random
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from config_variants import (
    _EXPERT_COUNTS,
    _LAYER_COUNTS,
    SWITCHES,
    _configs,
    _declared_types,
    _other_values,
    _recorded_reads,
)
from shape_search import Search
from torch import nn
from transformers import PreTrainedConfig

from ckptx.architecture.expressions import Scope, try_evaluate
from ckptx.architecture.introspection import meta_model
from ckptx.architecture.introspection.meta_model import ConfigBuilder
from ckptx.architecture.shape_rules import Condition, ShapeRules, Switch, as_hashable
from ckptx.mapping.names import pattern_of

Values = dict[str, Any]
Shapes = Mapping[str, tuple[int, ...]]

_JOINT = 10  # configs with several numbers changed
_FACTORS = (3, 2, 5)  # factors to try for a number
_FEW_LAYERS = (4, 8)  # numbers of layers to try for the first config
_MAX_ABSENT_CONFIGS = 24  # configs from which a key is removed
_MAX_PLAIN_CONSTANT = 4  # a constant up to this value is attributed to the class itself
_SIZED = re.compile(r"size|dim|num|heads|rank|width|length")
_UNDECLARED_VALUE = 48  # value to try for a size that the model reads and the config class does not define
_LABELS = "num_labels"
_LABELS_TEXT = "(num_labels ?? #id2label ?? 2)"
# Numbers that do not determine shapes, and that config classes compare with others.
_NO_SIZE = re.compile(r"(_token_id|_token_index|_token|token_ids?)$|drop|^_|^initializer|^use_cache$")


class Observation(NamedTuple):
    """One config and the shapes of its model.

    Attributes:
        changed: The dotted keys whose values differ from the first config.
        numbers: Every integer of the config by dotted key.
        shapes: Shapes of the tensors of the model by name.
    """

    changed: frozenset[str]
    numbers: Mapping[str, int]
    shapes: Shapes


def derive_shapes(cls: Any, build_config: ConfigBuilder, base: Values, tied: Iterable[str]) -> ShapeRules | None:
    """Return the rules of one class; None if its first config cannot be built.

    Args:
        cls: The model class.
        build_config: Its config class as a function of a dict.
        base: The dict to start from.
        tied: Names of tied tensors; a checkpoint may omit each of them.
    """
    probe = _Probe(cls, build_config)
    found = probe.first(base)
    if found is None:
        return None
    start, reads = found
    first = probe.observe(start, frozenset())
    assert first is not None
    sized = [first, *probe.vary_numbers(start, reads)]
    others = list(probe.vary_other_values(start, reads))
    return _Solver(probe, base, start, sized, others, frozenset(tied)).rules()


class _Probe:
    """Builder of one class under many configs.

    Args:
        cls: The model class.
        build_config: Its config class as a function of a dict.
    """

    def __init__(self, cls: Any, build_config: ConfigBuilder) -> None:
        self.cls, self.build_config = cls, build_config
        # Keys that the model reads and the config class does not define.
        self.undeclared_keys: list[tuple[str, ...]] = []
        self.unchanged_numbers: list[int] = []  # numbers for which no other number could be tried

    def observe(self, values: Values, changed: frozenset[str]) -> Observation | None:
        """Return the shapes of the model of a config; None if it cannot be built."""
        try:
            config = self.build_config(copy.deepcopy(values))
            with _without_values():
                model = meta_model.build_on_meta(self.cls, config)
            shapes = {name: tuple(value.shape) for name, value in model.state_dict(keep_vars=True).items()}
        except Exception:  # any error of the class means that no checkpoint has such a config
            return None
        return Observation(changed, numbers_of(config), shapes)

    def first(self, base: Values) -> tuple[Values, set[tuple[tuple[str, ...], str]]] | None:
        """Return `base` with few layers and every number set explicitly, and the keys that are read, with paths."""
        for few in (*_FEW_LAYERS, None):
            values = copy.deepcopy(base)
            try:
                if few is not None:
                    values = self._with_few_layers(values, few)
                config = self.build_config(copy.deepcopy(values))
                with _recorded_reads() as read:
                    model = meta_model.build_on_meta(self.cls, config)
                names = {pattern_of(name) for name in model.state_dict(keep_vars=True)}
                if few is not None and _layer_lists(config) != _layer_lists(self.build_config(copy.deepcopy(base))):
                    continue  # a kind of layer that occurs only in a deeper model
            except Exception:
                continue
            reads = {
                (place, key)
                for place, config_values in _configs(config)
                for key in config_values
                if (type(_config_at(config, place)), key) in read
            }
            if getattr(config, "sub_configs", None):  # a composite may pass its numbers to its parts
                reads |= {((), key) for key, value in vars(config).items() if type(value) is int}
            spelled = self._with_explicit_numbers(values, config, reads)
            observation = self.observe(spelled, frozenset())
            if observation is not None and {pattern_of(name) for name in observation.shapes} == names:
                return self._with_undeclared_keys(spelled, config, read, reads, observation)
            if self.observe(values, frozenset()) is not None:
                return values, reads
        return None

    def _with_undeclared_keys(
        self,
        values: Values,
        config: Any,
        read: set[tuple[type, str]],
        reads: set[tuple[tuple[str, ...], str]],
        observation: Observation,
    ) -> tuple[Values, set[tuple[tuple[str, ...], str]]]:
        """Set a number for each key that the model reads, its config class does not define, and that changes shapes."""
        for place, config_values in _configs(config):
            owner = _config_at(config, place)
            for kind, key in sorted(read, key=str):
                if kind is not type(owner) or key in config_values or hasattr(owner, key) or not _SIZED.search(key):
                    continue
                given = copy.deepcopy(values)
                _write(given, (*place, key), _UNDECLARED_VALUE, config)
                other = self.observe(given, frozenset())
                if (
                    other is not None
                    and other.shapes.keys() == observation.shapes.keys()
                    and other.shapes != observation.shapes
                ):
                    values, observation, reads = given, other, reads | {(place, key)}
                    self.undeclared_keys.append((*place, key))
        return values, reads

    def _with_few_layers(self, values: Values, few: int) -> Values:
        config = self.build_config(copy.deepcopy(values))
        for place, config_values in _configs(config):
            for key in (_LAYER_COUNTS | _EXPERT_COUNTS) & config_values.keys():
                if isinstance(config_values[key], int) and config_values[key] > few:
                    _write(values, (*place, key), few, config)
        return values

    def _with_explicit_numbers(
        self, values: Values, config: Any, reads: Iterable[tuple[tuple[str, ...], str]]
    ) -> Values:
        spelled = copy.deepcopy(values)
        for place, key in sorted(reads):
            value = vars(_config_at(config, place)).get(key)
            if type(value) is int and not _NO_SIZE.search(key):
                _write(spelled, (*place, key), value, config)
        return spelled

    def vary_numbers(self, start: Values, reads: Iterable[tuple[tuple[str, ...], str]]) -> Iterator[Observation]:
        """Yield the results of changing each number separately, then several at a time."""
        config = self.build_config(copy.deepcopy(start))
        changes: dict[tuple[str, ...], int] = {}
        for place, key in sorted(reads):
            value = vars(_config_at(config, place)).get(key)
            if type(value) is not int or _NO_SIZE.search(key) or value < 2:
                continue
            options = (value + 1, value + 2, value * 2) if key in _LAYER_COUNTS else [value * each for each in _FACTORS]
            for other in (*options, value + 1):
                observation = self._changed(start, {(*place, key): other}, config)
                if observation is not None:
                    changes[(*place, key)] = other
                    yield observation
                    break
            else:
                self.unchanged_numbers.append(value)
        labels = self._changed(start, {(_LABELS,): 7}, config)
        if labels is not None:
            changes[_LABELS,] = 7
            yield labels
        chooser = random.Random(7)  # a fixed seed: the table depends only on the classes
        done, paths = 0, sorted(changes)
        for _ in range(4 * _JOINT):
            if done == _JOINT or len(paths) < 2:
                break
            share = chooser.choice((0.3, 0.5, 0.8))
            chosen = {path: changes[path] for path in paths if chooser.random() < share}
            observation = self._changed(start, chosen, config)
            if observation is not None:
                done += 1
                yield observation

    def vary_other_values(
        self, start: Values, reads: Iterable[tuple[tuple[str, ...], str]]
    ) -> Iterator[tuple[Any, ...]]:
        """Yield (path of the key, first value, other value, result, keys set with it) for values that are not numbers.

        The result is None if no other value gives a model: what depends on the key remains unknown.
        """
        config = self.build_config(copy.deepcopy(start))
        together = set()  # keys that have an effect only together with others
        for place, own in _configs(config):
            for switch in SWITCHES:
                key = next(iter(switch))
                if key not in own or isinstance(own[key], list):
                    continue
                observation = self._changed(start, {(*place, each): value for each, value in switch.items()}, config)
                if observation is not None:
                    together.add((*place, key))
                    others = {
                        ".".join((*place, each)): as_hashable(value) for each, value in switch.items() if each != key
                    }
                    yield (*place, key), own[key], switch[key], observation, tuple(sorted(others.items()))
        for place, key in sorted(reads):
            first_value = vars(_config_at(config, place)).get(key)
            if _NO_SIZE.search(key) or isinstance(first_value, PreTrainedConfig):
                continue
            others = list(_trial_values(_config_at(config, place), key, first_value))
            tried = [(other, self._changed(start, {(*place, key): other}, config)) for other in others]
            if tried and all(observation is None for _, observation in tried) and (*place, key) not in together:
                yield (*place, key), first_value, others[0], None, ()
            for other, observation in tried:
                if observation is not None:
                    yield (*place, key), first_value, other, observation, ()

    def _changed(self, start: Values, changes: Mapping[tuple[str, ...], Any], config: Any) -> Observation | None:
        values = copy.deepcopy(start)
        for path, value in changes.items():
            _write(values, path, value, config)
        return self.observe(values, frozenset(".".join(path) for path in changes))

    def configs_without_key(
        self, start: Values, path: tuple[str, ...], others: Sequence[Mapping[tuple[str, ...], int]]
    ) -> Iterator[Any]:
        """Yield the config without a key for each of `others`: the dict, and the config built from it."""
        config = self.build_config(copy.deepcopy(start))
        for changes in others:
            values = copy.deepcopy(start)
            with contextlib.suppress(Exception):  # any error means that no checkpoint has such a config
                for each, value in changes.items():
                    if each != path:
                        _write(values, each, value, config)
                node: Any = values
                for key in path[:-1]:
                    node = node.get(key, {})
                node.pop(path[-1], None)
                yield values, self.build_config(copy.deepcopy(values))


@contextlib.contextmanager
def _without_values() -> Iterator[None]:
    """Build modules without initializing their weights, which takes most of the time."""
    kinds = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.modules.conv._ConvNd)
    before = [kind.reset_parameters for kind in kinds]
    for kind in kinds:
        kind.reset_parameters = lambda self: None
    try:
        yield
    finally:
        for kind, original in zip(kinds, before, strict=True):
            kind.reset_parameters = original


def numbers_of(config: Any) -> dict[str, int]:
    """Return every integer in a config and those below it, by dotted key."""
    numbers = {}
    for place, config_values in _configs(config):
        for key, value in config_values.items():
            if type(value) is int:
                numbers[".".join((*place, key))] = value
    with contextlib.suppress(Exception):
        numbers[_LABELS] = int(config.num_labels)
    return numbers


def _trial_values(config: Any, key: str, value: Any) -> Iterator[Any]:
    """Yield the other values to try for a value that is not a number, or for a number that acts as a switch."""
    if isinstance(value, bool) or value is None or isinstance(value, str) or value == []:
        yield from _other_values(config, key, value)
    elif isinstance(value, float):
        yield value * 2
        yield value / 2
    elif isinstance(value, int):
        yield from (4, 2, 1 - value) if value < 2 else (0,)
    elif isinstance(value, (list, tuple)) and all(type(each) is int for each in value):
        yield [each * 2 for each in value]
        yield [*value, value[-1]]
    if isinstance(value, int) and not isinstance(value, bool) and type(None) in _declared_types(config, key):
        yield None


def _config_at(config: Any, place: Sequence[str]) -> Any:
    for key in place:
        config = getattr(config, key)
    return config


def _write(values: Values, path: Sequence[str], value: Any, config: Any) -> None:
    """Set one key; the configs above it get all values that differ from the defaults of their classes."""
    node = values
    for key in path[:-1]:
        config = getattr(config, key)
        if not isinstance(node.get(key), dict):
            spelled = {
                name: each
                for name, each in config.to_diff_dict().items()
                if not _NO_SIZE.search(name) and not _is_list_of_layer_types(name, each)
            }
            node[key] = copy.deepcopy(spelled)
        node = node[key]
    node[path[-1]] = value


def _is_list_of_layer_types(key: str, value: Any) -> bool:
    """Return True for a list with a string or boolean per layer, which config classes create if it is not set."""
    return (
        isinstance(value, list)
        and ("layer" in key or "block" in key)
        and all(isinstance(each, (str, bool)) for each in value)
    )


class _Solver:
    """Derivation of the rules of a class from the shapes of its models.

    Args:
        probe: Builder of the class.
        base: The dict to start from.
        start: `base` with few layers and every number set explicitly.
        sized: Observations with other numbers; the first is that of `start`.
        others: Results of `_Probe.vary_other_values`.
        tied: Names of tied tensors.
    """

    def __init__(
        self,
        probe: _Probe,
        base: Values,
        start: Values,
        sized: Sequence[Observation],
        others: Sequence[tuple[Any, ...]],
        tied: frozenset[str],
    ) -> None:
        self.probe, self.base, self.start, self.sized, self.others, self.tied = probe, base, start, sized, others, tied
        self.first = sized[0]
        self.by_pattern = [_by_pattern(observation.shapes) for observation in sized]
        own = self.first.numbers
        # a number that a config class always computes is not read from the file
        fixed = {
            key for observation in sized for key in observation.changed if observation.numbers.get(key) == own.get(key)
        }
        given = set().union(*(observation.changed for observation in sized))
        self.keys = sorted((given - fixed) & own.keys())
        for observation in sized:
            self.keys = [key for key in self.keys if key in observation.numbers]
        moved = {
            key
            for observation in sized
            for key in self.keys
            if key not in observation.changed and observation.numbers[key] != own[key]
        }
        self.keys = [key for key in self.keys if key not in moved]
        self.search = Search({key: [observation.numbers[key] for observation in sized] for key in self.keys})
        self._texts: dict[tuple[int, ...], str | None] = {}
        self.dims: dict[str, tuple[tuple[str, ...], ...]] = {}

    def rules(self) -> ShapeRules:
        patterns = sorted(set.intersection(*(set(each) for each in self.by_pattern)))
        dims = self.dims
        for pattern in patterns:
            found = self._shapes_of(pattern)
            if found:
                dims[pattern] = found
        counts = self._counts(patterns)
        required = frozenset(each for each in patterns if self._has_all_indices(each, counts))
        required -= self._may_be_missing(required)
        conditions = self._conditions(dims, counts, required)
        texts = {text for shapes in dims.values() for shape in shapes for text in shape} | set(counts.values())
        used = [key for key in self.keys if any(_reads_key(text, key) for text in texts)]
        resolved, defaults, aliases = self._resolution(used)
        every = self._all_patterns()
        return ShapeRules(
            shapes={
                name: tuple(tuple(_resolved(text, resolved) for text in shape) for shape in shapes)
                for name, shapes in dims.items()
            },
            counts={path: _resolved(text, resolved) for path, text in counts.items()},
            required=required,
            conditions=conditions,
            models=self._models(),
            defaults=defaults,
            aliases=aliases,
            switches=self._switches(every),
            other_patterns=frozenset(every) - set(dims) - required,
        )

    # -- expressions

    def _expression(self, sizes: Sequence[int]) -> str | None:
        key = tuple(sizes)
        if key not in self._texts:
            text = self.search.find(key)
            self._texts[key] = text if text is not None and not self._may_be_config_number(text) else None
        return self._texts[key]

    def _may_be_config_number(self, text: str) -> bool:
        """Return True if a constant may be a number of the config that was not changed."""
        constants = [int(each) for each in re.findall(r"(?<![\w.])[0-9]+(?![\w.])", text)]
        if text.isdecimal() and self.probe.unchanged_numbers and int(text) > _MAX_PLAIN_CONSTANT:
            return True
        first_numbers = set(self.first.numbers.values())
        return any(
            (each > 1 and each in self.probe.unchanged_numbers)
            or (each > _MAX_PLAIN_CONSTANT and each in first_numbers)
            for each in constants
        )

    def _shapes_of(self, pattern: str) -> tuple[tuple[str, ...], ...]:
        """Return the shapes that tensors of a pattern may have, in the order of the first tensor with each shape."""
        shapes_by_config = [list(dict.fromkeys(each[pattern].values())) for each in self.by_pattern]
        number = len(shapes_by_config[0])
        if number > 3 or any(len(shapes) != number for shapes in shapes_by_config):
            return ()
        found = []
        for at in range(number):
            shapes = [each[at] for each in shapes_by_config]
            if len({len(shape) for shape in shapes}) != 1:
                return ()
            texts = [self._expression([shape[dim] for shape in shapes]) for dim in range(len(shapes[0]))]
            if number > 1 and None in texts:
                return ()
            found.append(tuple(text or "" for text in texts))
        return tuple(found) if any(text for shape in found for text in shape) or not found[0] else ()

    # -- names

    def _counts(self, patterns: Iterable[str]) -> dict[str, str]:
        """Return the number of indices that each star stands for, by the path in front of it."""
        paths = {
            ".".join(parts[:at]) for parts in (each.split(".") for each in patterns)
            for at, part in enumerate(parts) if part == "*"
        }  # fmt: skip
        found = {}
        for path in sorted(paths):
            numbers = [_number_below(path, observation.shapes) for observation in self.sized]
            text = self._expression([number or 0 for number in numbers]) if all(numbers) else None
            if text:
                found[path] = text
        return found

    def _has_all_indices(self, pattern: str, counts: Mapping[str, str]) -> bool:
        parts = pattern.split(".")
        paths = [".".join(parts[:at]) for at, part in enumerate(parts) if part == "*"]
        if any(path not in counts for path in paths):
            return False
        for observation, grouped in zip(self.sized, self.by_pattern, strict=True):
            whole = 1
            for path in paths:
                whole *= _number_below(path, observation.shapes) or 0
            if len(grouped[pattern]) != whole:
                return False
        return True

    def _may_be_missing(self, patterns: Iterable[str]) -> set[str]:
        """Return the patterns that a checkpoint may omit: buffers, tied names, keys that transformers may miss."""
        model = meta_model.build_on_meta(self.probe.cls, self.probe.build_config(copy.deepcopy(self.start)))
        buffers = {pattern_of(name) for name, _ in model.named_buffers()}
        regexes = [each for each in model._keys_to_ignore_on_load_missing or () if isinstance(each, str)]
        names: dict[str, str] = {}
        for name in self.first.shapes:
            names.setdefault(pattern_of(name), name)
        return {
            each
            for each in patterns
            if each in buffers or each in self.tied or any(re.search(regex, names[each]) for regex in regexes)
        }

    def _conditions(
        self, dims: Mapping[str, Any], counts: Mapping[str, str], required: frozenset[str]
    ) -> dict[Condition, frozenset[str]]:
        """Return the conditions under which the rules are valid, each with its patterns; see `vary_other_values`."""
        found: dict[Condition, set[str]] = {}
        patterns = set(dims) | required
        for path, first_value, other, observation, _ in self.others:
            grouped = _by_pattern(observation.shapes) if observation is not None else {}
            differs = {
                each
                for each in patterns
                if each not in grouped
                or list(dict.fromkeys(grouped[each].values())) != list(dict.fromkeys(self.by_pattern[0][each].values()))
                or (each in required and grouped[each].keys() != self.by_pattern[0][each].keys())
            }
            if differs:
                found.setdefault(_condition(".".join(path), first_value, other), set()).update(differs)
        for path, words in _layer_lists(self.probe.build_config(copy.deepcopy(self.start))).items():
            numbered = {each for each in patterns if "*" in each}
            if numbered:
                found.setdefault(Condition(path, "among", tuple(words)), set()).update(numbered)
        return {condition: frozenset(names) for condition, names in sorted(found.items(), key=str)}

    def _all_patterns(self) -> set[str]:
        """Return the patterns of the first config, and of the same config with all layers."""
        whole = self.probe.observe(self.base, frozenset())
        shapes = {**self.first.shapes, **(whole.shapes if whole is not None else {})}
        return set(map(pattern_of, shapes))

    def _switches(self, every: Collection[str]) -> dict[Switch, frozenset[str]]:
        """Find the patterns that one value of one key adds or removes."""
        found: dict[Switch, set[str]] = {}
        first = set(map(pattern_of, self.first.shapes))
        for path, first_value, other, observation, companions in self.others:
            patterns = set(map(pattern_of, observation.shapes)) if observation is not None else first
            key, value = ".".join(path), as_hashable(first_value)
            if patterns - first:
                effect = "adds" if self._is_default(path, value) else "adds where given"
                found.setdefault(Switch(key, effect, value, companions), set()).update(patterns - first)
            # Whether a number removes a layer of some kind depends on how many layers there are.
            if not companions and first - patterns and (other is None or isinstance(other, bool | str)):
                found.setdefault(Switch(key, "removes", as_hashable(other)), set()).update(first - patterns)
        for switch in [each for each in found if each.companions]:  # without them, the key adds what another row says
            found[switch] -= found.get(switch._replace(companions=()), set())
            if not found[switch]:
                del found[switch]
        for switch in [each for each in found if each.effect != "removes"]:
            if type(switch.value) is int or found[switch] & every:
                found[switch._replace(effect="may add")] = found.pop(switch)
        return {switch: frozenset(names) for switch, names in sorted(found.items(), key=str)}

    def _is_default(self, path: Sequence[str], value: Any) -> bool:
        """Return True if a config without the key has this value: a part has the defaults of its own class."""
        try:
            owner = _config_at(self.probe.build_config(copy.deepcopy(self.start)), path[:-1])
            return bool(as_hashable(vars(type(owner)()).get(path[-1])) == value)
        except Exception:  # a class that cannot be built without arguments has no defaults
            return False

    def _models(self) -> dict[str, str]:
        """Return the model types of the exchangeable parts with which the class was measured."""
        config = self.probe.build_config(copy.deepcopy(self.start))
        found = {}
        for key, kind in sorted(getattr(config, "sub_configs", {}).items()):
            nested = getattr(config, key, None)
            if kind.__name__ == "AutoConfig" and nested is not None:
                found[key] = str(nested.model_type)
        return found

    # -- keys

    def _resolution(self, used: Sequence[str]) -> tuple[dict[str, str], dict[str, int], dict[str, str]]:
        """Return the values of absent keys, as expressions over others or as numbers, and the other names of keys."""
        config = self.probe.build_config(copy.deepcopy(self.start))
        resolved: dict[str, str] = {}
        defaults: dict[str, int] = {}
        aliases: dict[str, str] = {}
        changes = [
            {
                tuple(key.split(".")): observation.numbers[key]
                for key in observation.changed
                if key in observation.numbers
            }
            for observation in self.sized
        ]
        for key in used:
            if key == _LABELS:
                resolved[key] = _LABELS_TEXT
                continue
            path = tuple(key.split("."))
            owner = _config_at(config, path[:-1])
            spelled = [name for name, mapped in getattr(owner, "attribute_map", {}).items() if mapped == path[-1]]
            if spelled:
                aliases[key] = spelled[0]
            absent_values = list(self._without(path, changes))
            values = [value for _, value in absent_values]
            if not absent_values or None in values:
                continue
            if len(set(values)) == 1:
                if len(path) > 1:
                    defaults[key] = values[0]
            else:
                keys = [
                    each for each in self.keys if each != key and all(each in numbers for numbers, _ in absent_values)
                ]
                text = Search({each: [numbers[each] for numbers, _ in absent_values] for each in keys}).find(
                    tuple(values)
                )
                if text:
                    resolved[key] = f"({key} ?? {text})"
        # an expression for an absent key reads keys that may be absent, too
        for key in [key for key in self.keys if key not in used]:
            if any(_reads_key(text, key) for text in resolved.values()):
                for _, value in self._without(tuple(key.split(".")), [{}]):
                    if value is not None and "." in key:
                        defaults.setdefault(key, value)
        return resolved, defaults, aliases

    def _without(
        self, path: tuple[str, ...], changes: Sequence[Mapping[tuple[str, ...], int]]
    ) -> Iterator[tuple[Mapping[str, int], int | None]]:
        """Yield (numbers of the config, its value of the key) for configs without the key."""
        companions = [each for each in changes if len(each) != 1 or next(iter(each))[:-1] == path[:-1]][
            :_MAX_ABSENT_CONFIGS
        ]
        for values, config in self.probe.configs_without_key(self.start, path, companions):
            if path in self.probe.undeclared_keys:
                yield numbers_of(config), self._equivalent_value(path, values)
            else:
                value = vars(_config_at(config, path[:-1])).get(path[-1])
                yield numbers_of(config), value if type(value) is int else None

    def _equivalent_value(self, path: tuple[str, ...], values: Values) -> int | None:
        """Return the value of an undeclared key that gives the same shapes as the model without it."""
        observation = self.probe.observe(values, frozenset())
        key = ".".join(path)
        if observation is None:
            return None
        for pattern, shapes in self.dims.items():
            for dim, text in enumerate(shapes[0]) if len(shapes) == 1 else ():
                grouped = _by_pattern(observation.shapes).get(pattern) if _reads_key(text, key) else None
                if grouped is None:
                    continue
                size = next(iter(grouped.values()))[dim]
                tried = [try_evaluate(text, Scope(_nested({**observation.numbers, key: at}))) for at in (1, 2)]
                rise = (tried[1] or 0) - (tried[0] or 0)
                if rise and (size - (tried[0] or 0)) % rise == 0:
                    return 1 + (size - (tried[0] or 0)) // rise
        return None


def _layer_lists(config: Any) -> dict[str, list[str]]:
    """Return the lists with a string per layer, by dotted key; other strings mean other layers."""
    return {
        ".".join((*place, key)): sorted(set(value))
        for place, config_values in _configs(config)
        for key, value in sorted(config_values.items())
        if _is_list_of_layer_types(key, value) and value and isinstance(value[0], str)
    }


def _nested(numbers: Mapping[str, int]) -> Values:
    """Return dotted keys as a nested dict."""
    config: Values = {}
    for key, value in numbers.items():
        node = config
        *path, last = key.split(".")
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return config


def _condition(key: str, first_value: Any, other: Any) -> Condition:
    """Return the condition that separates the measured config from the one with the other value."""
    if other is None or (other == 0 and type(other) is int and first_value != 1):
        return Condition(key, "set", ())
    value = list(first_value) if isinstance(first_value, tuple) else first_value
    return Condition(key, "is", (value,) if not isinstance(value, list) else (tuple(value),))


def _by_pattern(shapes: Shapes) -> dict[str, dict[str, tuple[int, ...]]]:
    grouped: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        grouped.setdefault(pattern_of(name), {})[name] = shape
    return grouped


def _number_below(path: str, names: Iterable[str]) -> int | None:
    """Return the number of indices after `path`; None if it differs between tensors of the path or has gaps."""
    depth = path.count(".") + 1
    found: dict[str, set[int]] = {}
    for name in names:
        parts = name.split(".")
        if len(parts) > depth and parts[depth].isdecimal() and pattern_of(".".join(parts[:depth])) == path:
            found.setdefault(".".join(parts[:depth]), set()).add(int(parts[depth]))
    sets = list(found.values())
    if not sets or any(each != sets[0] for each in sets) or sets[0] != set(range(len(sets[0]))):
        return None
    return len(sets[0])


def _reads_key(text: str, key: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", text) is not None


def _resolved(text: str, resolved: Mapping[str, str]) -> str:
    return re.sub(r"[A-Za-z_][\w.]*", lambda found: resolved.get(found[0], found[0]), text)
