"""Edits to config.json: functions that list them, and one that applies them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

# Dtype of a config -> safetensors dtypes that it represents without rounding, from the narrowest to the widest.
_EXACT_DTYPES = {
    "bfloat16": frozenset({"BF16"}),
    "float16": frozenset({"F16"}),
    "float32": frozenset({"F32", "F16", "BF16"}),
    "float64": frozenset({"F64", "F32", "F16", "BF16"}),
}
# Keys of a config that describe how weights are stored. `expert_dtype` is the dtype of DeepSeek V4's experts.
_QUANTIZATION_KEYS = ("quantization_config", "expert_dtype")
# Value of `--dtype` -> dtype in a config.
_CONFIG_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def dtype_edits(config: dict[str, Any] | None, dtype: str) -> list[dict[str, Any]]:
    """Return edits that set the dtypes of a config and its sub-configs to the dtype its tensors were cast to.

    Args:
        config: Contents of `config.json`; None if there is none.
        dtype: Value of `--dtype`.

    Returns:
        `{"key": dotted path, "before": ..., "after": ...}` for each `dtype` or `torch_dtype` with another value; empty
        without a config, or if `dtype` is not bf16, fp16 or fp32.
    """
    if config is None or dtype not in _CONFIG_DTYPES:
        return []
    after = _CONFIG_DTYPES[dtype]
    return [{"key": key, "before": value, "after": after} for key, value in dtypes_in(config).items() if value != after]


def dtypes_in(config: Mapping[str, Any], path: str = "") -> dict[str, str]:
    """Return the dtypes in a config and its sub-configs except `quantization_config`: dotted path of key -> dtype."""
    found: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict) and key.endswith("config") and key != "quantization_config":
            found |= dtypes_in(value, f"{path}{key}.")
        elif key in ("dtype", "torch_dtype") and isinstance(value, str):
            found[f"{path}{key}"] = value
    return found


def widening_edits(config: Mapping[str, Any], tensor_dtypes: Collection[str]) -> list[dict[str, Any]]:
    """Return edits after which loading in the dtype of the config rounds nothing.

    A loader casts the floating-point tensors of a checkpoint to the dtype of the config. A dtype that cannot represent
    them is replaced by the narrowest that can. One that is wider than necessary loses nothing and stays, as does an
    unknown one.

    Args:
        config: Config to edit.
        tensor_dtypes: Dtypes of tensors that it has to represent, by safetensors name: F64, F32, F16 or BF16.

    Returns:
        Edits in the form of `dtype_edits`.
    """
    required = frozenset(tensor_dtypes)
    after = next(name for name, exact in _EXACT_DTYPES.items() if required <= exact)
    return [
        {"key": key, "before": value, "after": after}
        for key, value in dtypes_in(config).items()
        if value in _EXACT_DTYPES and not required <= _EXACT_DTYPES[value]
    ]


def is_exact_in(dtype: str, config_dtype: str) -> bool:
    """Return True if the dtype of a config represents every value of `dtype` (safetensors name), or is unknown."""
    return config_dtype not in _EXACT_DTYPES or dtype in _EXACT_DTYPES[config_dtype]


def dequantization_edits(config: Mapping[str, Any], path: str = "") -> list[dict[str, Any]]:
    """Return edits that remove the quantization from a config and its sub-configs, in the form of `dtype_edits`.

    Their `after` is None, which removes the key.
    """
    found = []
    for key, value in config.items():
        if key in _QUANTIZATION_KEYS and value is not None:
            found.append({"key": f"{path}{key}", "before": value, "after": None})
        elif isinstance(value, dict) and key.endswith("config"):
            found += dequantization_edits(value, f"{path}{key}.")
    return found


def apply_edits(config: dict[str, Any], edits: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return a config with edits applied; a key whose `after` is None is removed."""
    config = json.loads(json.dumps(config))
    for edit in edits:
        *parents, key = edit["key"].split(".")
        node = config
        for parent in parents:
            node = node.setdefault(parent, {})
        if edit["after"] is None:
            node.pop(key, None)
        else:
            node[key] = edit["after"]
    return config


def format_edited_config(config: dict[str, Any], edits: Iterable[dict[str, Any]]) -> bytes:
    """Return the bytes of a `config.json` with edits applied, in the format of transformers."""
    return (json.dumps(apply_edits(config, edits), indent=2, ensure_ascii=False) + "\n").encode()
