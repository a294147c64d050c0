"""Forecast the ranks of a task, one per pipeline rank, in forked processes.

If many layers repeat, models with fewer of them run in place of the whole one, in parallel; `extrapolation` computes
the forecast of the whole model from them, or rejects them, and the whole model runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ckptx.processes.fork import run_in_children
from ckptx.runtime.forecasting.extrapolation import ShortModelForecast, extrapolate
from ckptx.runtime.forecasting.run import BoundaryCache, RankForecast, find_sent_shapes, run_rank
from ckptx.runtime.forecasting.short_models import ShorteningPlan, assign_stages, plan_shortening, shorten
from ckptx.runtime.forecasting.task import ForecastTask
from ckptx.runtime.model.build import build_model
from ckptx.runtime.parallel.pipeline.boundaries import StageBoundaries
from ckptx.runtime.parallel.pipeline.schedules import find_schedule

T = TypeVar("T")
BoundariesBySplit = dict[tuple[Any, ...], StageBoundaries]  # boundaries of a model, by how it is split into stages


def count_stages(pp: int, schedule: str) -> int:
    """Return the number of pipeline stages; 1 without a pipeline."""
    return pp * find_schedule(schedule).stages_per_rank if pp > 1 else 1


def forecast_ranks(
    task: ForecastTask,
    *,
    all_layers: bool = False,
    validate_extrapolation: bool = True,
    peak_ranks_only: bool = False,
    in_process: bool = False,
    known_boundaries: BoundariesBySplit | None = None,
    directory: Path | None = None,
) -> list[RankForecast]:
    """Return the forecasts of the first rank of each pipeline rank.

    Args:
        task: Step to forecast.
        all_layers: Run all layers, even if many repeat.
        validate_extrapolation: Validate the extrapolation with a third, larger model.
        peak_ranks_only: Run only pipeline ranks that can have the peak: the first rank, which has most microbatches in
            flight, the one with most parameters, and the last, which has the logits.
        in_process: Run one after another, and without a pipeline in this process, which caches facts about operations
            and must not be forked afterwards.
        known_boundaries: Known stage boundaries; new ones are added. None starts without any.
        directory: Parent of temporary configs with fewer layers, for processes that may be killed before they clean up.

    Raises:
        UnsupportedError: The class cannot run in this layout, or its shapes depend on values.
    """
    with tempfile.TemporaryDirectory(prefix="ckptx-layers-", dir=directory) as own_directory:
        short_tasks = None if all_layers else _make_short_tasks(task, Path(own_directory), validate_extrapolation)
        return _RankForecaster(task, short_tasks, in_process, {} if known_boundaries is None else known_boundaries).run(
            _peak_candidates(task) if peak_ranks_only else range(task.dims.pp)
        )


def _peak_candidates(task: ForecastTask) -> list[int]:
    layout = task.recipe.layout
    if layout.pp == 1 or find_schedule(layout.schedule).stages_per_rank > 1:
        return list(range(layout.pp))
    model = build_model(task.source, trust_remote_code=task.recipe.model.trust_remote_code)
    stages = assign_stages(model, task)
    sizes = [0] * layout.pp
    for name, parameter in model.named_parameters():
        sizes[stages.stage_of(name)] += parameter.numel()
    return sorted({0, sizes.index(max(sizes)), layout.pp - 1})


@dataclass(frozen=True, slots=True)
class _ShortTasks:
    """Models with fewer layers.

    Attributes:
        plan: Layers that can be left out.
        tasks: Tasks with as few layers as possible, with one more period per axis, and, to validate, with two of all.
        extra_periods: For each task, the additional periods of each axis.
    """

    plan: ShorteningPlan
    tasks: tuple[ForecastTask, ...]
    extra_periods: tuple[tuple[int, ...], ...]

    def axes_of_rank(self, rank: int) -> list[int]:
        """Return the axes that have layers of a pipeline rank."""
        return [axis for axis, repeat in enumerate(self.plan.repeats_of_rank(rank)) if repeat is not None]


def _make_short_tasks(task: ForecastTask, directory: Path, validate_extrapolation: bool) -> _ShortTasks | None:
    plan = plan_shortening(task, model_count=3 if validate_extrapolation else 2)
    if plan is None:
        return None
    count = len(plan.axes)
    extra_periods = [tuple(int(axis == each) for each in range(count)) for axis in range(-1, count)]
    if validate_extrapolation:
        extra_periods.append((2,) * count)
    tasks = [shorten(task, plan, each, directory / "-".join(map(str, each))) for each in extra_periods]
    built_tasks = tuple(each for each in tasks if each is not None)
    return _ShortTasks(plan, built_tasks, tuple(extra_periods)) if len(built_tasks) == len(extra_periods) else None


class _RankForecaster:
    """The ranks of a task, which run in order because each needs the shapes that the previous one sends."""

    def __init__(
        self, task: ForecastTask, short_tasks: _ShortTasks | None, in_process: bool, known_boundaries: BoundariesBySplit
    ) -> None:
        self._task, self._short_tasks, self._in_process = task, short_tasks, in_process
        self._input_slots = BoundaryCache().input_slots
        self._known_boundaries = known_boundaries

    def run(self, ranks: Sequence[int]) -> list[RankForecast]:
        """Return the forecasts; a rank whose predecessor is left out receives what the second stage receives.

        If stages receive different numbers of values, no rank is left out.
        """
        layout = self._task.recipe.layout
        stages = count_stages(layout.pp, layout.schedule)
        if layout.pp > 1 and stages > layout.pp:  # find what stages send as if each had a rank of its own
            task_index = 0 if self._short_tasks is None else 1
            for number in range(stages):
                self._update_cache(
                    task_index,
                    self._run_calls(
                        find_sent_shapes,
                        [(self._task_of_index(task_index), stages, number, self._make_cache(task_index))],
                    )[0],
                )
        forecasts: dict[int, RankForecast] = {}
        for rank in ranks:
            if rank > 1 and rank not in self._input_slots:
                if self._have_equal_input_counts():
                    self._input_slots[rank] = self._input_slots[1]
                else:
                    forecasts |= {each: self._forecast_rank(each) for each in range(max(forecasts) + 1, rank)}
            forecasts[rank] = self._forecast_rank(rank)
        return list(forecasts.values())

    def _have_equal_input_counts(self) -> bool:
        return all(len({len(slots) for slots in each.slots[1:]}) == 1 for each in self._known_boundaries.values())

    def _forecast_rank(self, rank: int) -> RankForecast:
        forecast = self._forecast_from_short_models(rank)
        if forecast is None:
            forecast, cache = self._run_calls(run_rank, [(self._task, rank, self._make_cache(0))])[0]
            self._update_cache(0, cache)
        return forecast

    def _forecast_from_short_models(self, rank: int) -> RankForecast | None:
        short_tasks = self._short_tasks
        axes = short_tasks.axes_of_rank(rank) if short_tasks is not None else []
        if short_tasks is None or not axes:
            return None
        indices = [0, *(1 + axis for axis in axes), *range(1 + len(short_tasks.plan.axes), len(short_tasks.tasks))]
        calls = [(short_tasks.tasks[each], rank, self._make_cache(1 + each)) for each in indices]
        results = self._run_calls(run_rank, calls)
        for each, (_, cache) in zip(indices, results, strict=True):
            self._update_cache(1 + each, cache)
        short_forecasts = [
            ShortModelForecast(forecast, short_tasks.plan.remaining_layers(short_tasks.extra_periods[each]))
            for each, (forecast, _) in zip(indices, results, strict=True)
        ]
        repeats = [each for each in short_tasks.plan.repeats_of_rank(rank) if each is not None]
        longer_models, check_models = short_forecasts[1 : 1 + len(repeats)], short_forecasts[1 + len(repeats) :]
        forecast = extrapolate(repeats, short_forecasts[0], longer_models, check_models[0] if check_models else None)
        return None if forecast is None else replace(forecast, parameter_count=short_tasks.plan.parameter_count)

    def _run_calls(self, function: Callable[..., T], calls: Sequence[tuple[Any, ...]]) -> list[T]:
        if not self._in_process:
            return run_in_children(function, calls)
        if self._task.dims.pp > 1:  # DTensor caches groups by mesh, and each rank has other groups
            return run_in_children(function, calls, max_processes=1)
        return [function(*each) for each in calls]

    def _task_of_index(self, task_index: int) -> ForecastTask:
        """Return the whole task for index 0, and the short tasks from index 1."""
        return self._task if task_index == 0 or self._short_tasks is None else self._short_tasks.tasks[task_index - 1]

    def _split_key(self, task_index: int) -> tuple[Any, ...]:
        layout = self._task_of_index(task_index).recipe.layout
        return layout.pp, layout.schedule, layout.pp_split

    def _make_cache(self, task_index: int) -> BoundaryCache:
        return BoundaryCache(self._known_boundaries.get(self._split_key(task_index)), self._input_slots)

    def _update_cache(self, task_index: int, cache: BoundaryCache) -> None:
        if cache.stage_boundaries is not None:
            self._known_boundaries[self._split_key(task_index)] = cache.stage_boundaries
        self._input_slots = {**self._input_slots, **cache.input_slots}
