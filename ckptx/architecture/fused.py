"""Read `fused.json`: projections with attention heads or several fused parts, and the order of the parts.

    {"modules": ["gate_up_proj", "Wi"], "equal": 2, "reason": "[gate|up]"}

The entries never decide how TP shards a tensor. They decide whether a shard, made by whatever rule, is `aligned` (holds
whole heads, and its chunk of each fused part): see `ckptx.layout.composition`. A plan may shard a fused projection in
plain chunks, as transformers' own plans do with ``colwise_gather_output``, and a user's plan may do so by mistake.

An entry names the last one or two components of module paths in `modules`. If several entries name the same module, the
first is used that has no `types`, or the model type of the text model among them. `parts` are candidates for the fused
parts, each a list with [number of heads or features, size of one in elements] for each part, as expressions over
``config.json``, in which the keys of `names` at the top of the file stand for their expressions:

    {"modules": ["kv_proj"], "parts": [[["kv_heads", "kv_channels"], ["kv_heads", "kv_channels"]]], "reason": "[k|v]"}

The first candidate that adds up to the size of the stored tensor's dim is used. If none does, the dim has `equal` parts
of the same size. A projection with an entry whose parts are not found is never aligned: nothing shows that its shards
hold whole parts.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ckptx.architecture.expressions import Scope, try_evaluate
from ckptx.architecture.structure import Structure, in_sub_config
from ckptx.errors import InputError
from ckptx.layout.composition import Composition, Compositions, FeatureSide, Part

FUSED_FILE = Path(__file__).with_name("fused.json")

_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

CountSizePairs = tuple[tuple[str, str], ...]


class FusedProjection(NamedTuple):
    """An entry of `fused.json`: the parts that the named modules are fused from.

    Attributes:
        modules: Last one or two components of module paths.
        candidates: Candidates for the fused parts. Each has a pair of expressions for each part, in the order in which
            the parts are stored: the number of heads or features, and the size of one.
        num_equal_parts: Number of equal parts if no candidate fits; 1 if the features are not fused, 0 if unknown.
        side: "out" if the parts are along the output features, "in" if along the input features.
        types: Model types of the text models to which the entry applies; empty for all.
        reason: Fused parts in a few words, for maintainers.
    """

    modules: tuple[str, ...]
    candidates: tuple[CountSizePairs, ...]
    num_equal_parts: int
    side: FeatureSide
    types: tuple[str, ...]
    reason: str


@functools.cache
def fused_projections() -> tuple[FusedProjection, ...]:
    """Return the entries of `fused.json`, with the abbreviations in its expressions expanded."""
    document = json.loads(FUSED_FILE.read_text(encoding="utf-8"))
    names: dict[str, str] = document["names"]

    def expand(expression: str) -> str:
        return _IDENTIFIER.sub(lambda word: f"({expand(names[word[0]])})" if word[0] in names else word[0], expression)

    return tuple(
        FusedProjection(
            tuple(values["modules"]),
            tuple(tuple((expand(count), expand(size)) for count, size in pairs) for pairs in values.get("parts", ())),
            values.get("equal", 0),
            values.get("side", "out"),
            tuple(values.get("types", ())),
            values["reason"],
        )
        for values in document["projections"]
    )


def compositions_of(structure: Structure, scopes: Sequence[Scope], *, is_in_table: bool) -> Compositions:
    """Return the heads and fused parts of each projection of a class, with the sizes in a ``config.json``.

    Args:
        structure: Structure of the class.
        scopes: Sources of values for the expressions: the whole config, then one for each kind of layer with sizes of
            its own (`per_layer_config`).
        is_in_table: See `Architecture.is_in_table`. If True, all fused projections of the class are in `fused.json`; if
            False, its projections may have any names.
    """
    layers = [(scope, structure.text_config_path) for scope in scopes]
    towers = [(Scope(each), "") for each in scopes[0].config.values() if isinstance(each, Mapping)]
    return Compositions(
        _compositions_by_module(layers, structure.text_type),
        _compositions_by_module([*towers, *layers], structure.text_type),
        tuple(stack.path for stack in structure.stacks),
        structure.transposed,
        is_complete=is_in_table,
        is_of_unknown_class=not is_in_table,
    )


def compositions_of_unknown_class(config: Mapping[str, Any] | None) -> Compositions:
    """Return the heads and fused parts that module names and config keys suggest for an unknown class."""
    config = config or {}
    texts = [config[key] for key in _TEXT_CONFIGS if isinstance(config.get(key), Mapping)]
    return Compositions(
        _compositions_by_module([(Scope(each), "") for each in (*texts, config)], str(config.get("model_type", ""))),
        is_of_unknown_class=True,
    )


def _compositions_by_module(scopes: Iterable[tuple[Scope, str]], text_type: str) -> dict[str, Composition]:
    """Return the heads and fused parts by module name, with the sizes of all scopes as candidates.

    Args:
        scopes: Each scope with the dotted path from its config to the sub-config with the keys; empty for its root.
        text_type: Model type of the text model.
    """
    scopes = list(scopes)
    compositions: dict[str, Composition] = {}
    for projection in fused_projections():
        if projection.types and text_type not in projection.types:
            continue
        candidates = (
            _evaluate_parts(pairs, scope, text_config_path)
            for scope, text_config_path in scopes
            for pairs in projection.candidates
        )
        composition = Composition(
            projection.side, tuple(dict.fromkeys(each for each in candidates if each)), projection.num_equal_parts
        )
        for module in projection.modules:
            compositions.setdefault(module, composition)
    return compositions


def _evaluate_parts(pairs: CountSizePairs, scope: Scope, text_config_path: str) -> tuple[Part, ...] | None:
    """Return (count, size) of each part of a candidate; None if a number is missing or not a positive integer."""
    try:
        numbers = [
            (
                try_evaluate(in_sub_config(count, text_config_path), scope),
                try_evaluate(in_sub_config(size, text_config_path), scope),
            )
            for count, size in pairs
        ]
    except InputError:
        return None
    found = tuple((count, size) for count, size in numbers if count and size and count > 0 and size > 0)
    return found if len(found) == len(pairs) else None
