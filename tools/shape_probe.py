"""Build a model class under many configs and record the shapes of its tensors.

`Probe.find_start_config` gives a config with few layers, with every number set explicitly where possible. The other
methods change this start config: other numbers (`vary_numbers`), other booleans, strings, floats and lists
(`vary_other_values`), and a key removed, which then has its default (`configs_without_key`).
"""

from __future__ import annotations

import contextlib
import copy
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from config_variants import (
    EXPERT_COUNT_KEYS,
    LAYER_COUNT_KEYS,
    SWITCHES,
    declared_types,
    other_values,
    record_reads,
    walk_configs,
)
from torch import nn
from transformers import PreTrainedConfig

from ckptx.architecture.introspection import meta_model
from ckptx.architecture.introspection.meta_model import ConfigBuilder
from ckptx.architecture.shape_rules import as_hashable
from ckptx.mapping.names import pattern_of

Values = dict[str, Any]  # arguments of a config class, with a nested dict for each sub-config
KeyPath = tuple[str, ...]  # keys from the root config to a value; to a sub-config: its attribute path, () for the root
ReadKeys = set[tuple[KeyPath, str]]  # path of the sub-config, and the key that the model reads there
Shapes = Mapping[str, tuple[int, ...]]  # tensor name -> shape

_NUM_JOINT_CONFIGS = 10  # configs with several numbers changed
_FACTORS = (3, 2, 5)  # a number is multiplied by the first of these that gives a model
_SMALL_COUNTS = (4, 8)  # maximum numbers of layers and of experts to try for the start config
_SIZE_KEY = re.compile(r"size|dim|num|heads|rank|width|length")
_UNDECLARED_VALUE = 48  # value to try for a size that the model reads and the config class does not define
LABELS_KEY = "num_labels"
_LABELS_VALUE = 7  # value to try for it
# Keys whose numbers do not determine shapes, and that config classes check against other keys.
_NOT_A_SIZE = re.compile(r"(_token_id|_token_index|_token|token_ids?)$|drop|^_|^initializer|^use_cache$")


class Observation(NamedTuple):
    """One config and the shapes of its model.

    Attributes:
        changed_keys: The dotted keys that were set to another value than in the start config.
        numbers: Every integer of the config by dotted key.
        shapes: Shapes of the tensors of the model by name.
    """

    changed_keys: frozenset[str]
    numbers: Mapping[str, int]
    shapes: Shapes


class ValueTrial(NamedTuple):
    """Another value for one key of the start config, and its effect.

    Attributes:
        path: Path of the key.
        start_value: Its value in the start config.
        other_value: The value tried.
        observation: The model with `other_value`; None if no other value for the key gives a model, so that the effect
            of the key is unknown.
        companions: Dotted keys that were set together with the key, with their values.
    """

    path: KeyPath
    start_value: Any
    other_value: Any
    observation: Observation | None
    companions: tuple[tuple[str, Any], ...] = ()


class Probe:
    """Build the model of one class under many configs.

    Args:
        cls: The model class.
        build_config: Builds a config of the class from a dict.
    """

    def __init__(self, cls: Any, build_config: ConfigBuilder) -> None:
        self.cls, self.build_config = cls, build_config
        # Paths of keys that the model reads and the config class does not define.
        self.undeclared_keys: list[KeyPath] = []
        self.unchanged_numbers: list[int] = []  # values of the keys for which no other number gives a model

    def observe(self, values: Values, changed_keys: frozenset[str]) -> Observation | None:
        """Build a config and its model; return None if one of them cannot be built."""
        try:
            config = self.build_config(copy.deepcopy(values))
            with _without_weight_init():
                model = meta_model.build_on_meta(self.cls, config)
            shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}
        except Exception:  # any error of the class means that no checkpoint has such a config
            return None
        return Observation(changed_keys, numbers_of(config), shapes)

    def find_start_config(self, base: Values) -> tuple[Values, ReadKeys] | None:
        """Return the start config, and the keys that the model reads; None if no model can be built.

        The start config is `base` with few layers, if these have all types of layers, and with every number set
        explicitly, if the model then has the same names.
        """
        for max_count in (*_SMALL_COUNTS, None):
            values = copy.deepcopy(base)
            try:
                if max_count is not None:
                    values = self._with_small_counts(values, max_count)
                config = self.build_config(copy.deepcopy(values))
                with record_reads() as class_reads:
                    model = meta_model.build_on_meta(self.cls, config)
                patterns = {pattern_of(name) for name in model.state_dict(keep_vars=True)}
                if max_count is not None and layer_types_of(config) != layer_types_of(
                    self.build_config(copy.deepcopy(base))
                ):
                    continue  # some type of layer occurs only in a deeper model
            except Exception:
                continue
            read_keys = {
                (config_path, key)
                for config_path, config_values in walk_configs(config)
                for key in config_values
                if (type(config_at(config, config_path)), key) in class_reads
            }
            if getattr(config, "sub_configs", None):  # a composite config may pass its numbers to its sub-configs
                read_keys |= {((), key) for key, value in vars(config).items() if type(value) is int}
            explicit = self._with_explicit_numbers(values, config, read_keys)
            observation = self.observe(explicit, frozenset())
            if observation is not None and {pattern_of(name) for name in observation.shapes} == patterns:
                return self._with_undeclared_keys(explicit, config, class_reads, read_keys, observation)
            if self.observe(values, frozenset()) is not None:
                return values, read_keys
        return None

    def _with_undeclared_keys(
        self,
        values: Values,
        config: Any,
        class_reads: set[tuple[type, str]],
        read_keys: ReadKeys,
        observation: Observation,
    ) -> tuple[Values, ReadKeys]:
        """Set a number for each key that the model reads, its config class does not define, and that changes shapes.

        Args:
            values: The config, as a dict, to add the numbers to.
            config: The config built without explicit numbers.
            class_reads: Config class and key of every attribute that was read while the model was built.
            read_keys: The keys of `config` among `class_reads`.
            observation: The model of `values`.

        Returns:
            `values` and `read_keys`, with the keys that change shapes.
        """
        for config_path, config_values in walk_configs(config):
            owner = config_at(config, config_path)
            for config_class, key in sorted(class_reads, key=str):
                if (
                    config_class is not type(owner)
                    or key in config_values
                    or hasattr(owner, key)
                    or not _SIZE_KEY.search(key)
                ):
                    continue
                trial_values = copy.deepcopy(values)
                _set_key(trial_values, (*config_path, key), _UNDECLARED_VALUE, config)
                trial = self.observe(trial_values, frozenset())
                if (
                    trial is not None
                    and trial.shapes.keys() == observation.shapes.keys()
                    and trial.shapes != observation.shapes
                ):
                    values, observation, read_keys = trial_values, trial, read_keys | {(config_path, key)}
                    self.undeclared_keys.append((*config_path, key))
        return values, read_keys

    def _with_small_counts(self, values: Values, max_count: int) -> Values:
        """Set every larger number of layers or experts in `values` to `max_count`, and return `values`."""
        config = self.build_config(copy.deepcopy(values))
        for config_path, config_values in walk_configs(config):
            for key in (LAYER_COUNT_KEYS | EXPERT_COUNT_KEYS) & config_values.keys():
                if isinstance(config_values[key], int) and config_values[key] > max_count:
                    _set_key(values, (*config_path, key), max_count, config)
        return values

    def _with_explicit_numbers(self, values: Values, config: Any, read_keys: ReadKeys) -> Values:
        """Return `values` with every number of `config` that the model reads, also if it is a default."""
        explicit = copy.deepcopy(values)
        for config_path, key in sorted(read_keys):
            value = vars(config_at(config, config_path)).get(key)
            if type(value) is int and not _NOT_A_SIZE.search(key):
                _set_key(explicit, (*config_path, key), value, config)
        return explicit

    def vary_numbers(self, start: Values, read_keys: ReadKeys) -> Iterator[Observation]:
        """Yield observations with each number changed separately, then with several numbers changed at a time."""
        config = self.build_config(copy.deepcopy(start))
        changes: dict[KeyPath, int] = {}
        for config_path, key in sorted(read_keys):
            value = vars(config_at(config, config_path)).get(key)
            if type(value) is not int or _NOT_A_SIZE.search(key) or value < 2:
                continue
            candidates = (
                (value + 1, value + 2, value * 2) if key in LAYER_COUNT_KEYS else [value * each for each in _FACTORS]
            )
            for candidate in (*candidates, value + 1):
                observation = self._observe_changed(start, {(*config_path, key): candidate}, config)
                if observation is not None:
                    changes[(*config_path, key)] = candidate
                    yield observation
                    break
            else:
                self.unchanged_numbers.append(value)
        observation = self._observe_changed(start, {(LABELS_KEY,): _LABELS_VALUE}, config)
        if observation is not None:
            changes[LABELS_KEY,] = _LABELS_VALUE
            yield observation
        rng = random.Random(7)  # a fixed seed: the table depends only on the classes
        num_observed, paths = 0, sorted(changes)
        for _ in range(4 * _NUM_JOINT_CONFIGS):
            if num_observed == _NUM_JOINT_CONFIGS or len(paths) < 2:
                break
            fraction = rng.choice((0.3, 0.5, 0.8))
            joint_changes = {path: changes[path] for path in paths if rng.random() < fraction}
            observation = self._observe_changed(start, joint_changes, config)
            if observation is not None:
                num_observed += 1
                yield observation

    def vary_other_values(self, start: Values, read_keys: ReadKeys) -> Iterator[ValueTrial]:
        """Yield trials of values other than sizes: booleans, strings, floats, lists, and integers used as switches."""
        config = self.build_config(copy.deepcopy(start))
        switch_paths = set()  # paths of keys that have an effect together with others
        for config_path, own_values in walk_configs(config):
            for switch in SWITCHES:
                key = next(iter(switch))
                if key not in own_values or isinstance(own_values[key], list):
                    continue
                changes = {(*config_path, each): value for each, value in switch.items()}
                observation = self._observe_changed(start, changes, config)
                if observation is not None:
                    switch_paths.add((*config_path, key))
                    companions = {
                        ".".join((*config_path, each)): as_hashable(value)
                        for each, value in switch.items()
                        if each != key
                    }
                    yield ValueTrial(
                        (*config_path, key),
                        own_values[key],
                        switch[key],
                        observation,
                        tuple(sorted(companions.items())),
                    )
        for config_path, key in sorted(read_keys):
            owner, path = config_at(config, config_path), (*config_path, key)
            start_value = vars(owner).get(key)
            if _NOT_A_SIZE.search(key) or isinstance(start_value, PreTrainedConfig):
                continue
            observations = [
                (other_value, self._observe_changed(start, {path: other_value}, config))
                for other_value in _trial_values(owner, key, start_value)
            ]
            if observations and path not in switch_paths and all(each is None for _, each in observations):
                yield ValueTrial(path, start_value, observations[0][0], None)
            for other_value, observation in observations:
                if observation is not None:
                    yield ValueTrial(path, start_value, other_value, observation)

    def _observe_changed(self, start: Values, changes: Mapping[KeyPath, Any], config: Any) -> Observation | None:
        """Observe the start config with other values for some keys; `config` is the one built from `start`."""
        values = copy.deepcopy(start)
        for path, value in changes.items():
            _set_key(values, path, value, config)
        return self.observe(values, frozenset(".".join(path) for path in changes))

    def configs_without_key(
        self, start: Values, path: KeyPath, changes_of_configs: Sequence[Mapping[KeyPath, int]]
    ) -> Iterator[tuple[Values, Any]]:
        """Yield the start config without a key and with some changes, as a dict and as a config; once for each changes.

        Args:
            start: The start config.
            path: Path of the key to remove.
            changes_of_configs: For each config, other numbers by path; a number for `path` is ignored.
        """
        config = self.build_config(copy.deepcopy(start))
        for changes in changes_of_configs:
            values = copy.deepcopy(start)
            with contextlib.suppress(Exception):  # any error means that no checkpoint has such a config
                for changed_path, value in changes.items():
                    if changed_path != path:
                        _set_key(values, changed_path, value, config)
                node: Any = values
                for key in path[:-1]:
                    node = node.get(key, {})
                node.pop(path[-1], None)
                yield values, self.build_config(copy.deepcopy(values))


@contextlib.contextmanager
def _without_weight_init() -> Iterator[None]:
    """Build modules without initializing their weights, which takes most of the time."""
    module_classes = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.modules.conv._ConvNd)
    originals = [each.reset_parameters for each in module_classes]
    for module_class in module_classes:
        module_class.reset_parameters = lambda self: None
    try:
        yield
    finally:
        for module_class, original in zip(module_classes, originals, strict=True):
            module_class.reset_parameters = original


def numbers_of(config: Any) -> dict[str, int]:
    """Return every integer of a config and of its sub-configs, by dotted key, and the number of labels."""
    numbers = {}
    for config_path, config_values in walk_configs(config):
        for key, value in config_values.items():
            if type(value) is int:
                numbers[".".join((*config_path, key))] = value
    with contextlib.suppress(Exception):
        numbers[LABELS_KEY] = int(config.num_labels)
    return numbers


def _trial_values(config: Any, key: str, value: Any) -> Iterator[Any]:
    """Yield the other values to try for a value that is not a size, or for a number that may act as a switch."""
    if isinstance(value, bool) or value is None or isinstance(value, str) or value == []:
        yield from other_values(config, key, value)
    elif isinstance(value, float):
        yield value * 2
        yield value / 2
    elif isinstance(value, int):
        yield from (4, 2, 1 - value) if value < 2 else (0,)
    elif isinstance(value, (list, tuple)) and all(type(each) is int for each in value):
        yield [each * 2 for each in value]
        yield [*value, value[-1]]
    if isinstance(value, int) and not isinstance(value, bool) and type(None) in declared_types(config, key):
        yield None


def config_at(config: Any, config_path: Sequence[str]) -> Any:
    """Return the sub-config at an attribute path; the config itself for an empty path."""
    for key in config_path:
        config = getattr(config, key)
    return config


def _set_key(values: Values, path: Sequence[str], value: Any, config: Any) -> None:
    """Set one key in the dict of a config.

    A sub-config on the path that `values` lacks gets the values that differ from the defaults of its class, so that
    setting the key changes nothing else; without token ids, lists of layer types and similar keys.

    Args:
        values: Dict of the root config; changed in place.
        path: Path of the key.
        value: The new value.
        config: The root config before the change.
    """
    node = values
    for key in path[:-1]:
        config = getattr(config, key)
        if not isinstance(node.get(key), dict):
            diff = {
                name: each
                for name, each in config.to_diff_dict().items()
                if not _NOT_A_SIZE.search(name) and not _is_list_of_layer_types(name, each)
            }
            node[key] = copy.deepcopy(diff)
        node = node[key]
    node[path[-1]] = value


def _is_list_of_layer_types(key: str, value: Any) -> bool:
    """Return True for a list with a string or boolean per layer, which config classes create if it is not set."""
    return (
        isinstance(value, list)
        and ("layer" in key or "block" in key)
        and all(isinstance(each, (str, bool)) for each in value)
    )


def layer_types_of(config: Any) -> dict[str, list[str]]:
    """Return the distinct strings of every list with a string per layer, by dotted key."""
    return {
        ".".join((*config_path, key)): sorted(set(value))
        for config_path, config_values in walk_configs(config)
        for key, value in sorted(config_values.items())
        if _is_list_of_layer_types(key, value) and value and isinstance(value[0], str)
    }
