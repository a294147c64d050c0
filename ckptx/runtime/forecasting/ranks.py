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

from ckptx.processes.fork import in_children
from ckptx.runtime.forecasting.extrapolation import ShortModel, extrapolated
from ckptx.runtime.forecasting.run import RankForecast, SharedFacts, run_rank, walk_stage
from ckptx.runtime.forecasting.short_models import ShorteningPlan, plan_of, shortened, stages_of_model
from ckptx.runtime.forecasting.task import Task
from ckptx.runtime.model.build import build_model
from ckptx.runtime.parallel.pipeline.boundaries import StageBoundaries
from ckptx.runtime.parallel.pipeline.schedules import find_schedule

T = TypeVar("T")
KnownBoundaries = dict[tuple[Any, ...], StageBoundaries]  # boundaries of a model, by how it is split into stages


def stages_of(pp: int, schedule: str) -> int:
    """Return the number of pipeline stages; 1 without a pipeline."""
    return pp * find_schedule(schedule).stages if pp > 1 else 1


def ranks_of(
    task: Task,
    *,
    all_layers: bool = False,
    validate_extrapolation: bool = True,
    few_ranks: bool = False,
    in_place: bool = False,
    known_boundaries: KnownBoundaries | None = None,
    directory: Path | None = None,
) -> list[RankForecast]:
    """Return the forecasts of the first rank of each pipeline rank.

    Args:
        task: Step to forecast.
        all_layers: Run all layers, even if many repeat.
        validate_extrapolation: Validate the extrapolation with a third, larger model.
        few_ranks: Run only pipeline ranks that can have the peak: the first rank, which has most microbatches in
            flight, the one with most parameters, and the last, which has the logits.
        in_place: Run one after another, and without a pipeline in this process, which caches facts about operations and
            must not be forked afterwards.
        known_boundaries: Known stage boundaries; new ones are added. None for none.
        directory: Parent of temporary configs with fewer layers, for processes that may be killed before they clean up.

    Raises:
        UnsupportedError: The class cannot run in this layout, or its shapes depend on values.
    """
    with tempfile.TemporaryDirectory(prefix="ckptx-layers-", dir=directory) as own:
        short = None if all_layers else _short_models(task, Path(own), validate_extrapolation)
        return _Ranks(task, short, in_place, {} if known_boundaries is None else known_boundaries).run(
            _peak_candidates(task) if few_ranks else range(task.dims.pp)
        )


def _peak_candidates(task: Task) -> list[int]:
    layout = task.recipe.layout
    if layout.pp == 1 or find_schedule(layout.schedule).stages > 1:
        return list(range(layout.pp))
    model = build_model(task.source, trust_remote_code=task.recipe.model.trust_remote_code)
    stages = stages_of_model(model, task)
    sizes = [0] * layout.pp
    for name, parameter in model.named_parameters():
        sizes[stages.stage_of(name)] += parameter.numel()
    return sorted({0, sizes.index(max(sizes)), layout.pp - 1})


@dataclass(frozen=True, slots=True)
class _Short:
    """Models with fewer layers.

    Attributes:
        plan: Layers that can be left out.
        tasks: Tasks with as few layers as possible, with one more period per axis, and, to validate, with two of all.
        extra: For each task, the additional periods of each axis.
    """

    plan: ShorteningPlan
    tasks: tuple[Task, ...]
    extra: tuple[tuple[int, ...], ...]

    def of_rank(self, rank: int) -> list[int]:
        """Return the axes that have layers of a pipeline rank."""
        return [axis for axis, repeat in enumerate(self.plan.of_rank(rank)) if repeat is not None]


def _short_models(task: Task, directory: Path, validate_extrapolation: bool) -> _Short | None:
    plan = plan_of(task, runs=3 if validate_extrapolation else 2)
    if plan is None:
        return None
    count = len(plan.axes)
    extra = [tuple(int(axis == each) for each in range(count)) for axis in range(-1, count)]
    if validate_extrapolation:
        extra.append((2,) * count)
    tasks = [shortened(task, plan, each, directory / "-".join(map(str, each))) for each in extra]
    found = tuple(each for each in tasks if each is not None)
    return _Short(plan, found, tuple(extra)) if len(found) == len(extra) else None


class _Ranks:
    """The ranks of a task, which run in order because each needs the shapes that the previous one sends."""

    def __init__(self, task: Task, short: _Short | None, in_place: bool, known_boundaries: KnownBoundaries) -> None:
        self._task, self._short, self._in_place = task, short, in_place
        self._boundaries = SharedFacts().boundaries
        self._known_boundaries = known_boundaries

    def run(self, ranks: Sequence[int]) -> list[RankForecast]:
        """Return the forecasts; a rank whose predecessor is left out receives what the second stage receives.

        If stages receive different numbers of values, no rank is left out.
        """
        layout = self._task.recipe.layout
        stages = stages_of(layout.pp, layout.schedule)
        if layout.pp > 1 and stages > layout.pp:  # find what stages send as if each had a rank of its own
            at = 0 if self._short is None else 1
            for number in range(stages):
                self._learn(at, self._answers(walk_stage, [(self._task_at(at), stages, number, self._known(at))])[0])
        found: dict[int, RankForecast] = {}
        for rank in ranks:
            if rank > 1 and rank not in self._boundaries:
                if self._are_given_as_many():
                    self._boundaries[rank] = self._boundaries[1]
                else:
                    found |= {each: self._rank(each) for each in range(max(found) + 1, rank)}
            found[rank] = self._rank(rank)
        return list(found.values())

    def _are_given_as_many(self) -> bool:
        return all(len({len(slots) for slots in each.slots[1:]}) == 1 for each in self._known_boundaries.values())

    def _rank(self, rank: int) -> RankForecast:
        found = self._rank_of_few_layers(rank)
        if found is None:
            found, known = self._answers(run_rank, [(self._task, rank, self._known(0))])[0]
            self._learn(0, known)
        return found

    def _rank_of_few_layers(self, rank: int) -> RankForecast | None:
        short = self._short
        axes = short.of_rank(rank) if short is not None else []
        if short is None or not axes:
            return None
        needed = [0, *(1 + axis for axis in axes), *range(1 + len(short.plan.axes), len(short.tasks))]
        calls = [(short.tasks[each], rank, self._known(1 + each)) for each in needed]
        answers = self._answers(run_rank, calls)
        for each, (_, known) in zip(needed, answers, strict=True):
            self._learn(1 + each, known)
        runs = [
            ShortModel(forecast, short.plan.kept(short.extra[each]))
            for each, (forecast, _) in zip(needed, answers, strict=True)
        ]
        repeats = [each for each in short.plan.of_rank(rank) if each is not None]
        grown, rest = runs[1 : 1 + len(repeats)], runs[1 + len(repeats) :]
        found = extrapolated(repeats, runs[0], grown, rest[0] if rest else None)
        return None if found is None else replace(found, parameters=short.plan.parameters)

    def _answers(self, work: Callable[..., T], calls: Sequence[tuple[Any, ...]]) -> list[T]:
        if not self._in_place:
            return in_children(work, calls)
        if self._task.dims.pp > 1:  # DTensor caches groups by mesh, and each rank has other groups
            return in_children(work, calls, most=1)
        return [work(*each) for each in calls]

    def _task_at(self, at: int) -> Task:
        return self._task if at == 0 or self._short is None else self._short.tasks[at - 1]

    def _stages_at(self, at: int) -> tuple[Any, ...]:
        layout = self._task_at(at).recipe.layout
        return layout.pp, layout.schedule, layout.pp_split

    def _known(self, at: int) -> SharedFacts:
        return SharedFacts(self._known_boundaries.get(self._stages_at(at)), self._boundaries)

    def _learn(self, at: int, known: SharedFacts) -> None:
        if known.stage_boundaries is not None:
            self._known_boundaries[self._stages_at(at)] = known.stage_boundaries
        self._boundaries = {**self._boundaries, **known.boundaries}
