"""`verify --strict` and configs: the exit code, and the reason in the verdict, the repr and the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import ckptx
from ckptx.report.text import verify_verdict


def write(path: Path, **changes: Any) -> Path:
    """Write a Llama, and then change keys of its config."""
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4,
    )  # fmt: skip
    LlamaForCausalLM(config).eval().save_pretrained(path)
    document = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**document, **changes}))
    return path


def copy_with(source: Path, path: Path, **changes: Any) -> Path:
    path.mkdir()
    for file in source.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    document = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**document, **changes}))
    return path


@pytest.mark.parametrize(
    ("changes", "differences", "mismatched", "reason"),
    [
        ({"rms_norm_eps": 1e-3}, ["rms_norm_eps"], False, 'config.json differs in "rms_norm_eps"'),
        (
            {"rms_norm_eps": 1e-3, "hidden_act": "gelu"}, ["hidden_act", "rms_norm_eps"], False,
            'config.json differs in "hidden_act", ...',
        ),
        ({"head_dim": 8}, ["head_dim"], True, "does not match its config"),
        ({"num_key_value_heads": 4}, ["num_key_value_heads"], True, "does not match its config"),
        ({"intermediate_size": 48}, ["intermediate_size"], True, "does not match its config"),
        ({"_name_or_path": "x"}, [], False, None),
    ],
)  # fmt: skip
def test_strict_names_what_is_wrong_with_the_config(
    changes: dict[str, Any], differences: list[str], mismatched: bool, reason: str | None, tmp_path: Path
) -> None:
    reference = write(tmp_path / "a")
    checkpoint = copy_with(reference, tmp_path / "b", **changes)
    plain, strict = (ckptx.verify(reference, checkpoint, strict=strict) for strict in (False, True))
    assert plain.exit == 0 and strict.exit == (reason is not None)
    assert sorted(strict.config_differences) == differences
    assert strict.config_mismatches == ([str(checkpoint)] if mismatched else [])
    verdict = verify_verdict(strict)
    if reason is None:
        assert verdict.startswith("EQUAL: ") and "EQUAL" in repr(strict)
    else:
        assert verdict.startswith("INCOMPLETE: ") and reason in verdict and verdict.endswith("12 tensors are equal")
        assert "exit 1, INCOMPLETE" in repr(strict)
    assert "EQUAL" in repr(plain)


def test_a_checkpoint_that_does_not_match_its_own_config_is_found_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "a", intermediate_size=48)
    report = ckptx.verify(path, path, strict=True)
    assert (report.exit, report.config_differences) == (1, [])
    assert report.config_mismatches == [str(path)] * 2
    assert str(path) in verify_verdict(report) and "does not match its config" in verify_verdict(report)
