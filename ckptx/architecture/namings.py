"""Naming schemes of a model's tensors that load into it: Hub originals, saved files, names without a prefix.

transformers has a list of renamings per model. A renaming that only drops a prefix cannot be reversed with certainty,
so each subset of these renamings, reversed, gives one naming scheme. A scheme counts only if the loader maps its names
back to the original parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

Rename = Callable[[str], str]


def loadable_name_pairs(
    target: str,
    source: str,
    to_disk_names: list[Rename],
    to_model_name: Rename,
    prefix: str,
) -> tuple[tuple[str, str], ...]:
    """Return both names of a tied pair in every naming scheme that loads; the model's own names come first.

    Args:
        target: Model name of the alias.
        source: Model name of the tensor that it is tied to.
        to_disk_names: Functions from a model name to a disk name, one per naming scheme.
        to_model_name: The loader's function from a disk name to a model name.
        prefix: Name of the base model in the class; empty for none.
    """
    pairs: dict[tuple[str, str], None] = {(target, source): None}
    for to_disk_name in to_disk_names:
        pair = to_disk_name(target), to_disk_name(source)
        for candidate in (pair, _without_prefix(pair, prefix)):
            if to_model_name(candidate[0]) == target and to_model_name(candidate[1]) == source:
                pairs[candidate] = None
    return tuple(pairs)


def subsets(optional: list[Any]) -> list[tuple[Any, ...]]:
    """Return all subsets, small ones first; for more than three values only the empty and the full one."""
    if len(optional) > 3:
        return [(), tuple(optional)]
    return [chosen for size in range(len(optional) + 1) for chosen in itertools.combinations(optional, size)]


def _without_prefix(pair: tuple[str, str], prefix: str) -> tuple[str, str]:
    drop = f"{prefix}." if prefix else ""
    return pair[0].removeprefix(drop), pair[1].removeprefix(drop)
