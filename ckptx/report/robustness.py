"""Format the report of `robustness` as text: a line for each phase, with its failures below it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckptx.report.documents.robustness import FaultsReport, RobustnessReport
from ckptx.report.robustness_phrases import (
    cause_text,
    check_cause,
    check_text,
    checks_without_result,
    differing_items,
    failing_checks,
    first_items,
    kill_text,
    kills_text,
    memory_failures,
    mesh_text,
    noise_text,
    phase_name,
    phase_notes,
    skipped_checks_text,
    step_memory_text,
    unchecked_text,
    verdict,
    widened_checks,
    widened_text,
)
from ckptx.report.text import cost_text

_NAME_WIDTH = len("1 uninterrupted run")  # the longest name of a phase
_RESULT_WORDS = {True: "ok", False: "FAILED", None: "not run"}


def robustness_text(report: RobustnessReport, red: Callable[[str], str] = str, num_printed: int | None = None) -> str:
    """Return the summary that `robustness` prints.

    Args:
        report: Report of `robustness`.
        red: Colors a string red if the terminal supports it.
        num_printed: Number of phases that `progress_text` has printed; None if it has printed nothing.
    """
    lines = [progress_text(report, red, num_printed)] if num_printed is None or report.phases[num_printed:] else []
    for quantity in ("loss", "logits"):
        noise = noise_text(report, quantity)
        if noise is not None:
            lines.append(f"noise of {quantity}: {noise}")
    memory = step_memory_text(report)
    if memory is not None:
        lines.append(f"tensor memory of one step (max over ranks): {memory}")
    lines += [red(f"WIDENED by the recipe: {widened_text(phase, row)}") for phase, row in widened_checks(report)]
    lines += _kill_lines(report, red)
    lines.append(f"output: {report.output_dir or 'temporary, removed'}")
    lines.append(verdict(report) if report.ok else red(verdict(report)))
    lines.append(cost_text(report))
    cause = cause_text(report)
    if cause is not None:
        lines.append(red(cause))
    return "\n".join(lines)


def progress_text(report: RobustnessReport, red: Callable[[str], str] = str, num_printed: int | None = None) -> str:
    """Return the lines to print when a phase has ended, while `robustness` is still running.

    Args:
        report: Report of the phases so far.
        red: Colors a string red if the terminal supports it.
        num_printed: Number of phases that are printed already; None if the header is not printed either.
    """
    lines = [] if num_printed is not None else _header_lines(report)
    for phase in report.phases[num_printed or 0 :]:
        lines += _phase_lines(report, phase, red)
    return "\n".join(lines)


def _header_lines(report: RobustnessReport) -> list[str]:
    mesh = mesh_text(report)
    lines = [f"{report.recipe} on {mesh}" if mesh else report.recipe]
    if report.trainer != "ckptx":
        lines.append(f"  trainer: {report.trainer}")
    lines += [f"  {key} = {value}" for key, value in report.overrides.items()]
    if report.injected_fault:
        lines.append(f"  injected fault: {report.injected_fault}")
    return lines


def robustness_verdict(report: RobustnessReport) -> str:
    """Return the one line that `robustness -q` prints: the verdict, with the first difference and its cause."""
    verdict_line, cause = verdict(report), cause_text(report)
    suffix = "" if cause is None else f"; {cause}"
    for phase in report.phases:
        for row in failing_checks(phase):
            items = differing_items(report, phase, str(row["name"]))
            difference = "; ".join([check_text(row), *items[:1]])
            return f"{verdict_line}; {phase['name']}: {row['name']}: {difference}{suffix}"
    return verdict_line + suffix


def phase_text(report: RobustnessReport, phase: Mapping[str, Any]) -> str:
    """Return the lines of one phase."""
    return "\n".join(_phase_lines(report, phase, str, width=0))


def faults_text(report: FaultsReport) -> str:
    """Return the faults that `robustness --inject list` prints."""
    width = max(map(len, report.faults), default=0)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in report.faults.items())


def _phase_lines(
    report: RobustnessReport, phase: Mapping[str, Any], red: Callable[[str], str], width: int = _NAME_WIDTH
) -> list[str]:
    """Return the line of a phase, with its name padded to `width` characters, and lines for its failures and notes."""
    # The first note of a phase without a result is printed in place of its title. For a phase that did not run, it is
    # the reason.
    notes = phase_notes(phase)
    title = notes[0] if phase["ok"] is None and notes else str(phase.get("title") or "")
    skipped = skipped_checks_text(phase)
    title += f" ({skipped})" if skipped else ""
    seconds = "" if phase["ok"] is None else f"{phase['seconds']:.1f} s"
    word = f"{_RESULT_WORDS[phase['ok']]:<7}"
    line = f"  {phase_name(phase):<{width}}  {red(word) if phase['ok'] is False else word} {seconds:>8}  {title}"
    lines = [line.rstrip()]
    for row in failing_checks(phase):
        name = str(row["name"])
        lines.append(f"      {red(name)}: {check_text(row)}")
        lines += [f"          {item}" for item in first_items(differing_items(report, phase, name))]
        cause = check_cause(report, phase, name)
        if cause is not None:
            lines.append(f"          diagnosis: {cause}")
    lines += [
        f"      {row['name']}: {unchecked_text(row)}" for row in checks_without_result(phase) if phase["ok"] is not None
    ]
    lines += [f"      {red('memory')}: {failure}" for failure in memory_failures(phase)]
    lines += [f"      note: {note}" for note in (notes if phase["ok"] is not None else notes[1:])]
    return lines


def _kill_lines(report: RobustnessReport, red: Callable[[str], str]) -> list[str]:
    kills = report.kills or ()
    if not kills:
        return []
    lines = [f"killed while saving: {kills_text(kills)}"]
    return lines + [
        f"  {red('FAILED')} {text}" for text in first_items([kill_text(row) for row in kills if not row["ok"]], 20)
    ]
