"""What is written beside the code holds: fields of the report, its version, how completion is switched on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckptx.report.report import SCHEMA_VERSION
from ckptx.report.schema import build_schema
from tests.report.made import forecasted

PAGE = Path("docs/report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("report", build_schema()["$defs"])
def test_every_field_of_a_report_is_described(report: str) -> None:
    described = set(re.findall(r"`(\w+)`", PAGE))
    assert not build_schema()["$defs"][report]["properties"].keys() - described, "docs/report.md says nothing of these"


def test_every_field_of_a_forecast_is_described() -> None:
    """Without a run: those of a report, of a row of it, and of a tensor."""
    report = forecasted().to_dict()
    row = report["by_pipeline_rank"][0]
    described = set(re.findall(r"`(\w+)`", PAGE))
    assert not {*report, *row, *row["largest_tensors"][0], *report["memory_kinds"], *report["settings"]} - described


def test_the_version_of_the_report_is_the_one_described() -> None:
    assert f"`schema_version` is {SCHEMA_VERSION}." in PAGE
    assert f"`schema_version` {SCHEMA_VERSION}" in Path("CHANGELOG.md").read_text(encoding="utf-8")
