"""The report of `robustness` as one HTML page: verdicts, losses, memory, what differs, and what it ran with.

This module says what the page shows, in rows; `templates/robustness.html` says how. Nothing in the page runs, and it
asks for nothing outside of itself. Names of tensors, recipes and trainers are anybody's text; the template escapes
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any

from ckptx.report.documents.robustness import RobustnessReport
from ckptx.report.numbers import peak_memory_text
from ckptx.report.page import page
from ckptx.report.plots import Band, Plot, RunCurve, distances_plot, runs_plot
from ckptx.report.report import Report, counted, human_bytes
from ckptx.report.robustness_words import (
    called,
    cause_of,
    cause_text,
    failing_oracles,
    is_of,
    items_of,
    kill_text,
    memory_faults,
    mesh,
    noise_of,
    noise_text,
    notes_of,
    number_of,
    oracle_text,
    some,
    step_memory_text,
    unchecked_text,
    verdict,
    widened,
    widened_text,
)

_KINDS = {True: "ok", False: "bad", None: "left"}
_STYLES = ("report.css", "robustness.css")
_MOST_ROWS = 400
_MOST_RUNS = 6  # drawn, beside the first
_MOST_FOUND = 12  # items named below an oracle


@dataclass(frozen=True, slots=True)
class VerdictRow:
    """A line in the head of the page.

    Attributes:
        kind: "ok" or "bad".
        word: PASSED, FAILED, ...
        said: The rest of the sentence.
    """

    kind: str
    word: str
    said: str


@dataclass(frozen=True, slots=True)
class RobustnessHeading:
    """The head of the page.

    Attributes:
        title: The name of the recipe.
        verdicts: The verdict, and what explains it.
        facts: Terms with values.
    """

    title: str
    verdicts: Sequence[VerdictRow]
    facts: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Oracle:
    """The result of an oracle.

    Attributes:
        name: Its name.
        said: The result, in words.
        is_failed: Whether it found a difference.
        is_widened: Whether the recipe widened its tolerance.
        items: What differs, the first of it.
        cause: Why it may have failed; "" if nothing is known or it did not fail.
    """

    name: str
    said: str
    is_failed: bool
    is_widened: bool
    items: Sequence[str] = ()
    cause: str = ""


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """The result of a phase.

    Attributes:
        kind: "ok", "bad" or "left" (not run).
        name: Its name.
        title: What it proves.
        time: Its duration, or "not run".
        oracles: Its oracles, those that failed first.
        memory_faults: What it did not release.
        notes: What the user should know.
    """

    kind: str
    name: str
    title: str
    time: str
    oracles: Sequence[Oracle]
    memory_faults: Sequence[str]
    notes: Sequence[str]


@dataclass(frozen=True, slots=True)
class LossPlots:
    """Losses of the runs, and their differences from the first.

    Attributes:
        lead: The noise.
        runs: The runs that are drawn, the uninterrupted one first.
        plot: Their losses; None if there are no numbers.
        differences: The other runs with their differences from the first, where they have steps in common.
        differences_lead: Which of them are equal.
        differences_plot: Their differences; None if there are no steps.
        band: Noise and tolerance.
        note: Set if runs are left out; else "".
    """

    lead: str
    runs: Sequence[RunCurve]
    plot: Plot | None
    differences: Sequence[RunCurve]
    differences_lead: str
    differences_plot: Plot | None
    band: Band
    note: str


@dataclass(frozen=True, slots=True)
class Use:
    """Memory that is retained after a phase.

    Attributes:
        said: In words.
        is_over: Whether it is above the baseline.
        part: In percent of the most of all phases.
        baseline_part: The baseline, likewise.
    """

    said: str
    is_over: bool
    part: float
    baseline_part: float


@dataclass(frozen=True, slots=True)
class Retained:
    """Memory and threads after a phase."""

    phase: str
    tensors: Use
    threads: Use


@dataclass(frozen=True, slots=True)
class Kill:
    """A process that was killed while saving; `kind` is "ok" or "bad"."""

    kind: str
    said: str


@dataclass(frozen=True, slots=True)
class PageContent:
    """Everything below the head.

    Attributes:
        summary: How many phases passed.
        phases: The phases.
        losses: None without runs.
        memory: Empty where none was taken.
        step_memory: Memory of one step, in words; "" where it was not taken.
        differences: Cells of the first differences; None for what is not known.
        differences_count: The number of all differences.
        kills: Processes that were killed.
        kills_lead: How many of these ended well.
        settings: What the run was asked for.
        environment: Names with versions.
    """

    summary: str
    phases: Sequence[PhaseRow]
    losses: LossPlots | None
    memory: Sequence[Retained]
    step_memory: str
    differences: Sequence[Sequence[str | None]]
    differences_count: int
    kills: Sequence[Kill]
    kills_lead: str
    settings: Sequence[tuple[str, str]]
    environment: Sequence[tuple[str, str]]


def robustness_page(report: Report, recipe: str) -> str:
    """Return the page.

    Args:
        report: The report of `robustness`; a plain report is that of a run that could not be judged, and the page says
            why.
        recipe: The recipe as it was asked for.
    """
    if isinstance(report, RobustnessReport):
        heading, content = _heading(report), _content(report)
    else:
        why = VerdictRow("bad", "NOT JUDGED", report.error or "no reason was given")
        facts = [("exit", str(report.exit)), ("time", f"{report.seconds:.1f} s")]
        heading, content = RobustnessHeading(recipe, [why], facts), None
    title = f"{heading.title} - robustness"
    return page("robustness.html", title, _STYLES, heading=heading, report=content, notes=report.warnings)


def _heading(report: RobustnessReport) -> RobustnessHeading:
    word, _, said = verdict(report).partition(": ")
    verdicts = [VerdictRow("ok" if report.ok else "bad", word, said)]
    cause = cause_text(report)
    if cause is not None:
        verdicts.append(VerdictRow("bad", "CAUSE", cause.partition(": ")[2]))
    verdicts += [
        VerdictRow("bad", "WIDENED", f"by the recipe: {widened_text(phase, row)}") for phase, row in widened(report)
    ]
    facts = [
        ("mesh", mesh(report)),
        ("trainer", report.trainer),
        ("time", f"{report.seconds:.1f} s"),
        peak_memory_text(report),
        *(("injected fault", each) for each in [report.injected] if each),
    ]
    return RobustnessHeading(report.recipe, verdicts, facts)


def _content(report: RobustnessReport) -> PageContent:
    kills = report.kills or ()
    good = sum(1 for row in kills if row["ok"])
    settings = {
        "recipe": report.recipe_file,
        "written to": report.out or "a temporary folder, removed",
        **report.settings,
    }
    return PageContent(
        summary=_summary(report),
        phases=[_phase(report, phase) for phase in report.phases],
        losses=_losses(report),
        memory=list(_memory(report)),
        step_memory=step_memory_text(report) or "",
        differences=[_difference(report, row) for row in report.differing[:_MOST_ROWS]],
        differences_count=len(report.differing),
        kills=[Kill(_KINDS[bool(row["ok"])], kill_text(row)) for row in kills[:_MOST_ROWS]],
        kills_lead=f"{counted(len(kills), 'time')}; {good:,} left the last good step and nothing else.",
        settings=[(str(key), str(said)) for key, said in settings.items()],
        environment=[(str(key), str(said)) for key, said in report.environment.items()],
    )


def _summary(report: RobustnessReport) -> str:
    failed = sum(phase["ok"] is False for phase in report.phases)
    left = sum(phase["ok"] is None for phase in report.phases)
    parts = [f"{len(report.phases) - failed - left} passed", f"{failed} failed", f"{left} not run"]
    return ", ".join(part for part in parts if not part.startswith("0 "))


def _phase(report: RobustnessReport, phase: Mapping[str, Any]) -> PhaseRow:
    rows = phase.get("oracles") or ()
    good = [row for row in rows if row["ok"] is not False]
    return PhaseRow(
        kind=_KINDS[phase["ok"]],
        name=called(phase),
        title=str(phase.get("title") or ""),
        time="not run" if phase["ok"] is None else f"{phase['seconds']:.1f} s",
        oracles=[_oracle(report, phase, row) for row in (*failing_oracles(phase), *good)],
        memory_faults=list(memory_faults(phase)),
        notes=notes_of(phase),
    )


def _oracle(report: RobustnessReport, phase: Mapping[str, Any], row: Mapping[str, Any]) -> Oracle:
    name, is_widened = str(row["name"]), bool(row.get("widened"))
    if row["ok"] is False:
        items = list(some(items_of(report, phase, name), _MOST_FOUND))
        return Oracle(name, oracle_text(row), True, is_widened, items, cause_of(report, phase, name) or "")
    if not row["ok"]:
        return Oracle(name, unchecked_text(row), False, is_widened)
    said = f"{row['compared']:,} identical" if row.get("value") is None else oracle_text(row)
    return Oracle(name, said, False, is_widened)


def _losses(report: RobustnessReport) -> LossPlots | None:
    runs = _runs(report)
    if not runs:
        return None
    noise = noise_text(report, "loss")
    band = Band(noise_of(report, "loss"), _limit(report))
    differences = [found for run in runs[1:] if (found := _difference_of_runs(runs[0], run)).points]
    left = len(report.losses) - len(runs)
    return LossPlots(
        lead=f"Noise, as measured in this run: {noise}." if noise else "No noise was measured.",
        runs=runs,
        plot=runs_plot(runs),
        differences=differences,
        differences_lead=_differences_lead(differences),
        differences_plot=distances_plot(differences, band),
        band=band,
        note=f"{counted(left, 'more run')} in the document of --json." if left > 0 else "",
    )


def _runs(report: RobustnessReport) -> list[RunCurve]:
    first, others = report.losses[:1], sorted(report.losses[1:], key=_drawn_late)
    rows = [*first, *others[:_MOST_RUNS]]
    return [
        RunCurve(
            str(row["run"]),
            index,
            [(float(step), number_of(loss)) for step, loss in zip(row["steps"], row["losses"], strict=False)],
        )
        for index, row in enumerate(rows)
    ]


def _drawn_late(row: Mapping[str, Any]) -> int:
    """Sort resumed runs first, and last those with a moved embedding: they are the noise, which is drawn as a band."""
    name = str(row["run"])
    return 0 if name.startswith("resumed") else 2 if name.startswith("moved") else 1


def _difference_of_runs(first: RunCurve, run: RunCurve) -> RunCurve:
    known = dict(first.points)
    return run._replace(
        points=[
            (step, abs(number - known[step]) if isfinite(number) and isfinite(known[step]) else nan)
            for step, number in run.points
            if step in known
        ]
    )


def _differences_lead(runs: Sequence[RunCurve]) -> str:
    equal = [run.name for run in runs if all(difference == 0 for _, difference in run.points)]
    if len(equal) == len(runs):
        return "Bit-equal at every step."
    return f"Bit-equal at every step: {', '.join(equal)}." if equal else "No run is bit-equal at every step."


def _limit(report: RobustnessReport) -> float | None:
    """Return the strictest tolerance of the loss among the phases that allow any difference.

    A row whose limit is the noise itself is where the noise was measured; it allows nothing.
    """
    rows = [row for phase in report.phases for row in phase.get("oracles") or () if row["name"] == "loss"]
    judged = [row for row in rows if row.get("times_noise") != 1.0] or rows
    limits = [number_of(row["limit"]) for row in judged if row.get("limit") is not None]
    return min((limit for limit in limits if isfinite(limit) and limit > 0), default=None)


def _memory(report: RobustnessReport) -> Iterator[Retained]:
    rows = [(phase, phase["memory"]) for phase in report.phases if phase.get("memory") and phase["ok"] is not None]
    most = {
        key: max(1, *(memory[of] for _, memory in rows for of in (key, f"baseline_{key}")))
        for key in ("tensor_bytes", "threads")
        if rows
    }

    def use(memory: Mapping[str, int], key: str, shown: Callable[[int], str]) -> Use:
        value, baseline = memory[key], memory[f"baseline_{key}"]
        is_over = value > baseline
        said = f"{shown(value)}{f', {shown(baseline)} before' if is_over else ''}"
        return Use(said, is_over, 100 * value / most[key], 100 * baseline / most[key])

    for phase, memory in rows:
        yield Retained(called(phase), use(memory, "tensor_bytes", human_bytes), use(memory, "threads", str))


def _difference(report: RobustnessReport, row: Mapping[str, Any]) -> list[str | None]:
    phase = next((called(each) for each in report.phases if is_of(row, each)), row.get("phase"))
    cells = [phase, *(row.get(key) for key in ("oracle", "item", "rank", "reference", "found"))]
    return [None if cell is None else str(cell) for cell in cells]
