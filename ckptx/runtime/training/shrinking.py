"""Shrink the config of a large model to one that a CPU can train: few narrow layers and a vocabulary of bytes.

The layers that are kept are a prefix with every kind of layer:

    sliding x 5, full, sliding x 5, full, ...   60 layers     sliding x 5, full     6 layers
    one kind                                    40 layers                           4 layers

Widths come from `tiny_config`. Special tokens of the config get small ids, in their original order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ckptx.runtime.model.shrink_config import find_token_ids, iter_configs
from ckptx.runtime.model.tiny_model import tiny_config
from ckptx.runtime.model.width_keys import VOCABULARY_KEYS
from ckptx.runtime.training.source_tokenizer import BYTE_VOCABULARY_SIZE

_LAYER_COUNT_KEY = "num_hidden_layers"
_LAYER_TYPE_KEYS = ("layer_types", "layers_block_type", "mlp_layer_types")  # lists with the type of each layer
_MIN_LAYERS = 4  # minimum layers of a language model, so that a stage can have several
_MIN_TOWER_LAYERS = 2
_SHARED_LAYERS_KEY = "num_kv_shared_layers"  # counts layers from the end, so that a prefix would change them

Values = dict[str, Any]


def reduce_layers(values: Values, config: PreTrainedConfig, user_keys: Mapping[str, Any]) -> Values:
    """Return a copy of a config.json with fewer layers in the config and in each nested one.

    A config keeps its layers if some layers share keys and values, or if a list in it has indices of layers that would
    be removed.

    Args:
        values: Keys and values of config.json.
        config: Config object that the class builds from them, with its defaults.
        user_keys: Keys set by the user, nested like `values`; numbers of layers among them are kept.
    """
    reduced = copy.deepcopy(values)
    for path, nested_config in _iter_configs_with_paths(config):
        count = vars(nested_config).get(_LAYER_COUNT_KEY)
        if (
            not isinstance(count, int)
            or bool(vars(nested_config).get(_SHARED_LAYERS_KEY))
            or _LAYER_COUNT_KEY in _find_nested(user_keys, path)
        ):
            continue
        layer_count = _find_layer_count(nested_config, count)
        target = reduced
        for key in path:
            target = target.setdefault(key, {})
        lists = {key: value for key, value in target.items() if isinstance(value, list) and key not in _LAYER_TYPE_KEYS}
        if layer_count < count and not any(
            _refers_to_removed_layers(value, layer_count, count) for value in lists.values()
        ):
            target[_LAYER_COUNT_KEY] = layer_count
            for key, value in target.items():
                if isinstance(value, list) and len(value) == count:
                    target[key] = value[:layer_count]
            layers = target.get("per_layer_config")
            if isinstance(layers, dict):
                target["per_layer_config"] = {key: value for key, value in layers.items() if int(key) < layer_count}
    return reduced


def shrink_widths(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> PreTrainedConfig:
    """Return a copy with narrow layers and a small vocabulary.

    Raises:
        UnsupportedError: See `tiny_config`.
    """
    small_config = copy.deepcopy(config)
    new_ids = {old: new for new, old in enumerate(sorted(find_token_ids(small_config)))}
    vocabulary_size = -(-(len(new_ids) + BYTE_VOCABULARY_SIZE) // 64) * 64  # rounded up to a multiple of 64
    for nested_config in iter_configs(small_config):
        values = vars(nested_config)
        for key, value in values.items():
            if key.endswith(("_token_id", "_token_index", "_token_ids", "_bos_id", "_eos_id")):
                values[key] = (
                    [new_ids.get(each, each) for each in value]
                    if isinstance(value, list)
                    else new_ids.get(value, value)
                )
            elif key in VOCABULARY_KEYS and isinstance(value, int):
                values[key] = min(value, vocabulary_size)
    return tiny_config(small_config, cls)


def _iter_configs_with_paths(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path of keys, config) for a config, whose path is (), and each nested config."""
    yield path, config
    for key, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _iter_configs_with_paths(value, (*path, key))


def _find_nested(values: Any, path: tuple[str, ...]) -> Values:
    """Return the nested values at a path; empty if there are none."""
    for key in path:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values if isinstance(values, dict) else {}


def _find_layer_count(config: Any, count: int) -> int:
    """Return the length of the shortest prefix of `count` layers with all kinds of layers, and with a minimum number.

    The minimum is `_MIN_LAYERS` for a config with a vocabulary, else `_MIN_TOWER_LAYERS`.
    """
    min_layers = _MIN_LAYERS if isinstance(vars(config).get("vocab_size"), int) else _MIN_TOWER_LAYERS
    for key in _LAYER_TYPE_KEYS:
        kinds = vars(config).get(key)
        if isinstance(kinds, list | tuple) and len(kinds) == count:
            min_layers = max(min_layers, *(list(kinds).index(kind) + 1 for kind in set(kinds)))
    return min(count, min_layers)


def _refers_to_removed_layers(value: list[Any], layer_count: int, count: int) -> bool:
    """Return True if a list looks like layer indices, of which some would be removed.

    A list with one value per layer does not look like indices.

    Args:
        value: List in a config.
        layer_count: Number of layers that are kept.
        count: Original number of layers.
    """
    are_integers = all(isinstance(each, int) for each in value)
    return are_integers and len(value) != count and any(layer_count <= each < count for each in value)
