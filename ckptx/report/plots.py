"""Plots as inline SVG: losses over steps, differences between runs on a log scale, and the parts of any plot.

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

WIDTH, HEIGHT = 1000, 400  # units of the drawing
_MAX_STEP_LABELS = 9
_MAX_DOTS = 60  # points of a run; a longer run is drawn as a line only
_MIN_EXPONENT = -12  # smallest power of 10 on a log scale
# Distances from the top, in units of the drawing: of NaN and infinity, and of the largest finite number.
_NONFINITE_Y, _FINITE_TOP = 12, 46


@dataclass(frozen=True, slots=True)
class Tick:
    """A tick label on the vertical axis of a plot.

    Attributes:
        y: Distance from the top, in units of the drawing.
        text: Label.
    """

    y: float
    text: str

    @property
    def top(self) -> str:
        """Return the distance from the top, in percent."""
        return f"{100 * self.y / HEIGHT:.2f}"


@dataclass(frozen=True, slots=True)
class Label:
    """A label on a plot or below it.

    Attributes:
        text: Label.
        style: Position, as CSS.
        css_class: CSS class; "" for none.
        title: Full text for the tooltip; "" for none.
    """

    text: str
    style: str
    css_class: str = ""
    title: str = ""


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot with its labels.

    Attributes:
        label: Accessible name of the plot.
        ticks: Tick labels of the vertical axis.
        x_labels: Labels of the horizontal axis.
        shapes: SVG elements of the drawing.
        overlay_labels: Labels on top of the drawing.
        width: Width of the drawing, in its own units.
        height: Height of the drawing, in its own units.
    """

    label: str
    ticks: Sequence[Tick]
    x_labels: Sequence[Label]
    shapes: Sequence[Markup]
    overlay_labels: Sequence[Label] = ()
    width: int = WIDTH
    height: int = HEIGHT

    @property
    def grid(self) -> str:
        """Return the SVG path of the grid lines."""
        return "".join(f"M0 {tick.y:.1f}H{self.width}" for tick in self.ticks)


class RunCurve(NamedTuple):
    """Curve of one run: its loss, or its difference from another run, at each step.

    Attributes:
        name: Name of the run in the report.
        color: Number of its color in report.css.
        points: Pairs of step and value, in order of the steps; a value may be NaN or infinite.
    """

    name: str
    color: int
    points: Sequence[tuple[float, float]]


class NoiseBand(NamedTuple):
    """Band of differences that noise explains.

    Attributes:
        noise: Measured noise; None if it was not measured.
        tolerance: Tolerance of the difference; None if no phase has one.
        phase: Name of the phase with this tolerance; "" for none.
    """

    noise: float | None
    tolerance: float | None
    phase: str = ""


def plot_losses(runs: Sequence[RunCurve]) -> Plot | None:
    """Plot losses over steps, the first run as a broad line behind the others; None if no loss is finite."""
    steps = _steps(runs)
    losses = [loss for run in runs for _, loss in run.points if isfinite(loss)]
    if not steps or not losses:
        return None
    low, high = min(losses), max(losses)
    margin = (high - low) * 0.08 or abs(high) * 0.01 or 1.0
    low, high = low - margin, high + margin
    has_nonfinite = _has_nonfinite(runs)

    def y(value: float) -> float:
        top = _FINITE_TOP if has_nonfinite else 0
        return top + (HEIGHT - top) * (high - value) / (high - low)

    tick_values = [(low + (high - low) * index / 4) for index in range(5)]
    ticks = [
        *([Tick(_NONFINITE_Y, "nan")] if has_nonfinite else []),
        *(Tick(y(value), f"{value:.4g}") for value in tick_values),
    ]
    shapes = [shape for index, run in enumerate(runs) for shape in _draw_curve(run, steps, y, is_first=index == 0)]
    return Plot(f"loss over steps of {', '.join(run.name for run in runs)}", ticks, _step_labels(steps), shapes)


def plot_differences(runs: Sequence[RunCurve], band: NoiseBand) -> Plot | None:
    """Plot the differences of runs from those that they are compared with, on a log scale; None if there are no steps.

    Differences of 0 are drawn at the bottom, NaN and infinity at the top.
    """
    steps = _steps(runs)
    values = [band.noise, band.tolerance, *(value for run in runs for _, value in run.points)]
    positive_values = [value for value in values if value is not None and isfinite(value) and value > 0]
    if not steps:
        return None
    low = max(_MIN_EXPONENT, floor(log10(min(positive_values)))) if positive_values else -1  # exponents of 10
    high = max(low + 1, floor(log10(max(positive_values))) + 1) if positive_values else 0
    decades = high - low

    def y(value: float) -> float:
        if value <= 0:
            return HEIGHT - 12.0  # below all positive numbers, which end 60 units above the bottom
        fraction = (log10(value) - low) / decades
        return _FINITE_TOP + (1 - min(1.0, max(0.0, fraction))) * (HEIGHT - _FINITE_TOP - 60)

    shapes = []
    for css_class, value in (("tolerance", band.tolerance), ("noise", band.noise)):
        if value is not None and isfinite(value) and value > 0:
            shapes.append(svg_rect(css_class, 0, y(value), WIDTH, HEIGHT))
            shapes.append(svg_path(css_class, f"M0 {y(value):.1f}H{WIDTH}"))
    for run in runs:
        shapes += _draw_curve(run, steps, y, is_first=False)
    decades_per_tick = -(-decades // 5)
    ticks = [Tick(y(10.0**power), f"1e{power}") for power in range(low, high + 1, decades_per_tick)]
    ticks.append(Tick(y(0.0), "equal"))
    if _has_nonfinite(runs):
        ticks.append(Tick(_NONFINITE_Y, "nan"))
    names = ", ".join(run.name for run in runs)
    return Plot(f"differences: {names}", ticks, _step_labels(steps), shapes)


def svg_path(css_class: str, d: str) -> Markup:
    """Return an SVG path."""
    return Markup('<path class="{}" d="{}"/>').format(css_class, d)


def svg_rect(css_class: str, x: float, y: float, width: float, height: float, title: str = "") -> Markup:
    """Return an SVG rectangle; `title` is its tooltip."""
    attributes = f'x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}"'
    if not title:
        return Markup('<rect class="{}" {}/>').format(css_class, Markup(attributes))
    return Markup('<rect class="{}" {}><title>{}</title></rect>').format(css_class, Markup(attributes), title)


def _steps(runs: Sequence[RunCurve]) -> list[float]:
    return sorted({step for run in runs for step, _ in run.points})


def _has_nonfinite(runs: Sequence[RunCurve]) -> bool:
    return any(not isfinite(value) for run in runs for _, value in run.points)


def _x(step: float, steps: Sequence[float]) -> float:
    """Return the distance of a step from the left, in units of the drawing; `steps` are all steps, sorted."""
    step_range = steps[-1] - steps[0]
    return WIDTH / 2 if not step_range else 20 + (WIDTH - 40) * (step - steps[0]) / step_range


def _draw_curve(
    run: RunCurve, steps: Sequence[float], y: Callable[[float], float], *, is_first: bool
) -> Iterator[Markup]:
    """Draw a run as a line and dots; NaN and infinity leave a gap and are dots at the top.

    Args:
        run: Run to draw.
        steps: Steps of all runs, sorted.
        y: Function that returns the distance of a finite value from the top, in units of the drawing.
        is_first: True for the run that is drawn as a broad line.
    """
    line, dots, is_drawing = "", "", False
    for step, value in run.points:
        if not isfinite(value):
            yield svg_path("dot nan", f"M{_x(step, steps):.1f} {_NONFINITE_Y}h0")
            is_drawing = False
            continue
        position = f"{_x(step, steps):.1f} {y(value):.1f}"
        line += f"{'L' if is_drawing else 'M'}{position}"
        dots += f"M{position}h0"
        is_drawing = True
    css_class = f"{'first' if is_first else 'run'} c{run.color}"
    if line:
        yield svg_path(css_class, line)
    if len(run.points) <= _MAX_DOTS and dots:
        yield svg_path(f"dot {css_class}", dots)


def _step_labels(steps: Sequence[float]) -> list[Label]:
    return [
        Label(f"{step:g}" if index else f"step {step:g}", f"left:{100 * _x(step, steps) / WIDTH:.2f}%")
        for index, step in enumerate(_labeled_steps(steps))
    ]


def _labeled_steps(steps: Sequence[float]) -> list[float]:
    stride = -(-len(steps) // _MAX_STEP_LABELS)
    return list(steps[::stride])
