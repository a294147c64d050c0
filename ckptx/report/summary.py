"""The summary of a report: the text that the command prints, and the same in HTML for notebooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from importlib import import_module
from typing import Any, Protocol

from ckptx.untrusted.printable import escape_strings, one_line

# Class of report -> module and name of the function that renders it. Each module is imported when it is first used.
_RENDERERS = {
    "ConversionReport": ("ckptx.report.text", "conversion_text"),
    "InspectionReport": ("ckptx.report.text", "inspect_text"),
    "DiffReport": ("ckptx.report.text", "diff_text"),
    "VerifyReport": ("ckptx.report.text", "verify_text"),
    "RunReport": ("ckptx.report.verify_run", "run_text"),
    "ForecastReport": ("ckptx.report.forecast", "forecast_text"),
    "SearchReport": ("ckptx.report.forecast_search", "search_text"),
    "RobustnessReport": ("ckptx.report.robustness", "robustness_text"),
    "FaultsReport": ("ckptx.report.robustness", "faults_text"),
}


class SummaryFields(Protocol):
    """The fields of a `Report` that a summary reads; a protocol, as `Report` itself imports this module."""

    @property
    def command(self) -> str: ...
    @property
    def exit(self) -> int: ...
    @property
    def ok(self) -> bool: ...
    @property
    def error(self) -> str | None: ...
    @property
    def notes(self) -> Sequence[str]: ...
    @property
    def seconds(self) -> float: ...


def summary_text(report: SummaryFields) -> str:
    """Return the lines that the command prints, without color.

    Names from a checkpoint are escaped: none of them can start a line or send a terminal escape sequence. A report
    without a renderer, such as that of a failed command, is shown as its command, exit code and error.
    """
    if report.error is None and type(report).__name__ in _RENDERERS:
        module, name = _RENDERERS[type(report).__name__]
        render: Callable[[Any], str] = getattr(import_module(module), name)
        return render(escape_strings(report))
    error = "" if report.error is None else f": {one_line(report.error)}"
    return f"{report.command}: exit code {report.exit}{error}"


def summary_html(report: SummaryFields) -> str:
    """Return the summary and the notes as an HTML fragment without scripts or external styles."""
    color = "inherit" if report.ok else "#b00020"
    heading = f"ckptx {escape(one_line(report.command))}: exit code {report.exit}, {report.seconds:.1f} s"
    notes = "".join(f"<li>{escape(one_line(note))}</li>" for note in report.notes)
    return (
        f'<div class="ckptx-report"><p style="color: {color}"><strong>{heading}</strong></p>'
        f'<pre style="white-space: pre-wrap">{escape(summary_text(report))}</pre>'
        f"{f'<p>Notes</p><ul>{notes}</ul>' if notes else ''}</div>"
    )
