"""Plot of memory over one training step as inline SVG: stacked areas by kind of memory, with the peak marked.

Kinds are weights, gradients, activations and so on. Time is unknown, so all slots have the same width. A slot is one
layer in one forward or backward pass, or the work outside the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from markupsafe import Markup

from ckptx.report.plots import HEIGHT, WIDTH, Label, Plot, Tick, svg_path, svg_rect
from ckptx.report.report import human_bytes
from ckptx.untrusted.printable import one_line

_MAX_SLOTS = 600  # slots that are drawn, about
_PEAK_HEADROOM = 1.22  # upper edge / peak, with room for a label above the peak
_GPU_MEMORY_HEADROOM = 1.17  # upper edge / GPU memory
_MAX_GPU_MEMORY_RATIO = 2.5  # GPU memory is drawn up to this multiple of the peak
_MAX_TICKS = 6  # labels on the vertical axis, without that of 0
_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
# Possible distances between ticks, in the unit of their labels.
_TICK_STEPS = (0.2, 0.25, 0.5, 1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 10000)
_LETTER_WIDTH_PERCENT = 0.72  # width of a letter of a label, in percent of the plot width


class Slot(NamedTuple):
    """A part of a step, drawn with the same width as all other slots of the plot.

    Attributes:
        phase: "build" (inputs), "forward", "backward", "clipping" or "optimizer".
        microbatch: Index of the microbatch, in a forward or backward pass.
        layer: Name of the layer; "" for work outside layers.
        bytes_by_kind: Bytes by kind of memory, at the time when their sum is largest.
    """

    phase: str
    microbatch: int
    layer: str
    bytes_by_kind: tuple[int, ...]


class Area(NamedTuple):
    """One stacked area of the plot.

    Attributes:
        kind_index: Index of the kind of memory in `Slot.bytes_by_kind`.
        color: Number of its color in report.css.
    """

    kind_index: int
    color: int


class Scale(NamedTuple):
    """Vertical scale, shared by the plots of one page.

    Attributes:
        top: Bytes at the upper edge.
        gpu_memory: GPU memory in bytes; None if it was not given, or is above the range of the plot.
        reserved: Bytes of GPU memory reserved for allocations other than tensors.
    """

    top: float
    gpu_memory: int | None
    reserved: int

    @classmethod
    def fit(cls, peak: int, gpu_memory: int | None, reserved: int) -> Scale:
        """Return a scale that fits the highest peak and, up to 2.5 times the peak, the GPU memory.

        Args:
            peak: Highest peak in bytes.
            gpu_memory: GPU memory in bytes; None if it was not given.
            reserved: Bytes of GPU memory reserved for allocations other than tensors.
        """
        top = max(1, peak) * _PEAK_HEADROOM
        if gpu_memory is None or gpu_memory > _MAX_GPU_MEMORY_RATIO * peak:
            return cls(top, None, reserved)
        return cls(max(top, gpu_memory * _GPU_MEMORY_HEADROOM), gpu_memory, reserved)

    def y(self, size: float) -> float:
        """Return the distance of a size from the upper edge, in units of the drawing."""
        return HEIGHT * (1 - size / self.top)

    def ticks(self) -> list[Tick]:
        """Return tick marks at round sizes."""
        unit, name = next((each for each in _UNITS if self.top >= each[0]), (1, "B"))
        largest = self.top / unit
        step = next((each for each in _TICK_STEPS if largest / each <= _MAX_TICKS), largest)
        numbers = [step * index for index in range(1, int(largest / step) + 1)]
        return [Tick(self.y(0), "0"), *(Tick(self.y(each * unit), f"{each:g} {name}") for each in numbers)]


def make_slots(timeline: Sequence[Sequence[Any]]) -> list[Slot]:
    """Return a slot for each layer of each pass, at most about `_MAX_SLOTS`.

    Work between two layers of a pass is part of the slot of the first of them.

    Args:
        timeline: `timeline` of the report: phase, microbatch, layer and the bytes by kind of each part of the step.
    """
    slots = [Slot(phase, microbatch, layer, tuple(sizes)) for phase, microbatch, layer, *sizes in timeline]
    return _downsample(_merge_gaps(slots))


def _total_bytes(slot: Slot) -> int:
    return sum(slot.bytes_by_kind)


def _merge_gaps(slots: Sequence[Slot]) -> list[Slot]:
    """Merge work between two layers of a pass, and further slots of the same layer, into the slot of the first layer.

    A merged slot has the bytes of the largest one.
    """
    merged: list[Slot] = []
    for _, slots_of_pass in groupby(slots, key=lambda slot: slot[:2]):  # by phase and microbatch
        pass_slots = list(slots_of_pass)
        last_layer_index = max((index for index, slot in enumerate(pass_slots) if slot.layer), default=-1)
        begin = len(merged)
        for index, slot in enumerate(pass_slots):
            layer = merged[-1].layer if len(merged) > begin else ""
            if layer and (slot.layer == layer or (not slot.layer and index < last_layer_index)):
                merged[-1] = max(merged[-1], slot, key=_total_bytes)._replace(layer=layer)
            else:
                merged.append(slot)
    return merged


def _downsample(slots: list[Slot]) -> list[Slot]:
    """Reduce the slots to about `_MAX_SLOTS`: keep the largest of every few neighbors in a pass."""
    group_size = -(-len(slots) // _MAX_SLOTS)
    if group_size == 1:
        return slots
    kept_slots = []
    for _, slots_of_pass in groupby(slots, key=lambda slot: slot[:2]):  # by phase and microbatch
        pass_slots = list(slots_of_pass)
        kept_slots += [
            max(pass_slots[start : start + group_size], key=_total_bytes)
            for start in range(0, len(pass_slots), group_size)
        ]
    return kept_slots


def area_plot(
    slots: Sequence[Slot],
    areas: Sequence[Area],
    scale: Scale,
    *,
    peak_label: str,
    slot_text: Callable[[Slot], str],
    pass_names: Callable[[str, int], Sequence[str]],
) -> Plot:
    """Return the plot of memory over one training step.

    Args:
        slots: Slots of the step; at least one.
        areas: Areas, bottom first.
        scale: Vertical scale.
        peak_label: Label of the peak.
        slot_text: Returns the tooltip of a slot.
        pass_names: Returns the names of a pass, given its phase and microbatch, longest first; the first that fits is
            shown.
    """
    slot_width = WIDTH / len(slots)
    peak_index = max(range(len(slots)), key=lambda index: _total_bytes(slots[index]))
    shapes = [
        *_draw_backward_passes(slots, slot_width),
        *_draw_reserved(scale),
        *_draw_areas(slots, areas, scale, slot_width),
        *_draw_gpu_memory(scale),
    ]
    shapes += [
        svg_rect("slot", index * slot_width, 0, slot_width, HEIGHT, one_line(slot_text(slot)))
        for index, slot in enumerate(slots)
    ]
    x, y = (peak_index + 0.5) * slot_width, scale.y(_total_bytes(slots[peak_index]))
    shapes += [svg_path("peak", f"M{x:.1f} 0V{HEIGHT}"), svg_path("dot", f"M{x:.1f} {y:.1f}h0")]
    labels = [_make_peak_label(x / WIDTH, peak_label)]
    if scale.gpu_memory is not None:
        side = "right" if WIDTH / 2 <= x < 0.7 * WIDTH or x < 0.2 * WIDTH else "left"  # clear of the peak label
        style = f"top:{100 * scale.y(scale.gpu_memory) / HEIGHT:.2f}%;{side}:6px"
        reserved = f"{human_bytes(scale.reserved)} reserved"
        labels.append(Label(f"GPU memory {human_bytes(scale.gpu_memory)}, {reserved}", style, "memory"))
    return Plot(
        "memory over one training step",
        scale.ticks(),
        list(_pass_labels(slots, slot_width, pass_names)),
        shapes,
        labels,
    )


def _make_peak_label(x: float, text: str) -> Label:
    """Return the label of the peak, on the side with more room; `x` is its distance from the left, 0 to 1."""
    side = f"left:{100 * x:.2f}%" if x < 0.5 else f"right:{100 - 100 * x:.2f}%"
    return Label(text, side, f"peak {'after' if x < 0.5 else 'before'}")


def _group_passes(slots: Sequence[Slot]) -> Iterator[tuple[str, int, int, int]]:
    """Yield phase, microbatch, index of the first slot and number of slots of each pass."""
    begin = 0
    for (phase, microbatch), slots_of_pass in groupby(slots, key=lambda slot: (slot.phase, slot.microbatch)):
        count = len(list(slots_of_pass))
        yield phase, microbatch, begin, count
        begin += count


def _draw_backward_passes(slots: Sequence[Slot], slot_width: float) -> Iterator[Markup]:
    for phase, _, begin, count in _group_passes(slots):
        if phase == "backward":
            yield svg_rect("pass", begin * slot_width, 0, count * slot_width, HEIGHT)


def _draw_areas(slots: Sequence[Slot], areas: Sequence[Area], scale: Scale, slot_width: float) -> Iterator[Markup]:
    low = [0] * len(slots)  # bytes of the areas below, by slot
    for area in areas:
        high = [base + slot.bytes_by_kind[area.kind_index] for base, slot in zip(low, slots, strict=True)]
        if high != low:
            upper = "".join(
                f"V{scale.y(size):.1f}H{(index + 1) * slot_width:.2f}" for index, size in enumerate(high)
            )  # fmt: skip
            lower = "".join(
                f"V{scale.y(low[index]):.1f}H{index * slot_width:.2f}" for index in reversed(range(len(slots)))
            )  # fmt: skip
            yield svg_path(f"area c{area.color}", f"M0 {scale.y(low[0]):.1f}{upper}{lower}Z")
        low = high


def _draw_reserved(scale: Scale) -> Iterator[Markup]:
    if scale.gpu_memory is not None:
        top, bottom = scale.y(scale.gpu_memory), scale.y(max(0, scale.gpu_memory - scale.reserved))
        yield svg_rect("reserved", 0, top, WIDTH, bottom - top)


def _draw_gpu_memory(scale: Scale) -> Iterator[Markup]:
    if scale.gpu_memory is not None:
        yield svg_path("memory", f"M0 {scale.y(scale.gpu_memory):.1f}H{WIDTH}")


def _pass_labels(
    slots: Sequence[Slot], slot_width: float, pass_names: Callable[[str, int], Sequence[str]]
) -> Iterator[Label]:
    for phase, microbatch, begin, count in _group_passes(slots):
        candidates = pass_names(phase, microbatch)
        width_percent = 100 * count * slot_width / WIDTH
        shown = next((name for name in candidates if len(name) * _LETTER_WIDTH_PERCENT <= width_percent), "")
        style = f"left:{100 * begin * slot_width / WIDTH:.2f}%;width:{width_percent:.2f}%"
        yield Label(shown, style, "pass", candidates[0])
