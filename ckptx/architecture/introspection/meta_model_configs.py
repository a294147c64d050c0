"""Read the config of a meta model, and the defaults of its class for keys that ``config.json`` omits.

Imports transformers; see `meta_model`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ckptx.architecture.expressions import COMPOSITE_PREFIX, Scope, keys_of, try_evaluate


def nearest_config(model: PreTrainedModel, path: str) -> Any:
    """Return the config of the innermost module that contains the module or tensor at `path` and has a config.

    The config of the module at `path` itself does not count. None if no module around it has one.
    """
    while path:
        path = path.rpartition(".")[0]
        config = getattr(model.get_submodule(path), "config", None)
        if isinstance(config, PreTrainedConfig):
            return config
    return None


def class_defaults(keys: set[str], root: Any, expressions: set[str]) -> tuple[dict[str, int | None], dict[str, str]]:
    """Return the defaults of the config classes for absent keys, and the aliases of keys.

    Args:
        keys: Dotted keys.
        root: Config of the model, as an object of its config class.
        expressions: Expressions over `keys`. If the defaults that the classes declare leave one without a value, the
            values of its keys in `root` are added to the defaults.

    Returns:
        Values of `Scope.defaults` and `Scope.aliases`.
    """
    defaults: dict[str, int | None] = {}
    aliases: dict[str, str] = {}
    resolved: dict[str, int | None] = {}
    composite_built: set[str] = set()  # paths of sub-configs that their composite builds with values of its own
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
        resolved[key] = _as_integer(read_key(config, name))
        if path and resolved[key] != _as_integer(read_key(_default_config(config.__class__), name)):
            composite_built.add(".".join(path))
    for key, value in resolved.items():
        if value is not None and key.rpartition(".")[0] in composite_built:
            defaults[COMPOSITE_PREFIX + key] = value
    # values that the class derives in __init__ from other keys, without a known expression
    for expression in sorted(expressions):
        if try_evaluate(expression, Scope({}, defaults)) is None:
            defaults |= {key: resolved[key] for key in sorted(keys_of(expression)) if key not in defaults}
    return {key: value for key, value in sorted(defaults.items()) if value is not None}, aliases


@functools.cache
def _default_config(config_class: Callable[[], Any]) -> Any:
    """Return a config with all defaults; None if the class cannot be built from them."""
    try:
        return config_class()
    except Exception:  # config classes raise different exceptions
        return None


def class_default(config: Any, name: str) -> int | None:
    """Return the default that the config class declares, before its __init__ derives other values.

    None if there is none, or it is no integer.
    """
    declared = inspect.getattr_static(type(config), name, None)
    if _as_integer(declared) is not None:
        return _as_integer(declared)
    parameter = inspect.signature(type(config).__init__).parameters.get(name)
    return _as_integer(parameter.default) if parameter is not None else None


def read_key(config: Any, name: str) -> Any:
    """Return the value of a key of a config object for the whole model, even if single layers have other values.

    None if the config is None, or has no such value.
    """
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


def _as_integer(value: Any) -> int | None:
    return int(value) if isinstance(value, int) else None
