"""Every recipe that ckptx trains itself passes its phases on a CPU, the large ones with narrow layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptx import robustness
from ckptx.report.robustness import robustness_text

IMAGES = ("model.shrunk=true", "data.dataset=synthetic_images", "data.sequence_length=64")
TEXT = ("model.shrunk=true", "data.dataset=synthetic_text", "data.sequence_length=64")
SHORT = ("training.steps=3", "training.total_steps=null", "training.save_at=[1]")
RECIPES = {
    "llama_tiny": (),
    "llama_lora_tiny": (),
    "gemma3_tiny": (),
    "qwen3_moe_tiny": (),
    "gemma4_vlm_tiny": (),
    "gemma4_31b": (*IMAGES, *SHORT),
    "gemma4_31b_tp4_pp2": (*IMAGES, *SHORT, "layout.tp=1"),
    "gemma4_31b_tp4_pp4": (*IMAGES, *SHORT, "layout.tp=1", "checks.layouts=[{pp: 2}]"),
    "phi_4_squad": (*TEXT, *SHORT),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_it_passes_all_but_the_kills(name: str, tmp_path: Path) -> None:
    report = robustness(name, overrides=RECIPES[name], phases="0-6", out=tmp_path / "out", device="cpu")
    assert not report.exit, robustness_text(report)
    assert all(phase["ok"] is not False for phase in report.phases)
