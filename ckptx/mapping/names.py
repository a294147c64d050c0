"""Which tensors of a training checkpoint are the model, and what their names are without prefixes and wrappers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from sys import intern
from types import MappingProxyType
from typing import NamedTuple

from ckptx.errors import InputError
from ckptx.untrusted.limits import INDEX

_INDICES = re.compile(f"({INDEX.pattern})")  # a group, so that `split` keeps them

# What torch leaves in the names of parameters it wraps; meaningless outside of the run that wrapped them.
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module"})

# `module` is a name that models use themselves; nobody but torch writes the others.
_LIKE_A_MODULE = frozenset({"module"})

# transformers renames these two while loading, for every model
LEGACY_LEAVES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}

# Moments of an optimizer, for trainers that put the name of the parameter behind them: `exp_avg.model.norm.weight`.
_MOMENTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg"})
# First components under which trainers keep state that is not the model.
_OPTIMIZER_ROOTS = _MOMENTS | {
    "optimizer", "optimizers", "optim", "optimizer_state_dict", "optimizer_states"
}  # fmt: skip
_TRAINER_ROOTS = frozenset(
    {
        "train_state", "lr_scheduler", "lr_schedulers", "scheduler", "sched", "dataloader", "rng", "rng_state",
        "rng_states", "loops", "callbacks", "step", "epoch", "iteration", "trainer", "scaler", "ema_optimizer",
    }
)  # fmt: skip
_GRADIENTS = frozenset({"grad", "grads", "gradients", "main_grad"})
_OF_OPTIMIZER = re.compile(r"(optimi[sz]ers?|optim|opt)(_?(states?|state_dict|\d+))?|(master|main|fp32)_params?")
# Roots that hold both: `state.model.*`, `state.optimizers.*`; `app.model.*`, `app.optim.*`.
_CONTAINER_ROOTS = frozenset({"state", "app", "checkpoint", "training"})


class UnwrappedNames(NamedTuple):
    """Names without wrappers.

    Attributes:
        names: Old name to new, each new name once.
        counts: How often each wrapper was removed.
        duplicates: Name that is another one in a wrapper -> that other name, as both are in the checkpoint.
        kept: Names that keep a `module.`, because a name without it is there that the architecture does not know.
    """

    names: dict[str, str]
    counts: dict[str, int]
    duplicates: Mapping[str, str] = MappingProxyType({})
    kept: tuple[str, ...] = ()


def strip_wrappers(names: Iterable[str], patterns: frozenset[str] = frozenset()) -> UnwrappedNames:
    """Removes wrapper components at any depth, except from names the architecture has itself (`patterns`).

    A wrapper wraps something: the last component of a name is never one. Two names that differ in nothing but wrappers
    are one tensor stored twice. But models have modules called `module`, so where the architecture does not know the
    name without it, both names stay; and no `module` is removed where nothing is known of the architecture.

    Example:
        model._orig_mod.layers.0._checkpoint_wrapped_module.weight -> model.layers.0.weight
    """
    names = list(names)
    if all(WRAPPERS.isdisjoint(key.split(".")) for key in {pattern_of(name) for name in names}):
        return UnwrappedNames({name: name for name in names}, {})
    shorts = {name: _without(name, WRAPPERS, patterns) for name in names}
    doubtful = _names_of_modules(shorts, patterns)
    if doubtful and not patterns:
        doubtful = set(names)
    for name in doubtful:
        shorts[name] = _without(name, WRAPPERS - _LIKE_A_MODULE, patterns)
    counts: Counter[str] = Counter()
    owner: dict[str, str] = {}
    duplicates: dict[str, str] = {}
    for name, short in shorts.items():
        if short != name:
            counts.update(_removed(name, short))
        kept = owner.setdefault(short, name)
        if kept != name:
            # The plain name is the one to keep: a trainer that reads one of the two asks for it.
            owner[short] = name if name == short else kept
            duplicates[kept if name == short else name] = owner[short]
    duplicates = {name: owner[shorts[name]] for name in duplicates}
    renamed = {name: short for name, short in shorts.items() if name not in duplicates}
    kept_names = tuple(name for name in shorts if name in doubtful and not _LIKE_A_MODULE.isdisjoint(_parents(name)))
    return UnwrappedNames(renamed, dict(counts), duplicates, kept_names)


def _parents(name: str) -> list[str]:
    return name.split(".")[:-1]


def _without(name: str, wrappers: frozenset[str], patterns: frozenset[str]) -> str:
    *parents, last = name.split(".")
    if wrappers.isdisjoint(parents):
        return name
    own = _own_end(pattern_of(name), patterns)
    parents = parents[: len(parents) + 1 - own[0]] if own else parents
    kept = [part for part in parents if part not in wrappers]
    if not own:
        return ".".join([*kept, last])
    tail = name.split(".")[-own[0] :]
    return ".".join([*kept, *(tail[at] for at in own[1])])


@lru_cache(maxsize=1 << 12)
def _own_end(pattern: str, patterns: frozenset[str]) -> tuple[int, tuple[int, ...]] | None:
    """The end of a name that is one of the architecture, whose own names have components like wrappers.

    Returns:
        The number of components of the end, and which of them are the name; None where the name has no such end.
    """
    parts = pattern.split(".")
    for own in _with_wrappers(patterns):
        wanted, picked, at = own.split("."), [], len(parts)
        for part in reversed(wanted):
            at -= 1
            while at >= 0 and parts[at] != part and parts[at] in WRAPPERS:
                at -= 1
            if at < 0 or parts[at] != part:
                break
            picked.append(at)
        else:
            return len(parts) - at, tuple(each - at for each in reversed(picked))
    return None


@lru_cache(maxsize=64)
def _with_wrappers(patterns: frozenset[str]) -> tuple[str, ...]:
    """The names of an architecture that have components like wrappers, the longest first."""
    found = [each for each in patterns if not WRAPPERS.isdisjoint(each.split("."))]
    return tuple(sorted(found, key=lambda each: (-each.count("."), each)))


def _removed(name: str, short: str) -> Counter[str]:
    """The components that `name` has and `short` has not."""
    return Counter(_parents(name)) - Counter(_parents(short))


def _names_of_modules(shorts: Mapping[str, str], patterns: frozenset[str]) -> set[str]:
    """Names whose `module` may be one of the model: without it they are others, which the architecture does not know.

    State that belongs to such a name is among them.
    """
    together: dict[str, list[str]] = {}
    for name, short in shorts.items():
        together.setdefault(short, []).append(name)
    collisions = {short: found for short, found in together.items() if len(found) > 1}
    found: set[str] = set()
    modules: set[str] = set()
    for short, each in collisions.items():
        apart = {_without(name, WRAPPERS - _LIKE_A_MODULE, patterns) for name in each}
        if len(apart) == 1 or is_optimizer(short) or is_trainer_state(short) or _ends_known(short, patterns):
            continue
        modules.add(short)
        found.update(each)
    for short, each in collisions.items() if modules else ():
        parts = short.split(".")
        runs = (".".join(parts[i:j]) for i in range(1, len(parts)) for j in range(i + 1, len(parts)))
        if any(run in modules for run in runs):
            found.update(each)
    return found


def _ends_known(name: str, patterns: frozenset[str]) -> bool:
    """True when `name` is one of `patterns` below some prefix."""
    parts = pattern_of(name).split(".")
    return any(".".join(parts[begin:]) in patterns for begin in range(len(parts)))


class Roles(NamedTuple):
    """The tensors of a checkpoint by what they are.

    Attributes:
        prefix: What was stripped.
        model: Name without prefix -> name in the checkpoint.
        optimizer: Optimizer state.
        other: State of neither model nor optimizer (schedulers, counters, data loaders).
    """

    prefix: str
    model: dict[str, str]
    optimizer: list[str]
    other: list[str]


def is_optimizer(name: str) -> bool:
    """True for the name of optimizer state, wherever the trainer put it."""
    return _root_among(name, _OPTIMIZER_ROOTS)


def is_trainer_state(name: str) -> bool:
    """True for the name of a scheduler, counter, data loader or RNG state."""
    return _root_among(name, _TRAINER_ROOTS)


def _root_among(name: str, roots: frozenset[str]) -> bool:
    first, _, rest = name.partition(".")
    return first in roots or (first in _CONTAINER_ROOTS and rest.partition(".")[0] in roots)


def is_of_state(prefix: str) -> bool:
    """True for a prefix of names that repeat those of the model, and are moments or gradients of its parameters."""
    parts = prefix.split(".")
    roots = _OPTIMIZER_ROOTS | _TRAINER_ROOTS | _GRADIENTS
    return any(part in roots or _OF_OPTIMIZER.fullmatch(part) is not None for part in parts)


def assign_roles(names: Iterable[str], patterns: frozenset[str] | None, prefix: str | None = None) -> Roles:
    """Splits `names` into model, optimizer and the rest, and finds the prefix of the model.

    Args:
        names: Names of tensors, without wrappers.
        patterns: The names the architecture has, as `pattern_of` gives them; None when it is unknown.
        prefix: What to strip; None finds the prefix that leaves the most known names. Nothing is stripped when the
            architecture is unknown, or knows no more names without a prefix than with it.

    Raises:
        InputError: `prefix` was given and no tensor has it.
    """
    optimizer: list[str] = []
    other: list[str] = []
    rest: list[str] = []
    model: dict[str, str] = {}
    buckets: dict[str, list[str]] = {}  # by pattern: thousands of names have a few dozen patterns
    for name in names:
        key = pattern_of(name)
        bucket = buckets.get(key)
        if bucket is None:
            bucket = optimizer if is_optimizer(key) else other if is_trainer_state(key) else rest
            if patterns is not None and key in patterns:
                bucket = rest  # the architecture has a module of that name
            buckets[key] = bucket
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
                f'the tensors under "{prefix}" are optimizer state, not a model; look at their names with '
                "`ckptx inspect --tensors`"
            )
        raise InputError(f'no tensor name begins with "{prefix}"; look at them with `ckptx inspect --tensors`')
    return Roles(prefix, model, optimizer, other)


def _best_prefix(names: list[str], patterns: frozenset[str]) -> str:
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
    return min(candidates, key=lambda prefix: (-scores[prefix], is_of_state(prefix), len(prefix), prefix))


@lru_cache(maxsize=1 << 16)
def split_pattern(name: str) -> tuple[str, tuple[int, ...]]:
    """The pattern of a name, and the indices that its stars stand for, left to right.

    Example:
        model.layers.31.mlp.up_proj.weight -> model.layers.*.mlp.up_proj.weight, (31,)
    """
    parts = _INDICES.split(name)
    # One text for thousands of names: its hash is known, and it is compared by identity.
    return intern("*".join(parts[::2])), tuple(map(int, parts[1::2]))


@lru_cache(maxsize=1 << 16)
def pattern_of(name: str) -> str:
    """`name` with every all-digit component replaced by `*`."""
    return split_pattern(name)[0]
