"""Edits to config.json: the dtype at every level, nothing else."""

from __future__ import annotations

import json
from typing import Any

from ckptx.mapping.config_edits import dtype_edits, format_edited_config

CONFIG: dict[str, Any] = {
    "torch_dtype": "float32",
    "text_config": {"dtype": "float32", "hidden_size": 4},
    "vision_config": {"torch_dtype": "bfloat16", "deep_config": {"dtype": "float32"}},
    "quantization_config": {"dtype": "float32"},
    "rope": {"dtype": "float32"},
    "name": "größe",
}


def test_every_dtype_that_says_otherwise_is_listed() -> None:
    assert dtype_edits(CONFIG, "bf16") == [
        {"key": "torch_dtype", "before": "float32", "after": "bfloat16"},
        {"key": "text_config.dtype", "before": "float32", "after": "bfloat16"},
        {"key": "vision_config.deep_config.dtype", "before": "float32", "after": "bfloat16"},
    ]


def test_nothing_to_edit() -> None:
    assert dtype_edits(CONFIG, "auto") == []
    assert dtype_edits(None, "bf16") == []
    assert dtype_edits({"dtype": None}, "bf16") == []


def test_the_edits_made_and_nothing_else() -> None:
    written = json.loads(format_edited_config(json.loads(json.dumps(CONFIG)), dtype_edits(CONFIG, "bf16")))
    assert dtype_edits(written, "bf16") == []
    written["torch_dtype"] = written["text_config"]["dtype"] = "float32"
    written["vision_config"]["deep_config"]["dtype"] = "float32"
    assert written == CONFIG


def test_the_text_is_that_of_transformers() -> None:
    assert format_edited_config({"a": "größe"}, []) == '{\n  "a": "größe"\n}\n'.encode()
