"""The memory of a step over its course as inline SVG: areas by kind, stacked, with the peak marked.

Time is not known, so each part of a step is as wide as any other: a layer in one forward or backward pass, or what is
around the layers.
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
_HEADROOM = 1.22  # above the peak there is room for its label
_ABOVE_MEMORY = 1.17
_NEAR = 2.5  # GPU memory is drawn up to so many times the peak
_MOST_MARKS = 6
_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_STEPS = (0.2, 0.25, 0.5, 1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 10000)
_PERCENT_A_LETTER = 0.72  # of the drawing


class StepPart(NamedTuple):
    """A part of a step.

    Attributes:
        part: forward, backward, or another word.
        turn: Which forward or backward pass.
        unit: The layer; "" for what is around the layers.
        sizes: The bytes of each kind when their sum is largest.
    """

    part: str
    turn: int
    unit: str
    sizes: tuple[int, ...]


class Area(NamedTuple):
    """What is drawn of a kind.

    Attributes:
        at: Where its bytes are in the sizes of a slot.
        color: Which of the colours.
    """

    at: int
    color: int


class Scale(NamedTuple):
    """What drawings that are compared have in common.

    Attributes:
        top: Bytes at the upper edge.
        memory: Of a GPU, where it lies within the drawing.
        reserved: What is kept free of it.
    """

    top: float
    memory: int | None
    reserved: int

    @classmethod
    def of(cls, peak: int, memory: int | None, reserved: int) -> Scale:
        """A scale on which the highest peak can be read."""
        top = max(1, peak) * _HEADROOM
        if memory is None or memory > _NEAR * peak:
            return cls(top, None, reserved)
        return cls(max(top, memory * _ABOVE_MEMORY), memory, reserved)

    def down(self, size: float) -> float:
        """How far down it is drawn."""
        return HIGH * (1 - size / self.top)

    def marks(self) -> list[Mark]:
        """Return round sizes, and how far down they are."""
        unit, name = next((each for each in _UNITS if self.top >= each[0]), (1, "B"))
        most = self.top / unit
        step = next((each for each in _STEPS if most / each <= _MOST_MARKS), most)
        numbers = [step * index for index in range(1, int(most / step) + 1)]
        return [Mark(self.down(0), "0"), *(Mark(self.down(each * unit), f"{each:g} {name}") for each in numbers)]


def slots_of(course: Sequence[Sequence[Any]]) -> list[StepPart]:
    """The course of a report, with a slot for each layer and pass: what happens around a layer goes with it.

    Args:
        course: Rows of part, turn, unit and the bytes of each kind.
    """
    return _fewer(_without_gaps([StepPart(part, turn, unit, tuple(sizes)) for part, turn, unit, *sizes in course]))


def _most(slot: StepPart) -> int:
    return sum(slot.sizes)


def _without_gaps(slots: Sequence[StepPart]) -> list[StepPart]:
    """Within a pass, what is between two layers, or two parts of one, goes with the first of them."""
    found: list[StepPart] = []
    for _, each in groupby(slots, key=lambda slot: slot[:2]):
        group = list(each)
        last = max((index for index, slot in enumerate(group) if slot.unit), default=-1)
        begin = len(found)
        for index, slot in enumerate(group):
            layer = found[-1].unit if len(found) > begin else ""
            if layer and (slot.unit == layer or (not slot.unit and index < last)):
                found[-1] = max(found[-1], slot, key=_most)._replace(unit=layer)
            else:
                found.append(slot)
    return found


def _fewer(slots: list[StepPart]) -> list[StepPart]:
    """So few that each can be seen: of neighbours in a pass the one with the most."""
    together = -(-len(slots) // _MOST_SLOTS)
    if together == 1:
        return slots
    found = []
    for _, each in groupby(slots, key=lambda slot: slot[:2]):
        group = list(each)
        found += [max(group[at : at + together], key=_most) for at in range(0, len(group), together)]
    return found


def area_plot(
    slots: Sequence[StepPart],
    areas: Sequence[Area],
    scale: Scale,
    *,
    peak: str,
    said: Callable[[StepPart], str],
    pass_names: Callable[[str, int], Sequence[str]],
) -> Plot:
    """Return the drawing.

    Args:
        slots: At least one.
        areas: From below to above.
        scale: Of the drawing.
        peak: What stands at the mark of the peak.
        said: What a slot is.
        pass_names: What a pass is called, the longest name first.
    """
    wide = WIDE / len(slots)
    at = max(range(len(slots)), key=lambda index: _most(slots[index]))
    shapes = [*_passes(slots, wide), *_reserved(scale), *_areas(slots, areas, scale, wide), *_memory(scale)]
    shapes += [rect("slot", index * wide, 0, wide, HIGH, one_line(said(slot))) for index, slot in enumerate(slots)]
    x, y = (at + 0.5) * wide, scale.down(_most(slots[at]))
    shapes += [path("peak", f"M{x:.1f} 0V{HIGH}"), path("dot", f"M{x:.1f} {y:.1f}h0")]
    over = [_label(x / WIDE, peak)]
    if scale.memory is not None:
        far = "right" if WIDE / 2 <= x < 0.7 * WIDE or x < 0.2 * WIDE else "left"  # away from the label of the peak
        place = f"top:{100 * scale.down(scale.memory) / HIGH:.2f}%;{far}:6px"
        free = f"{human_bytes(scale.reserved)} kept free"
        over.append(Label(f"GPU memory {human_bytes(scale.memory)}, {free}", place, "memory"))
    return Plot("memory of a step over its course", scale.marks(), list(_names(slots, wide, pass_names)), shapes, over)


def _label(x: float, said: str) -> Label:
    side = f"left:{100 * x:.2f}%" if x < 0.5 else f"right:{100 - 100 * x:.2f}%"
    return Label(said, side, f"peak {'after' if x < 0.5 else 'before'}")


def _groups(slots: Sequence[StepPart]) -> Iterator[tuple[str, int, int, int]]:
    """Each pass: its part, its turn, its first slot, and how many it has."""
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
