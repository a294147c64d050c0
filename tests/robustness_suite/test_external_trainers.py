"""Trainers that were written without a thought of ckptx: passing as they are, and each mistake found and not misnamed.

Their scripts run in processes forked from one that has imported torch, so that a run takes about a second.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.injected.external_trainers import EXTERNAL, MISTAKES, SCRIPTS
from benchmarks.injected.trainers import inject_into
from ckptx.robustness_suite import command_runs
from ckptx.robustness_suite import external_trainer as foreign
from ckptx.robustness_suite.report_builder import ReportBuilder
from ckptx.runtime.training.recipe_file import read_recipe
from tests.robustness_suite.test_foreign_trainer import failed
from tests.support.warm_commands import run_warm

FAST = {("averaged", "average"), ("averaged", "off by one"), ("averaged", "place"), ("averaged", "early weights")}
CASES = [
    pytest.param(trainer, which, marks=() if (trainer, which) in FAST else pytest.mark.slow)
    for trainer, found in MISTAKES.items()
    for which in found
]
RunTrainer = Callable[[str, str | None], ReportBuilder]


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunTrainer:
    """Runs a trainer four times, as it is or with a mistake."""
    monkeypatch.setattr(command_runs, "run_command", run_warm)

    def run(trainer: str, which: str | None) -> ReportBuilder:
        if trainer == "accumulation" and find_spec("accelerate") is None:
            pytest.skip("accelerate is not installed")
        shutil.copytree(EXTERNAL, tmp_path / "recipes")
        if which is not None:
            inject_into(tmp_path / "recipes" / SCRIPTS[trainer], MISTAKES[trainer][which])
        recipe = read_recipe(tmp_path / "recipes" / f"{trainer}.yaml")
        return foreign.run_external(recipe, tmp_path / "out", folder=tmp_path / "recipes")

    return run


@pytest.mark.parametrize(
    "trainer",
    ["averaged", pytest.param("mesh", marks=pytest.mark.slow), pytest.param("accumulation", marks=pytest.mark.slow)],
)
def test_a_trainer_that_is_right_passes(trainer: str, judge: RunTrainer) -> None:
    outcome = judge(trainer, None)
    assert failed(outcome) == {} and outcome.ok and outcome.noise["loss"]["repeated"] == 0


@pytest.mark.parametrize(("trainer", "which"), CASES)
def test_a_mistake_is_found_and_named_rightly_or_called_unknown(trainer: str, which: str, judge: RunTrainer) -> None:
    mistake = MISTAKES[trainer][which]
    outcome = judge(trainer, which)
    first = next(row for row in outcome.phases if row["ok"] is False)
    print(f"{trainer} | {which} | {first['name']}: {', '.join(failed(outcome)[first['name']])} | {first['cause']}")
    assert first["name"] == mistake.phase and mistake.oracles <= set(failed(outcome)[mistake.phase])
    assert mistake.matches_cause(first["cause"]), first["cause"]


def test_there_are_six_mistakes_for_each_of_three_trainers() -> None:
    assert {trainer: len(found) for trainer, found in MISTAKES.items()} == dict.fromkeys(SCRIPTS, 6)


@pytest.mark.parametrize("trainer", SCRIPTS)
def test_every_mistake_can_be_injected(trainer: str, tmp_path: Path) -> None:
    for which, mistake in MISTAKES[trainer].items():
        script = tmp_path / f"{which}.py"
        shutil.copy(EXTERNAL / SCRIPTS[trainer], script)
        inject_into(script, mistake)
        compile(script.read_text(), script.name, "exec")
