"""The contents of ``config.json`` as plain dicts: which parts shape the model, and where remote code lies."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from ckptx.architecture.flags import FLAG

# Of the environment a checkpoint was made in, not of its tensors: they would demand kernels or quantizers
# here.
_NOT_STRUCTURE = (
    "quantization_config",
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
)


def structural(config: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy with only what decides names and shapes, at every level."""
    kept = {key: copy.deepcopy(value) for key, value in config.items() if key not in _NOT_STRUCTURE}
    return {key: structural(value) if isinstance(value, dict) else value for key, value in kept.items()}


def without_flag(value: Any) -> Any:
    """A copy without the tie flag, at every level."""
    if isinstance(value, dict):
        return {key: without_flag(below) for key, below in value.items() if key != FLAG}
    return value


def remote_reference(config: Mapping[str, Any], name: str) -> str | None:
    """The ``file.Class`` of ``auto_map`` for a class name or an auto class name, None when there is none."""
    for auto_name, reference in (config.get("auto_map") or {}).items():
        for each in reference if isinstance(reference, list) else [reference]:
            if each and (auto_name == name or each.rpartition(".")[2] == name):
                return str(each)
    return None
