"""The report of an error in the options has the exit code of the process."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from ckptx.cli.main import cli
from ckptx.options.commands import commands_by_name
from ckptx.options.option import settings_of

WITH_REPORT = [
    words for words, command in commands_by_name().items() if "report_file" in settings_of(command.output_table)
]
POSITIONAL = {"diff": 2, "merge": 3, "inspect": 1, "forecast": 1, "robustness": 1}


@pytest.mark.parametrize("words", WITH_REPORT)
@pytest.mark.parametrize(("place", "code"), [("https://host/report.json", 4), ("s3://bucket/report.json", 4)])
def test_a_refused_place_for_the_report(words: str, place: str, code: int) -> None:
    sources = ["a", "b", "c"][: POSITIONAL.get(words, 2)]
    result = CliRunner().invoke(cli, [*words.split(), *sources, "--report", place, "--json"], standalone_mode=False)
    assert result.return_value == code, result.output
    report, _ = json.JSONDecoder().raw_decode(result.output[result.output.index("{") :])  # stderr may be mixed in
    assert report["exit"] == code
