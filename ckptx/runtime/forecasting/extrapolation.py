"""Extrapolate a step of a whole model from steps of the same model with fewer layers.

The step of the smallest model is divided into segments (`timeline.Segment`). A model with one more period of layers
(`RepeatedLayers`) has the same segments plus those of the period. The memory changes of the period and of all other
segments are extrapolated to the full number of periods; memory is then accumulated from the start of the step, and its
maximum taken last. A third step, with two more periods, must match the extrapolation, else the result is rejected.

An axis is an index in `repeats`, the sequences of layers of one rank that can be shortened independently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ckptx.runtime.forecasting.counting import OpCounts
from ckptx.runtime.forecasting.repeated_layers import RepeatedLayers
from ckptx.runtime.forecasting.run import RankForecast
from ckptx.runtime.forecasting.timeline import BytesByKind, LayerKey, Segment, make_timeline
from ckptx.runtime.memory.storage_ledger import BACKWARD, KINDS, StorageLifetime

_TOLERANCE = 2e-5  # tolerance of the third step, relative to the peak
_ZERO_BYTES: BytesByKind = (0,) * len(KINDS)


@dataclass(frozen=True, slots=True)
class ShortModelForecast:
    """A step of a model with fewer layers.

    Attributes:
        forecast: Forecast of one rank.
        layer_numbers: Path of a list of layers -> numbers in the whole model of the layers that remain, in order.
    """

    forecast: RankForecast
    layer_numbers: Mapping[str, Sequence[int]]


class _SegmentKey(NamedTuple):
    """Position of a segment in a step.

    Attributes:
        phase: See `Segment`.
        pass_index: See `Segment`.
        path: Path of the list of the layer, or for a segment outside layers that of the last layer before it; "" before
            the first layer of a pass.
        layer: Number of this layer in the whole model, or if it is in a period that may be left out, its number in the
            period, from 0; -1 before the first layer of a pass.
        is_outside: True for a segment outside layers, after this layer.
        occurrence: Number of earlier segments with the same values; 0 in a period that may be left out.
    """

    phase: str
    pass_index: int
    path: str
    layer: int
    is_outside: bool
    occurrence: int


class _SegmentChange(NamedTuple):
    """A segment, and its changes of memory.

    Attributes:
        key: Position in the step.
        axis: Axis of the period that the segment belongs to; None if its layer is always kept.
        segment: Segment of the step that ran.
        peak_by_kind: Bytes of each kind at the peak of the segment, relative to its start.
        end_by_kind: Bytes of each kind at its end, relative to its start.
    """

    key: _SegmentKey
    axis: int | None
    segment: Segment
    peak_by_kind: BytesByKind
    end_by_kind: BytesByKind


@dataclass(slots=True)
class _AlignedSegments:
    """Segments of the smallest model, with those of the larger models aligned to them.

    Attributes:
        segments: Segments of the smallest model.
        longer_segments: For each axis, the same segments in the model with one period of this axis.
        period_segments: Index in `segments` -> the periods that come before the segment with this index, each as its
            axis and its segments.
    """

    segments: list[_SegmentChange]
    longer_segments: list[list[_SegmentChange]] = field(default_factory=list)
    period_segments: dict[int, list[tuple[int, list[_SegmentChange]]]] = field(default_factory=dict)


def extrapolate(
    repeats: Sequence[RepeatedLayers],
    base: ShortModelForecast,
    longer_models: Sequence[ShortModelForecast],
    check_model: ShortModelForecast | None,
) -> RankForecast | None:
    """Return the forecast of the whole model, or None if the steps do not agree.

    Args:
        repeats: Layers of this rank of which periods were left out.
        base: Step of the smallest model, without any of these periods.
        longer_models: For each axis, the step of the model with one of its periods.
        check_model: Step with two periods of each axis, which must match the extrapolation. None skips this check.
    """
    aligned = _align_segments(repeats, base, longer_models)
    if aligned is None:
        return None
    if check_model is not None:
        two_periods = [2] * len(repeats)
        expected = _build_forecast(
            base, longer_models, two_periods, [each for each, _ in _predict(aligned, repeats, two_periods)]
        )
        if not _is_match(expected, check_model.forecast):
            return None
    max_periods = [each.max_periods for each in repeats]
    predicted = _predict(aligned, repeats, max_periods)
    whole = _build_forecast(base, longer_models, max_periods, [each for each, _ in predicted])
    whole = replace(whole, omitted_layers=sum(each.period * each.max_periods for each in repeats))
    if check_model is None:
        return whole
    source = next(change for segment, change in predicted if segment is whole.timeline.peak_segment)
    check_segments = [
        each
        for each in _iter_segment_changes(repeats, check_model)
        if (each.axis, each.key) == (source.axis, source.key)
    ]
    return _with_peak_tensors(whole, check_segments[0].segment, check_model.layer_numbers)


def _align_segments(
    repeats: Sequence[RepeatedLayers], base: ShortModelForecast, longer_models: Sequence[ShortModelForecast]
) -> _AlignedSegments | None:
    """Align the segments of the larger models to those of the smallest; None if the models run different segments."""
    aligned = _AlignedSegments(list(_iter_segment_changes(repeats, base)))
    if any(each.axis is not None for each in aligned.segments):
        return None
    keys = [each.key for each in aligned.segments]
    for axis, model in enumerate(longer_models):
        changes = list(_iter_segment_changes(repeats, model))
        common = [each for each in changes if each.axis is None]
        if [each.key for each in common] != keys:
            return None
        aligned.longer_segments.append(common)
        position = 0
        for change in changes:
            if change.axis is None:
                position += 1
                continue
            blocks = aligned.period_segments.setdefault(position, [])
            if not blocks or blocks[-1][0] != axis:
                blocks.append((axis, []))
            blocks[-1][1].append(change)
    return aligned


def _iter_segment_changes(repeats: Sequence[RepeatedLayers], model: ShortModelForecast) -> Iterator[_SegmentChange]:
    """Yield the segments of a step, with layers numbered as in the whole model."""
    occurrences: Counter[tuple[object, ...]] = Counter()
    start = _ZERO_BYTES
    path, index, axis = "", -1, None
    current_pass = None
    for segment in model.forecast.timeline.segments:
        layer_key = segment.layer
        if (segment.phase, segment.pass_index) != current_pass:
            current_pass = segment.phase, segment.pass_index
            path, index, axis = "", -1, None
        if layer_key.stack:
            path, index = layer_key.stack, _layer_number(layer_key, model.layer_numbers)
            axis = next(
                (n for n, each in enumerate(repeats) if each.path == path and each.first <= index < each.stop), None
            )
            if axis is not None:
                index = (index - repeats[axis].first) % repeats[axis].period
        key = segment.phase, segment.pass_index, path, index, not layer_key.stack
        yield _SegmentChange(
            _SegmentKey(*key, occurrences[key] if axis is None else 0), axis, segment,
            _subtract(segment.peak_by_kind, start), _subtract(segment.end_by_kind, start),
        )  # fmt: skip
        if axis is None:
            occurrences[key] += 1
        start = segment.end_by_kind


def _layer_number(layer: LayerKey, layer_numbers: Mapping[str, Sequence[int]]) -> int:
    """Return the number in the whole model of a layer of a model with fewer layers."""
    layers = layer_numbers.get(layer.stack)
    return layer.index if layers is None else layers[layer.index]


def _predict(
    aligned: _AlignedSegments, repeats: Sequence[RepeatedLayers], extra_periods: Sequence[int]
) -> list[tuple[Segment, _SegmentChange]]:
    """Return the segments of a step with `extra_periods[axis]` periods of each axis.

    Each is returned with the segment of a model that ran from which it was made.
    """
    predicted: list[tuple[Segment, _SegmentChange]] = []
    current_bytes = _ZERO_BYTES

    def add(change: _SegmentChange, peak_by_kind: BytesByKind, end_by_kind: BytesByKind, layer_key: LayerKey) -> None:
        nonlocal current_bytes
        segment = replace(
            change.segment,
            layer=layer_key,
            peak_by_kind=_add(current_bytes, peak_by_kind),
            end_by_kind=_add(current_bytes, end_by_kind),
        )
        predicted.append((segment, change))
        current_bytes = segment.end_by_kind

    for position in range(len(aligned.segments) + 1):
        for axis, block in aligned.period_segments.get(position, ()):
            repeat = repeats[axis]
            for number in range(extra_periods[axis]):
                for change in block:
                    # The backward pass runs periods in descending order.
                    period = extra_periods[axis] - 1 - number if change.key.phase == BACKWARD else number
                    layer = repeat.first + period * repeat.period + change.key.layer
                    layer_key = LayerKey() if change.key.is_outside else LayerKey(repeat.path, layer)
                    add(change, change.peak_by_kind, change.end_by_kind, layer_key)
        if position < len(aligned.segments):
            change = aligned.segments[position]
            others = [longer[position] for longer in aligned.longer_segments]
            peak_by_kind = _extrapolate_bytes(
                change.peak_by_kind, [each.peak_by_kind for each in others], extra_periods
            )
            end_by_kind = _extrapolate_bytes(change.end_by_kind, [each.end_by_kind for each in others], extra_periods)
            key = change.key
            add(change, peak_by_kind, end_by_kind, LayerKey() if key.is_outside else LayerKey(key.path, key.layer))
    return predicted


def _build_forecast(
    base: ShortModelForecast,
    longer_models: Sequence[ShortModelForecast],
    extra_periods: Sequence[int],
    segments: Sequence[Segment],
) -> RankForecast:
    """Return the forecast of a rank with these segments, and with operation counts in proportion to the periods."""
    first, others = base.forecast, [each.forecast for each in longer_models]
    return replace(
        first,
        timeline=make_timeline(segments, segments[-1].end_by_kind),
        op_counts_by_pass={
            pass_key: _extrapolate_op_counts(
                first.op_counts_by_pass.get(pass_key, OpCounts()),
                [each.op_counts_by_pass.get(pass_key, OpCounts()) for each in others],
                extra_periods,
            )
            for pass_key in dict.fromkeys(pass_key for each in (first, *others) for pass_key in each.op_counts_by_pass)
        },
        checkpointed_layers=_extrapolate_number(
            first.checkpointed_layers, [each.checkpointed_layers for each in others], extra_periods
        ),
    )


def _is_match(expected: RankForecast, actual: RankForecast) -> bool:
    """Return True if a step matches its extrapolation: bytes within the tolerance, and equal counts."""
    one, other = expected.timeline.segments, actual.timeline.segments
    if [(each.phase, each.pass_index) for each in one] != [(each.phase, each.pass_index) for each in other]:
        return False
    tolerance = _TOLERANCE * sum(actual.timeline.peak_segment.peak_by_kind)
    for left, right in zip(one, other, strict=True):
        pairs = zip((*left.peak_by_kind, *left.end_by_kind), (*right.peak_by_kind, *right.end_by_kind), strict=True)
        if any(abs(a - b) > tolerance for a, b in pairs):
            return False
    return (
        expected.op_counts_by_pass == actual.op_counts_by_pass
        and expected.checkpointed_layers == actual.checkpointed_layers
    )


def _with_peak_tensors(
    forecast: RankForecast, source: Segment, layer_numbers: Mapping[str, Sequence[int]]
) -> RankForecast:
    """Replace the tensors at the peak by those of the same segment in the largest model that ran, renumbered."""
    timeline = forecast.timeline
    segment = replace(
        timeline.peak_segment,
        peak_storage=_renumber(source.peak_storage, layer_numbers) if source.peak_storage is not None else None,
        largest_storages=tuple(_renumber(each, layer_numbers) for each in source.largest_storages),
    )
    return replace(forecast, timeline=replace(timeline, peak_segment=segment))


def _renumber(lifetime: StorageLifetime, layer_numbers: Mapping[str, Sequence[int]]) -> StorageLifetime:
    """Return a lifetime with the module and parameter names of the whole model."""
    phase = lifetime.alloc_phase
    return replace(
        lifetime,
        alloc_phase=phase._replace(module=_renumber_name(phase.module, layer_numbers)),
        parameter=_renumber_name(lifetime.parameter, layer_numbers),
    )


def _renumber_name(name: str, layer_numbers: Mapping[str, Sequence[int]]) -> str:
    for path, layers in layer_numbers.items():
        index, _, rest = name.removeprefix(f"{path}.").partition(".")
        if name.startswith(f"{path}.") and index.isdecimal():
            return f"{path}.{layers[int(index)]}" + (f".{rest}" if rest else "")
    return name


def _extrapolate_bytes(
    base: BytesByKind, longer_models: Sequence[BytesByKind], extra_periods: Sequence[int]
) -> BytesByKind:
    return tuple(
        _extrapolate_number(each, [other[at] for other in longer_models], extra_periods) for at, each in enumerate(base)
    )


def _extrapolate_op_counts(base: OpCounts, longer_models: Sequence[OpCounts], extra_periods: Sequence[int]) -> OpCounts:
    counts = OpCounts()
    counts.add(base, 1 - sum(extra_periods))
    for each, number in zip(longer_models, extra_periods, strict=True):
        counts.add(each, number)
    return counts


def _extrapolate_number(base: int, longer_models: Sequence[int], extra_periods: Sequence[int]) -> int:
    """Return `base` plus, for each axis, the change by one period times the number of periods.

    Args:
        base: Number of the smallest model.
        longer_models: For each axis, the number of the model with one of its periods.
        extra_periods: For each axis, the number of periods.
    """
    return base + sum(number * (each - base) for each, number in zip(longer_models, extra_periods, strict=True))


def _subtract(one: BytesByKind, other: BytesByKind) -> BytesByKind:
    return tuple(a - b for a, b in zip(one, other, strict=True))


def _add(one: BytesByKind, other: BytesByKind) -> BytesByKind:
    return tuple(a + b for a, b in zip(one, other, strict=True))
