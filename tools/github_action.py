"""Run ckptx for the GitHub action (action.yml), and show its reports as annotations and as a summary of the job.

    python tools/github_action.py [--verify "REFERENCE CHECKPOINT ..."] [--robustness "RECIPE ..."] [--reports DIR]

The arguments of each command are one string, split as a shell would. Both commands run, also when the first one
fails; the exit code is that of the first that failed. The report of each (docs/report.md) is DIR/verify.json and
DIR/robustness.json.

Names in a checkpoint are untrusted. GitHub takes a line that begins with `::` for a command, so its commands are
switched off while ckptx prints, and everything from a report is escaped.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

MAX_ANNOTATIONS = 10  # annotations of one kind that GitHub shows for a step
MAX_ROWS = 50  # maximum number of rows of a table in the summary of the job
MAX_TEXT_LENGTH = 500  # maximum number of characters of a message or a cell

SCHEMA_VERSION = 3  # of the reports that this script reads

Report = Mapping[str, Any]  # document of `--report`, see docs/report.md


# ------------------------------------------------------------------------------------------------------- annotations


def annotation(kind: str, title: str, message: str, file: str = "") -> str:
    """Return a workflow command that GitHub shows next to the job, and next to the file if there is one.

    Args:
        kind: `error`, `warning` or `notice`.
        title: First line.
        message: Text below it.
        file: Path of the file in the repository; empty if the annotation is about no file.
    """
    properties = {"file": file, "title": title}
    properties_text = ",".join(f"{name}={_escape_property(value)}" for name, value in properties.items() if value)
    return f"::{kind} {properties_text}::{_escape_message(_shorten(message))}"


def annotations(report: Report, workspace: Path) -> list[str]:
    """Return the annotations of a report: errors and warnings, at most ten of each.

    Args:
        report: The report.
        workspace: Directory of the repository; annotations of a recipe in it name the file of the recipe.
    """
    title = f"ckptx {report['command']}"
    file = _path_in_repository(report.get("recipe_file"), workspace)
    errors = [annotation("error", title, message, file) for message in _errors(report)]
    warnings = [annotation("warning", title, message, file) for message in _warnings(report)]
    return [*_limited(errors, "error", title), *_limited(warnings, "warning", title)]


def _errors(report: Report) -> list[str]:
    if report["ok"]:
        return []
    if report["error"]:
        return [f"exit {report['exit']}: {report['error']}"]
    found = [": ".join(row) for row in differences(report)]
    return found or [f"exit {report['exit']}: {verdict(report)}"]


def _warnings(report: Report) -> list[str]:
    inconclusive = [f"inconclusive: {_level_text(row)}: {row['name']}" for row in report.get("inconclusive") or ()]
    return [*report["notes"], *inconclusive]


def _limited(lines: list[str], kind: str, title: str) -> list[str]:
    """Return at most ten annotations; the last one says how many were left out."""
    if len(lines) <= MAX_ANNOTATIONS:
        return lines
    first_lines = lines[: MAX_ANNOTATIONS - 1]
    more = f"and {len(lines) - len(first_lines):,} more; the summary of the job and the report have them"
    return [*first_lines, annotation(kind, title, more)]


def _path_in_repository(path: str | None, workspace: Path) -> str:
    """Return a path relative to the repository, empty if it is outside."""
    if not path:
        return ""
    try:
        return str(Path(path).resolve().relative_to(workspace.resolve()))
    except ValueError:
        return ""


# ----------------------------------------------------------------------------------------------------------- summary


def _level_text(row: Report) -> str:
    """Return the level of a difference as `verify --run` prints it."""
    return {"bytes": "tensor bytes", "forward": "logits/loss"}.get(row["level"], str(row["level"]))


def differences(report: Report) -> list[tuple[str, str, str]]:
    """Return a row for each difference: its kind, the item that differs, and how it differs."""
    if report["command"] == "robustness":
        return [*_failed_checks(report), *_failed_kills(report)]
    rows = []
    for row in report.get("differing") or ():
        if "level" in row:
            rank = f"rank {row['rank']}" if "rank" in row else ""
            rows.append((_level_text(row), str(row["name"]), ", ".join(filter(None, [_run_difference(row), rank]))))
        elif row["what"] == "content":
            first = f"first difference at {row['index']}: 0x{row['a']} and 0x{row['b']}"
            rows.append(("content", str(row["name"]), first))
        else:
            rows.append((str(row["what"]), str(row["name"]), f"{row['a'] or 'absent'} and {row['b'] or 'absent'}"))
    return rows


def _failed_checks(report: Report) -> list[tuple[str, str, str]]:
    rows = []
    first_cause = report.get("first_failure") or {}
    for phase in report.get("phases") or ():
        if phase["ok"] is not False:
            continue
        failed_checks = [check for check in phase["checks"] if check["ok"] is False]
        for check in failed_checks:
            details = []
            if check["differing_count"]:
                items = ", ".join(dict.fromkeys(map(str, check["differing"])))
                details.append(f"{check['differing_count']:,} of {check['compared']:,} items: {items}")
            if check["value"] is not None:
                details.append(
                    f"difference {_format_number(check['value'])}, tolerance {_format_number(check['tolerance'])}"
                )
            if (first_cause.get("phase"), first_cause.get("check")) == (phase["name"], check["name"]):
                details.append(str(first_cause["cause"]))
            rows.append((str(phase["name"]), str(check["name"]), "; ".join(details)))
        if not failed_checks:
            reason = str(phase.get("cause") or "; ".join(phase["notes"]) or phase["title"])
            rows.append((str(phase["name"]), "phase", reason))
    return rows


def _failed_kills(report: Report) -> list[tuple[str, str, str]]:
    return [
        ("killed while saving", str(row["operation"]), "the last good step cannot be loaded")
        for row in report.get("kills") or ()
        if not row["ok"]
    ]


def verdict(report: Report) -> str:
    """Return the result of a report in one line."""
    if report["error"]:
        return str(report["error"])
    if report["command"] == "robustness":
        phases = [phase for phase in report.get("phases") or () if phase["ok"] is not None]
        failed = [str(phase["name"]) for phase in phases if phase["ok"] is False]
        if not failed and not report["ok"] and report.get("injected_fault"):
            return f"injected fault not detected: {report['injected_fault']}"
        return f"failed: {', '.join(failed)}" if failed else f"{_format_count(len(phases), 'phase')} passed"
    rows = report.get("differing") or ()
    if report.get("run"):
        levels = ", ".join(dict.fromkeys(map(_level_text, rows)))
        counts = (
            f"{_format_count(report['compared'], 'tensor')} per rank, {_format_count(report['world_size'], 'rank')}"
        )
        return f"different: {levels}" if rows else f"equal: {counts}" if report["ok"] else "inconclusive"
    if report["ok"]:
        return f"equal: {_format_count(report['compared'], 'tensor')} compared bit for bit{_uncompared(report)}"
    tensors = report.get("compared", 0) + sum(row["what"] != "content" for row in rows)
    if rows:
        return f"different: {len(rows):,} of {_format_count(tensors, 'tensor')}{_uncompared(report)}"
    if not report.get("compared"):
        return "no tensors to compare"
    return f"incomplete: {_format_count(report['compared'], 'tensor')} equal{_uncompared(report)}"


def _uncompared(report: Report) -> str:
    """Return what `verify` did not compare, to append to a result: `; 117 optimizer tensors not compared`."""
    nouns = {"optimizer": "optimizer tensor", "other": "other tensor", "objects": "pickled object"}
    counts = report.get("not_compared") or {}
    text = ", ".join(_format_count(counts[kind], noun) for kind, noun in nouns.items() if counts.get(kind))
    return f"; {text} not compared" if text else ""


def _run_difference(row: Mapping[str, Any]) -> str:
    """Return the difference in a row of `verify --run`."""
    if row["level"] == "config":
        return f"{row['reference']} in the reference, {row['checkpoint']} in the checkpoint"
    if row.get("what"):
        return str(row["what"])
    if "max_abs" in row:
        return f"max abs difference {_format_number(row['max_abs'])}, tolerance {_format_number(row['tolerance'])}"
    return "differs from the reference"


def summary(report: Report) -> str:
    """Return a report as Markdown for the summary of the job."""
    result = "passed" if report["ok"] else f"failed, exit {report['exit']}"
    lines = [
        f"### `ckptx {report['command']}`: {result}",
        "",
        f"{_escape_cell(verdict(report))} ({report['seconds']:.1f} s)",
    ]
    if phases := report.get("phases"):
        rows = [(phase["name"], _phase_result(phase["ok"]), f"{phase['seconds']:.1f}") for phase in phases]
        lines += _table(("phase", "result", "seconds"), rows)
    difference_rows = differences(report)
    if difference_rows:
        header = (
            ("phase", "check", "difference") if report["command"] == "robustness" else ("level", "name", "difference")
        )
        lines += _table(header, difference_rows[:MAX_ROWS])
    if len(difference_rows) > MAX_ROWS:
        lines += ["", f"{len(difference_rows) - MAX_ROWS:,} more rows are in the report."]
    if warnings := _warnings(report):
        lines += ["", *(f"* {_escape_cell(warning)}" for warning in warnings[:MAX_ROWS])]
    return "\n".join([*lines, "", ""])


def _phase_result(ok: bool | None) -> str:
    return "not run" if ok is None else "passed" if ok else "**failed**"


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    shown = [[cell if cell == "**failed**" else _escape_cell(str(cell)) for cell in row] for row in rows]
    return ["", f"| {' | '.join(header)} |", f"|{'---|' * len(header)}", *(f"| {' | '.join(row)} |" for row in shown)]


# ---------------------------------------------------------------------------------------------------------- escaping


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_TEXT_LENGTH else f"{text[:MAX_TEXT_LENGTH]} ..."


def _escape_message(text: str) -> str:
    """Escape the message of a workflow command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    """Escape a property of a workflow command."""
    return _escape_message(text).replace(":", "%3A").replace(",", "%2C")


def _escape_cell(text: str) -> str:
    """Escape text for a cell of a Markdown table: one line, without markup."""
    line = " ".join(_shorten(text).split())
    return "".join(f"&#{ord(char)};" if char in "|<>&`*_[]!@#\\~" else char for char in line)


def _format_count(count: int, noun: str) -> str:
    """Return a count with its noun: `1 tensor`, `2 tensors`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _format_number(value: float | str) -> str:
    """Return a measurement with three digits; NaN and infinity are strings in a report."""
    return f"{float(value):.3g}"


# --------------------------------------------------------------------------------------------------------------- run


def run(command: str, arguments: str, path: Path) -> tuple[int, Report | None, str]:
    """Run a command of ckptx; return its exit code, its report (None if it wrote none) and the last error it printed.

    Args:
        command: `verify` or `robustness`.
        arguments: Its arguments, as one string.
        path: File for the report.
    """
    path.unlink(missing_ok=True)  # report of an earlier run
    command_line = [sys.executable, "-m", "ckptx", command, *shlex.split(arguments), "--report", str(path)]
    token, error = secrets.token_hex(16), ""
    print(f"::stop-commands::{token}", flush=True)
    try:
        with subprocess.Popen(command_line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            assert process.stdout is not None
            for line in process.stdout:
                sys.stdout.buffer.write(line)
                sys.stdout.flush()
                text = line.decode(errors="replace").strip()
                error = text.removeprefix("error: ") if text.startswith("error: ") else error
        code = process.returncode
    finally:
        print(f"::{token}::", flush=True)
    code = 128 - code if code < 0 else code  # killed by a signal
    return code, json.loads(path.read_bytes()) if path.is_file() else None, error


def main() -> int:
    """Run the commands, print annotations and write the summary; return the exit code of ckptx."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verify", default="", help="arguments of `ckptx verify`")
    parser.add_argument("--robustness", default="", help="arguments of `ckptx robustness`")
    parser.add_argument("--reports", type=Path, default=Path("ckptx-reports"), help="directory for the reports")
    options = parser.parse_args()
    arguments_by_command = {
        name: arguments for name in ("verify", "robustness") if (arguments := getattr(options, name).strip())
    }
    if not arguments_by_command:
        print(annotation("error", "ckptx", "the input verify or robustness is required"))
        return 2
    options.reports.mkdir(parents=True, exist_ok=True)
    workspace = Path(os.environ.get("GITHUB_WORKSPACE") or ".")
    exit_codes = []
    for command, arguments in arguments_by_command.items():
        code, report, error = run(command, arguments, options.reports / f"{command}.json")
        exit_codes.append(code)
        if report is None:
            message = f"exit {code}: {error or 'no report was written; the log of the step has the reason'}"
            print(annotation("error", f"ckptx {command}", message), flush=True)
            markdown = (
                f"### `ckptx {command}`: failed, exit {code}\n\n{_escape_cell(error)}\n\nNo report was written.\n\n"
            )
        elif report["schema_version"] != SCHEMA_VERSION:
            message = (
                f"exit {code}: the report has schema_version {report['schema_version']}, this action reads "
                f"{SCHEMA_VERSION}; use the action and ckptx of the same version"
            )
            print(annotation("error", f"ckptx {command}", message), flush=True)
            markdown = f"### `ckptx {command}`: exit {code}\n\n{_escape_cell(message)}\n\n"
        else:
            for line in annotations(report, workspace):
                print(line, flush=True)
            markdown = summary(report)
        if file := os.environ.get("GITHUB_STEP_SUMMARY"):
            with Path(file).open("a", encoding="utf-8") as out:
                out.write(markdown)
    return next((code for code in exit_codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())
