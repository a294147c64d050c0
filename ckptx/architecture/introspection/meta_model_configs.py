"""Read the config of a meta model, and the defaults of its class for keys that ``config.json`` omits.

Imports transformers; see `meta_model`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ckptx.architecture.expressions import MADE, Scope, attempt, keys_of


def config_around(model: PreTrainedModel, path: str) -> Any:
    """Return the config of the nearest module around `path` that has one."""
    while path:
        path = path.rpartition(".")[0]
        config = getattr(model.get_submodule(path), "config", None)
        if isinstance(config, PreTrainedConfig):
            return config
    return None


def class_defaults(keys: set[str], root: Any, expressions: set[str]) -> tuple[dict[str, int | None], dict[str, str]]:
    """Return the defaults of the config classes for absent keys, and the aliases of keys."""
    defaults: dict[str, int | None] = {}
    aliases: dict[str, str] = {}
    resolved: dict[str, int | None] = {}
    made: set[str] = set()  # paths of sub-configs that their composite builds with values of its own
    for key in sorted(keys):
        *path, name = key.split(".")
        config = root
        for part in path:
            config = getattr(config, part)
        attribute = getattr(config, "attribute_map", {}).get(name, name)
        if attribute != name:
            aliases[key] = attribute
        value = class_default(config, attribute)
        if value is not None:
            defaults[key] = value
        resolved[key] = _whole(read(config, name))
        if path and resolved[key] != _whole(read(_plain(config.__class__), name)):
            made.add(".".join(path))
    for key, value in resolved.items():
        if value is not None and key.rpartition(".")[0] in made:
            defaults[MADE + key] = value
    # values that the class derives in __init__ from other keys, without a known expression
    for expression in sorted(expressions):
        if attempt(expression, Scope({}, defaults)) is None:
            defaults |= {key: resolved[key] for key in sorted(keys_of(expression)) if key not in defaults}
    return {key: value for key, value in sorted(defaults.items()) if value is not None}, aliases


@functools.cache
def _plain(config_class: Callable[[], Any]) -> Any:
    """Return a config with all defaults, or None."""
    try:
        return config_class()
    except Exception:  # the class cannot be built from its defaults
        return None


def class_default(config: Any, name: str) -> int | None:
    """Return the default that the config class declares, before its __init__ derives other values."""
    declared = inspect.getattr_static(type(config), name, None)
    if _whole(declared) is not None:
        return _whole(declared)
    parameter = inspect.signature(type(config).__init__).parameters.get(name)
    return _whole(parameter.default) if parameter is not None else None


def read(config: Any, name: str) -> Any:
    """Return the value of a key for the whole model, even if single layers have values of their own."""
    if config is None:
        return None
    values = vars(config)
    attribute = getattr(config, "attribute_map", {}).get(name, name)
    if attribute in values:
        return values[attribute]
    try:
        return getattr(config, attribute, None)
    except Exception:  # a property that raises
        return None


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, int) else None
