"""Plot of memory over one training step as inline SVG: stacked areas by kind, with the peak marked.

Time is unknown, so all parts of a step have the same width. A part is one layer in one forward or backward pass, or the
work outside the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from markupsafe import Markup

from ckptx.report.plots import HIGH, WIDE, Label, Mark, Plot, path, rect
from ckptx.report.report import human_bytes
from ckptx.untrusted.printable import one_line

_MOST_SLOTS = 600
_HEADROOM = 1.22  # leaves room for a label above the peak
_ABOVE_MEMORY = 1.17
_NEAR = 2.5  # GPU memory is drawn up to this multiple of the peak
_MOST_MARKS = 6
_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_STEPS = (0.2, 0.25, 0.5, 1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 10000)
_PERCENT_A_LETTER = 0.72  # of the plot width


class StepPart(NamedTuple):
    """A part of a step, drawn as one slot of the plot.

    Attributes:
        part: "forward", "backward", or another part such as "optimizer".
        turn: Index of the forward or backward pass (microbatch).
        unit: Name of the layer; "" outside layers.
        sizes: Bytes by kind, at the time when their sum is largest.
    """

    part: str
    turn: int
    unit: str
    sizes: tuple[int, ...]


class Area(NamedTuple):
    """One stacked area of the plot.

    Attributes:
        at: Index of its bytes in `StepPart.sizes`.
        color: Number of its color in report.css.
    """

    at: int
    color: int


class Scale(NamedTuple):
    """Vertical scale, shared by the plots of one page.

    Attributes:
        top: Bytes at the upper edge.
        memory: GPU memory in bytes; None if not given or above the range of the plot.
        reserved: Bytes of GPU memory reserved for allocations other than tensors.
    """

    top: float
    memory: int | None
    reserved: int

    @classmethod
    def of(cls, peak: int, memory: int | None, reserved: int) -> Scale:
        """Return a scale that fits the highest peak and, if it is near, the GPU memory."""
        top = max(1, peak) * _HEADROOM
        if memory is None or memory > _NEAR * peak:
            return cls(top, None, reserved)
        return cls(max(top, memory * _ABOVE_MEMORY), memory, reserved)

    def down(self, size: float) -> float:
        """Return the distance of a size from the upper edge, in units of the drawing."""
        return HIGH * (1 - size / self.top)

    def marks(self) -> list[Mark]:
        """Return tick marks at round sizes."""
        unit, name = next((each for each in _UNITS if self.top >= each[0]), (1, "B"))
        most = self.top / unit
        step = next((each for each in _STEPS if most / each <= _MOST_MARKS), most)
        numbers = [step * index for index in range(1, int(most / step) + 1)]
        return [Mark(self.down(0), "0"), *(Mark(self.down(each * unit), f"{each:g} {name}") for each in numbers)]


def slots_of(course: Sequence[Sequence[Any]]) -> list[StepPart]:
    """Return a slot for each layer and pass, with the work around a layer merged into the layer.

    Args:
        course: Rows of part, turn, unit and the bytes by kind.
    """
    return _downsample(_merge_gaps([StepPart(part, turn, unit, tuple(sizes)) for part, turn, unit, *sizes in course]))


def _total(slot: StepPart) -> int:
    return sum(slot.sizes)


def _merge_gaps(slots: Sequence[StepPart]) -> list[StepPart]:
    """Merge work between two layers of a pass, or between two parts of one layer, into the first of them."""
    found: list[StepPart] = []
    for _, each in groupby(slots, key=lambda slot: slot[:2]):
        group = list(each)
        last = max((index for index, slot in enumerate(group) if slot.unit), default=-1)
        begin = len(found)
        for index, slot in enumerate(group):
            layer = found[-1].unit if len(found) > begin else ""
            if layer and (slot.unit == layer or (not slot.unit and index < last)):
                found[-1] = max(found[-1], slot, key=_total)._replace(unit=layer)
            else:
                found.append(slot)
    return found


def _downsample(slots: list[StepPart]) -> list[StepPart]:
    """Keep at most `_MOST_SLOTS` slots: of neighbors in a pass, the one with the highest memory."""
    together = -(-len(slots) // _MOST_SLOTS)
    if together == 1:
        return slots
    found = []
    for _, each in groupby(slots, key=lambda slot: slot[:2]):
        group = list(each)
        found += [max(group[at : at + together], key=_total) for at in range(0, len(group), together)]
    return found


def area_plot(
    slots: Sequence[StepPart],
    areas: Sequence[Area],
    scale: Scale,
    *,
    peak: str,
    slot_text: Callable[[StepPart], str],
    pass_names: Callable[[str, int], Sequence[str]],
) -> Plot:
    """Return the plot.

    Args:
        slots: Parts of the step; at least one.
        areas: Areas, bottom first.
        scale: Vertical scale.
        peak: Label of the peak.
        slot_text: Returns the tooltip of a slot.
        pass_names: Returns the names of a pass, longest first; the first that fits is shown.
    """
    wide = WIDE / len(slots)
    at = max(range(len(slots)), key=lambda index: _total(slots[index]))
    shapes = [*_passes(slots, wide), *_reserved(scale), *_areas(slots, areas, scale, wide), *_memory(scale)]
    shapes += [rect("slot", index * wide, 0, wide, HIGH, one_line(slot_text(slot))) for index, slot in enumerate(slots)]
    x, y = (at + 0.5) * wide, scale.down(_total(slots[at]))
    shapes += [path("peak", f"M{x:.1f} 0V{HIGH}"), path("dot", f"M{x:.1f} {y:.1f}h0")]
    over = [_label(x / WIDE, peak)]
    if scale.memory is not None:
        far = "right" if WIDE / 2 <= x < 0.7 * WIDE or x < 0.2 * WIDE else "left"  # clear of the peak label
        place = f"top:{100 * scale.down(scale.memory) / HIGH:.2f}%;{far}:6px"
        free = f"{human_bytes(scale.reserved)} reserved"
        over.append(Label(f"GPU memory {human_bytes(scale.memory)}, {free}", place, "memory"))
    return Plot("memory over one training step", scale.marks(), list(_names(slots, wide, pass_names)), shapes, over)


def _label(x: float, text: str) -> Label:
    side = f"left:{100 * x:.2f}%" if x < 0.5 else f"right:{100 - 100 * x:.2f}%"
    return Label(text, side, f"peak {'after' if x < 0.5 else 'before'}")


def _groups(slots: Sequence[StepPart]) -> Iterator[tuple[str, int, int, int]]:
    """Yield part, turn, first slot and number of slots of each pass."""
    begin = 0
    for (part, turn), each in groupby(slots, key=lambda slot: (slot.part, slot.turn)):
        count = len(list(each))
        yield part, turn, begin, count
        begin += count


def _passes(slots: Sequence[StepPart], wide: float) -> Iterator[Markup]:
    for part, _, begin, count in _groups(slots):
        if part == "backward":
            yield rect("pass", begin * wide, 0, count * wide, HIGH)


def _areas(slots: Sequence[StepPart], areas: Sequence[Area], scale: Scale, wide: float) -> Iterator[Markup]:
    low = [0] * len(slots)
    for area in areas:
        high = [below + slot.sizes[area.at] for below, slot in zip(low, slots, strict=True)]
        if high != low:
            upper = "".join(
                f"V{scale.down(size):.1f}H{(index + 1) * wide:.2f}" for index, size in enumerate(high)
            )  # fmt: skip
            lower = "".join(
                f"V{scale.down(low[index]):.1f}H{index * wide:.2f}" for index in reversed(range(len(slots)))
            )  # fmt: skip
            yield path(f"area c{area.color}", f"M0 {scale.down(low[0]):.1f}{upper}{lower}Z")
        low = high


def _reserved(scale: Scale) -> Iterator[Markup]:
    if scale.memory is not None:
        top, bottom = scale.down(scale.memory), scale.down(max(0, scale.memory - scale.reserved))
        yield rect("reserved", 0, top, WIDE, bottom - top)


def _memory(scale: Scale) -> Iterator[Markup]:
    if scale.memory is not None:
        yield path("memory", f"M0 {scale.down(scale.memory):.1f}H{WIDE}")


def _names(slots: Sequence[StepPart], wide: float, names: Callable[[str, int], Sequence[str]]) -> Iterator[Label]:
    for part, turn, begin, count in _groups(slots):
        known = names(part, turn)
        room = 100 * count * wide / WIDE
        shown = next((name for name in known if len(name) * _PERCENT_A_LETTER <= room), "")
        place = f"left:{100 * begin * wide / WIDE:.2f}%;width:{room:.2f}%"
        yield Label(shown, place, "pass", known[0])
