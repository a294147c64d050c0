"""Extrapolate a step of a whole model from steps of the same model with fewer layers.

The step of the smallest model is divided into segments. A model with another period of layers has the same segments
plus those of the period. The memory changes of the period and of all other segments are extrapolated to the full number
of periods; memory is then accumulated from the start of the step, and its maximum taken last. A third step, with two
more periods, must match the extrapolation, else the result is rejected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ckptx.runtime.forecasting.counting import Tally
from ckptx.runtime.forecasting.repeated_layers import RepeatedLayers
from ckptx.runtime.forecasting.run import RankForecast
from ckptx.runtime.forecasting.timeline import Bytes, Segment, Unit, timeline_from
from ckptx.runtime.memory.storage_ledger import BACKWARD, KINDS, StorageLifetime

_CLOSE = 2e-5  # tolerance of the third step, relative to the peak
_NOTHING: Bytes = (0,) * len(KINDS)


@dataclass(frozen=True, slots=True)
class ShortModel:
    """A step of a model with fewer layers.

    Attributes:
        forecast: Forecast of one rank.
        kept: Layers that remain of each list, by their numbers in the whole model.
    """

    forecast: RankForecast
    kept: Mapping[str, Sequence[int]]


class _Place(NamedTuple):
    """Position of a segment in a step.

    Attributes:
        part: forward, backward, ...
        turn: Number of the forward or backward pass.
        path: Path of the list of the layer, or of the last layer before a segment outside layers.
        layer: Number of the layer in the whole model; within a period that may be left out, its number in the period.
        is_outside: True for a segment outside layers, after this layer.
        time: Number of earlier segments with the same values.
    """

    part: str
    turn: int
    path: str
    layer: int
    is_outside: bool
    time: int


class _Step(NamedTuple):
    """A segment, and its changes of memory.

    Attributes:
        place: Position in the step.
        axis: Index of the repeat that the segment belongs to; None if its layer is always kept.
        segment: Segment as counted.
        most: Bytes of each kind at the peak of the segment, relative to its start.
        last: Bytes of each kind at its end, relative to its start.
    """

    place: _Place
    axis: int | None
    segment: Segment
    most: Bytes
    last: Bytes


@dataclass(slots=True)
class _Base:
    """Segments of the smallest model, with those of the larger models aligned to them."""

    steps: list[_Step]
    grown: list[list[_Step]] = field(default_factory=list)  # per axis: the same segments with one more period
    blocks: dict[int, list[tuple[int, list[_Step]]]] = field(default_factory=dict)  # by position: axis, its period


def extrapolated(
    repeats: Sequence[RepeatedLayers], base: ShortModel, grown: Sequence[ShortModel], third: ShortModel | None
) -> RankForecast | None:
    """Return the forecast of the whole model, or None if the steps do not agree.

    Args:
        repeats: Layers of this rank that were left out.
        base: Step without any of their periods.
        grown: Steps with one period, one for each repeat.
        third: Step with two periods of each repeat, which must match the extrapolation. None skips this check.
    """
    found = _base_of(repeats, base, grown)
    if found is None:
        return None
    if third is not None:
        twice = [2] * len(repeats)
        expected = _forecast_of(base, grown, twice, [each for each, _ in _predict(found, repeats, twice)])
        if not _agree(expected, third.forecast):
            return None
    most = [each.most for each in repeats]
    predicted = _predict(found, repeats, most)
    whole = _forecast_of(base, grown, most, [each for each, _ in predicted])
    whole = replace(whole, left_out=sum(each.period * each.most for each in repeats))
    if third is None:
        return whole
    source = next(step for segment, step in predicted if segment is whole.timeline.worst)
    same = [each for each in _steps(repeats, third) if (each.axis, each.place) == (source.axis, source.place)]
    return _with_tensors(whole, same[0].segment, third.kept)


def _base_of(repeats: Sequence[RepeatedLayers], base: ShortModel, grown: Sequence[ShortModel]) -> _Base | None:
    found = _Base(list(_steps(repeats, base)))
    if any(each.axis is not None for each in found.steps):
        return None
    places = [each.place for each in found.steps]
    for axis, run in enumerate(grown):
        steps = list(_steps(repeats, run))
        common = [each for each in steps if each.axis is None]
        if [each.place for each in common] != places:
            return None
        found.grown.append(common)
        position = 0
        for step in steps:
            if step.axis is None:
                position += 1
                continue
            blocks = found.blocks.setdefault(position, [])
            if not blocks or blocks[-1][0] != axis:
                blocks.append((axis, []))
            blocks[-1][1].append(step)
    return found


def _steps(repeats: Sequence[RepeatedLayers], run: ShortModel) -> Iterator[_Step]:
    """Yield the segments of a step, with layers numbered as in the whole model."""
    seen: Counter[tuple[object, ...]] = Counter()
    start = _NOTHING
    path, index, axis = "", -1, None
    part = None
    for segment in run.forecast.timeline.segments:
        unit = segment.unit
        if (segment.part, segment.turn) != part:
            part = segment.part, segment.turn
            path, index, axis = "", -1, None
        if unit.stack:
            path, index = unit.stack, _number_of(unit, run.kept)
            axis = next(
                (n for n, each in enumerate(repeats) if each.path == path and each.at <= index < each.stop), None
            )
            if axis is not None:
                index = (index - repeats[axis].at) % repeats[axis].period
        key = segment.part, segment.turn, path, index, not unit.stack
        yield _Step(
            _Place(*key, seen[key] if axis is None else 0), axis, segment,
            _difference(segment.most, start), _difference(segment.last, start),
        )  # fmt: skip
        if axis is None:
            seen[key] += 1
        start = segment.last


def _number_of(unit: Unit, kept: Mapping[str, Sequence[int]]) -> int:
    layers = kept.get(unit.stack)
    return unit.index if layers is None else layers[unit.index]


def _predict(base: _Base, repeats: Sequence[RepeatedLayers], extra: Sequence[int]) -> list[tuple[Segment, _Step]]:
    """Return the segments with `extra` periods of each repeat, each with the segment it was made from."""
    found: list[tuple[Segment, _Step]] = []
    now = _NOTHING

    def add(step: _Step, most: Bytes, last: Bytes, unit: Unit) -> None:
        nonlocal now
        segment = replace(step.segment, unit=unit, most=_sum(now, most), last=_sum(now, last))
        found.append((segment, step))
        now = segment.last

    for position in range(len(base.steps) + 1):
        for axis, block in base.blocks.get(position, ()):
            repeat = repeats[axis]
            for copy in range(extra[axis]):
                for step in block:
                    period = extra[axis] - 1 - copy if step.place.part == BACKWARD else copy
                    layer = repeat.at + period * repeat.period + step.place.layer
                    unit = Unit() if step.place.is_outside else Unit(repeat.path, layer)
                    add(step, step.most, step.last, unit)
        if position < len(base.steps):
            step = base.steps[position]
            others = [grown[position] for grown in base.grown]
            most = _line(step.most, [each.most for each in others], extra)
            last = _line(step.last, [each.last for each in others], extra)
            place = step.place
            add(step, most, last, Unit() if place.is_outside else Unit(place.path, place.layer))
    return found


def _forecast_of(
    base: ShortModel, grown: Sequence[ShortModel], extra: Sequence[int], segments: Sequence[Segment]
) -> RankForecast:
    """Return the forecast of a rank with these segments, and with work in proportion to the periods."""
    first, others = base.forecast, [each.forecast for each in grown]
    return replace(
        first,
        timeline=timeline_from(segments, segments[-1].last),
        turns={
            turn: _tally(first.turns.get(turn, Tally()), [each.turns.get(turn, Tally()) for each in others], extra)
            for turn in dict.fromkeys(turn for each in (first, *others) for turn in each.turns)
        },
        wrapped_layers=_number(first.wrapped_layers, [each.wrapped_layers for each in others], extra),
    )


def _agree(expected: RankForecast, found: RankForecast) -> bool:
    """Return True if a step matches its extrapolation."""
    one, other = expected.timeline.segments, found.timeline.segments
    if [(each.part, each.turn) for each in one] != [(each.part, each.turn) for each in other]:
        return False
    most = _CLOSE * sum(found.timeline.worst.most)
    for left, right in zip(one, other, strict=True):
        pairs = zip((*left.most, *left.last), (*right.most, *right.last), strict=True)
        if any(abs(a - b) > most for a, b in pairs):
            return False
    return expected.turns == found.turns and expected.wrapped_layers == found.wrapped_layers


def _with_tensors(whole: RankForecast, same: Segment, kept: Mapping[str, Sequence[int]]) -> RankForecast:
    """Replace the tensors at the peak by those of the same segment in the largest model that ran, renumbered."""
    timeline = whole.timeline
    segment = replace(
        timeline.worst,
        peak=_renumber(same.peak, kept) if same.peak is not None else None,
        largest=tuple(_renumber(each, kept) for each in same.largest),
    )
    return replace(whole, timeline=replace(timeline, worst=segment))


def _renumber(life: StorageLifetime, kept: Mapping[str, Sequence[int]]) -> StorageLifetime:
    module = life.born.module
    for path, layers in kept.items():
        index, _, rest = module.removeprefix(f"{path}.").partition(".")
        if module.startswith(f"{path}.") and index.isdecimal():
            name = f"{path}.{layers[int(index)]}" + (f".{rest}" if rest else "")
            return replace(life, born=life.born._replace(module=name))
    return life


def _line(base: Bytes, grown: Sequence[Bytes], extra: Sequence[int]) -> Bytes:
    return tuple(_number(each, [other[at] for other in grown], extra) for at, each in enumerate(base))


def _tally(base: Tally, grown: Sequence[Tally], extra: Sequence[int]) -> Tally:
    found = Tally()
    found.add(base, 1 - sum(extra))
    for each, number in zip(grown, extra, strict=True):
        found.add(each, number)
    return found


def _number(base: int, grown: Sequence[int], extra: Sequence[int]) -> int:
    return base + sum(number * (each - base) for each, number in zip(grown, extra, strict=True))


def _difference(one: Bytes, other: Bytes) -> Bytes:
    return tuple(a - b for a, b in zip(one, other, strict=True))


def _sum(one: Bytes, other: Bytes) -> Bytes:
    return tuple(a + b for a, b in zip(one, other, strict=True))
