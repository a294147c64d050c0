"""The contents of ``config.json`` as plain dicts: keys that shape the model, and references to remote code."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ckptx.errors import InputError

TIE_FLAG = "tie_word_embeddings"

# Keys that do not determine names and shapes; a model built with them would require kernels or quantizers.
_NON_STRUCTURAL_KEYS = (
    "quantization_config",
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
)


def read_flag(config: Mapping[str, Any], path: Sequence[str]) -> bool | None:
    """Return the boolean at a path of keys; None if the key is absent, or a config on the path is absent or ``null``.

    Only `true` and `false` are flags: nearly every config class of transformers refuses other values, `null` included,
    and the few that accept `null` read it as false whatever their default.

    Raises:
        InputError: The value is not a boolean, or a config on the path is not an object.
    """
    node: Any = config
    for depth, key in enumerate(path):
        if key not in node:
            return None
        node = node[key]
        if depth < len(path) - 1 and not isinstance(node, Mapping):
            if node is None:
                return None
            raise InputError(invalid_value_message(path[: depth + 1], node, "an object"))
    if not isinstance(node, bool):
        raise InputError(invalid_value_message(path, node, "true or false"))
    return node


def invalid_value_message(path: Sequence[str], value: object, expected: str) -> str:
    """Return the error message for a key of ``config.json`` with a value of the wrong kind."""
    shown = json.dumps(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return f"config.json: {'.'.join(path)} is {shown} and must be {expected}; correct it"


def structural_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy without `_NON_STRUCTURAL_KEYS`, at every level of nested objects."""
    kept = {key: copy.deepcopy(value) for key, value in config.items() if key not in _NON_STRUCTURAL_KEYS}
    return {key: structural_config(value) if isinstance(value, dict) else value for key, value in kept.items()}


def without_tie_flag(value: Any) -> Any:
    """Return a copy of a parsed ``config.json`` without the tie flag, at every level of nested objects."""
    if isinstance(value, dict):
        return {key: without_tie_flag(below) for key, below in value.items() if key != TIE_FLAG}
    return value


def remote_reference(config: Mapping[str, Any], name: str) -> str | None:
    """Return the reference (``file.Class``) to the remote code of a class; None if ``auto_map`` has none for it.

    Args:
        config: Contents of ``config.json``.
        name: Class name (``NovelForCausalLM``), or name of an auto class, which is a key of ``auto_map``
            (``AutoConfig``).
    """
    for auto_name, reference in (config.get("auto_map") or {}).items():
        for each in reference if isinstance(reference, list) else [reference]:
            if each and (auto_name == name or each.rpartition(".")[2] == name):
                return str(each)
    return None
