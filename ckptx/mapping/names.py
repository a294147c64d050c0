"""Which tensors of a training checkpoint are the model, and what their names are without prefixes and wrappers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from sys import intern
from typing import NamedTuple

from ckptx.errors import InputError
from ckptx.untrusted.limits import INDEX

_INDICES = re.compile(f"({INDEX.pattern})")  # a group, so that `split` keeps them

# What torch leaves in the names of parameters it wraps; meaningless outside of the run that wrapped them.
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module"})

# First components under which trainers keep state that is not the model.
_OPTIMIZER_ROOTS = frozenset({"optimizer", "optimizers", "optim", "optimizer_state_dict", "optimizer_states"})
_TRAINER_ROOTS = frozenset(
    {
        "train_state", "lr_scheduler", "lr_schedulers", "scheduler", "sched", "dataloader", "rng", "rng_state",
        "rng_states", "loops", "callbacks", "step", "epoch", "iteration", "trainer", "scaler", "ema_optimizer",
    }
)  # fmt: skip
# Roots that hold both: `state.model.*`, `state.optimizers.*`; `app.model.*`, `app.optim.*`.
_CONTAINER_ROOTS = frozenset({"state", "app", "checkpoint", "training"})


class Unwrapped(NamedTuple):
    """Names without wrappers.

    Attributes:
        names: Old name to new.
        counts: How often each wrapper was removed.
        collision: Two names that would have become one, so that nothing was removed; else None.
    """

    names: dict[str, str]
    counts: dict[str, int]
    collision: tuple[str, str] | None = None


def strip_wrappers(names: Iterable[str], patterns: frozenset[str] = frozenset()) -> Unwrapped:
    """Removes wrapper components at any depth, except from names the architecture has itself (`patterns`).

    A wrapper wraps something: the last component of a name is never one.

    Example:
        model._orig_mod.layers.0._checkpoint_wrapped_module.weight -> model.layers.0.weight
    """
    renamed: dict[str, str] = {}
    counts: dict[str, int] = {}
    owner: dict[str, str] = {}
    names = list(names)
    if all(WRAPPERS.isdisjoint(key.split(".")) for key in {pattern_of(name) for name in names}):
        return Unwrapped({name: name for name in names}, {})
    for name in names:
        *parents, last = name.split(".")
        short = name
        if not WRAPPERS.isdisjoint(parents) and pattern_of(name) not in patterns:
            short = ".".join([*(part for part in parents if part not in WRAPPERS), last])
            for part in parents:
                if part in WRAPPERS:
                    counts[part] = counts.get(part, 0) + 1
        if short in owner:
            return Unwrapped({name: name for name in names}, {}, (owner[short], name))
        owner[short] = name
        renamed[name] = short
    return Unwrapped(renamed, counts)


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
    return min(candidates, key=lambda prefix: (-scores[prefix], len(prefix), prefix))


@lru_cache(maxsize=1 << 16)
def parted(name: str) -> tuple[str, tuple[int, ...]]:
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
    return parted(name)[0]
