"""Find the configs of a class that add tensor names to those of its default config.

A class builds additional modules for some configs: biases, gated MLPs, experts, towers. `names_of_variants` changes
one key of the config at a time, among those that the model reads while it is built, and builds each model on the meta
device; a config that adds names is changed further. Configs that cannot be built are skipped. Sizes do not matter: only
names are kept.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from ckptx.architecture.introspection import meta_model
from ckptx.architecture.introspection.meta_model import ConfigBuilder, MetaModelNames
from ckptx.architecture.patterns import patterns_of

Values = dict[str, Any]  # arguments of a config class, with a nested dict for each sub-config
Reads = set[tuple[type, str]]  # config class and key

# Changes that `other_values` does not find: keys that a config class converts into others, strings without declared
# choices, and keys that have an effect only together. Each is tried for every config and sub-config that has its first
# key.
SWITCHES: tuple[Values, ...] = (
    {"feed_forward_proj": "gated-gelu"},  # T5 v1.1, UMT5: wi_0, wi_1
    {"word_embed_proj_dim": 16},  # OPT 350m: project_in, project_out
    {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8},  # Gemma 4
    {"is_decoder": True, "add_cross_attention": True},  # decoders built from BERT and similar models
    {
        "relative_attention": True, "norm_rel_ebd": "layer_norm", "conv_kernel_size": 3, "position_buckets": 8,
        "share_att_key": False, "pos_att_type": ["p2c", "c2p"],
    },  # every published DeBERTa v2 and v3
    {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},  # DeBERTa v1
    {"feat_extract_norm": "layer"},  # wav2vec 2.0 large and similar models: a norm after every convolution
    {"encoder_attention_type": "transient-global"},  # LongT5
    {"position_embedding_type": "rotary"},  # ESM 2
    {"position_embedding_type": "relative_key"},
    {"position_embedding_type": "rope"},
    {"position_embedding_type": "learned"},
    {"position_embeddings_type": "relative"},  # wav2vec 2.0 conformer
    {"position_embeddings_type": "rotary"},
    {"layer_type": "bottleneck"},  # ResNet
    {"layer_type": "basic"},
    {"attn_layer_indices": [1]},  # Bamba
    {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},  # Granite 4
    {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},  # LFM2
    {"interleave_moe_layer_step": 2, "moe_layers": None},  # Llama 4 Maverick
    {"mlp_layer_types": ["dense", "sparse"], "layer_types": None, "num_hidden_layers": 2},  # MiniMax M3: all sparse
)  # fmt: skip
# Model types of the vision towers of published composites whose class accepts any vision model.
VISION_TYPES = ("clip_vision_model", "pixtral", "siglip_vision_model")

# Keys that models read and that have no effect on names.
_KEYS_WITHOUT_EFFECT = frozenset(
    {
        "architectures", "chunk_size_feed_forward", "dtype", "initializer_range", "is_encoder_decoder",
        "output_attentions", "output_hidden_states", "problem_type", "return_dict", "tie_word_embeddings", "use_cache",
    }
)  # fmt: skip
LAYER_COUNT_KEYS = frozenset(
    {
        "decoder_layers", "depth", "encoder_layers", "n_layer", "n_layers", "num_decoder_layers",
        "num_encoder_layers", "num_hidden_layers", "num_layers",
    }
)  # fmt: skip
EXPERT_COUNT_KEYS = frozenset({"n_routed_experts", "num_experts", "num_local_experts"})
_SMALL_COUNT = 8  # maximum number of layers or experts of a small config
_TRIAL_COUNT = 4  # value to try for a count that is 0, 1 or absent
_MAX_BUILDS = 96  # maximum number of models to build per class


class Change(NamedTuple):
    """New values for keys of a config or sub-config.

    Attributes:
        config_path: Attribute path from the root config to the sub-config; empty for the root.
        values: Key -> new value.
    """

    config_path: tuple[str, ...]
    values: Values


def names_of_variants(cls: Any, build_config: ConfigBuilder, base: Values, names: MetaModelNames) -> MetaModelNames:
    """Return `names` and those of the same class under other configs.

    Args:
        cls: The model class.
        build_config: Builds a config of the class from a dict.
        base: The config, as a dict, that the variants change.
        names: The names known so far, at least those under `base`.
    """
    base = small_base(cls, build_config, base)
    tried: set[str] = set()
    queue: list[tuple[Values, Change | None]] = [(base, None)]
    effective: list[Change] = []  # those that added names
    for index in range(_MAX_BUILDS):
        if index == len(queue):
            break
        values, change = queue[index]
        try:
            config = build_config(copy.deepcopy(values))
            with record_reads() as reads:
                model = meta_model.build_with_tie_flags_set(cls, config)
            extended_names = meta_model.merge_names(names, model)
        except Exception:  # any error of the class means that no checkpoint has such a config
            continue
        if change is not None and (extended_names.patterns, extended_names.ignored) == (names.patterns, names.ignored):
            continue
        names = extended_names
        effective += [change] if change is not None else []
        for next_change in possible_changes(build_config(copy.deepcopy(values)), reads):
            if repr(next_change) not in tried:
                tried.add(repr(next_change))
                queue.append((with_change(values, build_config, next_change), next_change))
    return _names_with_all_changes(cls, build_config, base, effective, names)


def small_base(cls: Any, build_config: ConfigBuilder, base: Values) -> Values:
    """Return `base` with few layers and experts, or `base` itself if the names then differ; few are faster to build."""
    full_names = _state_names(cls, build_config, base)
    for count_keys in (LAYER_COUNT_KEYS | EXPERT_COUNT_KEYS, LAYER_COUNT_KEYS):
        try:
            small = base
            for config_path, config_values in walk_configs(build_config(copy.deepcopy(base))):
                smaller_counts = {
                    key: _SMALL_COUNT
                    for key in count_keys & config_values.keys()
                    if _is_greater(config_values[key], _SMALL_COUNT)
                }
                if smaller_counts:
                    small = with_change(small, build_config, Change(config_path, smaller_counts))
            if _state_names(cls, build_config, small) == full_names:
                return small
        except Exception:  # a list with an entry per layer, or groups of experts
            continue
    return base


def _state_names(cls: Any, build_config: ConfigBuilder, values: Values) -> frozenset[str]:
    return patterns_of(meta_model.build_on_meta(cls, build_config(copy.deepcopy(values))).state_dict(keep_vars=True))


def walk_configs(config: Any, config_path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """Yield the attribute path and the values of the config and of each of its sub-configs, at any depth."""
    yield config_path, vars(config)
    for key, value in sorted(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            yield from walk_configs(value, (*config_path, key))


def _is_greater(value: Any, count: int) -> bool:
    return isinstance(value, int) and value > count


def _names_with_all_changes(
    cls: Any, build_config: ConfigBuilder, base: Values, effective: list[Change], names: MetaModelNames
) -> MetaModelNames:
    """Return `names` and those with all effective changes together, such as biases of modules that another key adds."""
    if len(effective) < 2:
        return names
    try:
        for change in effective:
            base = with_change(base, build_config, change)
        model = meta_model.build_with_tie_flags_set(cls, build_config(copy.deepcopy(base)))
        return meta_model.merge_names(names, model)
    except Exception:  # the changes exclude each other
        return names


def possible_changes(config: Any, reads: Reads, config_path: tuple[str, ...] = ()) -> Iterator[Change]:
    """Yield every change of one key, or of one entry of `SWITCHES`, in this config and its sub-configs.

    Args:
        config: The config.
        reads: Keys that the model reads, with their config classes; other keys are not changed.
        config_path: Attribute path from the root config to `config`.
    """
    config_values = vars(config)
    for switch in SWITCHES:
        if next(iter(switch)) in config_values:
            yield Change(config_path, switch)
    for key in sorted(config_values):
        value = config_values[key]
        if isinstance(value, PreTrainedConfig):
            yield from possible_changes(value, reads, (*config_path, key))
            if key == "vision_config" and _is_auto_config(config, key):
                yield from (Change(config_path, {key: {"model_type": model_type}}) for model_type in VISION_TYPES)
        elif (type(config), key) in reads and key not in _KEYS_WITHOUT_EFFECT:
            yield from (Change(config_path, {key: other}) for other in other_values(config, key, value))


def other_values(config: Any, key: str, value: Any) -> Iterator[Any]:
    """Yield other values to try for a key; none if it has no effect on names or the possible values are unknown."""
    declared = declared_types(config, key)
    if key.startswith("_") or key.endswith(("_token_id", "_token_index")) or "drop" in key:
        return
    if isinstance(value, bool):
        yield not value
    elif value is None and key in getattr(config, "sub_configs", {}):
        if not _is_auto_config(config, key):
            yield {}
    elif value is None and bool in declared:
        yield True
    elif value is None and int in declared:
        yield _TRIAL_COUNT
    elif isinstance(value, str):
        yield from (choice for choice in declared if isinstance(choice, str) and choice != value)
    elif value == []:
        yield [0]  # indices of layers, as in `mlp_only_layers`
    elif isinstance(value, int):
        if value in (0, 1):
            yield _TRIAL_COUNT
        if type(None) in declared:
            yield None


def _is_auto_config(config: Any, key: str) -> bool:
    """Return True if the config class accepts any type of config for a sub-config."""
    sub_configs: Mapping[str, type] = getattr(config, "sub_configs", {})
    return key in sub_configs and sub_configs[key].__name__ == "AutoConfig"


def declared_types(config: Any, key: str) -> list[Any]:
    """Return the types, and the choices of a `Literal`, that the config class declares for a key."""
    for base in type(config).__mro__:
        annotations = inspect.get_annotations(base)
        if key in annotations:
            declared = annotations[key]
            parts = typing.get_args(declared) or (declared,)
            return [each for part in parts for each in (typing.get_args(part) or (part,))]
    return []


def with_change(values: Values, build_config: ConfigBuilder, change: Change) -> Values:
    """Return a copy of `values` with the change.

    Each sub-config on its path gets all values that differ from the defaults of its class, so that other keys stay as
    they are.
    """
    result = copy.deepcopy(values)
    config, node = build_config(copy.deepcopy(values)), result
    for key in change.config_path:
        config = getattr(config, key)
        diff = {name: value for name, value in config.to_diff_dict().items() if name not in _KEYS_WITHOUT_EFFECT}
        node[key] = {**diff, **(node.get(key) or {})}
        node = node[key]
    node.update(copy.deepcopy(change.values))
    return result


@contextlib.contextmanager
def record_reads() -> Iterator[Reads]:
    """Yield a set that collects the keys that are read from any config in this context, with their config classes."""
    reads: Reads = set()
    base: Any = PreTrainedConfig
    original: Callable[[Any, str], Any] = base.__getattribute__

    def recorded_getattribute(self: Any, key: str) -> Any:
        config_class = type(self)
        reads.add((config_class, config_class.attribute_map.get(key, key)))
        return original(self, key)

    base.__getattribute__ = recorded_getattribute
    try:
        yield reads
    finally:
        base.__getattribute__ = original
