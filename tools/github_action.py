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

# GitHub shows ten annotations of a kind for a step.
MAX_ANNOTATIONS = 10
MAX_ROWS = 50  # rows of a table in the summary of the job
MAX_TEXT_LENGTH = 500  # characters of a message or a cell

SCHEMA_VERSION = 3  # of the reports that this script reads

Report = Mapping[str, Any]


# ------------------------------------------------------------------------------------------------------- annotations


def annotation(kind: str, title: str, message: str, file: str = "") -> str:
    """Return a workflow command that GitHub shows next to the job, and next to the file if there is one.

    Args:
        kind: `error`, `warning` or `notice`.
        title: First line.
        message: Text below it.
        file: Path of the file in the repository; empty for none.
    """
    properties = {"file": file, "title": title}
    properties_text = ",".join(f"{name}={_property(value)}" for name, value in properties.items() if value)
    return f"::{kind} {properties_text}::{_data(_short(message))}"


def annotations(report: Report, workspace: Path) -> list[str]:
    """Return the annotations of a report: errors and warnings, at most ten of each.

    Args:
        report: Document of `--report`.
        workspace: Directory of the repository; the annotation of a recipe in it names the file.
    """
    title = f"ckptx {report['command']}"
    file = _in_repository(report.get("recipe_file"), workspace)
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
    inconclusive = [f"inconclusive: {row['level']}: {row['name']}" for row in report.get("inconclusive") or ()]
    return [*report["notes"], *inconclusive]


def _limited(lines: list[str], kind: str, title: str) -> list[str]:
    if len(lines) <= MAX_ANNOTATIONS:
        return lines
    first_lines = lines[: MAX_ANNOTATIONS - 1]
    more = f"and {len(lines) - len(first_lines):,} more; the summary of the job and the report have them"
    return [*first_lines, annotation(kind, title, more)]


def _in_repository(path: str | None, workspace: Path) -> str:
    """Return a path relative to the repository, empty if it is outside."""
    if not path:
        return ""
    try:
        return str(Path(path).resolve().relative_to(workspace.resolve()))
    except ValueError:
        return ""


# ----------------------------------------------------------------------------------------------------------- summary


def differences(report: Report) -> list[tuple[str, str, str]]:
    """Return a row for each difference: its kind, the item that differs, and how it differs."""
    if report["command"] == "robustness":
        return [*_failed_oracles(report), *_failed_kills(report)]
    rows = []
    for row in report.get("differing") or ():
        if "level" in row:
            rank = f"rank {row['rank']}" if "rank" in row else ""
            rows.append((str(row["level"]), str(row["name"]), ", ".join(filter(None, [_run_difference(row), rank]))))
        elif row["what"] == "content":
            first = f"first difference at {row['index']}: 0x{row['a']} and 0x{row['b']}"
            rows.append(("content", str(row["name"]), first))
        else:
            rows.append((str(row["what"]), str(row["name"]), f"{row['a'] or 'absent'} and {row['b'] or 'absent'}"))
    return rows


def _failed_oracles(report: Report) -> list[tuple[str, str, str]]:
    rows = []
    first = report.get("cause") or {}
    for phase in report.get("phases") or ():
        if phase["ok"] is not False:
            continue
        failed = [oracle for oracle in phase["checks"] if oracle["ok"] is False]
        for oracle in failed:
            parts = []
            if oracle["count"]:
                items = ", ".join(dict.fromkeys(map(str, oracle["differing"])))
                parts.append(f"{oracle['count']:,} of {oracle['compared']:,} items: {items}")
            if oracle["value"] is not None:
                parts.append(f"difference {_number(oracle['value'])}, tolerance {_number(oracle['tolerance'])}")
            if (first.get("phase"), first.get("check")) == (phase["name"], oracle["name"]):
                parts.append(str(first["cause"]))
            rows.append((str(phase["name"]), str(oracle["name"]), "; ".join(parts)))
        if not failed:
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
        return f"failed: {', '.join(failed)}" if failed else f"{_count(len(phases), 'phase')} passed"
    rows = report.get("differing") or ()
    if report.get("run"):
        levels = ", ".join(dict.fromkeys(str(row["level"]) for row in rows))
        counts = f"{_count(report['compared'], 'tensor')} per rank, {_count(report['world_size'], 'rank')}"
        return f"different: {levels}" if rows else f"equal: {counts}" if report["ok"] else "inconclusive"
    if report["ok"]:
        return f"equal: {_count(report['compared'], 'tensor')} compared bit for bit"
    tensors = report.get("compared", 0) + sum(row["what"] != "content" for row in rows)
    return f"different: {len(rows):,} of {_count(tensors, 'tensor')}" if rows else "no tensors to compare"


def _run_difference(row: Mapping[str, Any]) -> str:
    """Return the difference in a row of `verify --run`."""
    if row["level"] == "config":
        return f"{row['reference']} in the reference, {row['checkpoint']} in the checkpoint"
    if row.get("what"):
        return str(row["what"])
    if "max_abs" in row:
        return f"max abs difference {_number(row['max_abs'])}, tolerance {_number(row['tolerance'])}"
    return "differs from the reference"


def summary(report: Report) -> str:
    """Return a report as Markdown for the summary of the job."""
    passed = "passed" if report["ok"] else f"failed, exit {report['exit']}"
    lines = [f"### `ckptx {report['command']}`: {passed}", "", f"{_cell(verdict(report))} ({report['seconds']:.1f} s)"]
    if phases := report.get("phases"):
        rows = [(phase["name"], _state(phase["ok"]), f"{phase['seconds']:.1f}") for phase in phases]
        lines += _table(("phase", "result", "seconds"), rows)
    found = differences(report)
    if found:
        head = (
            ("phase", "check", "difference") if report["command"] == "robustness" else ("level", "name", "difference")
        )
        lines += _table(head, found[:MAX_ROWS])
    if len(found) > MAX_ROWS:
        lines += ["", f"{len(found) - MAX_ROWS:,} more rows are in the report."]
    if warnings := _warnings(report):
        lines += ["", *(f"* {_cell(each)}" for each in warnings[:MAX_ROWS])]
    return "\n".join([*lines, "", ""])


def _state(ok: bool | None) -> str:
    return "not run" if ok is None else "passed" if ok else "**failed**"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    shown = [[cell if cell == "**failed**" else _cell(str(cell)) for cell in row] for row in rows]
    return ["", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in shown)]


# ---------------------------------------------------------------------------------------------------------- escaping


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT_LENGTH else f"{text[:MAX_TEXT_LENGTH]} ..."


def _data(text: str) -> str:
    """Escape the message of a workflow command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """Escape a property of a workflow command."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _cell(text: str) -> str:
    """Escape text for a cell of a Markdown table: one line, without markup."""
    line = " ".join(_short(text).split())
    return "".join(f"&#{ord(char)};" if char in "|<>&`*_[]!@#\\~" else char for char in line)


def _count(count: int, noun: str) -> str:
    """Return a count with its noun: `1 tensor`, `2 tensors`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _number(value: float | str) -> str:
    """Return a measurement with three digits; NaN and infinity are strings in a report."""
    return f"{float(value):.3g}"


# --------------------------------------------------------------------------------------------------------------- run


def run(command: str, arguments: str, path: Path) -> tuple[int, Report | None]:
    """Run a command of ckptx; return its exit code and its report, None if it wrote none.

    Args:
        command: `verify` or `robustness`.
        arguments: Its arguments, as one string.
        path: File for the report.
    """
    path.unlink(missing_ok=True)  # report of an earlier run
    words = [sys.executable, "-m", "ckptx", command, *shlex.split(arguments), "--report", str(path)]
    token = secrets.token_hex(16)
    print(f"::stop-commands::{token}", flush=True)
    try:
        code = subprocess.run(words, stderr=subprocess.STDOUT).returncode
    finally:
        print(f"::{token}::", flush=True)
    code = 128 - code if code < 0 else code  # killed by a signal
    return code, json.loads(path.read_bytes()) if path.is_file() else None


def main() -> int:
    """Run the commands, print annotations and write the summary; return the exit code of ckptx."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verify", default="", help="arguments of `ckptx verify`")
    parser.add_argument("--robustness", default="", help="arguments of `ckptx robustness`")
    parser.add_argument("--reports", type=Path, default=Path("ckptx-reports"), help="directory for the reports")
    options = parser.parse_args()
    arguments_by_command = {
        name: words for name in ("verify", "robustness") if (words := getattr(options, name).strip())
    }
    if not arguments_by_command:
        print(annotation("error", "ckptx", "the input verify or robustness is required"))
        return 2
    options.reports.mkdir(parents=True, exist_ok=True)
    workspace = Path(os.environ.get("GITHUB_WORKSPACE") or ".")
    exits = []
    for command, arguments in arguments_by_command.items():
        code, report = run(command, arguments, options.reports / f"{command}.json")
        exits.append(code)
        if report is None:
            text = f"exit {code}: no report was written; the log of the step has the reason"
            print(annotation("error", f"ckptx {command}", text), flush=True)
            markdown = f"### `ckptx {command}`: failed, exit {code}\n\nNo report was written.\n\n"
        elif report["schema_version"] != SCHEMA_VERSION:
            text = (
                f"exit {code}: the report has schema_version {report['schema_version']}, this action reads "
                f"{SCHEMA_VERSION}; use the action and ckptx of the same version"
            )
            print(annotation("error", f"ckptx {command}", text), flush=True)
            markdown = f"### `ckptx {command}`: exit {code}\n\n{_cell(text)}\n\n"
        else:
            for line in annotations(report, workspace):
                print(line, flush=True)
            markdown = summary(report)
        if file := os.environ.get("GITHUB_STEP_SUMMARY"):
            with Path(file).open("a", encoding="utf-8") as out:
                out.write(markdown)
    return next((code for code in exits if code), 0)


if __name__ == "__main__":
    sys.exit(main())
