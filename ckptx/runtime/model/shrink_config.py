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
    BUCKETS,
    CHOSEN_EXPERTS,
    DERIVED,
    EXPERTS,
    EXTRA_TOKENS,
    FEED_FORWARD,
    HEAD_DIMS,
    HEADS,
    HIDDEN,
    LINKS,
    NO_WIDTHS,
    RANKS,
    ROPE_COUNTS,
    ROPE_FACTORS,
    STATES,
    TABLES,
    VOCABULARIES,
    WIDTH_ENDINGS,
    Values,
)


@dataclass(frozen=True, slots=True)
class ShrinkPolicy:
    """The widths of a config that are reduced.

    Attributes:
        head_dim: Minimum width of the widest head; None keeps the widths of heads.
        few_heads: Reduce the number of heads.
        narrow_hidden: Reduce the residual stream, and not only the widths inside of layers.
        cut_vocabulary: End the vocabulary after the last token that the config names.
    """

    head_dim: int | None = 16
    few_heads: bool = True
    narrow_hidden: bool = True
    cut_vocabulary: bool = False

    def __str__(self) -> str:
        """Return the description of the attempt for a message."""
        heads = "few heads" if self.few_heads else "all heads"
        width = "of unchanged width" if self.head_dim is None else f"at least {self.head_dim} wide"
        stream = "a narrow" if self.narrow_hidden else "the whole"
        words = "a shortened" if self.cut_vocabulary else "the whole"
        return f"{heads} {width}, {stream} residual stream, {words} vocabulary"


@dataclass(slots=True)
class _ConfigPart:
    """A config that describes layers: the whole config, or one nested in it.

    Attributes:
        old: Original values.
        overrides: Values of layers that differ, by layer.
        heads: Old number of heads -> new.
        divisor: Divisor of the widths of heads.
    """

    old: Values
    overrides: Mapping[Any, Values]
    heads: dict[int, int]
    divisor: int

    def numbers_under(self, keys: Iterable[str]) -> list[int]:
        """Return the integers under some keys, including those in lists and in layers that differ."""
        values = [each.get(key) for key in keys for each in (self.old, *self.overrides.values())]
        return [number for value in values for number in _numbers(value)]

    @property
    def hidden(self) -> int | None:
        """The width of the residual stream; None for a config without layers of its own."""
        found = (self.old.get(key) for key in HIDDEN)
        return next((each for each in found if _is_number(each)), None)

    @property
    def width_of_head(self) -> int | None:
        """The width of a head if it is the hidden size divided by the number of heads; else None."""
        heads = next(
            iter(self.numbers_under(("num_attention_heads", "num_heads", "n_head", "encoder_attention_heads"))), None
        )
        heads = heads or next(iter(self.numbers_under(sorted(HEADS))), None)
        if self.hidden is None or not heads or self.hidden % heads:
            return None
        width = self.hidden // heads
        given = self.numbers_under(("head_dim", "d_kv"))
        is_latent = bool(self.numbers_under(("kv_lora_rank",)))
        return width if not is_latent and all(each == width for each in given[:1]) else None

    @property
    def is_expanded(self) -> bool:
        """True for a state-space model, whose heads share an expanded stream."""
        return "expand" in self.old or "mamba_expand" in self.old


def shrink_config(config: PreTrainedConfig, policy: ShrinkPolicy) -> PreTrainedConfig:
    """Return a copy with small widths, and the same number and types of layers.

    The class may not be buildable from the result; callers have to try.

    Args:
        config: Config of a model of any size.
        policy: Widths to reduce.
    """
    copied = copy.deepcopy(config)
    nested = list(parts(copied))
    described = [_describe(each, policy) for each in nested]
    hidden = _hidden_sizes(described) if policy.narrow_hidden else {}
    links = _small_widths((number for each in described for number in each.numbers_under(sorted(LINKS))), 56, hidden)
    vocabulary = max(token_ids(copied), default=0) + 1 + EXTRA_TOKENS if policy.cut_vocabulary else None
    for part, known in zip(nested, described, strict=True):
        _adjust_divisor(known, hidden)
        change = _changes(known, hidden, links, policy)
        values = vars(part)
        values.update({key: _map_value(key, value, change, known) for key, value in known.old.items()})
        for rope in _rope_dicts(values):
            _narrow_rope(rope, known.divisor)
        if vocabulary is not None:
            for key in VOCABULARIES:
                if _is_number(values.get(key)):
                    values[key] = min(values[key], -(-vocabulary // 64) * 64)
        _derive(known.old, values)
        if known.overrides:
            part.per_layer_config = {
                layer: {key: _map_value(key, value, change, known) for key, value in each.items()}
                for layer, each in known.overrides.items()
            }
    return copied


def parts(config: Any) -> Iterator[Any]:
    """Yield a config and every config nested in it, each once."""
    seen: set[int] = set()

    def walk(part: Any) -> Iterator[Any]:
        if id(part) in seen:
            return
        seen.add(id(part))
        yield part
        for value in list(vars(part).values()):
            if isinstance(value, PreTrainedConfig):
                yield from walk(value)

    yield from walk(config)


def token_ids(config: Any) -> set[int]:
    """Return every token id that a config names."""
    return {
        number
        for part in parts(config)
        for key, value in vars(part).items()
        if key.endswith(("_token_id", "_token_index", "_token_ids", "_bos_id", "_eos_id"))
        for number in _numbers(value)
        if number >= 0
    }


# ------------------------------------------------------------------------------------------------- what is in a config


def _describe(part: Any, policy: ShrinkPolicy) -> _ConfigPart:
    old = copy.deepcopy({key: value for key, value in vars(part).items() if not isinstance(value, PreTrainedConfig)})
    spec = old.pop("_heterogeneity_spec", None)
    part_facts = _ConfigPart(old, dict(getattr(spec, "per_layer_overrides", None) or {}), {}, 1)
    part_facts.heads = _fewer_heads(part_facts.numbers_under(sorted(HEADS))) if policy.few_heads else {}
    if policy.head_dim is not None:
        part_facts.divisor = _divisor(part_facts, policy.head_dim)
    return part_facts


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _numbers(value: Any) -> list[int]:
    """Return the integers in a value: itself, or those of a list."""
    found = value if isinstance(value, list | tuple) else [value]
    return [each for each in found if _is_number(each)]


def _rope_dicts(values: Values) -> list[Values]:
    """Return the rotary position settings of a config, including those per layer type."""
    found = [
        each for key in ("rope_parameters", "rope_scaling") for each in [values.get(key)] if isinstance(each, dict)
    ]
    return found + [inner for each in found for inner in each.values() if isinstance(inner, dict)]


# ------------------------------------------------------------------------------------------------------ what it becomes


def _fewer_heads(counts: Iterable[int]) -> dict[int, int]:
    """Return reduced numbers of heads: equal counts stay equal, the order is kept, one stays one.

    A count that is not a power of two stays so, as ALiBi positions take another branch then.
    """
    ordered = sorted({each for each in counts if each > 1})
    first = 2 if len(ordered) == 1 else 1
    new = [(1 << first + at) if not each & (each - 1) else 3 << (first + at - 1) for at, each in enumerate(ordered)]
    if any(small > each for small, each in zip(new, ordered, strict=True)):
        return {}
    return dict(zip(ordered, new, strict=True))


def _divisor(part: _ConfigPart, least: int) -> int:
    """Return the divisor for the widths of heads.

    It is the largest power of two that divides them and the counts of their parts, and leaves at least `least` of the
    widest.
    """
    widths = part.numbers_under(sorted(HEAD_DIMS)) + ([part.width_of_head] if part.width_of_head else [])
    ropes = _rope_dicts(part.old)
    counts = [number for rope in ropes for key in ROPE_COUNTS for number in _numbers(rope.get(key))]
    counts += [len(rope[key]) for rope in ropes for key in ROPE_FACTORS if isinstance(rope.get(key), list)]
    shares = [rope["partial_rotary_factor"] for rope in ropes if rope.get("partial_rotary_factor")]
    shares += [part.old[key] for key in ("partial_rotary_factor", "rotary_pct") if part.old.get(key)]

    def fits(divisor: int) -> bool:
        whole = all(not each % (4 * divisor) for each in widths) and all(not each % divisor for each in counts)
        rotated = [each * share for each in widths for share in shares]
        return whole and all(each >= 2 * divisor and not each % (2 * divisor) for each in rotated if not each % 2)

    divisor = 1
    while widths and max(widths) // (2 * divisor) >= least and fits(2 * divisor):
        divisor *= 2
    return divisor


def _hidden_sizes(described: Iterable[_ConfigPart]) -> dict[int, int]:
    """Return old hidden size -> new, for all parts: the smallest that their heads allow and no other size has."""
    by_size: dict[int, list[_ConfigPart]] = {}
    for part in described:
        if part.hidden is not None:
            by_size.setdefault(part.hidden, []).append(part)
    found: dict[int, int] = {}

    def turn(size: int) -> tuple[bool, bool, int]:
        """Sort sizes that follow from heads first, as they have no choice.

        Among them, sizes of parts with a vocabulary are first, as they cost most.
        """
        users = by_size[size]
        return not any(map(_is_tied, users)), not any("vocab_size" in each.old for each in users), size

    for old in sorted(by_size, key=turn):
        choices = [choice for part in by_size[old] for choice in _hidden_choices(part) if choice <= old]
        free = [each for each in choices if each not in found.values()]
        tied = [part for part in by_size[old] if _is_tied(part)]
        good = [each for each in free if all(each in _hidden_choices(part) for part in tied)]
        found[old] = min(good or free or choices or [old])
    return found


def _is_tied(part: _ConfigPart) -> bool:
    return part.width_of_head is not None and not part.is_expanded


def _hidden_choices(part: _ConfigPart) -> list[int]:
    """Return the hidden sizes that the heads of a part allow, in ascending order."""
    new = [part.heads.get(each, each) for each in part.numbers_under(sorted(HEADS))]
    if _is_tied(part):
        old_width, old = part.width_of_head or 1, part.hidden or 1
        heads = part.heads.get(old // old_width, old // old_width)
        return [heads * old_width // (part.divisor >> power) for power in range(part.divisor.bit_length())]
    is_given = bool(part.numbers_under(("head_dim", "d_kv")))  # else the hidden size is divided among the heads
    step = math.lcm(8, *(each if is_given else 8 * each for each in new))
    first = -(-64 // step)
    inner = {heads * width // part.divisor for heads in new for width in part.numbers_under(("head_dim", "d_kv"))}
    return [step * times for times in range(first, first + 16) if step * times not in inner]


def _adjust_divisor(part: _ConfigPart, hidden: Mapping[int, int]) -> None:
    """Adjust the widths of heads to the chosen hidden size, if one follows from the other."""
    old = part.hidden
    if old is None or not _is_tied(part) or old not in hidden:
        return
    width = part.width_of_head or 1
    heads = part.heads.get(old // width, old // width)
    part.divisor = max(1, width * heads // hidden[old])


def _small_widths(numbers: Iterable[int], first: int, excluded: Mapping[int, int]) -> dict[int, int]:
    """Return old width -> new: equal stay equal, different stay different, none grows."""
    ordered = sorted(set(numbers) - set(excluded))
    return {old: min(old, first + 8 * at) for at, old in enumerate(ordered)}


def _changes(
    part: _ConfigPart, hidden: Mapping[int, int], links: Mapping[int, int], policy: ShrinkPolicy
) -> dict[str, Callable[[int], int]]:
    """Return the mapping of the numbers under each kind of key: "heads", "head dims", ..."""
    inner = _small_widths(part.numbers_under(sorted(FEED_FORWARD)), 32, {})
    ranks = _small_widths(part.numbers_under(sorted(RANKS)), 16, {})
    experts = _experts_needed(part)
    return {
        "hidden": lambda old: hidden.get(old, old),
        "links": lambda old: hidden.get(old, links.get(old, old) if policy.narrow_hidden else old),
        "heads": lambda old: part.heads.get(old, old),
        "head dims": lambda old: old // part.divisor,
        "feed forward": lambda old: inner.get(old, old),
        "ranks": lambda old: ranks.get(old, old),
        "states": lambda old: min(old, 8),
        "tables": lambda old: min(old, 4),
        "buckets": lambda old: min(old, 1024),
        "experts": lambda old: min(old, experts),
    }


def _experts_needed(part: _ConfigPart) -> int:
    """Return twice the number of chosen experts, with enough experts in each group for the chosen groups."""
    chosen = max((each for each in part.numbers_under(CHOSEN_EXPERTS) if each > 0), default=1)
    groups = max(part.numbers_under(("n_group", "num_expert_group")), default=1) or 1
    of_groups = max(part.numbers_under(("topk_group",)), default=groups) or groups
    if groups == 1:
        return max(4, 2 * chosen)
    return max(2, -(-2 * chosen // groups), -(-chosen // of_groups)) * groups


_KINDS = {
    **dict.fromkeys(LINKS, "links"),
    **dict.fromkeys(HIDDEN, "links"),
    **dict.fromkeys(HEADS, "heads"),
    **dict.fromkeys(HEAD_DIMS, "head dims"),
    **dict.fromkeys(FEED_FORWARD, "feed forward"),
    **dict.fromkeys(RANKS, "ranks"),
    **dict.fromkeys(STATES, "states"),
    **dict.fromkeys(TABLES, "tables"),
    **dict.fromkeys(BUCKETS, "buckets"),
    **dict.fromkeys(EXPERTS, "experts"),
}


def _map_value(key: str, value: Any, change: Mapping[str, Callable[[int], int]], part: _ConfigPart) -> Any:
    """Return the new value; lists element by element, values that are no integers unchanged."""
    kind = _KINDS.get(key)
    if kind is None and key.endswith(WIDTH_ENDINGS) and not any(word in key for word in NO_WIDTHS):
        kind = "hidden"
    if kind is None or (kind == "head dims" and not _is_divisible(value, part.divisor)):
        return value
    if isinstance(value, list | tuple):
        return type(value)(change[kind](each) if _is_number(each) else each for each in value)
    return change[kind](value) if _is_number(value) else value


def _is_divisible(value: Any, divisor: int) -> bool:
    return all(not each % divisor for each in _numbers(value))


def _narrow_rope(rope: Values, divisor: int) -> None:
    """Adjust per-frequency rotary settings to the new widths of heads, in place."""
    for key in ROPE_COUNTS:
        if isinstance(rope.get(key), list | tuple):
            rope[key] = [each // divisor for each in rope[key]]
    for key in ROPE_FACTORS:
        if isinstance(rope.get(key), list | tuple):
            rope[key] = list(rope[key][::divisor])


def _derive(old: Values, values: Values) -> None:
    """Compute values again that were derived from other keys, in place."""
    for key, work_out in DERIVED:
        if _is_number(old.get(key)) and _compute_derived(work_out, old) == old[key]:
            derived = _compute_derived(work_out, values)
            if derived is not None and derived == int(derived):
                values[key] = int(derived)


def _compute_derived(work_out: Callable[[Values], Any], values: Values) -> Any:
    try:
        return work_out(values)
    except (KeyError, TypeError, ZeroDivisionError):  # a key is missing, or its value is None
        return None
