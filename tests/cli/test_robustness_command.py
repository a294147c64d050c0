"""`ckptx robustness`: what it passes on, what it prints and writes, and how it ends; the training is a stand-in."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ckptx
from ckptx.cli import main as main_module
from ckptx.cli.main import cli
from ckptx.errors import CkptxError, EnvironmentProblem, InputError, UsageError
from ckptx.options.recipes import shipped_recipes_text
from ckptx.options.robustness import RobustnessOptions
from ckptx.report.documents.robustness import RobustnessReport
from ckptx.report.robustness import robustness_text
from ckptx.robustness_suite.phases import PHASES
from tests.report.made import broken, robust
from tests.report.pages import fault_of_page
from tests.support.runner import CliRunner
from tests.support.stub_robustness import StubRun

Ran = Callable[..., Any]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubRun:
    return StubRun(monkeypatch, robust(notes=["a warning"]))


def ran(*words: object) -> Any:
    return CliRunner().invoke(cli, ["robustness", *map(str, words)], standalone_mode=False)


# ------------------------------------------------------------------------------------------------------- what it runs


def test_options_are_passed_on(stub: StubRun) -> None:
    words = ["recipe.yaml", "--set", "layout.tp=2", "--set", "a.b=c=d", "--phases", "1,6", "--inject", "nan"]
    words += ["--out", "here", "--device", "cpu", "--backend", "gloo", "--gpu_memory", "80GB"]
    assert ran(*words).return_value == 0
    (options,) = stub.calls
    given = RobustnessOptions(
        "recipe.yaml", overrides=("layout.tp=2", "a.b=c=d"), phases="1,6", inject="nan", out="here", device="cpu",
        backend="gloo", gpu_memory="80GB",
    )  # fmt: skip
    assert options.with_values(log=None, on_phase=given.on_phase) == given
    assert options.log is not None and options.on_phase is not given.on_phase


def test_what_is_not_given_is_the_default(stub: StubRun) -> None:
    assert ran("llama_tiny").return_value == 0
    assert ckptx.robustness("llama_tiny").ok
    of_command, of_python = stub.calls
    assert of_command.log is not None and of_python == RobustnessOptions("llama_tiny")
    assert of_command.with_values(log=None, on_phase=of_python.on_phase) == of_python


# --------------------------------------------------------------------------------------------------- what it ends with


def test_a_run_that_passes_prints_and_ends_with_0(stub: StubRun) -> None:
    result = ran("llama_tiny")
    assert result.return_value == 0
    assert "PASSED: small, 2 phases" in result.stdout
    assert result.stderr == "note: a warning\n"
    assert "\x1b" not in result.output


def test_each_phase_is_told_when_it_is_over_and_once(stub: StubRun, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = robust()

    def run(options: RobustnessOptions) -> RobustnessReport:
        for done in range(len(whole.phases) + 1):
            options.on_phase(replace(whole, phases=whole.phases[:done]))
        if options.recipe == "late":
            raise EnvironmentProblem("rank 1: ended by signal 9; look at its output")
        return whole

    monkeypatch.setattr(sys.modules["ckptx.robustness_suite.run"], "robustness", run)
    lines = robustness_text(whole).splitlines()
    assert ran("llama_tiny").stdout.splitlines()[:-1] == lines[:-1], "the last says how long it took"
    late = ran("late")
    assert late.return_value == 7 and late.stdout.splitlines() == lines[: len(late.stdout.splitlines())]
    assert all(each["name"] in late.stdout for each in whole.phases) and "PASSED" not in late.stdout
    assert json.loads(ran("llama_tiny", "--json").stdout)["ok"]
    assert ran("llama_tiny", "-q").stdout.splitlines() == ["PASSED: small, 2 phases"]


def test_a_difference_ends_with_1(stub: StubRun, tmp_path: Path) -> None:
    stub.result = broken()
    result = ran("llama_tiny")
    assert result.return_value == 1
    assert "rng: 2 of 185 items differ" in result.stdout
    (line,) = ran("-q", "llama_tiny").stdout.splitlines()
    assert line.startswith("FAILED: small: ")
    document = json.loads(ran("llama_tiny", "--json").stdout)
    assert (document["exit"], document["ok"], document["injected_fault"]) == (1, False, "stale_rng")


@pytest.mark.parametrize("error", [UsageError("x"), InputError("x"), EnvironmentProblem("x"), KeyboardInterrupt()])
def test_everything_is_written_when_it_fails(stub: StubRun, tmp_path: Path, error: BaseException) -> None:
    stub.result = error
    files = {name: tmp_path / f"robustness.{name}" for name in ("html", "junit", "report")}
    result = ran("llama_tiny", *(word for name, path in files.items() for word in (f"--{name}", path)))
    code = error.exit_code if isinstance(error, CkptxError) else 130
    assert result.return_value == code
    assert "<b>ERROR</b>" in files["html"].read_text()
    assert fault_of_page(files["html"].read_text(), has_script=False) is None
    assert [each.get("type") for each in ET.parse(files["junit"]).iter("error")] == [f"exit {code}"]
    assert json.loads(files["report"].read_text())["exit"] == code
    assert result.stderr.startswith("error: ")


@pytest.mark.parametrize("result", [robust(), broken()], ids=["passing", "failing"])
def test_pages_are_written_and_written_over(stub: StubRun, tmp_path: Path, result: Any) -> None:
    stub.result = result
    html, junit = tmp_path / "a.html", tmp_path / "a.xml"
    for _ in range(2):
        assert ran("llama_tiny", "--html", html, "--junit", junit, "--json").return_value == result.exit
    assert fault_of_page(html.read_text(), has_script=False) is None
    assert ET.parse(junit).getroot().get("failures") == ("0" if result.ok else "5")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "a.xml"]


@pytest.mark.parametrize("option", ["--html", "--junit", "--report"])
@pytest.mark.parametrize("held", ["<testsuites/>", "<!doctype html>\n", "mine"])
def test_what_is_not_ours_is_not_written_over(stub: StubRun, tmp_path: Path, option: str, held: str) -> None:
    path = tmp_path / "notes"
    path.write_text(held)
    result = ran("llama_tiny", option, path)
    assert result.return_value == 5
    assert path.read_text() == held
    assert not stub.calls, "the place is looked at before the work"
    assert "is not a report or HTML page that ckptx wrote" in result.stderr and len(result.stderr.splitlines()) == 1


def test_a_page_that_cannot_be_written_after_the_run_is_exit_5(stub: StubRun, tmp_path: Path) -> None:
    path = tmp_path / "a.html"

    def report() -> None:
        path.mkdir()

    stub.result = robust()
    original = stub._robustness
    sys.modules["ckptx.robustness_suite.run"].robustness = lambda options: (report(), original(options))[1]  # type: ignore[attr-defined]
    result = ran("llama_tiny", "--html", path, "--json")
    assert result.return_value == 5
    assert json.loads(result.stdout)["exit"] == 5


def test_other_ranks_say_and_write_nothing(
    stub: StubRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    stub.result = broken()
    result = ran("llama_tiny", "--html", tmp_path / "a.html", "--junit", tmp_path / "a.xml", "--json")
    assert (result.return_value, result.output) == (1, "")
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------------- wrong usage


def ended(monkeypatch: pytest.MonkeyPatch, *words: object) -> object:
    monkeypatch.setattr("sys.argv", ["ckptx", "robustness", *map(str, words)])
    with pytest.raises(SystemExit) as leave:
        main_module.main()
    return leave.value.code


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Missing argument 'RECIPE'"),
        (["--inject", "nan"], "Missing argument 'RECIPE'"),
        (["r", "--html", "x", "--junit", "x"], "x is given for both --html and --junit"),
        (["r", "--report", "x", "--junit", "x"], "x is given for both --report and --junit"),
        (["r", "s"], "unexpected extra argument"),
    ],
)
def test_wrong_usage_is_one_line(
    stub: StubRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert ended(monkeypatch, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not stub.calls


def test_faults_are_listed(stub: StubRun) -> None:
    for words in (["--inject", "list"], ["llama_tiny", "--inject", "list"]):
        result = ran(*words)
        assert result.return_value == 0
        assert result.stdout == "nan        a row is NaN\nstale_rng  an older state\n"
    assert json.loads(ran("--inject", "list", "--json").stdout)["faults"] == {
        "nan": "a row is NaN",
        "stale_rng": "an older state",
    }
    assert not stub.calls


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr("ckptx.robustness_suite.import_module", absent)
    result = ran("llama_tiny")
    assert result.return_value == 7
    assert result.stderr == ("error: robustness: requires torch, which is not installed; pip install 'ckptx[run]'\n")


def test_help_names_the_sections(stub: StubRun) -> None:
    said = ran("--help").stdout
    assert [line for line in said.splitlines() if line.endswith(":") and not line.startswith(" ")] == [
        "Arguments:",
        "Model run:",
        "Recipe:",
        "Memory limits:",
        "Execution:",
        "Report:",
        "Global options:",
        "Sizes:",
        "Examples:",
    ]
    assert "ckptx robustness llama_tiny" in said


def test_help_lists_the_phases(stub: StubRun) -> None:
    shown = " ".join(ran("--help").stdout.split())
    listed = [f"{each.number} {each.name}" for each in PHASES]
    assert [shown.count(each) for each in listed] == [1] * len(listed)
    assert sorted(listed, key=shown.index) == listed


def test_help_lists_the_built_in_recipes(stub: StubRun) -> None:
    shown = " ".join(ran("--help").stdout.split())
    assert f"a built-in recipe: {shipped_recipes_text()}." in shown and "llama_tiny" in shown


# ---------------------------------------------------------------------------------------------- the package is callable

_BOTH_WAYS = """
import sys
from types import ModuleType, SimpleNamespace
import ckptx
run = ModuleType("ckptx.robustness_suite.run")
run.robustness = lambda options: (options.recipe, options.overrides)
sys.modules[run.__name__] = run
{before}
assert ckptx.robustness("small", overrides=["a=b"]) == ("small", ("a=b",))
from ckptx import robustness
assert robustness("small") == ("small", ())
import ckptx.robustness_suite.oracles
assert ckptx.robustness("small") == ("small", ())
assert ckptx.robustness_suite.oracles.EXACT_ORACLES
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(
    "before",
    [
        "",
        "import ckptx.robustness_suite.oracles",
        "from ckptx.robustness_suite.oracles import compare",
        "import ckptx.robustness_suite",
        "from ckptx.robustness_suite import robustness as first; assert first('small') == ('small', ())",
    ],
)
def test_importing_the_package_leaves_the_function(before: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _BOTH_WAYS.format(before=before)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


_TYPED = """
import ckptx
import ckptx.robustness_suite.oracles
from ckptx.robustness_suite.oracles import compare
reveal_type(ckptx.robustness("small", overrides=["a=b"]))
ckptx.robustness("small", turbo=True)
"""


@pytest.mark.slow  # the environment of the oldest versions has no type checker
def test_a_type_checker_knows_the_function(tmp_path: Path) -> None:
    (tmp_path / "use.py").write_text(_TYPED)
    root = Path(ckptx.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", "pyproject.toml", str(tmp_path / "use.py")],
        capture_output=True, text=True, cwd=root,
    )  # fmt: skip
    assert 'Revealed type is "ckptx.report.documents.robustness.RobustnessReport"' in done.stdout
    assert 'Unexpected keyword argument "turbo"' in done.stdout
    assert "Found 1 error" in done.stdout, done.stdout
