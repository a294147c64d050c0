"""Edits to config.json: the dtype at every level, nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ckptx.mapping.config_edits import (
    dequantization_edits,
    dtype_edits,
    format_edited_config,
    is_exact_in,
    widening_edits,
)

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


@pytest.mark.parametrize(("dtype", "after"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")])
def test_each_cast_has_its_name_in_torch(dtype: str, after: str) -> None:
    assert dtype_edits({"dtype": "float64"}, dtype) == [{"key": "dtype", "before": "float64", "after": after}]


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


# Values that a dtype represents exactly: those of itself and of each dtype with fewer bits in exponent and fraction.
EXACT = {"float16": {"F16"}, "bfloat16": {"BF16"}, "float32": {"F32", "F16", "BF16"}}
EXACT["float64"] = {"F64", *EXACT["float32"]}


@pytest.mark.parametrize("config_dtype", [*EXACT, "int8", "unknown"])
@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_a_dtype_is_exact_in_itself_and_in_wider_ones(config_dtype: str, dtype: str) -> None:
    assert is_exact_in(dtype, config_dtype) is (dtype in EXACT.get(config_dtype, {dtype}))


@pytest.mark.parametrize(
    ("floats", "after"),
    [
        ({"F16"}, "float16"),
        ({"BF16"}, "bfloat16"),
        ({"BF16", "F16"}, "float32"),
        ({"F32"}, "float32"),
        ({"F64", "F16"}, "float64"),
    ],
)
@pytest.mark.parametrize("before", EXACT)
def test_a_dtype_that_rounds_is_replaced_by_the_narrowest_that_does_not(
    before: str, floats: set[str], after: str
) -> None:
    config = {"dtype": before, "text_config": {"torch_dtype": before}, "vision_config": {"dtype": "int8"}}
    keys = [] if floats <= EXACT[before] else ["dtype", "text_config.torch_dtype"]
    assert widening_edits(config, floats) == [{"key": key, "before": before, "after": after} for key in keys]


def test_the_quantization_is_removed_at_every_level() -> None:
    plan = {"quant_method": "fp8"}
    config = {
        "quantization_config": plan,
        "text_config": {"quantization_config": plan, "deep_config": {"quantization_config": plan, "a": 1}},
        "vision_config": {"quantization_config": None},
        "other": {"quantization_config": plan},
    }
    edits = dequantization_edits(config)
    assert edits == [
        {"key": key, "before": plan, "after": None}
        for key in (
            "quantization_config", "text_config.quantization_config", "text_config.deep_config.quantization_config"
        )
    ]  # fmt: skip
    assert json.loads(format_edited_config(config, edits)) == {
        "text_config": {"deep_config": {"a": 1}},
        "vision_config": {"quantization_config": None},
        "other": {"quantization_config": plan},
    }
