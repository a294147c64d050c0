"""`ckptx env`."""

from __future__ import annotations

import os
import platform

from ckptx.cli.command import CommandCall, define_command
from ckptx.cli.output import Output
from ckptx.options.commands import COMMANDS
from ckptx.options.defaults import all_defaults, display_value, unknown_variables
from ckptx.report.documents.environment import EnvironmentReport
from ckptx.report.environment import installed_version
from ckptx.report.report import Log
from ckptx.version import __version__

# Versions that the test suite was run with; the first is the oldest that is supported.
_TESTED_VERSIONS = {
    "torch": "2.11.0, 2.13.0 and 2.14.1",
    "transformers": "5.17.0 and 5.23.0",
    "safetensors": "0.8.0",
    "huggingface-hub": "1.5.0 and 2.4.0",
    "numpy": "1.26.0 and 2.4.6",
    "click": "8.1.0 and 8.5.1",
}
_OTHER_PACKAGES = ("xxhash", "isal", "tqdm", "msgspec", "jinja2")


@define_command("env", examples=["ckptx env", "ckptx env --json"])
def command(call: CommandCall) -> int:
    """Print versions, system information, and the options set by ckptx.toml, pyproject.toml and CKPTX_* variables."""
    return Output(call.output).run("env", _make_report, _text, format_verdict=_text)


def _make_report(log: Log) -> EnvironmentReport:
    unknown = unknown_variables()
    return EnvironmentReport(
        command="env",
        ckptx=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        cores=len(os.sched_getaffinity(0)),
        packages={package: installed_version(package) for package in (*_TESTED_VERSIONS, *_OTHER_PACKAGES)},
        tested_with=_TESTED_VERSIONS,
        settings=[
            {"option": each.setting.flag, "value": display_value(each), "origin": each.origin, "commands": commands}
            for each, commands in all_defaults()
        ],
        unknown_variables=[each.name for each in unknown],
    )


def _text(report: EnvironmentReport) -> str:
    rows = [(name, str(getattr(report, name))) for name in ("ckptx", "python", "platform", "cores")]
    for package, package_version in report.packages.items():
        suffix = f" (tested with {_TESTED_VERSIONS[package]})" if package in _TESTED_VERSIONS else ""
        rows.append((package, (package_version or "not installed") + suffix))
    for row in report.settings:
        commands = "every command" if len(row["commands"]) == len(COMMANDS) else ", ".join(row["commands"])
        rows.append((f"{row['option']}", f"{row['value']}  ({row['origin']}; for {commands})"))
    rows += [(name, "not an option of ckptx") for name in report.unknown_variables]
    return "\n".join(f"{name:<16} {value}" for name, value in rows)
