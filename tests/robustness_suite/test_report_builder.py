"""Rows of the report, from what a phase found: the same for our trainer and for a command."""

from __future__ import annotations

import pytest

from ckptx.errors import InputError
from ckptx.report.documents.robustness import RobustnessReport
from ckptx.report.report import Log
from ckptx.robustness_suite.oracles import Difference, Verdict
from ckptx.robustness_suite.report_builder import Findings, ReportBuilder, difference_rows, phase_row

GOOD, NOTHING = Verdict("model", 3), Verdict("replicas", 0)
BAD = Verdict("moments", 2, [Difference("moments", "w.exp_avg", 1, "a", "b")])


@pytest.mark.parametrize(
    ("found", "ok"),
    [
        (Findings([GOOD]), True),
        (Findings([GOOD, NOTHING]), True),
        (Findings([NOTHING]), None),
        (Findings([GOOD, BAD]), False),
        (Findings([GOOD], has_failed=True), False),
        (Findings(skip_reason="no other layouts"), None),
    ],
)
def test_a_phase_is_ok_if_nothing_failed_and_something_was_compared(found: Findings, ok: bool | None) -> None:
    assert found.ok is ok and phase_row("resume", "same end", found, 1.5)["ok"] is ok


def test_a_row_has_a_number_only_where_the_phase_has_one() -> None:
    ours = phase_row("resume", "same end", Findings([BAD], ["note"]), 1.5, number=6, memory={"threads": 2})
    assert list(ours) == ["name", "number", "title", "ok", "seconds", "checks", "notes", "memory"]
    assert (ours["number"], ours["notes"], ours["memory"]) == (6, ["note"], {"threads": 2})
    assert ours["checks"] == [BAD.row()]
    external = phase_row("resumed", "same end", Findings(skip_reason="cannot resume"), 0.0)
    assert "number" not in external and external["memory"] is None and external["notes"] == ["cannot resume"]


def test_items_of_a_command_are_of_no_rank() -> None:
    (ours,) = difference_rows(6, [GOOD, BAD])
    assert ours == {"phase": 6, "check": "moments", "item": "w.exp_avg", "rank": 1, "reference": "a", "actual": "b"}
    (external,) = difference_rows("resumed", [BAD])
    assert external == {**{key: value for key, value in ours.items() if key != "rank"}, "phase": "resumed"}


def test_what_cannot_be_read_is_a_finding() -> None:
    found = Findings()
    with found.catch_read_errors("step-2"):
        pass
    with found.catch_read_errors("step-3"):
        raise InputError("step-3: is truncated")
    assert [each.ok for each in found.verdicts] == [True, False]
    assert found.verdicts[1].differences[0].actual == "step-3: is truncated"


REPORT = RobustnessReport(
    command="robustness",
    recipe="r",
    recipe_file="r.yaml",
    output_dir="",
    world_size=9,
    layout={},
    trainer="ckptx",
    phases=[],
)


def test_a_report_has_the_rows_of_all_phases_so_far() -> None:
    seen: list[tuple[int, bool]] = []
    judge = ReportBuilder(lambda so_far: seen.append((len(so_far.phases), so_far.ok)), world_size=2)
    judge.add("uninterrupted", "runs", Findings([GOOD]), 1.0, cause="none was found")
    judge.add("resumed", "same end", Findings([GOOD, BAD]), 2.0, cause="no scheduler")
    judge.add_losses("uninterrupted", {1: 2.5, 2: float("nan")})
    assert seen == [(1, True), (2, False)]
    report = judge.report(REPORT)
    assert (report.exit, report.world_size) == (1, 2)
    assert [(row["name"], row["cause"]) for row in report.phases] == [
        ("uninterrupted", None),
        ("resumed", "no scheduler"),
    ]
    assert report.losses == [
        {"run": "uninterrupted", "steps": [1, 2], "losses": [2.5, "nan"], "compared_with": None, "mesh": None}
    ]
    assert report.differing == difference_rows("resumed", [BAD])


def test_a_report_lists_the_first_of_many_differences_and_says_so() -> None:
    judge, log = ReportBuilder(lambda _: None), Log()
    judge.add("resume", "same end", Findings([BAD._replace(differences=BAD.differences[:1] * 300)]), 0.0, number=6)
    report = judge.report(REPORT, log)
    assert len(judge.differing) == 300 and len(report.differing) == 200 and report.differing[0]["rank"] == 1
    assert list(log.notes) == ["300 items differ; the report lists the first 200"]
