"""`ckptx env`."""

from __future__ import annotations

import os
import platform

import click

from ckptx.cli.options import GLOBAL, SETTINGS, Section, SectionedCommand, with_global_options
from ckptx.cli.output import Output
from ckptx.report.documents.environment import EnvironmentReport
from ckptx.report.environment import installed
from ckptx.report.report import Log
from ckptx.version import __version__

# The versions the test suite runs with, the oldest and the newest; those between and beyond are expected to work.
_TESTED = {"torch": "2.11.0 and 2.13.0", "transformers": "5.17.0 and 5.23.0", "safetensors": "0.8.0"}
_ALSO = ("huggingface-hub", "numpy", "xxhash", "isal", "click", "tqdm", "msgspec", "jinja2")


@click.command(
    "env",
    cls=SectionedCommand,
    context_settings=SETTINGS,
    sections=[Section("Output", ["as_json"]), GLOBAL],
    examples=["ckptx env", "ckptx env --json"],
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@with_global_options
def command(as_json: bool) -> int:
    """Say which versions and which machine this is. Imports nothing it reports on."""
    return Output(as_json=as_json).run("env", _described, _text)


def _described(log: Log) -> EnvironmentReport:
    return EnvironmentReport(
        command="env",
        ckptx=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        cores=len(os.sched_getaffinity(0)),
        packages={package: installed(package) for package in (*_TESTED, *_ALSO)},
        tested_with=_TESTED,
    )


def _text(report: EnvironmentReport) -> str:
    rows = [(name, str(getattr(report, name))) for name in ("ckptx", "python", "platform", "cores")]
    for package, found in report.packages.items():
        tested = f" (tested with {_TESTED[package]})" if package in _TESTED else ""
        rows.append((package, (found or "not installed") + tested))
    return "\n".join(f"{name:<16} {said}" for name, said in rows)
