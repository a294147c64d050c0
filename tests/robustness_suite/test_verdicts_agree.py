"""Numbers of a verdict agree with each other, what compared nothing is no pass, and the first cause is named."""

from __future__ import annotations

import re
from itertools import product
from math import inf, isnan, nan
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from ckptx.report.junit import junit_xml
from ckptx.report.robustness import robustness_text, robustness_verdict
from ckptx.report.robustness_html import robustness_page
from ckptx.report.robustness_phrases import CAUSES, cause_text, check_text, find_first_failure
from ckptx.robustness_suite import robustness
from ckptx.robustness_suite.oracles import (
    ORACLE_ORDER,
    Difference,
    Verdict,
    compare_measurements,
    compare_replicas,
    phase_ok,
)
from ckptx.robustness_suite.report_builder import Findings, phase_row
from tests.report.made import oracle, phase, robust
from tests.robustness_suite.test_foreign_trainer import run

NOISES = (None, 0.0, 1e-45, 4.77e-07, 0.1, 1e30, nan, inf)
TIMES = (0.0, 1.0, 8.0, 100.0)
PAIRS = ((), ((1.0, 1.0),), ((1.0, 1.0), (2.0, 2.5)), ((1.0, nan),), ((inf, 1.0),))
TEXT = re.compile(r"difference (\S+), tolerance (\S+) \((?:(\S+) x noise (\S+)|bit-identity required)\)")


@pytest.mark.parametrize(("noise", "times", "pairs"), product(NOISES, TIMES, PAIRS))
def test_a_limit_is_the_product_that_is_printed(noise: float | None, times: float, pairs: Any) -> None:
    verdict = compare_measurements("loss", pairs, noise, times, 8.0)
    row = verdict.row()
    found = TEXT.fullmatch(check_text(row))
    assert found is not None, check_text(row)
    value, limit, factor, printed_noise = found.groups()
    if noise is None:
        assert (limit, factor, row["tolerance"], row["noise_factor"], row["noise"]) == ("0", None, 0.0, None, None)
        assert not verdict.is_widened
    else:
        product_of_both = times * noise
        assert float(factor) == row["noise_factor"] == times
        assert float(row["tolerance"]) == product_of_both or isnan(product_of_both)
        assert isnan(product_of_both) or limit == f"{product_of_both:.3g}"
        assert printed_noise == f"{noise:.3g}"
    assert value == f"{float(row['value']):.3g}"
    if not pairs:
        assert verdict.ok is None
    else:
        assert verdict.ok is (float(row["value"]) <= float(row["tolerance"]))


@pytest.mark.parametrize("fault", ["", "noise", "data", "nan"])
def test_numbers_of_a_whole_run_agree(tmp_path: Path, fault: str) -> None:
    outcome = run(tmp_path, fault)
    rows = [row for each in outcome.phases for row in each["checks"] if row["value"] is not None]
    assert len(rows) == 2
    for row in rows:
        assert str(row["noise"]) == str(outcome.noise["loss"]["repeated"])
        assert isnan(float(row["tolerance"])) or float(row["tolerance"]) == row["noise_factor"] * row["noise"]


def test_the_page_draws_the_limit_of_what_is_judged() -> None:
    """And not that of the phase which measured the noise."""
    rows = [oracle("loss", value=1e-9, tolerance=noise * 1e-9, noise_factor=noise, noise=1e-9) for noise in (1.0, 8.0)]
    report = robust(
        phases=[phase("rerun", True, rows[0]), phase("resumed", True, rows[1])],
        noise={"loss": {"repeated": 1e-9, "perturbed": None}},
    )
    assert "tolerance 8e-09" in re.sub("<[^>]*>", "", robustness_page(report, "small"))


# ------------------------------------------------------------------------------------------ nothing was compared


@pytest.mark.parametrize("name", ORACLE_ORDER)
@pytest.mark.parametrize("is_measure", [False, True])
def test_an_oracle_that_compared_nothing_is_no_pass(name: str, is_measure: bool) -> None:
    verdict = Verdict(name, 0, value=0.0 if is_measure else None, limit=0.0 if is_measure else None)
    assert verdict.ok is None and verdict.row()["ok"] is None
    assert phase_ok([verdict]) is None and phase_ok([verdict, Verdict("model", 1)]) is True
    assert Verdict(name, 0, [Difference(name, "x", None, None, "1")]).ok is False
    report = robust(phases=[phase("replicas", True, verdict.row(), oracle("model"))])
    said = robustness_text(report)
    assert f"      {name}: skipped: " in said and "0 items" not in said
    page = re.sub("<[^>]*>", " ", robustness_page(report, "small"))
    assert "skipped: " in page and " 0 identical" not in page
    case = next(
        each for each in ET.fromstring(junit_xml(report, "small").encode()).iter("testcase")
        if each.get("name") == name and str(each.get("classname")).endswith(".replicas")
    )  # fmt: skip
    skipped = case.find("skipped")
    assert skipped is not None and str(skipped.get("message")).startswith("skipped: ")


def test_replicas_of_a_sharded_model_are_not_checked() -> None:
    found = compare_replicas([{("w", "rows 0-8"): "1"}, {("w", "rows 8-16"): "2"}])
    assert (found.compared, found.ok) == (0, None)
    assert "skipped: no replicated state" in robustness_text(robust(phases=[phase("replicas", True, found.row())]))


def test_a_phase_of_nothing_but_such_is_not_ok() -> None:
    assert phase_row("replicas", "replicas are equal", Findings([Verdict("replicas", 0)]), 0.0)["ok"] is None


# -------------------------------------------------------------------------------------------------- the first cause

FAULTS = {
    "iterator": ("load and save", "rng"), "data": ("load and save", "batch"),
    "moments": ("load and save", "moments"), "late iterator": ("resumed", "model"),
    "nan": ("uninterrupted", "finite"), "fails to resume": ("load and save", None),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_last_line_names_what_failed_first(tmp_path: Path, fault: str) -> None:
    recipe = tmp_path / "stub.yaml"
    stub = Path(__file__).with_name("stub_trainer.py")
    recipe.write_text(
        f'trainer:\n  command: "{{python}} {stub} --out {{out}} --steps {{steps}} --total {{total_steps}} --save-at '
        f"{{save_at}} {{resume}} --fault '{fault}'\"\n  resume: --resume {{checkpoint}}\n"
        "training: {steps: 5, total_steps: 8, save_at: [2]}\n"
    )
    report = robustness(recipe, out=tmp_path / "out")
    name, which = FAULTS[fault]
    assert report.exit == 1 and report.first_failure is not None
    assert (report.first_failure["phase"], report.first_failure["check"]) == (name, which)
    last = robustness_text(report).splitlines()[-1]
    assert (
        last
        == cause_text(report)
        == f"cause: {name}{f', check {which}' if which else ''}: {report.first_failure['cause']}"
    )
    assert robustness_verdict(report).endswith(last)
    suite = ET.fromstring(junit_xml(report, "stub").encode())
    failures = [each.get("message") or "" for each in suite.iter("failure")]
    assert str(report.first_failure["cause"])[:60] in failures[0]
    assert any(each.get("name") == "cause" for each in suite.iter("property"))
    assert "CAUSE" in robustness_page(report, "stub")


def test_a_run_that_passes_has_no_cause() -> None:
    assert find_first_failure(robust()) is None and "cause" not in robustness_text(robust())


@pytest.mark.parametrize(("name", "later"), product(ORACLE_ORDER, ORACLE_ORDER[:4]))
def test_the_earliest_phase_and_its_first_oracle(name: str, later: str) -> None:
    report = robust(
        exit=1,
        phases=[
            phase("first", True, oracle(later)), phase("second", None, notes=["x"]),
            phase("third", False, oracle("model"), oracle(name, ["a"]), oracle("loss", ["b"])),
            phase("fourth", False, oracle(later, ["c"])),
        ],
    )  # fmt: skip
    assert find_first_failure(report) == {"phase": "third", "check": name, "cause": CAUSES[name]}
