"""The report of `forecast` as one HTML page: the memory of a step over its course, and what it is at its peak.

This module says what the page shows, in rows; `templates/forecast.html` says how. Nothing in the page runs, and it asks
for nothing outside of itself. Names of modules and of models are anybody's text; the template escapes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from ckptx.report.page import page
from ckptx.report.plots import Plot
from ckptx.report.report import Report, counted, human_bytes

_STYLES = ("report.css", "forecast.css")
# From below to above, what lives long first; with the colour of each.
_STACKED = {
    "parameters": 0, "optimizer": 5, "gradients": 2, "gathered": 3, "activations": 1, "carried": 6, "temporaries": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ForecastHeading:
    """The head of the page.

    Attributes:
        title: The class of the model.
        path: The model as it was asked for; "" where the title says it.
        kind: "ok", "bad", or "known" where no GPU memory was given.
        word: FITS, DOES NOT FIT, ...
        said: The rest of the verdict.
        facts: Terms with values.
    """

    title: str
    path: str
    kind: str
    word: str
    said: str
    facts: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class MemoryKind:
    """A kind of tensors: its bytes at the peak and between steps, and its color in the drawing."""

    name: str
    color: int
    at_peak: int
    between_steps: int


@dataclass(frozen=True, slots=True)
class LargeTensor:
    """A tensor at the peak.

    Attributes:
        nbytes: Its size.
        kind: Its kind.
        said: Its shape and dtype.
        op: The operation that made it.
        place: The module it belongs to.
    """

    nbytes: int
    kind: str
    said: str
    op: str
    place: str


@dataclass(frozen=True, slots=True)
class StageRow:
    """A pipeline stage.

    Attributes:
        title: Its name.
        peak: Bytes at the peak.
        between_steps: Bytes between steps.
        is_too_large: Whether it does not fit.
        facts: What else is known, in words.
        plot: Its memory over a step; None where nothing was recorded.
        kinds: Kinds of tensors in the order of the drawing.
        largest: The largest tensors at the peak.
    """

    title: str
    peak: int
    between_steps: int
    is_too_large: bool
    facts: str
    plot: Plot | None
    kinds: Sequence[MemoryKind]
    largest: Sequence[LargeTensor]


def forecast_page(report: Report, subject: str) -> str:
    """Return the page.

    Args:
        report: The report of `forecast`; a plain report is that of a step that could not be forecast, and the page says
            why.
        subject: The model as it was asked for.
    """
    stages: Sequence[StageRow] = ()
    assumptions: Sequence[str] | None = None
    note = ""
    if isinstance(report, ForecastReport):
        scale = Scale.of(int(worst_of(report)["peak"]), report.gpu_memory, report.reserved)
        heading, assumptions = _heading(report, subject), report.assumptions
        stages = [_stage(report, row, scale) for row in report.by_stage]
        if report.gpu_memory is not None and scale.memory is None:
            note = f"GPU memory, {human_bytes(report.gpu_memory)}, is far above what is drawn."
    else:
        heading = ForecastHeading(subject, "", "bad", "NOT FORECAST", report.error or "no reason was given", [])
    return page(
        "forecast.html",
        f"{heading.title} - forecast",
        _STYLES,
        heading=heading,
        stages=stages,
        note=note,
        assumptions=assumptions,
        warnings=report.warnings,
    )


def _heading(report: ForecastReport, subject: str) -> ForecastHeading:
    word, _, said = verdict(report).partition(": ")
    facts = [
        ("mesh", mesh(report)),
        ("per data-parallel rank", rows_text(report)),
        ("parameters", f"{report.parameters:,}"),
        ("all ranks", flops_text(report)),
        ("settings", settings_text(report)),
    ]
    kind = {True: "ok", False: "bad", None: "known"}[report.fits]
    return ForecastHeading(report.architecture, subject, kind, word, said, facts)


def _stage(report: ForecastReport, row: Mapping[str, Any], scale: Scale) -> StageRow:
    facts = [f"{human_bytes(row['between_steps'])} between steps", flops_text(row)]
    if row["wrapped_layers"]:
        facts.append(f"{counted(row['wrapped_layers'], 'layer')} checkpointed")
    if row["sent"]:
        facts.append(sent_text(row))
    drawn = zip(*(each[3:] for each in row["course"]), strict=True)
    has = {kind for kind, sizes in zip(report.kinds, drawn, strict=True) if any(sizes)}
    return StageRow(
        title=called(report, row).capitalize(),
        peak=row["peak"],
        between_steps=row["between_steps"],
        is_too_large=row["fits"] is False,
        facts=", ".join(facts),
        plot=_chart(report, row, scale),
        kinds=[
            MemoryKind(kind, _STACKED[kind], row["by_kind"][kind], row["between_by_kind"][kind])
            for kind in reversed(_STACKED)
            if kind in has
        ],
        largest=[
            LargeTensor(
                each["nbytes"], str(each["kind"]), tensor_text(each), str(each["op"]), place_text(each["module"])
            )
            for each in row["largest"]
        ],
    )


def _chart(report: ForecastReport, row: Mapping[str, Any], scale: Scale) -> Plot | None:
    slots = slots_of(row["course"])
    if not slots:
        return None
    kinds = list(report.kinds)

    def said(slot: StepPart) -> str:
        parts = [f"{kind} {human_bytes(size)}" for kind, size in zip(kinds, slot.sizes, strict=True) if size]
        place = pass_text(report, slot.part, slot.turn)
        return f"{place}, {slot.unit or 'outside layers'}: {human_bytes(sum(slot.sizes))}: {', '.join(parts)}"

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
    return area_plot(slots, areas, scale, peak=peak, said=said, pass_names=names)
