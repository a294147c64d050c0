"""Plots as inline SVG: losses over steps, differences from the first run on a log scale, and the frame of any plot.

This module computes shapes; the macro `plot` in `templates/parts.html` writes them and their labels. The SVG is
stretched to the available width, so lines keep their width by `non-scaling-stroke`, and dots are lines of length 0 with
round caps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import floor, isfinite, log10
from typing import NamedTuple

from markupsafe import Markup

WIDE, HIGH = 1000, 400  # units of the drawing
_MOST_TICKS = 9
_MOST_DOTS = 60  # of a run; a longer run is drawn as a line only
_LEAST_DECADE = -12
_NONFINITE, _ROOM_FOR_NONFINITE = 12, 46  # height of NaN and infinity, and the upper edge of the finite numbers


@dataclass(frozen=True, slots=True)
class Mark:
    """A tick label on the vertical axis of a plot.

    Attributes:
        down: Distance from the top, in units of the drawing.
        text: Label.
    """

    down: float
    text: str

    @property
    def top(self) -> str:
        """Return the distance from the top, in percent."""
        return f"{100 * self.down / HIGH:.2f}"


@dataclass(frozen=True, slots=True)
class Label:
    """A label on a plot or below it.

    Attributes:
        text: Label.
        style: Position, as CSS.
        kind: CSS class; "" for none.
        title: Full text for the tooltip; "" for none.
    """

    text: str
    style: str
    kind: str = ""
    title: str = ""


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot with its labels.

    Attributes:
        label: Accessible name of the plot.
        marks: Tick labels of the vertical axis.
        below: Labels of the horizontal axis.
        shapes: SVG elements.
        over: Labels on top of the drawing.
        width: Width of the drawing, in its own units.
        height: Height of the drawing, in its own units.
    """

    label: str
    marks: Sequence[Mark]
    below: Sequence[Label]
    shapes: Sequence[Markup]
    over: Sequence[Label] = ()
    width: int = WIDE
    height: int = HIGH

    @property
    def grid(self) -> str:
        """Return the SVG path of the grid lines."""
        return "".join(f"M0 {mark.down:.1f}H{WIDE}" for mark in self.marks)


class RunCurve(NamedTuple):
    """A run, with a number at each of its steps.

    Attributes:
        name: Name of the run in the report.
        color: Number of its color in report.css.
        points: Pairs of step and number, which may be NaN.
    """

    name: str
    color: int
    points: Sequence[tuple[float, float]]


class Band(NamedTuple):
    """Differences without meaning.

    Attributes:
        noise: Measured noise; None if it was not measured.
        limit: Tolerance; None if no phase has one.
    """

    noise: float | None
    limit: float | None


def runs_plot(runs: Sequence[RunCurve]) -> Plot | None:
    """Plot numbers over steps, the first run as a broad line below the others; None if there is no number."""
    steps = _steps(runs)
    numbers = [number for run in runs for _, number in run.points if isfinite(number)]
    if not steps or not numbers:
        return None
    low, high = min(numbers), max(numbers)
    room = (high - low) * 0.08 or abs(high) * 0.01 or 1.0
    low, high = low - room, high + room
    has_none = _has_nonfinite(runs)

    def down(value: float) -> float:
        top = _ROOM_FOR_NONFINITE if has_none else 0
        return top + (HIGH - top) * (high - value) / (high - low)

    values = [(low + (high - low) * part / 4) for part in range(5)]
    marks = [*([Mark(_NONFINITE, "nan")] if has_none else []), *(Mark(down(value), f"{value:.4g}") for value in values)]
    shapes = [shape for index, run in enumerate(runs) for shape in _curve(run, steps, down, is_first=index == 0)]
    return Plot(f"loss over steps of {', '.join(run.name for run in runs)}", marks, _step_labels(steps), shapes)


def distances_plot(runs: Sequence[RunCurve], band: Band) -> Plot | None:
    """Plot the differences of runs from the first, on a log scale; None if there are no steps.

    Equal numbers are drawn at the bottom, NaN and infinity above the top.
    """
    steps = _steps(runs)
    known = [band.noise, band.limit, *(number for run in runs for _, number in run.points)]
    sizes = [value for value in known if value is not None and isfinite(value) and value > 0]
    if not steps:
        return None
    first = max(_LEAST_DECADE, floor(log10(min(sizes)))) if sizes else -1
    last = max(first + 1, floor(log10(max(sizes))) + 1) if sizes else 0
    decades = last - first

    def down(value: float) -> float:
        if value <= 0:
            return HIGH - 12.0
        above = (log10(value) - first) / decades
        return _ROOM_FOR_NONFINITE + (1 - min(1.0, max(0.0, above))) * (HIGH - _ROOM_FOR_NONFINITE - 60)

    shapes = []
    for name, value in (("limit", band.limit), ("noise", band.noise)):
        if value is not None and isfinite(value) and value > 0:
            shapes.append(rect(name, 0, down(value), WIDE, HIGH))
            shapes.append(path(name, f"M0 {down(value):.1f}H{WIDE}"))
    for run in runs:
        shapes += _curve(run, steps, down, is_first=False)
    every = -(-decades // 5)
    marks = [Mark(down(10.0**power), f"1e{power}") for power in range(first, last + 1, every)]
    marks.append(Mark(down(0.0), "equal"))
    if _has_nonfinite(runs):
        marks.append(Mark(_NONFINITE, "nan"))
    names = ", ".join(run.name for run in runs)
    return Plot(f"difference of {names} from the first run", marks, _step_labels(steps), shapes)


def path(kind: str, d: str) -> Markup:
    """Return an SVG path."""
    return Markup('<path class="{}" d="{}"/>').format(kind, d)


def rect(kind: str, x: float, y: float, width: float, height: float, title: str = "") -> Markup:
    """Return an SVG rectangle; `title` is its tooltip."""
    place = f'x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}"'
    if not title:
        return Markup('<rect class="{}" {}/>').format(kind, Markup(place))
    return Markup('<rect class="{}" {}><title>{}</title></rect>').format(kind, Markup(place), title)


def _steps(runs: Sequence[RunCurve]) -> list[float]:
    return sorted({step for run in runs for step, _ in run.points})


def _has_nonfinite(runs: Sequence[RunCurve]) -> bool:
    return any(not isfinite(number) for run in runs for _, number in run.points)


def _across(step: float, steps: Sequence[float]) -> float:
    room = steps[-1] - steps[0]
    return WIDE / 2 if not room else 20 + (WIDE - 40) * (step - steps[0]) / room


def _curve(
    run: RunCurve, steps: Sequence[float], down: Callable[[float], float], *, is_first: bool
) -> Iterator[Markup]:
    """Draw a run as a line and dots; NaN and infinity leave a gap and are dots at the top."""
    line, dots, is_drawing = "", "", False
    for step, number in run.points:
        if not isfinite(number):
            yield path("dot nan", f"M{_across(step, steps):.1f} {_NONFINITE}h0")
            is_drawing = False
            continue
        place = f"{_across(step, steps):.1f} {down(number):.1f}"
        line += f"{'L' if is_drawing else 'M'}{place}"
        dots += f"M{place}h0"
        is_drawing = True
    kind = f"{'first' if is_first else 'run'} c{run.color}"
    if line:
        yield path(kind, line)
    if len(run.points) <= _MOST_DOTS and dots:
        yield path(f"dot {kind}", dots)


def _step_labels(steps: Sequence[float]) -> list[Label]:
    ticks = enumerate(_ticks(steps))
    return [
        Label(f"{step:g}" if index else f"step {step:g}", f"left:{100 * _across(step, steps) / WIDE:.2f}%")
        for index, step in ticks
    ]


def _ticks(steps: Sequence[float]) -> list[float]:
    every = -(-len(steps) // _MOST_TICKS)
    return list(steps[::every])
