"""What is written beside the code holds: fields of the report, its version, how completion is switched on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ckptx.cli.main import cli
from ckptx.report.report import SCHEMA_VERSION
from tests.report.made import forecasted
from tests.support.runner import CliRunner
from tests.support.writers import LLAMA, llama, write_dcp, write_hf

PAGE = Path("docs/report.md").read_text(encoding="utf-8")
CONFIG = LLAMA | {
    "hidden_size": 8, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "vocab_size": 16,
}  # fmt: skip
COMMANDS = {
    "inspect": "inspect HF --tensors --ranks --html PAGE",
    "inspect dcp": "inspect DCP --ranks",
    "hf2dcp": "convert hf2dcp HF OUT",
    "hf2dcp dry": "convert hf2dcp HF OUT --dry-run --dtype fp32 --tp 2",
    "dcp2hf": "convert dcp2hf DCP OUT",
    "reshard": "reshard DCP OUT --tp 2 --pp 2",
    "diff": "diff HF DCP",
    "verify": "verify HF DCP",
    "env": "env",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_field_of_a_report_is_described(tmp_path: Path, name: str) -> None:
    places = {"OUT": tmp_path / "out", "PAGE": tmp_path / "page.html"}
    places["HF"] = write_hf(tmp_path / "hf", llama(), config=CONFIG)
    moments = {f"optimizer.state.{key}.exp_avg": each for key, each in llama().items()}
    places["DCP"] = write_dcp(tmp_path / "dcp", llama() | moments, config=CONFIG)
    words = [str(places.get(word, word)) for word in COMMANDS[name].split()]
    result = CliRunner().invoke(cli, [*words, "--json"], standalone_mode=False)
    assert result.return_value in (0, 1), result.stderr
    fields = json.loads(result.stdout)
    described = set(re.findall(r"`(\w+)`", PAGE))
    assert not fields.keys() - described, "docs/report.md says nothing of these"


def test_every_field_of_a_forecast_is_described() -> None:
    """Without a run: those of a report, of a row of it, and of a tensor."""
    report = forecasted().to_dict()
    row = report["by_stage"][0]
    described = set(re.findall(r"`(\w+)`", PAGE))
    assert not {*report, *row, *row["largest"][0], *report["kinds"], *report["settings"]} - described


def test_the_version_of_the_report_is_the_one_described() -> None:
    assert f"`schema_version` is {SCHEMA_VERSION}." in PAGE
    assert f"`schema_version` {SCHEMA_VERSION}" in Path("CHANGELOG.md").read_text(encoding="utf-8")
