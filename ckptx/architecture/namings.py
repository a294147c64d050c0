"""The namings of a model's names that load into it: hub originals, saved files, without a prefix.

transformers keeps a list of renamings per model. A renaming that only drops a prefix cannot be undone with
certainty, so each subset of those is one dialect, and a naming counts only if the loader maps it back to
the parameter it came from.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

Rename = Callable[[str], str]


def aligned_namings(
    target: str,
    source: str,
    namings: list[Rename],
    load: Rename,
    prefix: str,
) -> tuple[tuple[str, str], ...]:
    """Both names of a tied pair in every dialect that loads, the model's own names first.

    Args:
        target: Model name of the alias.
        source: Model name it is tied to.
        namings: Functions from a model name to a disk name.
        load: The loader's function from a disk name to a model name.
        prefix: Name of the base model inside the class, empty for none.
    """
    found: dict[tuple[str, str], None] = {(target, source): None}
    for dialect in namings:
        pair = dialect(target), dialect(source)
        for variant in (pair, _without(pair, prefix)):
            if load(variant[0]) == target and load(variant[1]) == source:
                found[variant] = None
    return tuple(found)


def subsets(optional: list[Any]) -> list[tuple[Any, ...]]:
    """Every subset, small ones first; only none and all when there are too many to try."""
    if len(optional) > 3:
        return [(), tuple(optional)]
    return [chosen for size in range(len(optional) + 1) for chosen in itertools.combinations(optional, size)]


def _without(pair: tuple[str, str], prefix: str) -> tuple[str, str]:
    drop = f"{prefix}." if prefix else ""
    return pair[0].removeprefix(drop), pair[1].removeprefix(drop)
