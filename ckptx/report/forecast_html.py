"""HTML page of `forecast`: memory over one training step, and the largest tensors at the peak of memory.

This module computes the content; `templates/forecast.html` is the markup. The page has no scripts and loads nothing.
Names of modules and models are untrusted; the template escapes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ckptx.report.area_plot import Area, Scale, Slot, area_plot, make_slots
from ckptx.report.documents.forecast import ForecastReport
from ckptx.report.forecast_phrases import (
    batch_text,
    communication_text,
    flops_text,
    highest_peak_entry,
    kind_text,
    mesh_text,
    other_precision_text,
    pass_text,
    peak_time_text,
    place_text,
    present_kinds,
    settings_text,
    stages_text,
    tensor_text,
    verdict,
)
from ckptx.report.page import render_page
from ckptx.report.plots import Plot
from ckptx.report.report import Report, counted, human_bytes

_STYLES = ("report.css", "forecast.css")
_AXIS_NOTE = (
    "The height is the highest memory within a part of the step. Parts are shown in order, not by their duration; "
    "backward passes are shaded. In short "
    "labels, I stands for the inputs of the step, F for forward, B for backward, C for gradient clipping and O for the "
    "optimizer step."
)
# Kind of memory -> number of its color in report.css, from the bottom of the plot to its top, longest-lived first.
_COLOR_BY_KIND = {
    "parameters": 0, "optimizer": 5, "gradients": 2, "gathered": 3, "activations": 1, "pipeline_p2p": 6,
    "temporaries": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ForecastHeading:
    """The head of the page.

    Attributes:
        title: Architecture class of the model; for a failed run, the model or recipe as given to the command.
        model: Model or recipe as given to the command; "" if it is the title.
        css_class: CSS class of the verdict: "ok"; "bad", also for an error; or "known" if no GPU memory was given.
        word: First word of the verdict: FITS, DOES NOT FIT, PEAK or ERROR.
        text: Rest of the verdict.
        facts: Pairs of term and value.
    """

    title: str
    model: str
    css_class: str
    word: str
    text: str
    facts: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class MemoryKind:
    """Memory of one kind of tensor, such as "activations".

    Attributes:
        name: Name of the kind.
        color: Number of its color in report.css.
        at_peak: Bytes at the peak.
        between_steps: Bytes between steps.
    """

    name: str
    color: int
    at_peak: int
    between_steps: int


@dataclass(frozen=True, slots=True)
class LargeTensor:
    """A tensor that is allocated at the peak.

    Attributes:
        nbytes: Size in bytes.
        kind: Kind of tensor, such as "activations".
        text: Dtype and shape, in words.
        op: Operation that allocated it.
        module: Module that allocated it, in words: "in lm_head", "in the loss", or "outside modules"; of a parameter or
            its optimizer state, the name of the parameter: "of lm_head.weight".
    """

    nbytes: int
    kind: str
    text: str
    op: str
    module: str


@dataclass(frozen=True, slots=True)
class StageSection:
    """Memory of a pipeline rank, which runs one or more stages.

    Attributes:
        title: Names of its stages; "Each rank" without a pipeline.
        peak: Bytes at the peak.
        between_steps: Bytes between steps.
        is_too_large: True if it does not fit in GPU memory.
        facts: Memory between steps, FLOPs, and, if there are any, checkpointed layers and communication, in words.
        plot: Memory over one step; None if no step was recorded.
        kinds: Kinds of tensors, top of the plot first.
        largest_tensors: Largest tensors at the peak.
    """

    title: str
    peak: int
    between_steps: int
    is_too_large: bool
    facts: str
    plot: Plot | None
    kinds: Sequence[MemoryKind]
    largest_tensors: Sequence[LargeTensor]


def forecast_page(report: Report, model: str) -> str:
    """Return the page.

    Args:
        report: Report of `forecast`; a plain `Report` is that of a failed run, and the page shows its error.
        model: Model or recipe as given to the command.
    """
    stages: Sequence[StageSection] = ()
    assumptions: Sequence[str] | None = None
    note = ""
    if isinstance(report, ForecastReport):
        scale = Scale.fit(int(highest_peak_entry(report)["peak"]), report.gpu_memory, report.reserved)
        heading, assumptions = _heading(report, model), report.assumptions
        stages = [_stage_section(report, row, scale) for row in report.by_pipeline_rank]
        note = _AXIS_NOTE
        if report.gpu_memory is not None and scale.gpu_memory is None:
            note += f" GPU memory ({human_bytes(report.gpu_memory)}) is above the range of the plot."
    else:
        heading = ForecastHeading(model, "", "bad", "ERROR", report.error or "unknown error", [])
    return render_page(
        "forecast.html",
        f"{heading.title} - forecast",
        _STYLES,
        heading=heading,
        stages=stages,
        note=note,
        assumptions=assumptions,
        notes=report.notes,
    )


def _heading(report: ForecastReport, model: str) -> ForecastHeading:
    word, _, text = verdict(report).partition(": ")
    facts = [
        ("mesh", mesh_text(report)),
        ("per data-parallel rank", batch_text(report)),
        ("parameters", f"{report.parameters:,}"),
        ("all ranks", flops_text(report)),
        ("settings", settings_text(report)),
    ]
    if other := other_precision_text(report):
        facts.append(("other precision", other))
    css_class = {True: "ok", False: "bad", None: "known"}[report.fits]
    return ForecastHeading(report.architecture, model, css_class, word, text, facts)


def _stage_section(report: ForecastReport, row: Mapping[str, Any], scale: Scale) -> StageSection:
    facts = [f"{human_bytes(row['between_steps'])} between steps", f"per rank: {flops_text(row)}"]
    if row["checkpointed_layers"]:
        facts.append(f"{counted(row['checkpointed_layers'], 'layer')} checkpointed")
    if row["sent_bytes"]:
        facts.append(communication_text(row))
    present = present_kinds(report, row)
    return StageSection(
        title=stages_text(report, row).capitalize(),
        peak=row["peak"],
        between_steps=row["between_steps"],
        is_too_large=row["fits"] is False,
        facts="; ".join(facts),
        plot=_memory_plot(report, row, scale),
        kinds=[
            MemoryKind(kind_text(kind), _COLOR_BY_KIND[kind], row["by_kind"][kind], row["between_steps_by_kind"][kind])
            for kind in reversed(_COLOR_BY_KIND)
            if kind in present
        ],
        largest_tensors=[
            LargeTensor(
                each["bytes"],
                kind_text(str(each["kind"])),
                tensor_text(each),
                str(each["op"]),
                place_text(each),
            )
            for each in row["largest_tensors"]
        ],
    )


def _slot_places(slots: Sequence[Slot], has_first_stage: bool, has_last_stage: bool) -> Iterator[str]:
    """Yield where each slot is in its pass: `, layers.0` or `, before the layers (embedding)`.

    Yield "" for each slot of a pass without layers. In a forward pass, the embedding runs before the layers, and the
    final norm, head and loss after them; in a backward pass, it is the reverse.

    Args:
        slots: Slots of a rank, see `area_plot.Slot`.
        has_first_stage: True if all passes of the rank are those of the first stage, which has the embedding.
        has_last_stage: True if all passes of the rank are those of the last stage, which has the head and the loss.
    """
    embedding, head = " (embedding)" if has_first_stage else "", " (head, loss)" if has_last_stage else ""
    for (phase, _), group in groupby(slots, key=lambda slot: (slot.phase, slot.microbatch)):
        slots_of_pass = list(group)
        indices = [index for index, slot in enumerate(slots_of_pass) if slot.layer]
        for index, slot in enumerate(slots_of_pass):
            if slot.layer or not indices:
                yield f", {slot.layer}" if slot.layer else ""
            else:
                side = "before" if index < indices[0] else "after" if index > indices[-1] else "between"
                content = {
                    ("forward", "before"): embedding,
                    ("forward", "after"): head,
                    ("backward", "before"): head,
                    ("backward", "after"): embedding,
                }.get((phase, side), "")
                yield f", {side} the layers{content}"


def _memory_plot(report: ForecastReport, row: Mapping[str, Any], scale: Scale) -> Plot | None:
    slots = make_slots(row["timeline"])
    if not slots:
        return None
    kinds = list(report.memory_kinds)
    # The timeline does not record the stage of a pass, so it is known only if the rank has one stage.
    stages = list(row["stages"])
    first, last = stages == [0], stages == [report.layout["pp"] - 1]
    # By id, because two slots of a step can be equal.
    places = {id(slot): place for slot, place in zip(slots, _slot_places(slots, first, last), strict=True)}

    def slot_text(slot: Slot) -> str:
        parts = [
            f"{kind_text(kind)} {human_bytes(size)}"
            for kind, size in zip(kinds, slot.bytes_by_kind, strict=True)
            if size
        ]
        pass_name = pass_text(report, slot.phase, slot.microbatch)
        return f"{pass_name}{places[id(slot)]}: {human_bytes(sum(slot.bytes_by_kind))}: {', '.join(parts)}"

    def pass_names(phase: str, microbatch: int) -> Sequence[str]:
        letter = "I" if phase == "build" else phase[0].upper()
        if phase not in ("forward", "backward") or report.settings["microbatches"] == 1:
            return [pass_text(report, phase, microbatch), "inputs" if phase == "build" else phase, letter]
        return [pass_text(report, phase, microbatch), f"{phase} {microbatch}", f"{letter}{microbatch}"]

    peak_label = f"peak {human_bytes(row['peak'])}"
    if row["peak_tensor"] is not None:
        peak_label = f"{peak_label}: {peak_time_text(report, row['peak_tensor'])}"
    stacked_kinds = [kind for kind in _COLOR_BY_KIND if kind in kinds]
    areas = [Area(kinds.index(kind), _COLOR_BY_KIND[kind]) for kind in stacked_kinds]
    return area_plot(slots, areas, scale, peak_label=peak_label, slot_text=slot_text, pass_names=pass_names)
