"""Edits to config.json: listed, then made."""

from __future__ import annotations

import json
from typing import Any

_TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def dtype_edits(config: dict[str, Any] | None, dtype: str) -> list[dict[str, Any]]:
    """Edits that make a config say the dtype its tensors were cast to, in sub-configs too.

    Returns:
        `{"key": dotted path, "before": ..., "after": ...}` for each `dtype` or `torch_dtype` that says otherwise.
    """
    if config is None or dtype not in _TORCH_NAMES:
        return []
    edits: list[dict[str, Any]] = []
    _find(config, "", _TORCH_NAMES[dtype], edits)
    return edits


def _find(config: dict[str, Any], path: str, after: str, edits: list[dict[str, Any]]) -> None:
    for key, value in config.items():
        if isinstance(value, dict) and key.endswith("config") and key != "quantization_config":
            _find(value, f"{path}{key}.", after, edits)
        elif key in ("dtype", "torch_dtype") and isinstance(value, str) and value != after:
            edits.append({"key": f"{path}{key}", "before": value, "after": after})


def edited_config(config: dict[str, Any], edits: list[dict[str, Any]]) -> bytes:
    """The config with the edits made, as transformers writes one."""
    config = json.loads(json.dumps(config))
    for edit in edits:
        *parents, key = edit["key"].split(".")
        place = config
        for parent in parents:
            place = place.setdefault(parent, {})
        place[key] = edit["after"]
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
