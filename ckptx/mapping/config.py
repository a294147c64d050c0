"""Edits to config.json: listed, then made."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

# What holds what without rounding, the narrowest first.
_HOLDS = {
    "bfloat16": frozenset({"BF16"}),
    "float16": frozenset({"F16"}),
    "float32": frozenset({"F32", "F16", "BF16"}),
    "float64": frozenset({"F64", "F32", "F16", "BF16"}),
}
_TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def dtype_edits(config: dict[str, Any] | None, dtype: str) -> list[dict[str, Any]]:
    """Edits that make a config say the dtype its tensors were cast to, in sub-configs too.

    Returns:
        `{"key": dotted path, "before": ..., "after": ...}` for each `dtype` or `torch_dtype` that says otherwise.
    """
    if config is None or dtype not in _TORCH_NAMES:
        return []
    after = _TORCH_NAMES[dtype]
    return [{"key": key, "before": value, "after": after} for key, value in dtypes_in(config).items() if value != after]


def dtypes_in(config: Mapping[str, Any], path: str = "") -> dict[str, str]:
    """What a config says of dtypes, in its sub-configs too: dotted path of the key -> dtype."""
    found: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict) and key.endswith("config") and key != "quantization_config":
            found |= dtypes_in(value, f"{path}{key}.")
        elif key in ("dtype", "torch_dtype") and isinstance(value, str):
            found[f"{path}{key}"] = value
    return found


def widened(config: Mapping[str, Any], floats: Collection[str]) -> list[dict[str, Any]]:
    """Edits after which loading in the dtype of the config rounds nothing.

    A loader casts the floats of a checkpoint to the dtype that the config names. One that cannot hold them becomes the
    narrowest that can; one that is wider than need be loses nothing and stays.

    Args:
        config: The config.
        floats: Dtypes to hold, by safetensors name.

    Returns:
        As `dtype_edits`.
    """
    needed = frozenset(floats)
    after = next(name for name, held in _HOLDS.items() if needed <= held)
    return [
        {"key": key, "before": value, "after": after}
        for key, value in dtypes_in(config).items()
        if value in _HOLDS and not needed <= _HOLDS[value]
    ]


def is_held(dtype: str, said: str) -> bool:
    """True when every value of a dtype (safetensors name) is one of the dtype that a config names."""
    return said not in _HOLDS or dtype in _HOLDS[said]


def dequantized(config: Mapping[str, Any], path: str = "") -> list[dict[str, Any]]:
    """Edits after which a config, its sub-configs too, says nothing of quantisation; `after` is None: the key goes."""
    found = []
    for key, value in config.items():
        if key == "quantization_config" and value is not None:
            found.append({"key": f"{path}{key}", "before": value, "after": None})
        elif isinstance(value, dict) and key.endswith("config"):
            found += dequantized(value, f"{path}{key}.")
    return found


def edited_config(config: dict[str, Any], edits: Iterable[dict[str, Any]]) -> bytes:
    """The config with the edits made, as transformers writes one; a key whose `after` is None is taken out."""
    config = json.loads(json.dumps(config))
    for edit in edits:
        *parents, key = edit["key"].split(".")
        place = config
        for parent in parents:
            place = place.setdefault(parent, {})
        if edit["after"] is None:
            place.pop(key, None)
        else:
            place[key] = edit["after"]
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
