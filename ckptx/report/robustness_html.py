"""The report of `robustness` as one HTML page: verdicts, losses, memory, what differs, and what it ran with.

Nothing in it runs, and it asks for nothing outside of itself. Names of tensors, recipes and trainers are anybody's text
and go through `escape`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, nan
from typing import Any

from ckptx.report.documents.robustness import RobustnessReport
from ckptx.report.numbers import peak_memory_text
from ckptx.report.page import escape, page
from ckptx.report.plots import Band, RunCurve, distances_plot, runs_plot
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

_MARKS = {True: ("ok", "&#10003;", "ok"), False: ("bad", "&#10007;", "failed"), None: ("left", "&ndash;", "not run")}
_STYLES = ("report.css", "robustness.css")
_MOST_ROWS = 400
_MOST_RUNS = 6  # drawn, beside the first
_MOST_FOUND = 12  # items named below an oracle


def robustness_page(report: Report, recipe: str) -> str:
    """The page.

    Args:
        report: Of `robustness`; a plain report is that of a run that could not be judged, and the page says why.
        recipe: As it was asked for.
    """
    if not isinstance(report, RobustnessReport):
        return page(f"{escape(recipe)} - robustness", _STYLES, _failure(report, recipe))
    return page(
        f"{escape(report.recipe)} - robustness",
        _STYLES,
        [
            *_header(report),
            "<main>",
            *_phases(report),
            *_losses(report),
            *_memory(report),
            *_differing(report),
            *_kills(report),
            *_settings(report),
            "</main>",
        ],
    )


def _failure(report: Report, recipe: str) -> Iterator[str]:
    yield "<header><p class=eyebrow>checkpoint robustness</p>"
    yield f"<h1>{escape(recipe)}</h1>"
    yield f'<p class="verdict bad"><b>NOT JUDGED</b> {escape(report.error or "no reason was given")}</p>'
    yield _facts([("exit", str(report.exit)), ("time", f"{report.seconds:.1f} s")])
    yield "</header><main>"
    yield from _notes(report.warnings)
    yield "</main>"


def _header(report: RobustnessReport) -> Iterator[str]:
    word, _, said = verdict(report).partition(": ")
    yield "<header><p class=eyebrow>checkpoint robustness</p>"
    yield f"<h1>{escape(report.recipe)}</h1>"
    yield f'<p class="verdict {"ok" if report.ok else "bad"}"><b>{word}</b> {escape(said)}</p>'
    cause = cause_text(report)
    if cause is not None:
        yield f'<p class="verdict bad"><b>CAUSE</b> {escape(cause.partition(": ")[2])}</p>'
    for phase, row in widened(report):
        yield f'<p class="verdict bad"><b>WIDENED</b> by the recipe: {escape(widened_text(phase, row))}</p>'
    facts = [
        ("mesh", mesh(report)),
        ("trainer", report.trainer),
        ("time", f"{report.seconds:.1f} s"),
        peak_memory_text(report),
        *(("planted fault", each) for each in [report.injected] if each),
    ]
    yield _facts([(term, escape(value)) for term, value in facts])
    yield "</header>"


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    """Terms with values, both already escaped."""
    return f"<dl>{''.join(f'<div><dt>{term}</dt><dd>{value}</dd></div>' for term, value in facts)}</dl>"


def _phases(report: RobustnessReport) -> Iterator[str]:
    yield '<section aria-labelledby="phases"><h2 id="phases">Phases</h2>'
    if not report.phases:
        yield "<p class=lead>No phase was run.</p></section>"
        return
    failed = sum(phase["ok"] is False for phase in report.phases)
    left = sum(phase["ok"] is None for phase in report.phases)
    parts = [f"{len(report.phases) - failed - left} passed", f"{failed} failed", f"{left} not run"]
    said = ", ".join(part for part in parts if not part.startswith("0 "))
    yield f"<p class=lead>{said}. Exact oracles judge, loss confirms.</p>"
    for phase in report.phases:
        yield from _phase(report, phase)
    yield "</section>"


def _phase(report: RobustnessReport, phase: Mapping[str, Any]) -> Iterator[str]:
    kind, mark, said = _MARKS[phase["ok"]]
    notes = notes_of(phase)
    took = "" if phase["ok"] is None else f"{phase['seconds']:.1f} s"
    yield f'<article class="phase {kind}">'
    yield f'<h3><b class=mark title="{said}" role="img" aria-label="{said}">{mark}</b>{escape(called(phase))}'
    yield f"<span>{took or said}</span></h3>"
    if phase.get("title"):
        yield f"<p class=title>{escape(str(phase['title']))}</p>"
    failing = failing_oracles(phase)
    good = [row for row in phase.get("oracles") or () if row["ok"] is not False]
    if failing or good:
        yield "<ul class=oracles>"
        for row in (*failing, *good):
            yield from _oracle(report, phase, row)
        yield "</ul>"
    for fault in memory_faults(phase):
        yield f"<p class=red>memory: {escape(fault)}</p>"
    for note in notes:
        yield f"<p class=note>{escape(note)}</p>"
    yield "</article>"


def _oracle(report: RobustnessReport, phase: Mapping[str, Any], row: Mapping[str, Any]) -> Iterator[str]:
    name = str(row["name"])
    wide = ' <b class="red">widened</b>' if row.get("widened") else ""
    if row["ok"] is not False:
        said = f"{row['compared']:,} alike" if row.get("value") is None else oracle_text(row)
        said = said if row["ok"] else unchecked_text(row)
        yield f"<li><b>{escape(name)}</b> <span>{escape(said)}</span>{wide}</li>"
        return
    yield f"<li class=bad><b>{escape(name)}</b> <span>{escape(oracle_text(row))}</span>{wide}"
    items = some(items_of(report, phase, name), _MOST_FOUND)
    if items:
        yield f"<ul class=items>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"
    cause = cause_of(report, phase, name)
    if cause is not None:
        yield f"<p>{escape(cause)}</p>"
    yield "</li>"


def _losses(report: RobustnessReport) -> Iterator[str]:
    runs = _runs(report)
    if not runs:
        return
    first, others = runs[0], runs[1:]
    yield '<section aria-labelledby="losses"><h2 id="losses">Loss</h2>'
    noise = noise_text(report, "loss")
    lead = f"Noise, as measured in this run: {noise}." if noise else "No noise was measured."
    yield f"<p class=lead>{escape(lead)}</p>"
    yield from _legend(runs)
    yield from runs_plot(runs)
    apart = [_apart(first, run) for run in others]
    apart = [run for run in apart if run.points]
    if apart:
        band = Band(noise_of(report, "loss"), _limit(report))
        yield f"<h3>Distance from {escape(first.name)}</h3>"
        yield f"<p class=lead>{escape(_apart_text(apart))}</p>"
        yield from _legend(apart, band)
        yield from distances_plot(apart, band)
    left = len(report.losses) - len(runs)
    if left > 0:
        yield f"<p class=note>{counted(left, 'more run')} in the document of --json.</p>"
    yield "</section>"


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
    """Resumed runs are drawn if any are; those with a moved embedding are what noise is, which is drawn as a band."""
    name = str(row["run"])
    return 0 if name.startswith("resumed") else 2 if name.startswith("moved") else 1


def _apart(first: RunCurve, run: RunCurve) -> RunCurve:
    known = dict(first.points)
    return run._replace(
        points=[
            (step, abs(number - known[step]) if isfinite(number) and isfinite(known[step]) else nan)
            for step, number in run.points
            if step in known
        ]
    )


def _apart_text(runs: Sequence[RunCurve]) -> str:
    equal = [run.name for run in runs if all(distance == 0 for _, distance in run.points)]
    if len(equal) == len(runs):
        return "Bit-equal at every step."
    return f"Bit-equal at every step: {', '.join(equal)}." if equal else "No run is bit-equal at every step."


def _limit(report: RobustnessReport) -> float | None:
    """The strictest that a phase allows of the loss where it allows any difference.

    A row whose limit is the noise itself is where the noise was measured; it allows nothing.
    """
    rows = [row for phase in report.phases for row in phase.get("oracles") or () if row["name"] == "loss"]
    judged = [row for row in rows if row.get("times_noise") != 1.0] or rows
    limits = [number_of(row["limit"]) for row in judged if row.get("limit") is not None]
    return min((limit for limit in limits if isfinite(limit) and limit > 0), default=None)


def _legend(runs: Sequence[RunCurve], band: Band | None = None) -> Iterator[str]:
    named = [f'<span><i class="c{run.color}"></i>{escape(run.name)}</span>' for run in runs]
    if band is not None:
        named += [
            f'<span><i class="{kind}"></i>{said} {value:.3g}</span>'
            for kind, said, value in (("noise", "noise", band.noise), ("limit", "allowed", band.limit))
            if value is not None
        ]
    yield f"<p class=legend>{''.join(named)}</p>"


def _memory(report: RobustnessReport) -> Iterator[str]:
    rows = [(phase, phase["memory"]) for phase in report.phases if phase.get("memory") and phase["ok"] is not None]
    if not rows:
        return
    most = {
        key: max(1, *(max(memory[key], memory[f"baseline_{key}"]) for _, memory in rows))
        for key in ("tensor_bytes", "threads")
    }
    yield '<section aria-labelledby="memory"><h2 id="memory">Memory and threads</h2>'
    yield "<p class=lead>What the rank with the most still holds after each phase was released; the stroke is the "
    yield "baseline.</p><table class=bars>"
    yield "<thead><tr><th>phase</th><th>live tensors</th><th>threads</th></tr></thead><tbody>"
    for phase, memory in rows:
        cells = [
            _bar(memory["tensor_bytes"], memory["baseline_tensor_bytes"], most["tensor_bytes"], human_bytes),
            _bar(memory["threads"], memory["baseline_threads"], most["threads"], str),
        ]
        yield f"<tr><td>{escape(called(phase))}</td>{''.join(cells)}</tr>"
    yield "</tbody></table>"
    said = step_memory_text(report)
    if said is not None:
        yield f"<p>Tensors of one step, on the rank with the most: {escape(said)}.</p>"
    yield "</section>"


def _bar(value: int, baseline: int, most: int, said: Any) -> str:
    is_over = value > baseline
    words = f"{said(value)}{f', {said(baseline)} before' if is_over else ''}"
    return (
        f"<td{' class=bad' if is_over else ''}><span>{escape(words)}</span><div class=bar>"
        f'<i style="width:{100 * value / most:.2f}%"></i><u style="left:{100 * baseline / most:.2f}%"></u></div></td>'
    )


def _differing(report: RobustnessReport) -> Iterator[str]:
    rows = report.differing
    if not rows:
        return
    yield '<section aria-labelledby="differing"><h2 id="differing">What differs</h2>'
    yield f"<p class=lead>{counted(len(rows), 'difference')}, one for each item and rank.</p>"
    yield "<div class=scroll><table><thead><tr>"
    yield "".join(f"<th>{term}</th>" for term in ("phase", "oracle", "item", "rank", "should be", "is"))
    yield "</tr></thead><tbody>"
    for row in rows[:_MOST_ROWS]:
        phase = next((called(each) for each in report.phases if is_of(row, each)), row.get("phase"))
        cells = [phase, row.get("oracle"), row.get("item"), row.get("rank")]
        cells += [row.get("reference"), row.get("found")]
        yield f"<tr>{''.join(f'<td>{_cell(cell)}</td>' for cell in cells)}</tr>"
    yield "</tbody></table></div>"
    if len(rows) > _MOST_ROWS:
        yield f"<p class=note>{counted(len(rows) - _MOST_ROWS, 'more difference')} in the document of --json.</p>"
    yield "</section>"


def _cell(value: object) -> str:
    return "&ndash;" if value is None else escape(str(value))


def _kills(report: RobustnessReport) -> Iterator[str]:
    kills = report.kills or ()
    if not kills:
        return
    good = sum(1 for row in kills if row["ok"])
    yield '<section aria-labelledby="kills"><h2 id="kills">Killed while saving</h2>'
    yield f"<p class=lead>{counted(len(kills), 'time')}; {good:,} left the last good step and nothing else.</p>"
    yield "<ul class=kills>"
    for row in kills[:_MOST_ROWS]:
        kind, mark, said = _MARKS[bool(row["ok"])]
        yield f'<li class="{kind}"><b class=mark role="img" aria-label="{said}">{mark}</b>{escape(kill_text(row))}</li>'
    yield "</ul></section>"


def _settings(report: RobustnessReport) -> Iterator[str]:
    yield '<section aria-labelledby="settings"><h2 id="settings">Settings and environment</h2><div class=pairs>'
    settings = [
        ("recipe", report.recipe_file),
        ("written to", report.out or "a temporary folder, removed"),
        *report.settings.items(),
    ]
    for title, rows in (("Settings", settings), ("Environment", list(report.environment.items()))):
        if rows:
            pairs = "".join(f"<tr><th>{escape(str(key))}</th><td>{escape(str(said))}</td></tr>" for key, said in rows)
            yield f"<div><h3>{title}</h3><table>{pairs}</table></div>"
    yield "</div>"
    yield from _notes(report.warnings)
    yield "</section>"


def _notes(notes: Sequence[str]) -> Iterator[str]:
    for note in notes:
        yield f"<p class=note>{escape(note)}</p>"
