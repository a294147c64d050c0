"""The report of `forecast` as one HTML page: the memory of a step over its course, and what it is at its peak.

Nothing in it runs, and it asks for nothing outside of itself. Names of modules and of models are anybody's text and go
through `escape`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckptx.report.area_plot import Area, Scale, StepPart, area_plot, slots_of
from ckptx.report.documents.forecast import ForecastReport
from ckptx.report.forecast_words import (
    called,
    flops_text,
    mesh,
    moment_text,
    pass_text,
    place_text,
    rows_text,
    sent_text,
    settings_text,
    tensor_text,
    verdict,
    worst_of,
)
from ckptx.report.page import escape, page
from ckptx.report.report import Report, counted, human_bytes

_STYLES = ("report.css", "forecast.css")
# From below to above, what lives long first; with the colour of each.
_STACKED = {
    "parameters": 0, "optimizer": 5, "gradients": 2, "gathered": 3, "activations": 1, "carried": 6, "temporaries": 4,
}  # fmt: skip


def forecast_page(report: Report, subject: str) -> str:
    """The page.

    Args:
        report: Of `forecast`; a plain report is that of a step that could not be forecast, and the page says why.
        subject: The model, as it was asked for.
    """
    if not isinstance(report, ForecastReport):
        return page(f"{escape(subject)} - forecast", _STYLES, _failure(report, subject))
    body = [*_header(report, subject), "<main>", *_stages(report), *_assumptions(report), "</main>"]
    return page(f"{escape(report.architecture)} - forecast", _STYLES, body)


def _failure(report: Report, subject: str) -> Iterator[str]:
    yield "<header><p class=eyebrow>memory of a training step</p>"
    yield f"<h1>{escape(subject)}</h1>"
    yield f'<p class="verdict bad"><b>NOT FORECAST</b> {escape(report.error or "no reason was given")}</p>'
    yield "</header><main>"
    yield from _notes(report.warnings)
    yield "</main>"


def _header(report: ForecastReport, subject: str) -> Iterator[str]:
    word, _, said = verdict(report).partition(": ")
    kind = {True: "ok", False: "bad", None: "known"}[report.fits]
    yield "<header><p class=eyebrow>memory of a training step</p>"
    yield f"<h1>{escape(report.architecture)}</h1><p class=path>{escape(subject)}</p>"
    yield f'<p class="verdict {kind}"><b>{word}</b> {escape(said)}</p>'
    facts = [
        ("mesh", mesh(report)),
        ("a step of each data rank", rows_text(report)),
        ("parameters", f"{report.parameters:,}"),
        ("all ranks", flops_text(report)),
        ("settings", settings_text(report)),
    ]
    yield f"<dl>{''.join(f'<div><dt>{term}</dt><dd>{escape(value)}</dd></div>' for term, value in facts)}</dl>"
    yield "</header>"


def _stages(report: ForecastReport) -> Iterator[str]:
    scale = Scale.of(int(worst_of(report)["peak"]), report.gpu_memory, report.reserved)
    for number, row in enumerate(report.by_stage):
        yield f'<section aria-labelledby="stage{number}">'
        yield from _heading(report, row, number)
        yield from _chart(report, row, scale)
        yield "<div class=under>"
        yield from _kinds(report, row)
        yield from _largest(row)
        yield "</div></section>"
    if report.gpu_memory is not None and scale.memory is None:
        yield f"<p class=note>GPU memory, {human_bytes(report.gpu_memory)}, is far above what is drawn.</p>"


def _heading(report: ForecastReport, row: Mapping[str, Any], number: int) -> Iterator[str]:
    yield f'<h2 id="stage{number}">{escape(called(report, row).capitalize())}</h2>'
    said = [f"{human_bytes(row['between_steps'])} between steps", flops_text(row)]
    if row["wrapped_layers"]:
        said.append(f"{counted(row['wrapped_layers'], 'layer')} checkpointed")
    if row["sent"]:
        said.append(sent_text(row))
    peak = f"peak {human_bytes(row['peak'])}"
    peak = f"<b{' class=red' if row['fits'] is False else ''}>{peak}</b>"
    yield f"<p class=lead>{peak}, {escape(', '.join(said))}</p>"


def _chart(report: ForecastReport, row: Mapping[str, Any], scale: Scale) -> Iterator[str]:
    slots = slots_of(row["course"])
    if not slots:
        return
    kinds = list(report.kinds)

    def said(slot: StepPart) -> str:
        parts = [f"{kind} {human_bytes(size)}" for kind, size in zip(kinds, slot.sizes, strict=True) if size]
        place = pass_text(report, slot.part, slot.turn)
        return f"{place}, {slot.unit or 'around the layers'}: {human_bytes(sum(slot.sizes))}: {', '.join(parts)}"

    def names(part: str, turn: int) -> Sequence[str]:
        letter = part[0].upper()
        if part not in ("forward", "backward") or report.settings["microbatches"] == 1:
            return [pass_text(report, part, turn), "inputs" if part == "build" else part, letter]
        return [pass_text(report, part, turn), f"{part} {turn}", f"{letter}{turn}"]

    peak = f"peak {human_bytes(row['peak'])}"
    if row["at"] is not None:
        peak = f"{peak}: {moment_text(report, row['at'])}"
    order = [kind for kind in _STACKED if kind in kinds]
    areas = [Area(kinds.index(kind), _STACKED[kind]) for kind in order]
    yield from area_plot(slots, areas, scale, peak=peak, said=said, pass_names=names)


def _kinds(report: ForecastReport, row: Mapping[str, Any]) -> Iterator[str]:
    """Also the legend of the drawing, from above to below as there."""
    yield "<table class=kinds><thead><tr><th>bytes</th><th>at the peak</th><th>between steps</th></tr></thead><tbody>"
    drawn = zip(*(each[3:] for each in row["course"]), strict=True)
    has = {kind for kind, sizes in zip(report.kinds, drawn, strict=True) if any(sizes)}
    for kind in (each for each in reversed(_STACKED) if each in has):
        numbers = (human_bytes(row[key][kind]) for key in ("by_kind", "between_by_kind"))
        cells = "".join(f"<td>{each}</td>" for each in numbers)
        yield f'<tr><td><i class="c{_STACKED[kind]}"></i>{kind}</td>{cells}</tr>'
    yield f"<tr><th>sum</th><td>{human_bytes(row['peak'])}</td><td>{human_bytes(row['between_steps'])}</td></tr>"
    yield "</tbody></table>"


def _largest(row: Mapping[str, Any]) -> Iterator[str]:
    yield "<div class=scroll><table><thead><tr>"
    yield "".join(f"<th>{term}</th>" for term in ("largest at the peak", "kind", "tensor", "made by", "where"))
    yield "</tr></thead><tbody>"
    for each in row["largest"]:
        cells = [human_bytes(each["nbytes"]), each["kind"], tensor_text(each), each["op"], place_text(each["module"])]
        yield f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in cells)}</tr>"
    yield "</tbody></table></div>"


def _assumptions(report: ForecastReport) -> Iterator[str]:
    yield '<section aria-labelledby="assumed"><h2 id="assumed">What the numbers assume</h2>'
    yield f"<ul class=assumed>{''.join(f'<li>{escape(each)}</li>' for each in report.assumptions)}</ul>"
    yield from _notes(report.warnings)
    yield "</section>"


def _notes(notes: Sequence[str]) -> Iterator[str]:
    for note in notes:
        yield f"<p class=note>{escape(note)}</p>"
