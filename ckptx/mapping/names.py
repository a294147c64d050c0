"""Roles of names in a training checkpoint (model, optimizer, other), and names without prefixes and wrappers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from sys import intern
from types import MappingProxyType
from typing import NamedTuple

from ckptx.errors import InputError
from ckptx.untrusted.limits import INDEX_IN_NAME

_INDEX_COMPONENTS = re.compile(f"({INDEX_IN_NAME.pattern})")  # a group, so that `split` keeps them

# Components that torch adds to the names of wrapped parameters; meaningless outside of the run that wrapped them.
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module"})

# `module` is also a name in models; only torch writes the others.
_AMBIGUOUS_WRAPPERS = frozenset({"module"})

# Leaves that transformers renames while loading, for every model.
_LEGACY_LEAVES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}

# Moments of an optimizer, for trainers that append the name of the parameter: `exp_avg.model.norm.weight`.
_MOMENT_ROOTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg"})
# First components under which trainers store state other than the model.
_OPTIMIZER_ROOTS = _MOMENT_ROOTS | {
    "optimizer", "optimizers", "optim", "optimizer_state_dict", "optimizer_states"
}  # fmt: skip
_TRAINER_ROOTS = frozenset(
    {
        "train_state", "lr_scheduler", "lr_schedulers", "scheduler", "sched", "dataloader", "rng", "rng_state",
        "rng_states", "loops", "callbacks", "step", "epoch", "iteration", "trainer", "scaler", "ema_optimizer",
    }
)  # fmt: skip
_EMA_COUNTER = "n_averaged"  # buffer of torch.optim.swa_utils.AveragedModel
# Components of a prefix of gradients, and of optimizer state or master weights (`optim_0`, `fp32_params`).
_GRADIENTS = frozenset({"grad", "grads", "gradients", "main_grad"})
_OPTIMIZER_COMPONENT = re.compile(r"(optimi[sz]ers?|optim|opt)(_?(states?|state_dict|\d+))?|(master|main|fp32)_params?")
# Roots that hold both: `state.model.*`, `state.optimizers.*`; `app.model.*`, `app.optim.*`.
_CONTAINER_ROOTS = frozenset({"state", "app", "checkpoint", "training"})


class UnwrappedNames(NamedTuple):
    """Names without wrappers.

    Attributes:
        names: Old name -> new name, without `duplicates`; each new name occurs once.
        counts: Wrapper -> number of times it was removed, from all names.
        duplicates: Name that equals another one except for wrappers -> that other name; both are in the checkpoint.
        names_with_module: Names that keep a `module.`, because the name without it also exists and is unknown to the
            architecture; all names with `module.` if one is ambiguous and the architecture is unknown.
    """

    names: dict[str, str]
    counts: dict[str, int]
    duplicates: Mapping[str, str] = MappingProxyType({})
    names_with_module: tuple[str, ...] = ()

    def count_without(self, others: Iterable[str]) -> dict[str, int]:
        """Return `counts` without some of the old names."""
        counts = Counter(self.counts)
        for name in others:
            kept_name = self.duplicates.get(name, name)
            short_name = self.names.get(kept_name, kept_name)
            if short_name != name:
                counts.subtract(_removed_components(name, short_name))
        return {wrapper: count for wrapper, count in counts.items() if count}


def strip_wrappers(names: Iterable[str], patterns: frozenset[str] = frozenset()) -> UnwrappedNames:
    """Remove wrapper components at any depth, except from names of the architecture (`patterns`).

    The last component of a name is never a wrapper. Two names that differ only in wrappers are one tensor stored twice.
    But models have modules called `module`. So two names that differ only in `module`, and whose short name the
    architecture does not know, both stay. If the architecture is unknown, one such pair keeps `module` in all names.

    Example:
        model._orig_mod.layers.0._checkpoint_wrapped_module.weight -> model.layers.0.weight
    """
    names = list(names)
    if all(WRAPPERS.isdisjoint(key.split(".")) for key in {pattern_of(name) for name in names}):
        return UnwrappedNames({name: name for name in names}, {})
    short_names = {name: _strip_components(name, WRAPPERS, patterns) for name in names}
    ambiguous = _find_ambiguous_names(short_names, patterns)
    if ambiguous and not patterns:
        ambiguous = set(names)
    for name in ambiguous:
        short_names[name] = _strip_components(name, WRAPPERS - _AMBIGUOUS_WRAPPERS, patterns)
    counts: Counter[str] = Counter()
    first_name: dict[str, str] = {}
    duplicates: dict[str, str] = {}
    for name, short_name in short_names.items():
        if short_name != name:
            counts.update(_removed_components(name, short_name))
        other = first_name.setdefault(short_name, name)
        if other != name:
            # Keep the plain name, which is the one that a trainer reads.
            first_name[short_name] = name if name == short_name else other
            duplicates[other if name == short_name else name] = first_name[short_name]
    duplicates = {name: first_name[short_names[name]] for name in duplicates}
    renamed = {name: short_name for name, short_name in short_names.items() if name not in duplicates}
    names_with_module = tuple(
        name for name in short_names if name in ambiguous and not _AMBIGUOUS_WRAPPERS.isdisjoint(_parents(name))
    )
    return UnwrappedNames(renamed, dict(counts), duplicates, names_with_module)


def replace_legacy_leaf(name: str) -> str:
    """Return a name with a final `LayerNorm.gamma` or `LayerNorm.beta` renamed as transformers does while loading."""
    for old, new in _LEGACY_LEAVES.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def without_wrappers(prefix: str) -> str:
    """Return a prefix without its components in `WRAPPERS`, which `strip_wrappers` also removes from names."""
    *parents, last = prefix.split(".")
    return "".join(f"{part}." for part in parents if part not in WRAPPERS) + last


def _parents(name: str) -> list[str]:
    return name.split(".")[:-1]


def _strip_components(name: str, wrappers: frozenset[str], patterns: frozenset[str]) -> str:
    """Return a name without the components in `wrappers`, except for those of a model name in `patterns` at its end."""
    *parents, last = name.split(".")
    if wrappers.isdisjoint(parents):
        return name
    suffix = _match_suffix(pattern_of(name), patterns)
    parents = parents[: len(parents) + 1 - suffix.length] if suffix else parents
    kept = [part for part in parents if part not in wrappers]
    if not suffix:
        return ".".join([*kept, last])
    tail = name.split(".")[-suffix.length :]
    return ".".join([*kept, *(tail[index] for index in suffix.kept_indices)])


class _Suffix(NamedTuple):
    """Last components of a name that are a model name, possibly with wrappers between them.

    Attributes:
        length: Number of components.
        kept_indices: Indices of the components that are the model name; the others are wrappers.
    """

    length: int
    kept_indices: tuple[int, ...]


@lru_cache(maxsize=1 << 12)
def _match_suffix(pattern: str, patterns: frozenset[str]) -> _Suffix | None:
    """Find the longest model name that ends a name, among those with a component that could be a wrapper (`module`).

    Wrappers between the components of the model name are skipped.

    Returns:
        The suffix; None if no such model name matches.
    """
    parts = pattern.split(".")
    for model_pattern in _patterns_with_wrappers(patterns):
        components, matched, position = model_pattern.split("."), [], len(parts)
        for part in reversed(components):
            position -= 1
            while position >= 0 and parts[position] != part and parts[position] in WRAPPERS:
                position -= 1
            if position < 0 or parts[position] != part:
                break
            matched.append(position)
        else:
            return _Suffix(len(parts) - position, tuple(each - position for each in reversed(matched)))
    return None


@lru_cache(maxsize=64)
def _patterns_with_wrappers(patterns: frozenset[str]) -> tuple[str, ...]:
    """Return the patterns with a component that could be a wrapper, those with the most components first."""
    found = [each for each in patterns if not WRAPPERS.isdisjoint(each.split("."))]
    return tuple(sorted(found, key=lambda each: (-each.count("."), each)))


def _removed_components(name: str, short: str) -> Counter[str]:
    """Return the components that `name` has and `short` lacks."""
    return Counter(_parents(name)) - Counter(_parents(short))


def _find_ambiguous_names(short_names: Mapping[str, str], patterns: frozenset[str]) -> set[str]:
    """Return names whose `module` may be a module: the names without it also exist, and the architecture lacks them.

    State that belongs to such a name is included.
    """
    names_by_short: dict[str, list[str]] = {}
    for name, short in short_names.items():
        names_by_short.setdefault(short, []).append(name)
    collisions = {short: names for short, names in names_by_short.items() if len(names) > 1}
    ambiguous: set[str] = set()
    ambiguous_short_names: set[str] = set()
    for short, names in collisions.items():
        spellings = {_strip_components(name, WRAPPERS - _AMBIGUOUS_WRAPPERS, patterns) for name in names}
        if len(spellings) == 1 or is_optimizer(short) or is_trainer_state(short) or _has_known_end(short, patterns):
            continue
        ambiguous_short_names.add(short)
        ambiguous.update(names)
    for short, names in collisions.items() if ambiguous_short_names else ():
        parts = short.split(".")
        spans = (".".join(parts[i:j]) for i in range(1, len(parts)) for j in range(i + 1, len(parts)))
        if any(span in ambiguous_short_names for span in spans):
            ambiguous.update(names)
    return ambiguous


def _has_known_end(name: str, patterns: frozenset[str]) -> bool:
    """Return True if `name` is one of `patterns` under some prefix."""
    parts = pattern_of(name).split(".")
    return any(".".join(parts[begin:]) in patterns for begin in range(len(parts)))


class Roles(NamedTuple):
    """Names in a checkpoint by role.

    Attributes:
        prefix: Prefix removed from model names.
        model: Name without prefix -> name in the checkpoint.
        optimizer: Names of optimizer state.
        other: Names of other state, such as schedulers, counters and data loaders, and names outside of the prefix.
    """

    prefix: str
    model: dict[str, str]
    optimizer: list[str]
    other: list[str]


def is_optimizer(name: str) -> bool:
    """Return True for the name of optimizer state: by its first component, or the second under a root like `state`."""
    return _has_root(name, _OPTIMIZER_ROOTS)


def is_trainer_state(name: str) -> bool:
    """Return True for the name of a scheduler, counter, data loader, RNG, gradient scaler or other trainer state."""
    return _has_root(name, _TRAINER_ROOTS) or name.rpartition(".")[2] == _EMA_COUNTER


def _has_root(name: str, roots: frozenset[str]) -> bool:
    first, _, rest = name.partition(".")
    return first in roots or (first in _CONTAINER_ROOTS and rest.partition(".")[0] in roots)


def is_state_prefix(prefix: str) -> bool:
    """Return True for a prefix with a component of optimizer state, master weights, gradients or trainer state."""
    parts = prefix.split(".")
    roots = _OPTIMIZER_ROOTS | _TRAINER_ROOTS | _GRADIENTS
    return any(part in roots or _OPTIMIZER_COMPONENT.fullmatch(part) is not None for part in parts)


def assign_roles(names: Iterable[str], patterns: frozenset[str] | None, prefix: str | None = None) -> Roles:
    """Split `names` into model, optimizer and other, and detect the prefix of the model.

    Args:
        names: Names of tensors, without wrappers.
        patterns: Name patterns of the architecture, see `pattern_of`; None if it is unknown.
        prefix: Prefix to remove. Trainer state below it is recognized by the rest of the name, as `lr_scheduler.step`
            in `trainer.lr_scheduler.step`. None to detect the one that leaves the most known names; nothing is removed
            if the architecture is unknown, or if removing a prefix leaves no more known names.

    Raises:
        InputError: `prefix` was given and no tensor of the model has it.
    """
    optimizer: list[str] = []
    other: list[str] = []
    rest: list[str] = []
    model: dict[str, str] = {}
    # Pattern -> the list of names with its role: thousands of names have a few dozen patterns.
    buckets: dict[str, list[str]] = {}
    for name in names:
        pattern = pattern_of(name)
        bucket = buckets.get(pattern)
        if bucket is None:
            is_below = prefix and pattern.startswith(prefix) and not is_optimizer(pattern)
            own_pattern = pattern[len(prefix or "") :] if is_below and is_trainer_state(pattern) else pattern
            bucket = optimizer if is_optimizer(own_pattern) else other if is_trainer_state(own_pattern) else rest
            if patterns is not None and pattern in patterns:
                bucket = rest  # the architecture has a module of that name
            buckets[pattern] = bucket
        bucket.append(name)
    if prefix is None:
        prefix = _best_prefix(rest, patterns) if patterns is not None else ""
    for name in rest:
        if name.startswith(prefix) and (name != prefix or not prefix):
            model[name[len(prefix) :]] = name
        else:
            other.append(name)
    if prefix and not model:
        if any(name.startswith(prefix) for name in optimizer):
            raise InputError(
                f'the tensors under "{prefix}" are optimizer state, not a model; list the names with '
                "`ckptx inspect --tensors`"
            )
        if any(name.startswith(prefix) for name in other):
            raise InputError(
                f'the tensors under "{prefix}" are state of a trainer, not a model; list the names with '
                "`ckptx inspect --tensors`"
            )
        raise InputError(f'no tensor name begins with "{prefix}"; list the names with `ckptx inspect --tensors`')
    return Roles(prefix, model, optimizer, other)


def _best_prefix(names: list[str], patterns: frozenset[str]) -> str:
    """Return the prefix that leaves the most known names; among equal ones no state prefix, then the shortest.

    Prefixes have at most three components, none of them an index. The prefix may be empty.
    """
    counts = Counter(pattern_of(name) for name in names)
    candidates = {""}
    for name in counts:
        parts = name.split(".")
        for depth in range(1, min(4, len(parts))):
            if parts[depth - 1] == "*":
                break
            candidates.add(".".join(parts[:depth]) + ".")
    scores = {
        prefix: sum(
            count for name, count in counts.items() if name.startswith(prefix) and name[len(prefix) :] in patterns
        )
        for prefix in candidates
    }
    return min(candidates, key=lambda prefix: (-scores[prefix], is_state_prefix(prefix), len(prefix), prefix))


@lru_cache(maxsize=1 << 16)
def split_pattern(name: str) -> tuple[str, tuple[int, ...]]:
    """Return the pattern of a name, and the indices that its stars stand for, left to right.

    Example:
        model.layers.31.mlp.up_proj.weight -> model.layers.*.mlp.up_proj.weight, (31,)
    """
    parts = _INDEX_COMPONENTS.split(name)
    # Intern the pattern that thousands of names share: its hash is cached, and it is compared by identity.
    return intern("*".join(parts[::2])), tuple(map(int, parts[1::2]))


@lru_cache(maxsize=1 << 16)
def pattern_of(name: str) -> str:
    """Return `name` with every index replaced by `*`: components of up to 9 digits without a leading zero."""
    return split_pattern(name)[0]
