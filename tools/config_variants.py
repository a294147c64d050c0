"""Find the other configs of a class that add tensor names, so that its table row has every possible name.

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
Reads = set[tuple[type, str]]

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
_WITHOUT_NAMES = frozenset(
    {
        "architectures", "chunk_size_feed_forward", "dtype", "initializer_range", "is_encoder_decoder",
        "output_attentions", "output_hidden_states", "problem_type", "return_dict", "tie_word_embeddings", "use_cache",
    }
)  # fmt: skip
_LAYERS = frozenset(
    {
        "decoder_layers", "depth", "encoder_layers", "n_layer", "n_layers", "num_decoder_layers",
        "num_encoder_layers", "num_hidden_layers", "num_layers",
    }
)  # fmt: skip
_EXPERTS = frozenset({"n_routed_experts", "num_experts", "num_local_experts"})
_FEW = 8  # number of layers or experts of a small config
_SMALL = 4  # value to try for a count that is 0, 1 or absent
_MOST = 96  # maximum number of builds per class


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
    waiting: list[tuple[Values, Change | None]] = [(base, None)]
    effective: list[Change] = []
    for at in range(_MOST):
        if at == len(waiting):
            break
        values, change = waiting[at]
        try:
            config = build_config(copy.deepcopy(values))
            with _recorded() as reads:
                model = meta_model.build_with_all_ties(cls, config)
            found = meta_model.add_names_of(model, names)
        except Exception:  # any error of the class means that no checkpoint has such a config
            continue
        if change is not None and (found.patterns, found.ignored) == (names.patterns, names.ignored):
            continue
        names = found
        effective += [change] if change is not None else []
        for following in _changes(build_config(copy.deepcopy(values)), reads):
            if repr(following) not in tried:
                tried.add(repr(following))
                waiting.append((_changed(values, build_config, following), following))
    return _all_at_once(cls, build_config, base, effective, names)


def _small_base(cls: Any, build_config: ConfigBuilder, base: Values) -> Values:
    """Return `base` with few layers and experts if the names are the same; building them takes most of the time."""
    whole = _state_names(cls, build_config, base)
    for counts in (_LAYERS | _EXPERTS, _LAYERS):
        try:
            small = base
            for place, held in _configs(build_config(copy.deepcopy(base))):
                less = {key: _FEW for key in counts & held.keys() if _is_more(held[key], _FEW)}
                if less:
                    small = _changed(small, build_config, Change(place, less))
            if _state_names(cls, build_config, small) == whole:
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


def _is_more(value: Any, count: int) -> bool:
    return isinstance(value, int) and value > count


def _all_at_once(
    cls: Any, build_config: ConfigBuilder, base: Values, effective: list[Change], names: MetaModelNames
) -> MetaModelNames:
    """Add the names under all effective changes together, such as biases of modules that another key adds."""
    if len(effective) < 2:
        return names
    try:
        for change in effective:
            base = _changed(base, build_config, change)
        return meta_model.add_names_of(meta_model.build_with_all_ties(cls, build_config(copy.deepcopy(base))), names)
    except Exception:  # they exclude each other
        return names


def _changes(config: Any, reads: Reads, place: tuple[str, ...] = ()) -> Iterator[Change]:
    """Yield every change of one key, or of one switch, in this config and those below it."""
    held = vars(config)
    for switch in SWITCHES:
        if next(iter(switch)) in held:
            yield Change(place, switch)
    for key in sorted(held):
        value = held[key]
        if isinstance(value, PreTrainedConfig):
            yield from _changes(value, reads, (*place, key))
            if key == "vision_config" and _is_exchangeable(config, key):
                yield from (Change(place, {key: {"model_type": kind}}) for kind in VISION_TYPES)
        elif (type(config), key) in reads and key not in _WITHOUT_NAMES:
            yield from (Change(place, {key: other}) for other in _others(config, key, value))


def _others(config: Any, key: str, value: Any) -> Iterator[Any]:
    """Yield the other values that a key can have."""
    kinds = _kinds(config, key)
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
        yield _SMALL
    elif isinstance(value, str):
        yield from (kind for kind in kinds if isinstance(kind, str) and kind != value)
    elif value == []:
        yield [0]  # indices of layers, as in `mlp_only_layers`
    elif isinstance(value, int):
        if value in (0, 1):
            yield _SMALL
        if type(None) in kinds:
            yield None


def _is_exchangeable(config: Any, key: str) -> bool:
    sub_configs: Mapping[str, type] = getattr(config, "sub_configs", {})
    return key in sub_configs and sub_configs[key].__name__ == "AutoConfig"


def _kinds(config: Any, key: str) -> list[Any]:
    """Return the types, and the choices of a `Literal`, that the config class declares for a key."""
    for base in type(config).__mro__:
        annotations = inspect.get_annotations(base)
        if key in annotations:
            declared = annotations[key]
            parts = typing.get_args(declared) or (declared,)
            return [each for part in parts for each in (typing.get_args(part) or (part,))]
    return []


def _changed(values: Values, build_config: ConfigBuilder, change: Change) -> Values:
    """Return a copy of `values` with the change; configs above the key get all values that are not the default."""
    result = copy.deepcopy(values)
    config, node = build_config(copy.deepcopy(values)), result
    for key in change.place:
        config = getattr(config, key)
        spelled = {name: value for name, value in config.to_diff_dict().items() if name not in _WITHOUT_NAMES}
        node[key] = {**spelled, **(node.get(key) or {})}
        node = node[key]
    node.update(copy.deepcopy(change.values))
    return result


@contextlib.contextmanager
def _recorded() -> Iterator[Reads]:
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
