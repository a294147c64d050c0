"""Find the configs of a class that add tensor names to those of its default config.

A class builds additional modules for some configs: biases, gated MLPs, experts, towers. `names_of_variants` changes
one key of the config at a time, among those that the model reads while it is built, and builds each on the meta device;
a change that adds names is the start of further changes. Configs that cannot be built are skipped. Sizes do not matter:
only names are kept.
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

Values = dict[str, Any]
Reads = set[tuple[type, str]]  # config class and key

# Changes that one key cannot make: keys that a config class converts into others, one of many strings, and keys that
# have an effect only together. They are tried for every config, at any level, that has the first key.
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
# Towers of published composites that accept any vision model.
VISION_TYPES = ("clip_vision_model", "pixtral", "siglip_vision_model")

# Keys that models read and that do not affect names.
_KEYS_WITHOUT_NAMES = frozenset(
    {
        "architectures", "chunk_size_feed_forward", "dtype", "initializer_range", "is_encoder_decoder",
        "output_attentions", "output_hidden_states", "problem_type", "return_dict", "tie_word_embeddings", "use_cache",
    }
)  # fmt: skip
_LAYER_COUNTS = frozenset(
    {
        "decoder_layers", "depth", "encoder_layers", "n_layer", "n_layers", "num_decoder_layers",
        "num_encoder_layers", "num_hidden_layers", "num_layers",
    }
)  # fmt: skip
_EXPERT_COUNTS = frozenset({"n_routed_experts", "num_experts", "num_local_experts"})
_SMALL_COUNT = 8  # number of layers or experts of a small config
_TRIAL_COUNT = 4  # value to try for a count that is 0, 1 or absent
_MAX_BUILDS = 96  # maximum number of builds per class


class Change(NamedTuple):
    """New values for keys of the config at an attribute path below the root."""

    place: tuple[str, ...]
    values: Values


def names_of_variants(cls: Any, build_config: ConfigBuilder, base: Values, names: MetaModelNames) -> MetaModelNames:
    """Return `names` and those of the same class under other configs.

    Args:
        cls: The model class.
        build_config: Its config class as a function of a dict.
        base: The dict that `names` was measured with.
        names: The names known so far.
    """
    base = _small_base(cls, build_config, base)
    tried: set[str] = set()
    queue: list[tuple[Values, Change | None]] = [(base, None)]
    effective: list[Change] = []
    for at in range(_MAX_BUILDS):
        if at == len(queue):
            break
        values, change = queue[at]
        try:
            config = build_config(copy.deepcopy(values))
            with _recorded_reads() as reads:
                model = meta_model.build_with_all_ties(cls, config)
            found = meta_model.add_names_of(model, names)
        except Exception:  # any error of the class means that no checkpoint has such a config
            continue
        if change is not None and (found.patterns, found.ignored) == (names.patterns, names.ignored):
            continue
        names = found
        effective += [change] if change is not None else []
        for next_change in _possible_changes(build_config(copy.deepcopy(values)), reads):
            if repr(next_change) not in tried:
                tried.add(repr(next_change))
                queue.append((_with_change(values, build_config, next_change), next_change))
    return _with_all_changes(cls, build_config, base, effective, names)


def _small_base(cls: Any, build_config: ConfigBuilder, base: Values) -> Values:
    """Return `base` with few layers and experts if the names are the same; building them takes most of the time."""
    full_names = _state_names(cls, build_config, base)
    for counts in (_LAYER_COUNTS | _EXPERT_COUNTS, _LAYER_COUNTS):
        try:
            small = base
            for place, config_values in _configs(build_config(copy.deepcopy(base))):
                less = {
                    key: _SMALL_COUNT
                    for key in counts & config_values.keys()
                    if _is_greater(config_values[key], _SMALL_COUNT)
                }
                if less:
                    small = _with_change(small, build_config, Change(place, less))
            if _state_names(cls, build_config, small) == full_names:
                return small
        except Exception:  # a list with an entry per layer, or groups of experts
            continue
    return base


def _state_names(cls: Any, build_config: ConfigBuilder, values: Values) -> frozenset[str]:
    return patterns_of(meta_model.build_on_meta(cls, build_config(copy.deepcopy(values))).state_dict(keep_vars=True))


def _configs(config: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """Yield the attribute path and the values of the config and of those below it."""
    yield place, vars(config)
    for key, value in sorted(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            yield from _configs(value, (*place, key))


def _is_greater(value: Any, count: int) -> bool:
    return isinstance(value, int) and value > count


def _with_all_changes(
    cls: Any, build_config: ConfigBuilder, base: Values, effective: list[Change], names: MetaModelNames
) -> MetaModelNames:
    """Add the names under all effective changes together, such as biases of modules that another key adds."""
    if len(effective) < 2:
        return names
    try:
        for change in effective:
            base = _with_change(base, build_config, change)
        return meta_model.add_names_of(meta_model.build_with_all_ties(cls, build_config(copy.deepcopy(base))), names)
    except Exception:  # they exclude each other
        return names


def _possible_changes(config: Any, reads: Reads, place: tuple[str, ...] = ()) -> Iterator[Change]:
    """Yield every change of one key, or of one switch, in this config and those below it."""
    config_values = vars(config)
    for switch in SWITCHES:
        if next(iter(switch)) in config_values:
            yield Change(place, switch)
    for key in sorted(config_values):
        value = config_values[key]
        if isinstance(value, PreTrainedConfig):
            yield from _possible_changes(value, reads, (*place, key))
            if key == "vision_config" and _is_exchangeable(config, key):
                yield from (Change(place, {key: {"model_type": kind}}) for kind in VISION_TYPES)
        elif (type(config), key) in reads and key not in _KEYS_WITHOUT_NAMES:
            yield from (Change(place, {key: other}) for other in _other_values(config, key, value))


def _other_values(config: Any, key: str, value: Any) -> Iterator[Any]:
    """Yield the other values that a key can have."""
    kinds = _declared_types(config, key)
    if key.startswith("_") or key.endswith(("_token_id", "_token_index")) or "drop" in key:
        return
    if isinstance(value, bool):
        yield not value
    elif value is None and key in getattr(config, "sub_configs", {}):
        if not _is_exchangeable(config, key):
            yield {}
    elif value is None and bool in kinds:
        yield True
    elif value is None and int in kinds:
        yield _TRIAL_COUNT
    elif isinstance(value, str):
        yield from (kind for kind in kinds if isinstance(kind, str) and kind != value)
    elif value == []:
        yield [0]  # indices of layers, as in `mlp_only_layers`
    elif isinstance(value, int):
        if value in (0, 1):
            yield _TRIAL_COUNT
        if type(None) in kinds:
            yield None


def _is_exchangeable(config: Any, key: str) -> bool:
    sub_configs: Mapping[str, type] = getattr(config, "sub_configs", {})
    return key in sub_configs and sub_configs[key].__name__ == "AutoConfig"


def _declared_types(config: Any, key: str) -> list[Any]:
    """Return the types, and the choices of a `Literal`, that the config class declares for a key."""
    for base in type(config).__mro__:
        annotations = inspect.get_annotations(base)
        if key in annotations:
            declared = annotations[key]
            parts = typing.get_args(declared) or (declared,)
            return [each for part in parts for each in (typing.get_args(part) or (part,))]
    return []


def _with_change(values: Values, build_config: ConfigBuilder, change: Change) -> Values:
    """Return a copy of `values` with the change; configs above the key get all values that are not the default."""
    result = copy.deepcopy(values)
    config, node = build_config(copy.deepcopy(values)), result
    for key in change.place:
        config = getattr(config, key)
        spelled = {name: value for name, value in config.to_diff_dict().items() if name not in _KEYS_WITHOUT_NAMES}
        node[key] = {**spelled, **(node.get(key) or {})}
        node = node[key]
    node.update(copy.deepcopy(change.values))
    return result


@contextlib.contextmanager
def _recorded_reads() -> Iterator[Reads]:
    """Record the keys that are read, with their config classes."""
    reads: Reads = set()
    base: Any = PreTrainedConfig
    original: Callable[[Any, str], Any] = base.__getattribute__

    def read(self: Any, key: str) -> Any:
        kind = type(self)
        reads.add((kind, kind.attribute_map.get(key, key)))
        return original(self, key)

    base.__getattribute__ = read
    try:
        yield reads
    finally:
        base.__getattribute__ = original
