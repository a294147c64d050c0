"""Shrinks the config of any class: the same layers and branches with small widths.

The name of a key gives its meaning, and equal values belong together: equal sizes stay equal, so that a projection fits
its tower, and different sizes stay different, so that a class which compares them takes the same branch. Numbers of
layers, lists of layer types, windows, multipliers and token ids are kept.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from ckptx.runtime.model.width_keys import (
    DERIVED_VALUES,
    EXPERT_COUNT_KEYS,
    EXTRA_TOKENS,
    FEED_FORWARD_KEYS,
    HASH_BUCKET_KEYS,
    HEAD_COUNT_KEYS,
    HEAD_DIM_KEYS,
    HIDDEN_SIZE_KEYS,
    LOW_RANK_KEYS,
    NON_WIDTH_WORDS,
    PER_LAYER_EMBEDDING_KEYS,
    PROJECTION_KEYS,
    ROPE_COUNT_KEYS,
    ROPE_FACTOR_KEYS,
    STATE_SIZE_KEYS,
    TOP_K_KEYS,
    VOCABULARY_KEYS,
    WIDTH_ENDINGS,
    Values,
)


@dataclass(frozen=True, slots=True)
class ShrinkPolicy:
    """The widths of a config that are reduced.

    Attributes:
        min_head_dim: Minimum width that the widest head has afterwards; None keeps the widths of heads.
        reduce_heads: Reduce the number of heads.
        reduce_hidden: Reduce the residual stream, and not only the widths inside of layers.
        shorten_vocabulary: End the vocabulary soon after the last token that the config names (see `EXTRA_TOKENS`).
    """

    min_head_dim: int | None = 16
    reduce_heads: bool = True
    reduce_hidden: bool = True
    shorten_vocabulary: bool = False

    def __str__(self) -> str:
        """Describe the policy for a message."""
        heads = "few heads" if self.reduce_heads else "all heads"
        width = "of unchanged width" if self.min_head_dim is None else f"at least {self.min_head_dim} wide"
        stream = "a narrow" if self.reduce_hidden else "the whole"
        vocabulary = "a shortened" if self.shorten_vocabulary else "the whole"
        return f"{heads} {width}, {stream} residual stream, {vocabulary} vocabulary"


@dataclass(slots=True)
class _ConfigFacts:
    """Facts about a config that describes layers: the whole config, or one nested in it.

    Attributes:
        original: Original values by key, without nested configs.
        overrides: Layer -> the values by key that differ in this layer (transformers' `per_layer_config`).
        head_counts: Old number of heads -> new number; empty if the numbers are kept.
        divisor: Number by which the widths of heads are divided; 1 if they are kept.
    """

    original: Values
    overrides: Mapping[Any, Values]
    head_counts: dict[int, int]
    divisor: int

    def integers_under(self, keys: Iterable[str]) -> list[int]:
        """Return the integers under some keys, including those in lists and those of layers that differ."""
        values = [each.get(key) for key in keys for each in (self.original, *self.overrides.values())]
        return [number for value in values for number in _integers(value)]

    @property
    def hidden_size(self) -> int | None:
        """The width of the residual stream; None if no key gives it, as in a config without layers."""
        candidates = (self.original.get(key) for key in HIDDEN_SIZE_KEYS)
        return next((each for each in candidates if _is_integer(each)), None)

    @property
    def head_width(self) -> int | None:
        """The width of a head if it is the hidden size divided by the number of heads; else, and for MLA, None."""
        heads = next(
            iter(self.integers_under(("num_attention_heads", "num_heads", "n_head", "encoder_attention_heads"))), None
        )
        heads = heads or next(iter(self.integers_under(sorted(HEAD_COUNT_KEYS))), None)
        if self.hidden_size is None or not heads or self.hidden_size % heads:
            return None
        width = self.hidden_size // heads
        head_dims = self.integers_under(("head_dim", "d_kv"))
        is_latent = bool(self.integers_under(("kv_lora_rank",)))
        return width if not is_latent and all(each == width for each in head_dims[:1]) else None

    @property
    def is_state_space(self) -> bool:
        """True for a state-space model, whose heads share an expanded stream."""
        return "expand" in self.original or "mamba_expand" in self.original


def shrink_config(config: PreTrainedConfig, policy: ShrinkPolicy) -> PreTrainedConfig:
    """Return a copy with small widths, and the same number and types of layers.

    The class may not be buildable from the result; callers have to try.

    Args:
        config: Config of a model of any size.
        policy: Widths to reduce.
    """
    small_config = copy.deepcopy(config)
    nested_configs = list(iter_configs(small_config))
    all_facts = [_collect_facts(each, policy) for each in nested_configs]
    hidden = _reduce_hidden_sizes(all_facts) if policy.reduce_hidden else {}
    projection_sizes = _reduce_widths(
        (number for each in all_facts for number in each.integers_under(sorted(PROJECTION_KEYS))), 56, hidden
    )
    vocabulary_size = (
        max(find_token_ids(small_config), default=0) + 1 + EXTRA_TOKENS if policy.shorten_vocabulary else None
    )
    for nested_config, facts in zip(nested_configs, all_facts, strict=True):
        _adjust_divisor(facts, hidden)
        width_maps = _make_width_maps(facts, hidden, projection_sizes, policy)
        values = vars(nested_config)
        values.update({key: _map_value(key, value, width_maps, facts) for key, value in facts.original.items()})
        for rope in _rope_dicts(values):
            _shrink_rope(rope, facts.divisor)
        if vocabulary_size is not None:
            for key in VOCABULARY_KEYS:
                if _is_integer(values.get(key)):
                    values[key] = min(values[key], -(-vocabulary_size // 64) * 64)  # rounded up to a multiple of 64
        _recompute_derived(facts.original, values)
        if facts.overrides:
            nested_config.per_layer_config = {
                layer: {key: _map_value(key, value, width_maps, facts) for key, value in each.items()}
                for layer, each in facts.overrides.items()
            }
    return small_config


def iter_configs(config: Any) -> Iterator[Any]:
    """Yield a config and every config nested in it, each once."""
    seen: set[int] = set()

    def visit(nested_config: Any) -> Iterator[Any]:
        if id(nested_config) in seen:
            return
        seen.add(id(nested_config))
        yield nested_config
        for value in list(vars(nested_config).values()):
            if isinstance(value, PreTrainedConfig):
                yield from visit(value)

    yield from visit(config)


def find_token_ids(config: Any) -> set[int]:
    """Return every token id that a config or a config nested in it names, such as `eos_token_id`."""
    return {
        number
        for nested_config in iter_configs(config)
        for key, value in vars(nested_config).items()
        if key.endswith(("_token_id", "_token_index", "_token_ids", "_bos_id", "_eos_id"))
        for number in _integers(value)
        if number >= 0
    }


# ------------------------------------------------------------------------------------------------- facts about a config


def _collect_facts(config: Any, policy: ShrinkPolicy) -> _ConfigFacts:
    """Return the facts about a config itself, with the new numbers of heads and the divisor of their widths."""
    old = copy.deepcopy({key: value for key, value in vars(config).items() if not isinstance(value, PreTrainedConfig)})
    spec = old.pop("_heterogeneity_spec", None)
    facts = _ConfigFacts(old, dict(getattr(spec, "per_layer_overrides", None) or {}), {}, 1)
    facts.head_counts = (
        _reduce_head_counts(facts.integers_under(sorted(HEAD_COUNT_KEYS))) if policy.reduce_heads else {}
    )
    if policy.min_head_dim is not None:
        facts.divisor = _find_head_divisor(facts, policy.min_head_dim)
    return facts


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integers(value: Any) -> list[int]:
    """Return the integers in a value: the value itself, or the integers in a list or tuple."""
    found = value if isinstance(value, list | tuple) else [value]
    return [each for each in found if _is_integer(each)]


def _rope_dicts(values: Values) -> list[Values]:
    """Return the rotary position settings of a config, including those per layer type."""
    found = [
        each for key in ("rope_parameters", "rope_scaling") for each in [values.get(key)] if isinstance(each, dict)
    ]
    return found + [inner for each in found for inner in each.values() if isinstance(inner, dict)]


# ----------------------------------------------------------------------------------------------------------- new values


def _reduce_head_counts(counts: Iterable[int]) -> dict[int, int]:
    """Return old number of heads -> new: larger stays larger, and 1 stays 1; empty if a number would grow.

    A number that is no power of two gets a new number that is none either, because ALiBi positions take another branch
    for it.
    """
    ordered = sorted({each for each in counts if each > 1})
    first = 2 if len(ordered) == 1 else 1
    reduced = [
        (1 << first + index) if not each & (each - 1) else 3 << (first + index - 1)
        for index, each in enumerate(ordered)
    ]
    if any(small > each for small, each in zip(reduced, ordered, strict=True)):
        return {}
    return dict(zip(ordered, reduced, strict=True))


def _find_head_divisor(facts: _ConfigFacts, min_width: int) -> int:
    """Return the divisor for the widths of heads.

    It is the largest power of two that leaves the widest head at least `min_width`, every width a multiple of 4, every
    number of rotary frequencies (per section) an integer, and every even number of rotated elements even.
    """
    widths = facts.integers_under(sorted(HEAD_DIM_KEYS)) + ([facts.head_width] if facts.head_width else [])
    ropes = _rope_dicts(facts.original)
    counts = [number for rope in ropes for key in ROPE_COUNT_KEYS for number in _integers(rope.get(key))]
    counts += [len(rope[key]) for rope in ropes for key in ROPE_FACTOR_KEYS if isinstance(rope.get(key), list)]
    rotary_fractions = [rope["partial_rotary_factor"] for rope in ropes if rope.get("partial_rotary_factor")]
    rotary_fractions += [
        facts.original[key] for key in ("partial_rotary_factor", "rotary_pct") if facts.original.get(key)
    ]

    def fits(divisor: int) -> bool:
        is_divisible = all(not each % (4 * divisor) for each in widths) and all(not each % divisor for each in counts)
        rotated = [each * share for each in widths for share in rotary_fractions]
        return is_divisible and all(
            each >= 2 * divisor and not each % (2 * divisor) for each in rotated if not each % 2
        )

    divisor = 1
    while widths and max(widths) // (2 * divisor) >= min_width and fits(2 * divisor):
        divisor *= 2
    return divisor


def _reduce_hidden_sizes(all_facts: Iterable[_ConfigFacts]) -> dict[int, int]:
    """Return old hidden size -> new, for all configs: the smallest that their heads allow, different if possible."""
    by_size: dict[int, list[_ConfigFacts]] = {}
    for facts in all_facts:
        if facts.hidden_size is not None:
            by_size.setdefault(facts.hidden_size, []).append(facts)
    reduced: dict[int, int] = {}

    def priority(size: int) -> tuple[bool, bool, int]:
        """Return a key that sorts sizes that follow from heads first, because they have no choice.

        Among them, sizes of configs with a vocabulary are first, because they cost most.
        """
        users = by_size[size]
        return (
            not any(map(_derives_head_width_from_hidden_size, users)),
            not any("vocab_size" in each.original for each in users),
            size,
        )

    # A size is chosen among those that any of its configs allows: preferably a size that no other old size has got, and
    # that all configs allow whose head width follows from it.
    for old in sorted(by_size, key=priority):
        choices = [choice for facts in by_size[old] for choice in _hidden_choices(facts) if choice <= old]
        free = [each for each in choices if each not in reduced.values()]
        dependent_facts = [facts for facts in by_size[old] if _derives_head_width_from_hidden_size(facts)]
        shared_choices = [each for each in free if all(each in _hidden_choices(facts) for facts in dependent_facts)]
        reduced[old] = min(shared_choices or free or choices or [old])
    return reduced


def _derives_head_width_from_hidden_size(facts: _ConfigFacts) -> bool:
    return facts.head_width is not None and not facts.is_state_space


def _hidden_choices(facts: _ConfigFacts) -> list[int]:
    """Return the hidden sizes that the heads of a config allow, in ascending order."""
    head_counts = [facts.head_counts.get(each, each) for each in facts.integers_under(sorted(HEAD_COUNT_KEYS))]
    if _derives_head_width_from_hidden_size(facts):
        old_width, old = facts.head_width or 1, facts.hidden_size or 1
        heads = facts.head_counts.get(old // old_width, old // old_width)
        return [heads * old_width // (facts.divisor >> power) for power in range(facts.divisor.bit_length())]
    has_head_dim = bool(facts.integers_under(("head_dim", "d_kv")))  # else the hidden size is divided among the heads
    step = math.lcm(8, *(each if has_head_dim else 8 * each for each in head_counts))
    first = -(-64 // step)  # the smallest choice is at least 64
    # Widths of all heads together. They usually differ from the hidden size in the large model, and have to here.
    excluded = {
        heads * width // facts.divisor for heads in head_counts for width in facts.integers_under(("head_dim", "d_kv"))
    }
    return [step * times for times in range(first, first + 16) if step * times not in excluded]


def _adjust_divisor(facts: _ConfigFacts, hidden_sizes: Mapping[int, int]) -> None:
    """Adjust the divisor of the widths of heads, in place, if the width of a head follows from the hidden size.

    `hidden_sizes` maps old hidden sizes to new ones.
    """
    old = facts.hidden_size
    if old is None or not _derives_head_width_from_hidden_size(facts) or old not in hidden_sizes:
        return
    width = facts.head_width or 1
    heads = facts.head_counts.get(old // width, old // width)
    facts.divisor = max(1, width * heads // hidden_sizes[old])


def _reduce_widths(numbers: Iterable[int], first: int, excluded: Mapping[int, int]) -> dict[int, int]:
    """Return old width -> new: equal widths stay equal, different ones stay different, and none grows.

    Args:
        numbers: Old widths.
        first: New width of the smallest; each further one gets 8 more.
        excluded: Mapping whose keys are widths to leave out, such as hidden sizes, which are reduced on their own.
    """
    ordered = sorted(set(numbers) - set(excluded))
    return {old: min(old, first + 8 * index) for index, old in enumerate(ordered)}


def _make_width_maps(
    facts: _ConfigFacts, hidden_sizes: Mapping[int, int], projection_sizes: Mapping[int, int], policy: ShrinkPolicy
) -> dict[str, Callable[[int], int]]:
    """Return, by kind of key ("heads", "head dims", ...), the function from an old number to the new one."""
    feed_forward_sizes = _reduce_widths(facts.integers_under(sorted(FEED_FORWARD_KEYS)), 32, {})
    low_ranks = _reduce_widths(facts.integers_under(sorted(LOW_RANK_KEYS)), 16, {})
    expert_count = _reduced_expert_count(facts)
    return {
        "hidden": lambda old: hidden_sizes.get(old, old),
        "hidden or projection": lambda old: hidden_sizes.get(
            old, projection_sizes.get(old, old) if policy.reduce_hidden else old
        ),
        "heads": lambda old: facts.head_counts.get(old, old),
        "head dims": lambda old: old // facts.divisor,
        "feed forward": lambda old: feed_forward_sizes.get(old, old),
        "ranks": lambda old: low_ranks.get(old, old),
        "states": lambda old: min(old, 8),
        "per-layer embeddings": lambda old: min(old, 4),
        "buckets": lambda old: min(old, 1024),
        "experts": lambda old: min(old, expert_count),
    }


def _reduced_expert_count(facts: _ConfigFacts) -> int:
    """Return the reduced number of experts.

    It is at least twice the number of experts per token. With groups of experts (DeepSeek's `n_group`), a token uses
    `topk_group` of them, and these have at least as many experts as the token uses.
    """
    experts_per_token = max((each for each in facts.integers_under(TOP_K_KEYS) if each > 0), default=1)
    groups = max(facts.integers_under(("n_group", "num_expert_group")), default=1) or 1
    groups_per_token = max(facts.integers_under(("topk_group",)), default=groups) or groups
    if groups == 1:
        return max(4, 2 * experts_per_token)
    return max(2, -(-2 * experts_per_token // groups), -(-experts_per_token // groups_per_token)) * groups


# Config key -> kind of key, as in `_make_width_maps`.
_KIND_OF_KEY = {
    **dict.fromkeys(PROJECTION_KEYS, "hidden or projection"),
    **dict.fromkeys(HIDDEN_SIZE_KEYS, "hidden or projection"),
    **dict.fromkeys(HEAD_COUNT_KEYS, "heads"),
    **dict.fromkeys(HEAD_DIM_KEYS, "head dims"),
    **dict.fromkeys(FEED_FORWARD_KEYS, "feed forward"),
    **dict.fromkeys(LOW_RANK_KEYS, "ranks"),
    **dict.fromkeys(STATE_SIZE_KEYS, "states"),
    **dict.fromkeys(PER_LAYER_EMBEDDING_KEYS, "per-layer embeddings"),
    **dict.fromkeys(HASH_BUCKET_KEYS, "buckets"),
    **dict.fromkeys(EXPERT_COUNT_KEYS, "experts"),
}


def _map_value(key: str, value: Any, width_maps: Mapping[str, Callable[[int], int]], facts: _ConfigFacts) -> Any:
    """Return the new value of a key; lists are mapped element by element.

    A value that is not an integer, and the value of a key of unknown kind, are returned unchanged.
    """
    kind = _KIND_OF_KEY.get(key)
    if kind is None and key.endswith(WIDTH_ENDINGS) and not any(word in key for word in NON_WIDTH_WORDS):
        kind = "hidden"
    if kind is None or (kind == "head dims" and not _is_divisible(value, facts.divisor)):
        return value
    if isinstance(value, list | tuple):
        return type(value)(width_maps[kind](each) if _is_integer(each) else each for each in value)
    return width_maps[kind](value) if _is_integer(value) else value


def _is_divisible(value: Any, divisor: int) -> bool:
    return all(not each % divisor for each in _integers(value))


def _shrink_rope(rope: Values, divisor: int) -> None:
    """Adjust per-frequency rotary settings to the new widths of heads, in place."""
    for key in ROPE_COUNT_KEYS:
        if isinstance(rope.get(key), list | tuple):
            rope[key] = [each // divisor for each in rope[key]]
    for key in ROPE_FACTOR_KEYS:
        if isinstance(rope.get(key), list | tuple):
            rope[key] = list(rope[key][::divisor])


def _recompute_derived(old: Values, values: Values) -> None:
    """Update values that follow from other keys by a formula that held for the old values, in place."""
    for key, formula in DERIVED_VALUES:
        if _is_integer(old.get(key)) and _compute_derived(formula, old) == old[key]:
            derived = _compute_derived(formula, values)
            if derived is not None and derived == int(derived):
                values[key] = int(derived)


def _compute_derived(formula: Callable[[Values], Any], values: Values) -> Any:
    """Return the result of a formula; None if a value that it uses is missing or None, or a divisor is 0."""
    try:
        return formula(values)
    except (KeyError, TypeError, ZeroDivisionError):
        return None
