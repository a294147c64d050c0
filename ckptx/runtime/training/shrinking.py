"""Shrink the config of a large model to one that a CPU can train: few narrow layers and a vocabulary of bytes.

The layers that stay are a prefix that has every kind of layer:

    sliding x 5, full, sliding x 5, full, ...   60 layers     sliding x 5, full     6 layers
    one kind                                    40 layers                           4 layers

Widths come from `tiny_config`. Special tokens of the config get small ids, in their original order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ckptx.runtime.model.shrink_config import parts, token_ids
from ckptx.runtime.model.tiny_model import tiny_config
from ckptx.runtime.model.width_keys import VOCABULARIES
from ckptx.runtime.training.source_tokenizer import MOST_TOKENS

_LAYERS = "num_hidden_layers"
_KINDS = ("layer_types", "layers_block_type", "mlp_layer_types")
_LEAST = 4  # minimum layers of a language model, so that a stage can have several
_LEAST_OF_TOWER = 2
_FROM_THE_END = "num_kv_shared_layers"  # counts layers from the end, so that a prefix would change them

Values = dict[str, Any]


def with_few_layers(values: Values, config: PreTrainedConfig, kept: Mapping[str, Any]) -> Values:
    """Return keys of config.json with few layers in each part.

    Args:
        values: Keys of config.json.
        config: Config that their class builds from them, with its defaults.
        kept: Keys set by the user, nested like `values`; numbers of layers among them are kept.
    """
    found = copy.deepcopy(values)
    for path, part in _parts_at(config):
        count = vars(part).get(_LAYERS)
        if not isinstance(count, int) or bool(vars(part).get(_FROM_THE_END)) or _LAYERS in _at(kept, path):
            continue
        few = _few(part, count)
        there = found
        for key in path:
            there = there.setdefault(key, {})
        lists = {key: value for key, value in there.items() if isinstance(value, list) and key not in _KINDS}
        if few < count and not any(_points_behind(value, few, count) for value in lists.values()):
            there[_LAYERS] = few
            for key, value in there.items():
                if isinstance(value, list) and len(value) == count:
                    there[key] = value[:few]
            layers = there.get("per_layer_config")
            if isinstance(layers, dict):
                there["per_layer_config"] = {key: value for key, value in layers.items() if int(key) < few}
    return found


def shrunk_config(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> PreTrainedConfig:
    """Return a copy with narrow layers and a small vocabulary.

    Raises:
        UnsupportedError: No such config can be built and run; see `tiny_config`.
    """
    copied = copy.deepcopy(config)
    new = {old: at for at, old in enumerate(sorted(token_ids(copied)))}
    words = -(-(len(new) + MOST_TOKENS) // 64) * 64
    for part in parts(copied):
        values = vars(part)
        for key, value in values.items():
            if key.endswith(("_token_id", "_token_index", "_token_ids", "_bos_id", "_eos_id")):
                values[key] = (
                    [new.get(each, each) for each in value] if isinstance(value, list) else new.get(value, value)
                )
            elif key in VOCABULARIES and isinstance(value, int):
                values[key] = min(value, words)
    return tiny_config(copied, cls)


def _parts_at(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield a config and its nested configs, each with its path of keys."""
    yield path, config
    for key, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _parts_at(value, (*path, key))


def _at(values: Any, path: tuple[str, ...]) -> Values:
    """Return the nested values at a path; empty if there are none."""
    for key in path:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values if isinstance(values, dict) else {}


def _few(part: Any, count: int) -> int:
    """Return the length of the shortest prefix that has all kinds of layers and a minimum number of them."""
    least = _LEAST if isinstance(vars(part).get("vocab_size"), int) else _LEAST_OF_TOWER
    for key in _KINDS:
        kinds = vars(part).get(key)
        if isinstance(kinds, list | tuple) and len(kinds) == count:
            least = max(least, *(list(kinds).index(kind) + 1 for kind in set(kinds)))
    return min(count, least)


def _points_behind(value: list[Any], few: int, count: int) -> bool:
    """Return True if a list has numbers of layers some of which would be removed."""
    numbers = all(isinstance(each, int) for each in value)
    return numbers and len(value) != count and any(few <= each < count for each in value)
