"""Measure the effective ``tie_word_embeddings`` of a config class, for every combination of values of its tie keys.

It does not import torch or transformers: the config class is a function from a ``config.json``-like dict to an object,
and the config of the sub-model that ties its weights is given as a path of attributes in that object.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ckptx.architecture.architecture import TieFlag
from ckptx.architecture.configs import TIE_FLAG

# other keys that some config classes translate to the flag: the first in Lfm2, the second in CSM
_FLAG_ALIASES = ("tie_embedding", "tie_codebooks_embeddings")
_ABSENT = object()
_VALUES = (_ABSENT, False, True)
_MAX_KEYS = 3  # keys that affect the flag: the table has one entry per combination of values, 27 for three keys
_MAX_DEPTH = 5  # levels of nested configs; a limit for custom classes whose configs contain themselves


class UnmeasurableFlagError(Exception):
    """The config class refused a config without tie keys, or more than `_MAX_KEYS` keys affect the flag."""


def measure_flag(
    build: Callable[[dict[str, Any]], Any],
    base_config: Mapping[str, Any],
    config_path: Sequence[str],
    nested_paths: Sequence[tuple[str, ...]],
) -> TieFlag:
    """Return the truth table of the flag of the config at attribute path ``config_path``.

    Args:
        build: Builds a config object from a dict; may raise for a combination that the class refuses.
        base_config: Dict to vary. Its own tie keys are overwritten.
        config_path: Attribute names from the root config to the config from which the sub-model with the tied pair
            reads its flag; () for the root.
        nested_paths: Paths of the sub-configs whose keys may matter in addition to those of the root.

    Raises:
        UnmeasurableFlagError: More than `_MAX_KEYS` keys matter, or the class refuses a config without tie keys.
    """
    roots: list[tuple[str, ...]] = [()]
    locations = roots + [tuple(path) for path in nested_paths]
    keys = [(*place, key) for place in locations for key in (TIE_FLAG, *_FLAG_ALIASES)]

    @functools.cache
    def build_and_read(values: frozenset[tuple[tuple[str, ...], bool]]) -> bool | None:
        settings = dict(values)
        variant = copy.deepcopy(dict(base_config))
        for path in keys:
            _set_key(variant, path, settings.get(path, _ABSENT))
        try:
            config = build(variant)
        except Exception:  # whatever a config class raises means "this combination is refused"
            return None
        for name in config_path:
            config = getattr(config, name)
        return bool(getattr(config, TIE_FLAG, False))

    def flag_under(values: Mapping[tuple[str, ...], Any]) -> bool | None:
        return build_and_read(frozenset((path, value) for path, value in values.items() if value is not _ABSENT))

    relevant = [path for path in keys if _affects_flag(path, keys, config_path, flag_under)]
    if len(relevant) > _MAX_KEYS:
        listed = ", ".join(".".join(path) for path in relevant)
        raise UnmeasurableFlagError(
            f"its tied weights depend on {len(relevant)} config keys ({listed}), and ckptx supports at most "
            f"{_MAX_KEYS}; change the config class so that it reads fewer of them"
        )
    answers = [
        flag_under(dict(zip(relevant, combination, strict=True)))
        for combination in itertools.product(_VALUES, repeat=len(relevant))
    ]
    if answers[0] is None:
        raise UnmeasurableFlagError(
            f"its config class cannot be built from a config without {TIE_FLAG}; give the key a default in the class"
        )
    # a refused combination never reaches a model; it counts as not tied
    return TieFlag(tuple(relevant), "".join("1" if answer else "0" for answer in answers))


ConfigTree = Sequence[tuple[tuple[str, ...], Any]]  # a config and its nested configs, with their attribute paths


def config_tree(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the config and the nested configs to `_MAX_DEPTH` levels, with their attribute paths, the root first."""
    yield path, config
    if len(path) >= _MAX_DEPTH:
        return
    for name in sorted(getattr(config, "sub_configs", None) or ()):
        nested = getattr(config, name, None)
        if nested is not None and hasattr(nested, "to_dict"):
            yield from config_tree(nested, (*path, name))


def find_config_path(config: Any, tree: ConfigTree) -> tuple[str, ...]:
    """Return the attribute path of a sub-model's config in the tree.

    A sub-model may have a copy of the config: if the object itself is not in the tree, return the path of the first
    config of the same type, or else that of the root, ().
    """
    for path, candidate in tree:
        if candidate is config:
            return path
    for path, candidate in tree:
        if type(candidate) is type(config):
            return path
    return ()


def flag_config_paths(config: Any, config_path: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the paths of nested configs that may have a flag of their own; those of vision or audio towers do not."""
    return [
        path
        for path, nested in config_tree(config)
        if path and (hasattr(nested, TIE_FLAG) or path == config_path or path[-1] == "text_config")
    ]


def _affects_flag(
    path: tuple[str, ...],
    keys: Sequence[tuple[str, ...]],
    config_path: Sequence[str],
    flag_under: Callable[[Mapping[tuple[str, ...], Any]], bool | None],
) -> bool:
    """Return True if the value of the key at ``path`` changes the flag, alone or under a value of another key.

    The other keys are tie flags that may hide its effect because they take precedence.
    """
    contexts: list[dict[tuple[str, ...], Any]] = [{}]
    masking_keys = () if path[-1] != TIE_FLAG else ((TIE_FLAG,), ("text_config", TIE_FLAG), (*config_path, TIE_FLAG))
    for other in masking_keys:
        if other in keys and other != path:
            contexts += [{other: False}, {other: True}]
    for values in contexts:
        answers = {flag_under(values | ({} if value is _ABSENT else {path: value})) for value in _VALUES}
        if len(answers - {None}) > 1:
            return True
    return False


def _set_key(config: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Set the key at ``path`` in place, or remove it for `_ABSENT`, without creating an empty nested dict."""
    node = config
    for key in path[:-1]:
        nested = node.get(key)
        if not isinstance(nested, dict):
            if value is _ABSENT:
                return
            nested = node[key] = {}
        node = nested
    if value is _ABSENT:
        node.pop(path[-1], None)
    else:
        node[path[-1]] = value
