"""What `robustness` says to a person: a line for each phase, and below it what failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckptx.report.documents.robustness import FaultsReport, RobustnessReport
from ckptx.report.report import counted
from ckptx.report.robustness_words import (
    called,
    cause_of,
    cause_text,
    failing_oracles,
    items_of,
    kill_text,
    memory_faults,
    mesh,
    noise_text,
    notes_of,
    oracle_text,
    some,
    step_memory_text,
    unchecked_oracles,
    unchecked_text,
    verdict,
    widened,
    widened_text,
)
from ckptx.report.text import cost

_WIDTH = len("0 source parity")  # the longest that a phase is called
_WORDS = {True: "ok", False: "FAILED", None: "not run"}


def robustness_text(report: RobustnessReport, red: Callable[[str], str] = str, told: int | None = None) -> str:
    """What `robustness` says.

    Args:
        report: What was found.
        red: Makes a text red, where the terminal can.
        told: How many phases `progress_text` has told of; None is nothing.
    """
    lines = [progress_text(report, red, told)] if told is None or report.phases[told:] else []
    for what in ("loss", "logits"):
        noise = noise_text(report, what)
        if noise is not None:
            lines.append(f"noise of {what}: {noise}")
    memory = step_memory_text(report)
    if memory is not None:
        lines.append(f"tensors of a step, on the rank with the most: {memory}")
    lines += [red(f"WIDENED by the recipe: {widened_text(phase, row)}") for phase, row in widened(report)]
    lines += _kills(report, red)
    lines.append(f"everything that was written: {report.out or 'removed, it was in a temporary folder'}")
    lines.append(verdict(report) if report.ok else red(verdict(report)))
    lines.append(cost(report))
    cause = cause_text(report)
    if cause is not None:
        lines.append(red(cause))
    return "\n".join(lines)


def progress_text(report: RobustnessReport, red: Callable[[str], str] = str, told: int | None = None) -> str:
    """What there is to say when the last of the phases of a report that is not done has ended.

    Args:
        report: What was found so far.
        red: As `robustness_text` has it.
        told: How many of its phases are known already; None is not even what it runs.
    """
    lines = [] if told is not None else _opening(report)
    for phase in report.phases[told or 0 :]:
        lines += _phase(report, phase, red)
    return "\n".join(lines)


def _opening(report: RobustnessReport) -> list[str]:
    ours = "" if report.trainer == "ckptx" else f", trained by: {report.trainer}"
    lines = [f"{report.recipe} on {mesh(report)}{ours}"]
    lines += [f"  {key} = {value}" for key, value in report.settings.items()]
    if report.injected:
        lines.append(f"  planted: {report.injected}")
    return lines


def robustness_verdict(report: RobustnessReport) -> str:
    """Return one line for `robustness -q`: passed, or the first failing item with its cause."""
    said, cause = verdict(report), cause_text(report)
    end = "" if cause is None else f"; {cause}"
    for phase in report.phases:
        for row in failing_oracles(phase):
            items = items_of(report, phase, str(row["name"]))
            return f"{said}; {phase['name']}: {row['name']}: {'; '.join([oracle_text(row), *items[:1]])}{end}"
    return said + end


def phase_text(report: RobustnessReport, phase: Mapping[str, Any]) -> str:
    """What `robustness` says of one phase."""
    return "\n".join(_phase(report, phase, str, width=0))


def faults_text(report: FaultsReport) -> str:
    """What `robustness --inject list` says."""
    width = max(map(len, report.faults), default=0)
    return "\n".join(f"{name:<{width}}  {says}" for name, says in report.faults.items())


def _phase(
    report: RobustnessReport, phase: Mapping[str, Any], red: Callable[[str], str], width: int = _WIDTH
) -> list[str]:
    notes = notes_of(phase)
    said = notes[0] if phase["ok"] is None and notes else str(phase.get("title") or "")
    took = "" if phase["ok"] is None else f"{phase['seconds']:.1f} s"
    word = f"{_WORDS[phase['ok']]:<7}"
    line = f"  {called(phase):<{width}}  {red(word) if phase['ok'] is False else word} {took:>8}  {said}"
    lines = [line.rstrip()]
    for row in failing_oracles(phase):
        name = str(row["name"])
        lines.append(f"      {red(name)}: {oracle_text(row)}")
        lines += [f"          {item}" for item in some(items_of(report, phase, name))]
        cause = cause_of(report, phase, name)
        if cause is not None:
            lines.append(f"          that is: {cause}")
    lines += [
        f"      {row['name']}: {unchecked_text(row)}" for row in unchecked_oracles(phase) if phase["ok"] is not None
    ]
    lines += [f"      {red('memory')}: {fault}" for fault in memory_faults(phase)]
    lines += [f"      note: {note}" for note in (notes if phase["ok"] is not None else notes[1:])]
    return lines


def _kills(report: RobustnessReport, red: Callable[[str], str]) -> list[str]:
    kills = report.kills or ()
    if not kills:
        return []
    good = sum(1 for row in kills if row["ok"])
    lines = [f"killed while saving: {counted(len(kills), 'time')}, {good:,} left the last good step and nothing else"]
    return lines + [
        f"  {red('FAILED')} {text}" for text in some([kill_text(row) for row in kills if not row["ok"]], 20)
    ]
