"""`verify` names keys of config.json that change the computation; with `strict` it fails for them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import ckptx
from tests.support.checkpoint_writers import llama, write_hf


@pytest.mark.parametrize(
    ("key", "values", "is_noted", "is_strict_failure"),
    [
        ("rms_norm_eps", (1e-5, 1e-6), True, True),
        ("rope_parameters", ({"rope_theta": 1e4}, {"rope_theta": 1e6}), True, True),
        ("sliding_window", (64, None), True, True),
        ("unknown_key", (1, 2), True, True),
        ("rms_norm_eps", (1e-5,), True, False),
        ("sliding_window", (None,), False, False),
        ("attention_dropout", (0.0, 0.1), False, False),
        ("transformers_version", ("4.1", "5.2"), False, False),
        ("torch_dtype", ("float32", "bfloat16"), False, False),
        ("quantization_config", ({"bits": 4}, {"bits": 8}), False, False),
        ("rms_norm_eps", (1, 1.0), False, False),
    ],
)
def test_a_key_that_changes_the_computation_is_noted(
    tmp_path: Path, key: str, values: tuple[Any, ...], is_noted: bool, is_strict_failure: bool
) -> None:
    """A key that only one config has may have the same value as its default."""
    write_hf(tmp_path / "a", llama())
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for folder, value in zip("ab", values, strict=False):
        path = tmp_path / folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    if len(values) == 1:
        path = tmp_path / "b" / "config.json"
        path.write_text(json.dumps({name: each for name, each in json.loads(path.read_text()).items() if name != key}))
    report = ckptx.verify(tmp_path / "a", tmp_path / "b")
    assert report.ok
    assert any(f"config.json differs: {key}" in note for note in report.notes) == is_noted
    assert ckptx.verify(tmp_path / "a", tmp_path / "b", strict=True).ok != is_strict_failure
