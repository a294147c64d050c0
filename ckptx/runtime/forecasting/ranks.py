"""Forecast the ranks of a task, one per pipeline rank, in forked processes.

If many layers repeat, short models (the same model with fewer layers) run in place of the whole one. `extrapolation`
computes the forecast of the whole model from them; if it rejects them, the whole model runs. The short models of a rank
run one after another in one process, which caches what they have in common.

A repeat (`RepeatedLayers`) is a sequence of layers of one list and one stage with a periodic pattern, of which whole
periods can be left out. An axis is a group of repeats, at most one per pipeline rank, that get the same number of
periods; see `ShorteningPlan`.

Methods that return a `Flow` are generators: they yield batches of calls, which run in forked processes or (`run_flow`)
in this one, and receive the results of each batch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ckptx.processes.fork import Flow, run_flow, run_flows, run_in_children
from ckptx.runtime.forecasting.extrapolation import ShortModelForecast, extrapolate
from ckptx.runtime.forecasting.run import (
    BoundaryCache,
    RankForecast,
    find_sent_shapes,
    find_task_boundaries,
    run_rank_tasks,
)
from ckptx.runtime.forecasting.short_boundaries import derive_boundaries
from ckptx.runtime.forecasting.short_models import ShorteningPlan, assign_stages, plan_shortening, shorten
from ckptx.runtime.forecasting.task import ForecastTask
from ckptx.runtime.model.build import build_model
from ckptx.runtime.parallel.pipeline.boundaries import StageBoundaries
from ckptx.runtime.parallel.pipeline.schedules import count_stages, find_schedule

BoundariesBySplit = dict[tuple[Any, ...], StageBoundaries]  # `_split_key` of a task -> boundaries of its stages


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastRequest:
    """A step to forecast, and how.

    Attributes:
        task: Step to forecast.
        all_layers: Run all layers, even if many repeat.
        validate_extrapolation: Validate the extrapolation with one more, larger model.
        peak_ranks_only: Run only pipeline ranks that can have the peak: the first rank, which has most microbatches in
            flight, the one with most parameters, and the last, which has the logits. If ranks have several stages, all
            of them run.
    """

    task: ForecastTask
    all_layers: bool = False
    validate_extrapolation: bool = True
    peak_ranks_only: bool = False


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
    """Return the forecast of each pipeline rank that runs: that of the first global rank with its stages.

    Args:
        task: See `ForecastRequest`.
        all_layers: See `ForecastRequest`.
        validate_extrapolation: See `ForecastRequest`.
        peak_ranks_only: See `ForecastRequest`.
        in_process: See `forecast_requests`.
        known_boundaries: See `forecast_requests`.
        directory: See `forecast_requests`.

    Raises:
        UnsupportedError: The class cannot run in this layout, or its shapes depend on values.
    """
    request = ForecastRequest(
        task=task,
        all_layers=all_layers,
        validate_extrapolation=validate_extrapolation,
        peak_ranks_only=peak_ranks_only,
    )
    return forecast_requests([request], in_process=in_process, known_boundaries=known_boundaries, directory=directory)[
        0
    ]


def forecast_requests(
    requests: Sequence[ForecastRequest],
    *,
    in_process: bool = False,
    known_boundaries: BoundariesBySplit | None = None,
    directory: Path | None = None,
    on_step: Callable[[str], None] | None = None,
) -> list[list[RankForecast]]:
    """Return what `forecast_ranks` returns, for several steps of one model, which run at the same time.

    Args:
        requests: Steps to forecast. Those with a pipeline that are split into stages in the same way share boundaries.
        in_process: Run one after another in this process, which caches facts about operations and must not be forked
            afterwards. False runs them in forked processes.
        known_boundaries: Known stage boundaries; new ones are added. None starts without any.
        directory: Parent of temporary configs with fewer layers, which the caller removes if this process is killed
            before it does; None for the default.
        on_step: Called with a message on the current work, to show progress; None shows none.

    Returns:
        For each request, the forecasts of its pipeline ranks, in ascending order.

    Raises:
        UnsupportedError: The class cannot run in this layout, or its shapes depend on values.
    """
    boundaries: BoundariesBySplit = {} if known_boundaries is None else known_boundaries
    with tempfile.TemporaryDirectory(prefix="ckptx-layers-", dir=directory) as own_directory:
        forecasters = []
        for number, each in enumerate(requests):
            short_tasks = (
                None
                if each.all_layers
                else _make_short_tasks(each.task, Path(own_directory, str(number)), each.validate_extrapolation)
            )
            ranks = _peak_candidates(each.task) if each.peak_ranks_only else range(each.task.dims.pp)
            forecasters.append(_RankForecaster(each.task, short_tasks, ranks, boundaries))

        def show_search(_: object) -> None:
            if on_step is not None:
                on_step("finding the values that pipeline stages send each other")

        find_all = _run_in_process if in_process else partial(run_in_children, on_wait=show_search)
        _find_boundaries([each.boundary_source() for each in forecasters], boundaries, find_all)
        _find_boundaries([task for each in forecasters for task in each.underived_tasks()], boundaries, find_all)
        if in_process:
            return [run_flow(each.run()) for each in forecasters]

        def show_runs(ended: int, total: int) -> None:
            if on_step is not None:
                on_step(f"running the step without storage, {ended} of {total} runs done")

        return run_flows([each.run() for each in forecasters], on_wait=show_runs)


def _find_boundaries(
    tasks: Sequence[ForecastTask], known_boundaries: BoundariesBySplit, find_all: Callable[..., list[Any]]
) -> None:
    """Find the boundaries of tasks with a pipeline that are not known, once for each split into stages.

    Args:
        tasks: Tasks, with and without a pipeline.
        known_boundaries: Known boundaries; those that are found are added. Those that cannot be found are left out.
        find_all: Returns the results of a function for several tuples of arguments, like `run_in_children`.
    """
    missing = {_split_key(each): each for each in tasks if each.dims.pp > 1}
    missing = {key: each for key, each in missing.items() if key not in known_boundaries}
    found = find_all(find_task_boundaries, [(each,) for each in missing.values()])
    known_boundaries |= {key: each for key, each in zip(missing, found, strict=True) if each is not None}


def _run_in_process(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return the results of a function for several tuples of arguments, which run one after another."""
    return [function(*each) for each in calls]


def _split_key(task: ForecastTask) -> tuple[Any, ...]:
    """Return a key that determines how a task is split into stages; `pp_split` differs for models with fewer layers."""
    layout = task.recipe.layout
    return layout.pp, layout.schedule, layout.pp_split


def _peak_candidates(task: ForecastTask) -> list[int]:
    """Return the pipeline ranks that can have the peak, in ascending order; see `ForecastRequest.peak_ranks_only`."""
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
    """The tasks with short models.

    Attributes:
        plan: Layers that can be left out.
        tasks: First the task with as few layers as possible; then for each axis of the plan, the task with one more
            period of this axis; last, to validate the extrapolation, the task with two more periods of each axis.
        extra_periods: For each task, the number of additional periods of each axis.
    """

    plan: ShorteningPlan
    tasks: tuple[ForecastTask, ...]
    extra_periods: tuple[tuple[int, ...], ...]

    def axes_of_rank(self, rank: int) -> list[int]:
        """Return the axes of the plan that have layers of a pipeline rank."""
        return [axis for axis, repeat in enumerate(self.plan.repeats_of_rank(rank)) if repeat is not None]

    def derive_boundaries(self, boundaries: StageBoundaries, number: int) -> StageBoundaries | None:
        """Return the stage boundaries of `tasks[number]` from those of `tasks[0]`; None if they must be discovered."""
        return derive_boundaries(boundaries, self.plan, self.extra_periods[0], self.extra_periods[number])


def _make_short_tasks(task: ForecastTask, directory: Path, validate_extrapolation: bool) -> _ShortTasks | None:
    """Return the tasks with short models; None if too few layers repeat, or if no config builds one of the models.

    Configs are written to subdirectories of `directory`.
    """
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
    """The ranks of a task, which run in order because each needs the shapes that the previous one sends.

    The index of a task is 0 for the whole model, and 1 + i for `short_tasks.tasks[i]`.
    """

    def __init__(
        self,
        task: ForecastTask,
        short_tasks: _ShortTasks | None,
        ranks: Sequence[int],
        known_boundaries: BoundariesBySplit,
    ) -> None:
        """Create a forecaster.

        Args:
            task: Task with the whole model.
            short_tasks: Tasks with short models; None if only the whole model runs.
            ranks: Pipeline ranks to forecast, in ascending order.
            known_boundaries: Known stage boundaries; new ones are added.
        """
        self._task, self._short_tasks, self._ranks = task, short_tasks, ranks
        self._input_slots = BoundaryCache().input_slots  # shapes that stages receive, by stage
        self._known_boundaries = known_boundaries

    def boundary_source(self) -> ForecastTask:
        """Return the task from whose stage boundaries those of the other tasks are derived if possible.

        It is the smallest short task if it runs, else the whole task.
        """
        return self._task_of_index(1 if 1 in self._used_indices() else 0)

    def underived_tasks(self) -> list[ForecastTask]:
        """Return the tasks whose stage boundaries cannot be derived, among those that run unless rejected."""
        return [self._task_of_index(each) for each in self._used_indices() if self._boundaries_of(each) is None]

    def _used_indices(self) -> list[int]:
        """Return the indices of the tasks that run unless their extrapolation is rejected."""
        return sorted({index for rank in self._ranks for index in self._task_indices(rank)})

    def run(self) -> Flow[list[RankForecast]]:
        """Return the forecasts of all ranks of this forecaster, in ascending order.

        A rank whose predecessor is not forecast receives what the second stage receives. If stages receive different
        numbers of values, all ranks before it are forecast, too.
        """
        layout = self._task.recipe.layout
        stages = count_stages(layout.pp, layout.schedule)
        if layout.pp > 1 and stages > layout.pp:  # find what stages send as if each had a rank of its own
            task_index = 0 if self._short_tasks is None else 1
            for number in range(stages):
                args = self._task_of_index(task_index), stages, number, self._make_cache(task_index)
                self._update_cache(task_index, (yield [(find_sent_shapes, args)])[0])
        forecasts: dict[int, RankForecast] = {}
        for rank in self._ranks:
            if rank > 1 and rank not in self._input_slots:
                if self._have_equal_input_counts():
                    self._input_slots[rank] = self._input_slots[1]
                else:
                    for each in range(max(forecasts) + 1, rank):
                        forecasts[each] = yield from self._forecast_rank(each)
            forecasts[rank] = yield from self._forecast_rank(rank)
        return list(forecasts.values())

    def _have_equal_input_counts(self) -> bool:
        """Return True if all stages but the first receive equal numbers of values, in every known split."""
        return all(len({len(slots) for slots in each.slots[1:]}) == 1 for each in self._known_boundaries.values())

    def _forecast_rank(self, rank: int) -> Flow[RankForecast]:
        forecast = None
        if self._task_indices(rank) != [0]:
            forecast = yield from self._forecast_from_short_models(rank)
        if forecast is None:
            (forecast,) = yield from self._run_tasks(rank, [0])
        return forecast

    def _task_indices(self, rank: int) -> list[int]:
        """Return the indices of the tasks that run for a pipeline rank: [0], or those of the short tasks.

        The short tasks are the smallest, those of the axes that have layers of this rank, and the one that validates.
        """
        short_tasks = self._short_tasks
        axes = short_tasks.axes_of_rank(rank) if short_tasks is not None else []
        if short_tasks is None or not axes:
            return [0]
        return [1, *(2 + axis for axis in axes), *range(2 + len(short_tasks.plan.axes), 1 + len(short_tasks.tasks))]

    def _forecast_from_short_models(self, rank: int) -> Flow[RankForecast | None]:
        """Return the extrapolated forecast of a pipeline rank; None if the short models do not agree."""
        short_tasks = self._short_tasks
        assert short_tasks is not None
        indices = self._task_indices(rank)
        forecasts = yield from self._run_tasks(rank, indices)
        short_forecasts = [
            ShortModelForecast(forecast, short_tasks.plan.remaining_layers(short_tasks.extra_periods[each - 1]))
            for each, forecast in zip(indices, forecasts, strict=True)
        ]
        repeats = [each for each in short_tasks.plan.repeats_of_rank(rank) if each is not None]
        longer_models, check_models = short_forecasts[1 : 1 + len(repeats)], short_forecasts[1 + len(repeats) :]
        forecast = extrapolate(repeats, short_forecasts[0], longer_models, check_models[0] if check_models else None)
        return None if forecast is None else replace(forecast, parameter_count=short_tasks.plan.parameter_count)

    def _run_tasks(self, rank: int, indices: Sequence[int]) -> Flow[list[RankForecast]]:
        tasks = [(self._task_of_index(each), self._make_cache(each)) for each in indices]
        (results,) = yield [(run_rank_tasks, (tasks, rank))]
        for each, (_, cache) in zip(indices, results, strict=True):
            self._update_cache(each, cache)
        return [forecast for forecast, _ in results]

    def _task_of_index(self, task_index: int) -> ForecastTask:
        """Return the whole task for index 0, and the short tasks from index 1."""
        return self._task if task_index == 0 or self._short_tasks is None else self._short_tasks.tasks[task_index - 1]

    def _boundaries_of(self, task_index: int) -> StageBoundaries | None:
        """Return the stage boundaries of a task, derived if possible; None if they are unknown."""
        key = _split_key(self._task_of_index(task_index))
        source = self._known_boundaries.get(_split_key(self._task_of_index(1))) if task_index > 1 else None
        if key not in self._known_boundaries and source is not None:
            assert self._short_tasks is not None
            derived = self._short_tasks.derive_boundaries(source, task_index - 1)
            if derived is not None:
                self._known_boundaries[key] = derived
        return self._known_boundaries.get(key)

    def _make_cache(self, task_index: int) -> BoundaryCache:
        return BoundaryCache(self._boundaries_of(task_index), dict(self._input_slots))

    def _update_cache(self, task_index: int, cache: BoundaryCache) -> None:
        if cache.stage_boundaries is not None:
            self._known_boundaries[_split_key(self._task_of_index(task_index))] = cache.stage_boundaries
        self._input_slots = {**self._input_slots, **cache.input_slots}
