"""`Report.summary()` is the text of the command, and notebooks get the same text as HTML that no name can leave."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from importlib import import_module, resources
from pathlib import Path
from typing import Any

import pytest

import ckptx
from ckptx.cli.main import cli
from ckptx.report import documents, summary
from ckptx.report.report import Report
from tests.report.made import broken, converted, forecasted, inspected, robust, searched, too_large
from tests.support.checkpoint_writers import llama, write_hf
from tests.support.runner import CliRunner

MADE: list[Callable[..., Report]] = [broken, converted, forecasted, inspected, robust, searched, too_large]


def classes_of_reports() -> set[str]:
    found: set[str] = set()
    for file in resources.files(documents).iterdir():
        if file.name.endswith(".py") and file.name != "__init__.py":
            module = import_module(f"ckptx.report.documents.{file.name.removesuffix('.py')}")
            found |= {
                name
                for name, each in inspect.getmembers(module, inspect.isclass)
                if issubclass(each, Report) and each.__module__ == module.__name__
            }
    return found


def test_every_report_that_a_function_returns_has_a_text() -> None:
    assert classes_of_reports() - {"EnvironmentReport"} == set(summary._RENDERERS)
    for module, name in summary._RENDERERS.values():
        assert callable(getattr(import_module(module), name))


def test_the_summary_is_what_the_command_prints(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", llama())
    printed = CliRunner().invoke(cli, ["inspect", str(tmp_path / "hf")])
    assert printed.exit_code == 0
    assert ckptx.inspect(tmp_path / "hf").summary() == printed.stdout.rstrip("\n")


@pytest.mark.parametrize("made", MADE, ids=lambda made: made.__name__)
def test_the_html_holds_the_summary(made: Callable[..., Report]) -> None:
    report = replace(made(), notes=["one <note> & more"])
    page = report._repr_html_()
    assert report.summary() in unescape(page)
    assert "<li>one &lt;note&gt; &amp; more</li>" in page and "<script" not in page


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "a\nb", "\x1b[31mred", "\u202ereversed"])
def test_a_name_stays_text(name: str) -> None:
    made: dict[str, Any] = {"name": name, "reason": name}
    report = replace(converted(), dropped=[made], notes=[name], prefix=name)
    for text in (report.summary(), report._repr_html_()):
        assert "\x1b" not in text and "\u202e" not in text
    assert "<script" not in report._repr_html_()
    assert "a\nb" not in report.summary()


def test_a_report_of_a_failure_gives_its_error() -> None:
    report = Report(command="verify", exit=3, error="a.safetensors: is\ntruncated")
    assert report.summary() == r"verify: exit code 3: a.safetensors: is\ntruncated"
    assert "#b00020" in report._repr_html_()
