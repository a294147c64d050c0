"""Plots as inline SVG: runs over their steps, how far each is from the first, in decades, and the frame of any plot.

The SVG is stretched to the width there is, so lines keep their width by `non-scaling-stroke`, dots are lines without
length and a round end, and words stand beside it in HTML, where they can be read on a phone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import floor, isfinite, log10
from typing import NamedTuple

from ckptx.report.page import escape

WIDE, HIGH = 1000, 400  # units of the drawing
_MOST_TICKS = 9
_MOST_DOTS = 60  # of a run; a longer one is a line alone
_LEAST_DECADE = -12
_NONE, _ROOM_FOR_NONE = 12, 46  # where numbers that are none are drawn, and how far below it the others begin


class RunCurve(NamedTuple):
    """A run: its name, its steps, and a number at each, which may be NaN.

    Attributes:
        name: As the report has it.
        color: Which of the colours of runs.
        points: (step, number).
    """

    name: str
    color: int
    points: Sequence[tuple[float, float]]


class Band(NamedTuple):
    """How far apart means nothing: what was measured, and what is allowed."""

    noise: float | None
    limit: float | None


def runs_plot(runs: Sequence[RunCurve]) -> Iterator[str]:
    """Numbers over steps, the first run broad, the others thin upon it."""
    steps = _steps(runs)
    numbers = [number for run in runs for _, number in run.points if isfinite(number)]
    if not steps or not numbers:
        return
    low, high = min(numbers), max(numbers)
    room = (high - low) * 0.08 or abs(high) * 0.01 or 1.0
    low, high = low - room, high + room
    has_none = _has_none(runs)

    def down(value: float) -> float:
        top = _ROOM_FOR_NONE if has_none else 0
        return top + (HIGH - top) * (high - value) / (high - low)

    values = [(low + (high - low) * part / 4) for part in range(5)]
    marks = [*([(_NONE, "nan")] if has_none else []), *((down(value), f"{value:.4g}") for value in values)]
    shapes = [shape for index, run in enumerate(runs) for shape in _line(run, steps, down, is_first=index == 0)]
    yield from framed(f"loss over steps of {', '.join(run.name for run in runs)}", marks, _below(steps), shapes)


def distances_plot(runs: Sequence[RunCurve], band: Band) -> Iterator[str]:
    """How far runs are away from another, by decades; at the bottom what is equal, above the top what is no number."""
    steps = _steps(runs)
    known = [band.noise, band.limit, *(number for run in runs for _, number in run.points)]
    sizes = [value for value in known if value is not None and isfinite(value) and value > 0]
    if not steps:
        return
    first = max(_LEAST_DECADE, floor(log10(min(sizes)))) if sizes else -1
    last = max(first + 1, floor(log10(max(sizes))) + 1) if sizes else 0
    decades = last - first

    def down(value: float) -> float:
        if value <= 0:
            return HIGH - 12.0
        above = (log10(value) - first) / decades
        return _ROOM_FOR_NONE + (1 - min(1.0, max(0.0, above))) * (HIGH - _ROOM_FOR_NONE - 60)

    shapes = []
    for name, value in (("limit", band.limit), ("noise", band.noise)):
        if value is not None and isfinite(value) and value > 0:
            shapes.append(f'<rect class="{name}" x="0" y="{down(value):.1f}" width="{WIDE}" height="{HIGH}"/>')
            shapes.append(f'<path class="{name}" d="M0 {down(value):.1f}H{WIDE}"/>')
    for run in runs:
        shapes += _line(run, steps, down, is_first=False)
    every = -(-decades // 5)
    marks = [(down(10.0**power), f"1e{power}") for power in range(first, last + 1, every)]
    marks.append((down(0.0), "equal"))
    if _has_none(runs):
        marks.append((_NONE, "nan"))
    yield from framed(
        f"distance of {', '.join(run.name for run in runs)} from the first run", marks, _below(steps), shapes
    )


def _steps(runs: Sequence[RunCurve]) -> list[float]:
    return sorted({step for run in runs for step, _ in run.points})


def _has_none(runs: Sequence[RunCurve]) -> bool:
    return any(not isfinite(number) for run in runs for _, number in run.points)


def _across(step: float, steps: Sequence[float]) -> float:
    room = steps[-1] - steps[0]
    return WIDE / 2 if not room else 20 + (WIDE - 40) * (step - steps[0]) / room


def _line(run: RunCurve, steps: Sequence[float], down: Callable[[float], float], *, is_first: bool) -> Iterator[str]:
    """A run as a line with a gap where a number is none, and its dots; what is no number is a dot at the top."""
    path, dots, is_drawing = "", "", False
    for step, number in run.points:
        if not isfinite(number):
            yield f'<path class="dot nan" d="M{_across(step, steps):.1f} {_NONE}h0"/>'
            is_drawing = False
            continue
        place = f"{_across(step, steps):.1f} {down(number):.1f}"
        path += f"{'L' if is_drawing else 'M'}{place}"
        dots += f"M{place}h0"
        is_drawing = True
    kind = f"{'first' if is_first else 'run'} c{run.color}"
    if path:
        yield f'<path class="{kind}" d="{path}"/>'
    if len(run.points) <= _MOST_DOTS and dots:
        yield f'<path class="dot {kind}" d="{dots}"/>'


def framed(
    label: str,
    marks: Sequence[tuple[float, str]],
    below: Iterable[str],
    shapes: Iterable[str],
    over: Iterable[str] = (),
) -> Iterator[str]:
    """A drawing with what is written beside and below it.

    Args:
        label: What is drawn.
        marks: How far down, in units of the drawing, and what stands there.
        below: HTML, placed by `left` and `width` in percent of the drawing.
        shapes: SVG.
        over: HTML that lies on the drawing.
    """
    yield "<div class=plot>"
    yield "<div class=ys>"
    for y, said in marks:
        yield f'<span style="top:{100 * y / HIGH:.2f}%">{escape(said)}</span>'
    yield "</div>"
    yield f'<svg viewBox="0 0 {WIDE} {HIGH}" preserveAspectRatio="none" role="img" aria-label="{escape(label)}">'
    yield f'<path class="grid" d="{"".join(f"M0 {y:.1f}H{WIDE}" for y, _ in marks)}"/>'
    yield from shapes
    yield "</svg>"
    yield f"<div class=over>{''.join(over)}</div>"
    yield "<div class=xs>"
    yield from below
    yield "</div></div>"


def _below(steps: Sequence[float]) -> Iterator[str]:
    for step in _ticks(steps):
        yield f'<span style="left:{100 * _across(step, steps) / WIDE:.2f}%">{step:g}</span>'


def _ticks(steps: Sequence[float]) -> list[float]:
    every = -(-len(steps) // _MOST_TICKS)
    return list(steps[::every])
