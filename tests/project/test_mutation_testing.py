"""`tools/mutants.py` on a small package: lines that tests check, execute without a check, or never execute."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.import_tool import ROOT, tool

pytest.importorskip("mutmut", reason="mutmut is only in the extra `dev`")

CODE = '''\
"""A file whose functions are tested well, badly or not at all."""

from __future__ import annotations

import functools

STEP = 7


def checked(value: int, limit: int = 5) -> int:
    """Return value - 1."""
    if value > limit:
        raise ValueError(f"{value + 1} exceeds the limit of {limit - 1}")
    assert value < 100
    return value + STEP


def unchecked(value: int) -> int:
    return value - 1


def never_called(value: int) -> int:
    return value // 5


@functools.cache
def cached(value: int) -> int:
    return value * 3


def of_fixture(value: int) -> int:
    return value % 4


def in_child(value: int) -> int:
    return value ^ 8


def repeats(value: int) -> int:
    while value > 0:
        value = value - 2
    return value
'''
TESTS = """\
import os

import pytest

from shop.area import code


def test_checked():
    assert [code.checked(value) for value in (4, 5)] == [11, 12]
    with pytest.raises(ValueError):
        code.checked(6)


def test_unchecked():
    code.unchecked(3)


def test_cached_without_a_check():
    code.cached(2)


def test_cached():
    assert code.cached(2) == 6


@pytest.fixture(scope="module")
def once():
    return code.of_fixture(7)


def test_fixture_without_a_check(once):
    pass


def test_fixture(once):
    assert once == 3


def test_in_child():
    process = os.fork()
    if process == 0:
        os._exit(code.in_child(3))
    assert os.waitpid(process, 0)[1] == 11 << 8


@pytest.fixture
def pool():
    return None


def test_skipped_with_a_pool(pool):
    assert code.never_called(10) == 2


@pytest.mark.slow
def test_skipped_as_slow():
    assert code.never_called(10) == 2
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with one package and its tests."""
    place = tmp_path_factory.mktemp("project")
    for name, text in {
        "shop/area/code.py": CODE,
        "tests/area/test_code.py": TESTS,
        "conftest.py": "import pytest\n\npytest.register_assert_rewrite('shop')\n",  # as pytest does for a plugin
        "pytest.ini": "[pytest]\npythonpath = .\nmarkers = slow\n",
    }.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text, encoding="utf-8")
    return place


def run(place: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "tools/mutants.py"), "area", "--root", "shop", *options]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((place / "build/mutants/area.json").read_text(encoding="utf-8"))
    return {**document, "output": done.stdout}


def by_function(rows: list[dict[str, Any]]) -> dict[str, set[str]]:
    """Return the results of the mutants in each function; a line outside a function has its own text as the name."""
    names: list[str] = []
    for line in CODE.splitlines():
        names.append(line.partition("(")[0].removeprefix("def ") if not line.startswith(" ") else names[-1])
    results = defaultdict(set)
    for row in rows:
        results[names[row["line"] - 1]].add(row["result"])
    return results


def test_results_follow_from_the_checks_of_the_tests(place: Path) -> None:
    document = run(place, "--number", "1000")
    results = by_function(document["rows"])
    assert results == {
        "STEP = 7": {"killed"},  # runs on import, so that the file is imported again
        "checked": {"killed"},
        "unchecked": {"survived"},
        "never_called": {"not covered"},
        "cached": {"killed"},  # the first test of a cached function is not the only one
        "of_fixture": {"killed"},  # a fixture of the whole file counts for each of its tests
        "in_child": {"killed"},
        "repeats": {"not covered"},
    }
    rows = document["rows"]
    summary = document["summary"]
    assert summary["mutants"] == document["mutants_in_package"] == len(rows)
    assert summary["killed"] + summary["survived"] + summary["not_covered"] == len(rows)
    assert "- return value - 1\n+ return value + 1" in document["output"]
    assert (place / "build/mutants/area.txt").read_text(encoding="utf-8") in document["output"]


def test_the_last_survivors_run_again_with_new_tests(place: Path) -> None:
    before = run(place, "--number", "8", "--seed", "5")
    again = run(place, "--number", "8", "--seed", "5")
    assert [row["diff"] for row in before["rows"]] == [row["diff"] for row in again["rows"]]
    assert not {"survived", "not covered"}.isdisjoint(row["result"] for row in before["rows"])
    with (place / "tests/area/test_code.py").open("a", encoding="utf-8") as file:
        file.write("\n\ndef test_others():\n    assert code.unchecked(3) == 2 and code.never_called(16) == 3\n")
        file.write("\n\ndef test_repeats():\n    assert (code.repeats(0), code.repeats(3)) == (0, -1)\n")
    after = run(place, "--number", "8", "--seed", "5", "--again")
    assert after["summary"]["score"] == 1.0
    lines = [line for line in after["output"].splitlines() if line.startswith(("killed  ", "timeout  "))]
    assert len(lines) == sum(row["result"] not in ("killed", "timeout") for row in before["rows"])


def test_a_mutant_without_an_end_is_stopped() -> None:
    tool("mutant_source")  # which `mutant_session` imports
    session = tool("mutant_session")

    def endless() -> int:
        while True:
            pass

    assert session._result_of_status(session._run_in_fork(endless, 0.2)) == "timeout"
    assert session._result_of_status(session._run_in_fork(lambda: 0, 5)) == "survived"
    assert session._result_of_status(session._run_in_fork(lambda: 1 // 0, 5)) == "killed"


def test_messages_annotations_and_assertions_are_not_mutated(tmp_path: Path) -> None:
    source = tool("mutant_source")
    path = tmp_path / "code.py"
    path.write_text(CODE, encoding="utf-8")
    changed = {CODE.splitlines()[mutant.line - 1].strip() for mutant in source.mutants_of(path)}
    assert "return value + STEP" in changed and "if value > limit:" in changed
    assert not [line for line in changed if line.startswith(('"""', "raise", "assert", "from", "@"))]


@pytest.mark.parametrize(
    "successes, number, low, high", [(95, 100, 0.888, 0.978), (0, 10, 0.0, 0.278), (3, 3, 0.438, 1)]
)
def test_intervals_are_those_of_wilson(successes: int, number: int, low: float, high: float) -> None:
    assert tool("mutants").wilson_interval(successes, number) == pytest.approx((low, high), abs=1e-3)


def test_the_modules_that_compare_values_exist() -> None:
    mutants = tool("mutants")
    for package in mutants.COMPARISON_MODULES:
        files = mutants.files_of(package, ROOT / "ckptx")
        assert [file for file in files if not file.is_file()] == []
