"""HTML page of `robustness`: verdicts, losses, memory, differences and environment.

This module computes the content; `templates/robustness.html` is the markup. The page has no scripts and loads nothing.
Names of tensors, recipes and trainers are untrusted; the template escapes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any

from ckptx.report.documents.robustness import RobustnessReport
from ckptx.report.number_formats import peak_memory_text
from ckptx.report.page import render_page
from ckptx.report.plots import NoiseBand, Plot, RunCurve, plot_differences, plot_losses
from ckptx.report.report import Report, human_bytes
from ckptx.report.robustness_phrases import (
    CHECK_MEANINGS,
    cause_text,
    check_cause,
    check_text,
    differing_items,
    failing_checks,
    first_items,
    is_in_phase,
    kill_text,
    kills_text,
    measured_noise,
    memory_failures,
    mesh_text,
    noise_text,
    parse_number,
    passed_text,
    phase_name,
    phase_notes,
    skipped_checks_text,
    step_memory_text,
    unchecked_text,
    verdict,
    widened_checks,
    widened_text,
)

_CSS_CLASSES = {True: "ok", False: "bad", None: "skipped"}
_STYLES = ("report.css", "robustness.css")
_MAX_ROWS = 400  # differences and kills listed
_MAX_RUNS = 8  # runs drawn in addition to the first
_MAX_ITEMS = 12  # items listed below a check


@dataclass(frozen=True, slots=True)
class VerdictLine:
    """A line in the head of the page.

    Attributes:
        css_class: CSS class of the line, "ok" or "bad".
        word: First word of the line: PASSED, FAILED, CAUSE, WIDENED or ERROR.
        text: Rest of the line.
    """

    css_class: str
    word: str
    text: str


@dataclass(frozen=True, slots=True)
class RobustnessHeading:
    """The head of the page.

    Attributes:
        title: Name of the recipe.
        verdicts: Verdict, then its cause and widened tolerances.
        facts: Pairs of term and value.
    """

    title: str
    verdicts: Sequence[VerdictLine]
    facts: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check.

    Attributes:
        name: Name of the check.
        result: Result, in words.
        meaning: Text for the tooltip, on what the check compares; "" for an unknown check.
        is_failed: True if the check found a difference.
        is_widened: True if the recipe widened the tolerance.
        items: First items that differ.
        cause: Possible causes of the difference; "" if none is known or the check passed.
    """

    name: str
    result: str
    meaning: str
    is_failed: bool
    is_widened: bool
    items: Sequence[str] = ()
    cause: str = ""


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """The result of a phase.

    Attributes:
        css_class: CSS class of the phase: "ok", "bad" or "skipped" (not run).
        name: Number and name of the phase.
        title: Property that the phase tests.
        time: Duration, with the number of skipped checks if there are any; or "not run".
        checks: Checks of the phase, failed ones first.
        memory_failures: Memory and threads that the phase did not release.
        notes: Notes for the user.
    """

    css_class: str
    name: str
    title: str
    time: str
    checks: Sequence[CheckResult]
    memory_failures: Sequence[str]
    notes: Sequence[str]


@dataclass(frozen=True, slots=True)
class LossPlots:
    """Losses of the runs, and their differences from the runs that they are compared with.

    Attributes:
        lead: Noise of the loss, as a sentence.
        runs: Runs that are drawn, the uninterrupted one first.
        plot: Plot of losses; None if there are no numbers.
        differences: Differences of runs from the runs that they are compared with, at common steps.
        differences_lead: Names of the runs that are bit-identical to the run that they are compared with, as a
            sentence; it also says if all or none are.
        differences_plot: Plot of differences; None if there are no steps.
        band: Noise and tolerance.
        note: Note that runs are omitted; "" if all are drawn.
    """

    lead: str
    runs: Sequence[RunCurve]
    plot: Plot | None
    differences: Sequence[RunCurve]
    differences_lead: str
    differences_plot: Plot | None
    band: NoiseBand
    note: str


@dataclass(frozen=True, slots=True)
class RetainedAmount:
    """Memory, or threads, retained after a phase.

    Attributes:
        text: Value, with the baseline if it is exceeded.
        exceeds_baseline: True if the value exceeds the baseline.
        percent: Value, in percent of the maximum over phases.
        baseline_percent: Baseline, in percent of the same maximum.
    """

    text: str
    exceeds_baseline: bool
    percent: float
    baseline_percent: float


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """Memory and threads retained after a phase.

    Attributes:
        phase: Number and name of the phase.
        tensors: Bytes of tensors, maximum over ranks.
        threads: Number of threads, maximum over ranks.
    """

    phase: str
    tensors: RetainedAmount
    threads: RetainedAmount


@dataclass(frozen=True, slots=True)
class KillResult:
    """A process that was killed while saving.

    Attributes:
        css_class: CSS class: "ok" if the last complete step was kept, and no other step looks complete; else "bad".
        text: Operation, ranks and latest step, in words.
    """

    css_class: str
    text: str


@dataclass(frozen=True, slots=True)
class PageContent:
    """Everything below the head.

    Attributes:
        summary: Numbers of phases that passed, failed and did not run.
        phases: Phases in order.
        losses: Losses; None if there are no runs.
        memory: Retained memory by phase; empty if it was not measured.
        step_memory: Memory of one step, in words; "" if it was not measured.
        differences: Rows of the table of the first differences; None in a cell for an unknown value.
        differences_count: Number of all differences, listed or not.
        kills: The first processes that were killed; empty if none was.
        kills_lead: Number of kills that left a valid checkpoint, as a sentence.
        settings: Recipe file, output folder and overridden recipe keys, with their values.
        environment: Pairs of name and version.
    """

    summary: str
    phases: Sequence[PhaseResult]
    losses: LossPlots | None
    memory: Sequence[PhaseMemory]
    step_memory: str
    differences: Sequence[Sequence[str | None]]
    differences_count: int
    kills: Sequence[KillResult]
    kills_lead: str
    settings: Sequence[tuple[str, str]]
    environment: Sequence[tuple[str, str]]


def robustness_page(report: Report, recipe: str) -> str:
    """Return the page.

    Args:
        report: Report of `robustness`; a plain `Report` is that of a failed run, and the page shows its error.
        recipe: Recipe argument of the command.
    """
    if isinstance(report, RobustnessReport):
        heading, content = _heading(report), _content(report)
    else:
        error_line = VerdictLine("bad", "ERROR", report.error or "unknown error")
        facts = [("exit", str(report.exit)), ("time", f"{report.seconds:.1f} s")]
        heading, content = RobustnessHeading(recipe, [error_line], facts), None
    title = f"{heading.title} - robustness"
    return render_page("robustness.html", title, _STYLES, heading=heading, report=content, notes=report.notes)


def _heading(report: RobustnessReport) -> RobustnessHeading:
    word, _, text = verdict(report).partition(": ")
    verdicts = [VerdictLine("ok" if report.ok else "bad", word, text)]
    cause = cause_text(report)
    if cause is not None:
        verdicts.append(VerdictLine("bad", "CAUSE", cause.partition(": ")[2]))
    verdicts += [
        VerdictLine("bad", "WIDENED", f"by the recipe: {widened_text(phase, row)}")
        for phase, row in widened_checks(report)
    ]
    facts = [
        *(("mesh", each) for each in [mesh_text(report)] if each),
        ("trainer", report.trainer),
        ("time", f"{report.seconds:.1f} s"),
        peak_memory_text(report),
        *(("injected fault", each) for each in [report.injected_fault] if each),
    ]
    return RobustnessHeading(report.recipe, verdicts, facts)


def _content(report: RobustnessReport) -> PageContent:
    kills = report.kills or ()
    settings = {
        "recipe": report.recipe_file,
        "output": report.output_dir or "temporary, removed",
        **report.overrides,
    }
    return PageContent(
        summary=_summary(report),
        phases=[_phase_result(report, phase) for phase in report.phases],
        losses=_loss_plots(report),
        memory=list(_retained_memory(report)),
        step_memory=step_memory_text(report) or "",
        differences=[_difference_cells(report, row) for row in report.differing[:_MAX_ROWS]],
        differences_count=len(report.differing),
        kills=[KillResult(_CSS_CLASSES[bool(row["ok"])], kill_text(row)) for row in kills[:_MAX_ROWS]],
        kills_lead=f"{kills_text(kills)}.",
        settings=[(str(key), str(value)) for key, value in settings.items()],
        environment=[(str(key), str(value)) for key, value in report.environment.items()],
    )


def _summary(report: RobustnessReport) -> str:
    failed = sum(phase["ok"] is False for phase in report.phases)
    not_run = sum(phase["ok"] is None for phase in report.phases)
    parts = [f"{len(report.phases) - failed - not_run} passed", f"{failed} failed", f"{not_run} not run"]
    return ", ".join(part for part in parts if not part.startswith("0 "))


def _phase_result(report: RobustnessReport, phase: Mapping[str, Any]) -> PhaseResult:
    rows = phase.get("checks") or ()
    passed, skipped = [row for row in rows if row["ok"] is not False], skipped_checks_text(phase)
    return PhaseResult(
        css_class=_CSS_CLASSES[phase["ok"]],
        name=phase_name(phase),
        title=str(phase.get("title") or ""),
        time="not run" if phase["ok"] is None else f"{phase['seconds']:.1f} s{f', {skipped}' if skipped else ''}",
        checks=[_check_result(report, phase, row) for row in (*failing_checks(phase), *passed)],
        memory_failures=list(memory_failures(phase)),
        notes=phase_notes(phase),
    )


def _check_result(report: RobustnessReport, phase: Mapping[str, Any], row: Mapping[str, Any]) -> CheckResult:
    name, is_widened = str(row["name"]), bool(row.get("is_widened"))
    meaning = CHECK_MEANINGS.get(name, "")
    if row["ok"] is False:
        items = list(first_items(differing_items(report, phase, name), _MAX_ITEMS))
        return CheckResult(
            name, check_text(row), meaning, True, is_widened, items, check_cause(report, phase, name) or ""
        )
    if not row["ok"]:
        return CheckResult(name, unchecked_text(row), meaning, False, is_widened)
    result = passed_text(row) if row.get("value") is None else check_text(row)
    return CheckResult(name, result, meaning, False, is_widened)


def _loss_plots(report: RobustnessReport) -> LossPlots | None:
    rows = _drawn_runs(report)
    if not rows:
        return None
    runs = [RunCurve(_run_label(row, rows[0]), index, _points(row)) for index, row in enumerate(rows)]
    noise = noise_text(report, "loss")
    band = NoiseBand(measured_noise(report, "loss"), *_strictest_loss_tolerance(report))
    differences = list(_difference_curves(report, rows, runs))
    drawn = {row["run"] for row in rows}
    omitted = [str(row["run"]) for row in report.losses[1:] if row["steps"] and row["run"] not in drawn]
    return LossPlots(
        lead=f"Noise measured in this run: {noise}." if noise else "Noise was not measured.",
        runs=runs,
        plot=plot_losses(runs),
        differences=differences,
        differences_lead=_differences_lead(differences),
        differences_plot=plot_differences(differences, band),
        band=band,
        note=f"Not drawn: {', '.join(first_items(omitted))}; the --json report has all runs." if omitted else "",
    )


def _drawn_runs(report: RobustnessReport) -> list[Mapping[str, Any]]:
    """Return the entries of `losses` that are drawn, the uninterrupted run first."""
    first, others = report.losses[:1], [row for row in report.losses[1:] if row["steps"]]
    return [*first, *sorted(others, key=_drawing_order)[:_MAX_RUNS]]


def _points(row: Mapping[str, Any]) -> list[tuple[float, float]]:
    return [(float(step), parse_number(loss)) for step, loss in zip(row["steps"], row["losses"], strict=False)]


def _run_label(row: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """Return the name of a run, with its mesh and steps if they differ from the first: `layout-1 (tp 2, steps 4-6)`."""
    steps, mesh = row["steps"], row.get("mesh")
    parts = [mesh] if mesh and mesh != first.get("mesh") else []
    if steps and steps != first["steps"]:
        parts.append(f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}-{steps[-1]}")
    return f"{row['run']} ({', '.join(parts)})" if parts else str(row["run"])


def _drawing_order(row: Mapping[str, Any]) -> int:
    """Return a sort key: resumed runs first, and runs with a perturbed embedding last, as noise is drawn as a band."""
    name = str(row["run"])
    return 0 if name.startswith("resumed") else 2 if name.startswith("perturbed") else 1


def _difference_curves(
    report: RobustnessReport, rows: Sequence[Mapping[str, Any]], runs: Sequence[RunCurve]
) -> Iterator[RunCurve]:
    """Yield the differences of each drawn run from the run that it is compared with, at their common steps.

    The name of a curve has the other run if that is not the uninterrupted one: `layout-1 (tp 2) vs without-dropout`.
    """
    first = str(report.losses[0]["run"])
    losses_by_run = {row["run"]: dict(_points(row)) for row in report.losses}
    for row, run in zip(rows[1:], runs[1:], strict=True):
        compared_with = row.get("compared_with", first)
        reference = losses_by_run.get(compared_with, {})
        points = [
            (step, abs(loss - reference[step]) if isfinite(loss) and isfinite(reference[step]) else nan)
            for step, loss in run.points
            if step in reference
        ]
        if points:
            name = run.name if compared_with == first else f"{run.name} vs {compared_with}"
            yield run._replace(name=name, points=points)


def _differences_lead(runs: Sequence[RunCurve]) -> str:
    equal = [run.name for run in runs if all(difference == 0 for _, difference in run.points)]
    if len(equal) == len(runs):
        return "Bit-identical at every step."
    return f"Bit-identical at every step: {', '.join(equal)}." if equal else "No run is bit-identical at every step."


def _strictest_loss_tolerance(report: RobustnessReport) -> tuple[float | None, str]:
    """Return the strictest tolerance of the loss among the phases that allow any difference, and the phase's name.

    A check whose tolerance is the noise itself is that of the phase that measured the noise; it counts only if there is
    no other. None and "" if there is no tolerance above 0.
    """
    checks = [(phase, row) for phase in report.phases for row in phase.get("checks") or () if row["name"] == "loss"]
    relevant_checks = [(phase, row) for phase, row in checks if row.get("noise_factor") != 1.0] or checks
    limits = [
        (parse_number(row["tolerance"]), phase_name(phase))
        for phase, row in relevant_checks
        if row.get("tolerance") is not None
    ]
    return min((each for each in limits if isfinite(each[0]) and each[0] > 0), default=(None, ""))


def _retained_memory(report: RobustnessReport) -> Iterator[PhaseMemory]:
    rows = [(phase, phase["memory"]) for phase in report.phases if phase.get("memory") and phase["ok"] is not None]
    maxima = {
        key: max(1, *(memory[field] for _, memory in rows for field in (key, f"baseline_{key}")))
        for key in ("tensor_bytes", "threads")
        if rows
    }

    def amount(memory: Mapping[str, int], key: str, format_value: Callable[[int], str]) -> RetainedAmount:
        value, baseline = memory[key], memory[f"baseline_{key}"]
        exceeds_baseline = value > baseline
        text = f"{format_value(value)}{f', baseline {format_value(baseline)}' if exceeds_baseline else ''}"
        return RetainedAmount(text, exceeds_baseline, 100 * value / maxima[key], 100 * baseline / maxima[key])

    for phase, memory in rows:
        yield PhaseMemory(
            phase_name(phase), amount(memory, "tensor_bytes", human_bytes), amount(memory, "threads", str)
        )


def _difference_cells(report: RobustnessReport, row: Mapping[str, Any]) -> list[str | None]:
    phase = next((phase_name(each) for each in report.phases if is_in_phase(row, each)), row.get("phase"))
    cells = [phase, *(row.get(key) for key in ("check", "item", "rank", "reference", "actual"))]
    return [None if cell is None else str(cell) for cell in cells]
