"""Options for the output of a command; the Python functions do not have them."""

# No `from __future__ import annotations`: `settings_of` reads the annotations of fields as objects.

from pathlib import Path
from typing import Annotated

from ckptx.errors import UsageError
from ckptx.options.option import GLOBAL, REPORT, Option, Options


class JsonOutput(Options):
    """Option for the report as JSON on stdout."""

    as_json: Annotated[
        bool, Option("Print the report as JSON on stdout, even on failure.", REPORT, flags=("--json",))
    ] = False


class ReportOutput(JsonOutput):
    """Options for the report as a file."""

    report_file: Annotated[
        str | Path | None,
        Option(
            "Write the JSON report to FILE, even on failure.",
            REPORT,
            flags=("--report",),
            metavar="FILE",
            default="not set",
        ),
    ] = None

    def check(self) -> None:
        super().check()
        flag_by_path: dict[Path, str] = {}
        for setting, value in self.values():
            if setting.option is not None and setting.is_path:
                first_flag = flag_by_path.setdefault(Path(value), setting.flag)
                if first_flag != setting.flag:
                    raise UsageError(f"{value} is given for both {first_flag} and {setting.flag}; choose two files")


class GlobalOptions(Options):
    """Options of the program, accepted before and after the command."""

    quiet: Annotated[
        bool,
        Option(
            "Print errors only. verify, forecast and robustness also print a one-line result; diff also prints the "
            "differences.",
            GLOBAL,
            flags=("-q", "--quiet"),
        ),
    ] = False
    verbose: Annotated[bool, Option("Log each step and show tracebacks.", GLOBAL, flags=("-v", "--verbose"))] = False
    no_color: Annotated[bool, Option("Disable colors.", GLOBAL)] = False
