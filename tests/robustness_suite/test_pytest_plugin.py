"""`pytest --ckptx-recipe`: a test for each phase, one run for all of them, and what they say; the fixture."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ckptx import pytest_plugin
from ckptx.options.recipes import list_shipped_recipes
from ckptx.pytest_plugin import PHASES
from ckptx.report.documents.robustness import RobustnessReport
from ckptx.runtime.training.recipe_file import read_recipe
from tests.report.made import oracle, phase, robust

pytest_plugins = ["pytester"]
ROOT = Path(__file__).resolve().parents[2]

_CONFTEST = """
import json, sys
from pathlib import Path
from types import ModuleType
from ckptx import pytest_plugin as plugin
from ckptx.errors import InputError
from ckptx.report.documents.robustness import RobustnessReport

def robustness(options):
    recipe = options.recipe
    with open("calls", "a") as file:
        print(json.dumps([recipe, list(options.overrides), str(options.out)]), file=file)
    path = Path(recipe + ".json")
    if not path.exists():
        raise InputError(f"{recipe}: is no recipe, needed one of small; name another")
    return RobustnessReport(**json.loads(path.read_text()))

def phase_names(recipe, settings):
    path = Path(recipe + ".phases")
    return tuple(json.loads(path.read_text())) if path.exists() else ()

plugin.phase_names = phase_names
plugin.recipe_error = lambda recipe, settings: ""
stub = ModuleType("ckptx.robustness_suite.run")
stub.robustness = robustness
sys.modules[stub.__name__] = stub
"""


class Project:
    """A project with the plugin, recipes that a stand-in runs, and what it was called with."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self._pytester = pytester
        pytester.makeconftest(_CONFTEST)

    def recipe(self, report: RobustnessReport, phases: Sequence[str] = PHASES) -> None:
        (self._pytester.path / f"{report.recipe}.phases").write_text(json.dumps(list(phases)))
        made = {each.name: getattr(report, each.name) for each in dataclasses.fields(report)}
        (self._pytester.path / f"{report.recipe}.json").write_text(json.dumps(made))

    def run(self, *words: str) -> pytest.RunResult:
        return self._pytester.runpytest_inprocess("-p", "ckptx.pytest_plugin", "-W", "ignore", *words)

    @property
    def calls(self) -> list[Any]:
        path = self._pytester.path / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setattr(pytest_plugin, "phase_names", pytest_plugin.phase_names)  # restored after the conftest's
    monkeypatch.setattr(pytest_plugin, "recipe_error", pytest_plugin.recipe_error)
    return Project(pytester)


PASSING = robust(phases=[phase(name) for name in PHASES])
FAILING = robust(
    recipe="broken",
    exit=1,
    phases=[
        phase("uninterrupted run"),
        phase("export", None, notes=["not asked for"]),
        phase("resume", False, oracle("rng", ["torch"]), number=6),
    ],
    differing=[{"phase": 6, "check": "rng", "item": "torch", "rank": 1, "reference": "9c3d", "actual": "1f2a"}],
)


def test_a_test_for_each_phase_and_one_run_for_all(project: Project) -> None:
    project.recipe(PASSING)
    result = project.run("--ckptx-recipe", "small", "--ckptx-set", "layout.tp=2", "--ckptx-set", "a.b=c", "-v")
    result.assert_outcomes(passed=1 + len(PHASES))
    assert project.calls == [["small", ["layout.tp=2", "a.b=c"], "None"]]
    result.stdout.fnmatch_lines(["ckptx-recipe small::run PASSED*", "ckptx-recipe small::resume PASSED*"])


def test_a_phase_that_fails_names_the_oracle(project: Project) -> None:
    project.recipe(FAILING)
    result = project.run("--ckptx-recipe", "broken")
    result.assert_outcomes(passed=2, failed=1, skipped=6)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "*broken: resume*",
            "*6 resume  FAILED*",
            "*rng: 1 of 185 items differ*",
            "*torch on rank 1: expected *, got 1f2a*",
        ]
    )
    assert "Traceback" not in result.stdout.str() and "pytest_plugin.py" not in result.stdout.str()


def test_a_phase_that_did_not_run_is_skipped_with_its_reason(project: Project) -> None:
    project.recipe(FAILING)
    result = project.run("--ckptx-recipe", "broken", "-rs", "-k", "export or replicas")
    result.assert_outcomes(skipped=2, deselected=7)
    result.stdout.fnmatch_lines(["collected 9 items / 7 deselected / 2 selected"])
    result.stdout.fnmatch_lines_random(["SKIPPED*not asked for", "SKIPPED*the run did not reach this phase*"])


def test_a_recipe_that_cannot_be_judged_fails_once(project: Project) -> None:
    result = project.run("--ckptx-recipe", "none")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["exit 3: none: is no recipe*"])
    assert len(project.calls) == 1


@pytest.mark.parametrize("words", [(), ("-k", "resume"), ("-k", "run")])
@pytest.mark.parametrize(
    ("text", "said"), [(None, "no recipe"), ("trainer: [", "yaml"), ("trainer: {comand: x}", "comand")]
)
def test_a_recipe_that_cannot_be_read_is_an_error_whatever_is_selected(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, words: Sequence[str], text: str | None, said: str
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    if text is not None:
        (pytester.path / "own.yaml").write_text(text)
    result = pytester.runpytest_inprocess("-p", "ckptx.pytest_plugin", "--ckptx-recipe", "own.yaml", *words)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "--ckptx-recipe own.yaml: " in result.stderr.str() + result.stdout.str()


def test_phases_that_are_not_known_are_of_the_whole(project: Project) -> None:
    project.recipe(robust(exit=1, phases=[phase("resumed for no step", False, oracle("scheduler", ["last_epoch"]))]))
    result = project.run("--ckptx-recipe", "small")
    result.assert_outcomes(failed=1, skipped=len(PHASES))
    result.stdout.fnmatch_lines(["*resumed for no step  FAILED*", "*scheduler: 1 of 185 items differ*"])


def test_every_phase_of_a_trainer_is_a_test(project: Project) -> None:
    rows = [
        phase("uninterrupted"), phase("rerun"), phase("load and save", False, oracle("rng", ["torch"])),
        phase("resumed", False, oracle("scheduler", ["last_epoch"])), phase("extra", False, oracle("step", ["step"])),
        phase("more", False, oracle("epoch", ["epoch"])),
    ]  # fmt: skip
    project.recipe(robust(exit=1, phases=rows), ["uninterrupted", "rerun", "load and save", "resumed"])
    result = project.run("--ckptx-recipe", "small")
    result.assert_outcomes(passed=2, failed=3)
    result.stdout.fnmatch_lines_random(
        ["*rng: 1 of 185*", "*scheduler: 1 of 185*", "*extra  FAILED*", "*step: 1 of 185*", "*more  FAILED*",
         "*epoch: 1 of 185*"]
    )  # fmt: skip


def test_names_of_phases_are_read_from_the_recipe(tmp_path: Path) -> None:
    """Without torch, as `test_pytest_starts_without_torch` checks for the plugin."""
    assert pytest_plugin.phase_names("llama_tiny", ["layout.tp=2"]) == PHASES
    trainer = {name for name in list_shipped_recipes() if read_recipe(name, []).trainer is not None}
    assert trainer
    for name in trainer:
        has_check = read_recipe(name, []).checks.sharded is not None
        expected = [each for each in pytest_plugin.TRAINER_PHASES if has_check or each != "sharded"]
        assert list(pytest_plugin.phase_names(name, [])) == expected
    assert pytest_plugin.phase_names("nothing", []) == pytest_plugin.phase_names("llama_tiny", ["no.key=2"]) == ()


def test_a_failure_without_a_phase_is_of_the_whole(project: Project) -> None:
    project.recipe(robust(exit=1))
    project.run("--ckptx-recipe", "small", "-k", "run").stdout.fnmatch_lines(["FAILED: small: see the notes*"])


def test_several_recipes_stand_beside_other_tests(project: Project, pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_other(): pass")
    project.recipe(PASSING)
    project.recipe(FAILING)
    names = ["small", "broken", "small"]
    result = project.run(*(word for name in names for word in ("--ckptx-recipe", name)))
    result.assert_outcomes(passed=1 + 9 + 2, failed=1, skipped=6)
    assert [call[0] for call in project.calls] == ["small", "broken"]


def test_nothing_runs_without_a_recipe(project: Project, pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_other(): pass")
    project.run().assert_outcomes(passed=1)
    assert not project.calls


def test_only_collecting_runs_nothing(project: Project) -> None:
    project.recipe(PASSING)
    result = project.run("--ckptx-recipe", "small", "--collect-only", "-q")
    result.stdout.fnmatch_lines(["ckptx-recipe small::run", "ckptx-recipe small::initial logits"])
    assert not project.calls


def test_names_cannot_write_on_the_terminal(project: Project) -> None:
    bad = phase("resume", False, oracle("rng", ["\x1b[2J\nPASSED"]), notes=["\x1b]0;x\x07"])
    project.recipe(robust(exit=1, phases=[bad]))
    said = project.run("--ckptx-recipe", "small").stdout.str()
    assert "\\x1b[2J\\nPASSED" in said and "\x1b[2J" not in said and "\x07" not in said


def test_the_fixture_runs_a_recipe_and_asserts_nothing(project: Project, pytester: pytest.Pytester) -> None:
    project.recipe(FAILING)
    pytester.makepyfile("""
        def test_checkpoints(checkpoint_robustness, tmp_path):
            report = checkpoint_robustness("broken", overrides=["layout.tp=2"])
            assert not report.ok
            assert report.phases[-1]["checks"][0]["name"] == "rng"
            assert not checkpoint_robustness("broken", overrides=[], out=tmp_path / "mine").ok
    """)
    project.run().assert_outcomes(passed=1)
    first, second = project.calls
    assert first[:2] == ["broken", ["layout.tp=2"]] and first[2].endswith("robustness-0")
    assert second[2].endswith("mine")


def test_pytest_starts_without_torch() -> None:
    """What the plugin costs those who never ask for it."""
    work = "import sys, pytest; before = set(sys.modules); import ckptx.pytest_plugin"
    work += "; print(sorted(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-c", work],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    loaded = eval(done.stdout)  # a list of names that this test printed
    assert [name for name in loaded if name.startswith("ckptx")] == [
        "ckptx", "ckptx.processes", "ckptx.processes.imports", "ckptx.pytest_plugin", "ckptx.version",
    ]  # fmt: skip
    assert not {"torch", "numpy", "click", "yaml"} & set(loaded)


def test_pytest_finds_it() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert f'[project.entry-points.pytest11]\nckptx = "{pytest_plugin.__name__}"' in text


def test_phases_are_those_of_the_run() -> None:
    phases = pytest.importorskip("ckptx.robustness_suite.phases")
    assert [each.name for each in phases.PHASES] == list(PHASES)[: len(phases.PHASES)]
    external = pytest.importorskip("ckptx.robustness_suite.external_trainer")
    own = (external.UNINTERRUPTED, external.RERUN, external.LOAD_AND_SAVE, external.RESUMED, external.ALTERED)
    assert tuple(each for each in pytest_plugin.TRAINER_PHASES if each != "sharded") == own
