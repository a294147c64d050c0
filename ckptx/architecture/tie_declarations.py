"""Convert the tie declarations of model classes to one form: a dict of plain names, target -> source.

The target is the name that a checkpoint may omit; the source is the name that it stores.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any


def existing_pairs(declared: Mapping[str, str], names: Mapping[str, Any]) -> dict[str, str]:
    """Return the pairs whose names both exist, without the `$` that a few classes have at the end of a name.

    Args:
        declared: Target -> source, as declared by the class.
        names: Names of all tensors of the model, as keys.
    """
    pairs = {target.removesuffix("$"): source.removesuffix("$") for target, source in declared.items()}
    return {target: source for target, source in pairs.items() if target in names and source in names}


def ties_from_list(targets: Iterable[str], source: str | None, shapes: Mapping[str, Any]) -> dict[str, str]:
    """Convert the list that classes for transformers 4 declare to a dict.

    A listed name is tied to the input embedding if their shapes are equal. Else, the bias of a prediction head is tied
    to the bias of the module around it, under the same condition. All other names are left out.

    Args:
        targets: Names or regular expressions.
        source: Name of the input embedding's weight; None if the model has none.
        shapes: Shapes of all parameters of the model.

    Example:
        >>> ties_from_list(["lm_head.weight"], "wte.weight", {"wte.weight": (8, 4), "lm_head.weight": (8, 4)})
        {'lm_head.weight': 'wte.weight'}
    """
    patterns = sorted(targets)
    mapping = {}
    for target in (name for name in shapes if any(re.search(pattern, name) for pattern in patterns)):
        module, _, leaf = target.rpartition(".")
        outer = module.rpartition(".")[0]
        outer_name = f"{outer}.{leaf}" if outer else leaf
        if target != source and source is not None and shapes[target] == shapes.get(source):
            mapping[target] = source
        elif leaf == "bias" and shapes.get(outer_name) == shapes[target]:
            mapping[target] = outer_name
    return mapping


def flatten_chains(pairs: Mapping[str, str]) -> dict[str, str]:
    """Follow chains, so that no source is itself a target; self-references and cycles are dropped.

    Example:
        >>> flatten_chains({"c": "b", "b": "a"})
        {'c': 'a', 'b': 'a'}
    """
    flat: dict[str, str] = {}
    for target, first in pairs.items():
        source, seen = first, {target}
        while source in pairs and source not in seen:
            seen.add(source)
            source = pairs[source]
        if source not in seen:
            flat[target] = source
    return flat
