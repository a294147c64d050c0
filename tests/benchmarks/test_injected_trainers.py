"""Mistakes that benchmarks inject into trainer scripts: each edit is found in its script, and leaves valid Python."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from benchmarks.injected import external_trainers, trainers
from benchmarks.injected.trainers import inject_into

RECIPES = Path(__file__).parents[2] / "ckptx" / "runtime" / "training" / "recipes" / "scripts"
CASES = [
    *((RECIPES / trainers.SCRIPTS[name], trainers.MISTAKES[name]) for name in trainers.MISTAKES),
    *(
        (external_trainers.EXTERNAL / external_trainers.SCRIPTS[name], external_trainers.MISTAKES[name])
        for name in external_trainers.MISTAKES
    ),
]


@pytest.mark.parametrize(
    ("script", "mistake"),
    [
        pytest.param(script, mistake, id=f"{script.stem}: {name}")
        for script, mistakes in CASES
        for name, mistake in mistakes.items()
    ],
)
def test_every_edit_is_made(script: Path, mistake: trainers.Mistake, tmp_path: Path) -> None:
    copy = Path(shutil.copy(script, tmp_path))
    inject_into(copy, mistake)
    assert copy.read_text() != script.read_text()
    ast.parse(copy.read_text())


def test_a_script_that_has_changed_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("pass\n")
    with pytest.raises(ValueError, match=r"script.py: expected .* once, found it 0 times"):
        inject_into(script, trainers.MISTAKES["fsdp2_script"]["scheduler"])
