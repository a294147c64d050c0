"""Search for layouts that fit on a number of GPUs, with the least recomputation and communication.

Every layout runs the same step: the same global batch over all GPUs. Modes of activation checkpointing are tried from
least to most recomputation; the first that fits is used, with its best number of microbatches: fewer microbatches
gather parameters less often, but leave a pipeline idle for longer. Candidates run with few layers, few microbatches
and, of a pipeline, few ranks; the best one is then forecast with every stage.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from msgspec import structs

from ckptx.errors import CkptxError, InternalError, UsageError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.processes.fork import run_in_children
from ckptx.runtime.forecasting.ranks import BoundariesBySplit, forecast_ranks
from ckptx.runtime.forecasting.run import RankForecast
from ckptx.runtime.forecasting.task import ForecastTask, with_other_precision
from ckptx.runtime.memory.reserve import reserve_bytes
from ckptx.runtime.memory.storage_ledger import GRADIENTS, KINDS, OPTIMIZER, PARAMETERS
from ckptx.runtime.model.build import build_model
from ckptx.runtime.parallel.pipeline.schedules import find_schedule

MODES = ("none", "selective", "submodule", "full")  # in ascending order of recomputation
GPUS_PER_NODE = 8  # GPUs with a fast interconnect: TP stays within them
_STEADY_MICROBATCHES = 4  # microbatches without a pipeline: the first, two identical ones, the last
_EXTRA_PIPELINE_MICROBATCHES = 3  # with a pipeline, microbatches that run beyond one for each of its ranks
_MAX_CONFIRMED = 3  # candidates that are forecast in full, until one of them fits

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedDims:
    """Dimensions that are not searched.

    Attributes:
        tp: TP ranks; None to search, as for the other dimensions that may be None.
        pp: Pipeline ranks.
        dp_shard: FSDP2 ranks.
        dp_replicate: Replicas; never searched.
        microbatches: Microbatches per step and data-parallel rank.
        mode: Mode of activation checkpointing.
    """

    tp: int | None = None
    pp: int | None = None
    dp_shard: int | None = None
    dp_replicate: int = 1
    microbatches: int | None = None
    mode: str | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run the step.

    Attributes:
        task: Step in this layout.
        peak: Peak bytes of tensors, on the rank with the most.
        between_steps: Bytes between steps, on the rank with the most.
        flops: Floating-point operations of a step, on the rank with the most.
        recomputed_flops: Part of `flops` that is recomputed, on the same rank.
        sent_bytes: Kind of collective -> bytes in a step, on the rank that sends most.
        missing_inputs: Kinds of input that the model has a tower for, but the step lacks.
        is_fully_evaluated: True if every stage was forecast, and the extrapolation of layers was validated.
    """

    task: ForecastTask
    peak: int
    between_steps: int
    flops: int
    recomputed_flops: int
    sent_bytes: Mapping[str, int]
    missing_inputs: tuple[str, ...] = ()
    is_fully_evaluated: bool = False

    @property
    def bubble_fraction(self) -> float:
        """Fraction of a step in which pipeline ranks are idle."""
        layout = self.task.recipe.layout
        return find_schedule(layout.schedule).bubble_fraction(layout.pp, self.task.microbatches)

    @property
    def sort_key(self) -> tuple[float, int, int]:
        """Sort key, best first: (time relative to a step without recomputation and idle ranks, bytes sent, peak)."""
        useful = (1 - self.recomputed_flops / self.flops if self.flops else 1.0) * (1 - self.bubble_fraction)
        return round(1 / useful, 3), sum(self.sent_bytes.values()), self.peak

    def fits(self, memory: int) -> bool:
        """Return True if the step fits, reserve included."""
        return self.peak + reserve_bytes(self.peak) <= memory


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Step, GPUs and fixed dimensions of a layout search.

    Attributes:
        task: Step, in any layout; its global batch is that of all layouts.
        gpus: Number of GPUs.
        memory: Memory per GPU, in bytes.
        fixed: Dimensions that are not searched.
        directory: Directory for temporary files; None for the default.
    """

    task: ForecastTask
    gpus: int
    memory: int
    fixed: FixedDims
    directory: Path | None = None


@dataclass(frozen=True, slots=True)
class MeshResult:
    """Search result of one mesh.

    Attributes:
        dims: Mesh that was searched.
        best: Best candidate; None if none fits.
        min_peak: Peak of `best` in bytes. If none fits, that of `smallest_task`, or a lower bound if no candidate was
            run. 0 for an impossible mesh.
        smallest_task: Candidate with the lowest peak if none fits; None if one fits or no candidate was run.
        refusal_reason: Reason why the mesh is impossible; empty if it is possible.
        candidate_count: Number of candidates that were run.
    """

    dims: ParallelDims
    best: Candidate | None = None
    min_peak: int = 0
    smallest_task: ForecastTask | None = None
    refusal_reason: str = ""
    candidate_count: int = 0


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Result of a layout search.

    Attributes:
        architecture: Name of the model class.
        parameter_count: Number of parameters of the whole model.
        mesh_results: Results of all meshes; those that fit come first, best first.
    """

    architecture: str
    parameter_count: int
    mesh_results: tuple[MeshResult, ...]


def search(space: SearchSpace, on_step: Callable[[str], None] = lambda _: None) -> SearchResult:
    """Return the results of all meshes, several of which are searched at once.

    Args:
        space: Search to run.
        on_step: Called with a message on the current work, to show progress.

    Raises:
        UsageError: No mesh has the given dimensions.
        InputError, UnsupportedError: The model cannot be built.
    """
    meshes = list_meshes(space.gpus, space.fixed)
    trust_remote_code = space.task.recipe.model.trust_remote_code
    model: Any = build_model(space.task.source, trust_remote_code=trust_remote_code)
    parameter_count = sum(each.numel() for each in model.parameters())
    mesh_groups: dict[tuple[int, int], list[ParallelDims]] = {}
    # Meshes with the same number of stages run in one process, so that stage boundaries are found once. Without a
    # pipeline, each mesh is a group of its own.
    for number, dims in enumerate(meshes):
        mesh_groups.setdefault((dims.pp, number if dims.pp == 1 else 0), []).append(dims)
    calls = [(space, each, parameter_count) for _, each in sorted(mesh_groups.items(), reverse=True)]

    def show_progress(ended: Collection[int]) -> None:
        count = sum(len(calls[number][1]) for number in ended)
        on_step(f"searching layouts, {count} of {len(meshes)} done")

    results = [each for found in run_in_children(search_meshes, calls, on_wait=show_progress) for each in found]
    fitting = sorted((each for each in results if each.best is not None), key=_best_sort_key)
    other_results = [each for each in results if each.best is None]
    for number, result in enumerate(fitting[:_MAX_CONFIRMED]):
        on_step("forecasting every stage of the best layout")
        fitting[number] = confirm(result, space.memory)
        if fitting[number].best is not None:
            break
    other_results += [each for each in fitting if each.best is None]
    fitting = sorted((each for each in fitting if each.best is not None), key=_best_sort_key)
    other_results.sort(key=lambda each: meshes.index(each.dims))
    return SearchResult(str(model.config.architectures[0]), parameter_count, (*fitting, *other_results))


def search_meshes(space: SearchSpace, meshes: Sequence[ParallelDims], parameter_count: int) -> list[MeshResult]:
    """Return the results of some meshes, one after another.

    Args:
        space: Search to run.
        meshes: Meshes with the same number of stages.
        parameter_count: Number of parameters of the model.
    """
    known_boundaries: BoundariesBySplit = {}
    return [_search_mesh(space, dims, parameter_count, known_boundaries) for dims in meshes]


def _search_mesh(
    space: SearchSpace, dims: ParallelDims, parameter_count: int, known_boundaries: BoundariesBySplit
) -> MeshResult:
    """Return the result of a mesh: the first mode that fits, with its best number of microbatches."""
    task, fixed = space.task, space.fixed
    min_peak = min_peak_bytes(task, parameter_count, dims)
    if min_peak + reserve_bytes(min_peak) > space.memory:
        return MeshResult(dims, min_peak=min_peak)
    counts = list(possible_microbatches(task, dims, fixed))
    if not counts:
        return MeshResult(
            dims,
            refusal_reason="the batch of a data-parallel rank cannot be divided into at least one microbatch per "
            "pipeline rank, each of 1, 2, 4, ... sequences",
        )
    smallest: Candidate | None = None
    candidate_count = 0
    for mode in (fixed.mode,) if fixed.mode is not None else MODES:
        best = None
        for count in counts:  # in descending order: more microbatches take less memory
            try:
                candidate = _forecast_candidate(
                    with_layout(task, dims, mode, count),
                    validate_extrapolation=False, peak_ranks_only=True, in_process=True,
                    known_boundaries=known_boundaries, directory=space.directory,
                )  # fmt: skip
            except InternalError:
                raise
            except CkptxError as error:
                return MeshResult(dims, refusal_reason=str(error), candidate_count=candidate_count)
            candidate_count += 1
            smallest = candidate if smallest is None or candidate.peak < smallest.peak else smallest
            _logger.info("%s, %s, %d microbatches: %d bytes", dims, mode, count, candidate.peak)
            if not candidate.fits(space.memory):
                break
            best = candidate if best is None else min(best, candidate, key=lambda each: each.sort_key)
            if dims.dp_shard == 1:
                break  # without FSDP nothing is gathered, so fewer microbatches would not send less
        if best is not None:
            return MeshResult(dims, best, best.peak, candidate_count=candidate_count)
    assert smallest is not None  # a mode and a number of microbatches were evaluated
    return MeshResult(dims, min_peak=smallest.peak, smallest_task=smallest.task, candidate_count=candidate_count)


def confirm(result: MeshResult, memory: int) -> MeshResult:
    """Forecast the best candidate with every stage and validated extrapolation; drop it if it does not fit."""
    assert result.best is not None
    best = replace(_forecast_candidate(result.best.task), is_fully_evaluated=True)
    fits = best.fits(memory)
    return MeshResult(
        result.dims, best if fits else None, best.peak, smallest_task=None if fits else best.task,
        candidate_count=result.candidate_count + 1,
    )  # fmt: skip


def forecast_other_precision(space: SearchSpace, result: SearchResult) -> tuple[ForecastTask, int] | None:
    """Forecast the best layout in the precision of `with_other_precision`; if none fits, that with the smallest peak.

    Returns:
        The step, and its peak in bytes: a lower bound if `result` has only lower bounds. None if no layout is
        supported.
    """
    best = result.mesh_results[0].best
    supported = [each for each in result.mesh_results if not each.refusal_reason]
    if not supported:
        return None
    smallest = min(supported, key=lambda each: each.min_peak)
    task = smallest.smallest_task if best is None else best.task
    if task is None:
        other_task = with_other_precision(space.task)
        return other_task, min_peak_bytes(other_task, result.parameter_count, smallest.dims)
    other_task = with_other_precision(task)
    return other_task, _forecast_candidate(other_task, peak_ranks_only=True, validate_extrapolation=False).peak


def _forecast_candidate(task: ForecastTask, **options: Any) -> Candidate:
    """Forecast a task with few of its microbatches, or with all if they do not suffice to extrapolate.

    Args:
        task: Step with all microbatches.
        options: Keyword arguments of `forecast_ranks`.
    """
    microbatch_count = count_distinct_microbatches(task)
    ranks = forecast_ranks(with_microbatches(task, microbatch_count), **options)
    if microbatch_count < task.microbatches and not all(map(has_steady_passes, ranks)):
        microbatch_count, ranks = task.microbatches, forecast_ranks(task, **options)
    return make_candidate(task, ranks, task.microbatches - microbatch_count)


def _best_sort_key(result: MeshResult) -> tuple[float, int, int]:
    assert result.best is not None
    return result.best.sort_key


def list_meshes(gpus: int, fixed: FixedDims) -> list[ParallelDims]:
    """Return every mesh of a number of GPUs; TP stays within a node unless it is fixed.

    Raises:
        UsageError: No mesh has the given dimensions.
    """
    meshes = [
        ParallelDims(tp=tp, pp=pp, dp_shard=rest // fixed.dp_replicate, dp_replicate=fixed.dp_replicate)
        for tp in divisors(gpus)
        if fixed.tp in (None, tp) and (tp <= GPUS_PER_NODE or fixed.tp == tp)
        for pp in divisors(gpus // tp)
        if fixed.pp in (None, pp)
        for rest in (gpus // tp // pp,)
        if rest % fixed.dp_replicate == 0 and fixed.dp_shard in (None, rest // fixed.dp_replicate)
    ]
    if not meshes:
        raise UsageError(
            f"--gpus {gpus}: no mesh of this many GPUs has the given dimensions, whose product must divide it; leave "
            "one of them out"
        )
    return meshes


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, in ascending order."""
    return [each for each in range(1, number + 1) if number % each == 0]


def possible_microbatches(task: ForecastTask, dims: ParallelDims, fixed: FixedDims) -> Iterator[int]:
    """Yield the possible numbers of microbatches per data-parallel rank, for microbatches of 1, 2, 4, ... sequences."""
    batch_size, rest = divmod(task.recipe.training.global_batch, dims.dp)
    if rest:
        return
    sizes: Iterable[int] = (2**power for power in range(batch_size.bit_length()))
    for size in sizes:
        if (
            batch_size % size == 0
            and batch_size // size >= dims.pp
            and fixed.microbatches in (None, batch_size // size)
        ):
            yield batch_size // size


def with_layout(task: ForecastTask, dims: ParallelDims, mode: str, microbatches: int) -> ForecastTask:
    """Return the same step with another mesh, checkpointing mode and number of microbatches."""
    recipe = task.recipe
    layout = structs.replace(
        recipe.layout, tp=dims.tp, pp=dims.pp, dp_shard=dims.dp_shard, dp_replicate=dims.dp_replicate,
        activation_checkpointing=cast(Any, mode),
    )  # fmt: skip
    task = replace(task, recipe=structs.replace(recipe, layout=layout))
    return with_microbatches(task, microbatches, recipe.training.global_batch // dims.dp // microbatches)


def with_microbatches(task: ForecastTask, count: int, size: int | None = None) -> ForecastTask:
    """Return the step with `count` microbatches of `size` sequences; None keeps the microbatch size."""
    recipe = task.recipe
    size = task.microbatch if size is None else size
    training = structs.replace(
        recipe.training,
        global_batch=size * count * task.dims.dp,
        local_batch=size * count if task.dims.pp > 1 else size,
        microbatch=size,
    )
    return replace(task, recipe=structs.replace(recipe, training=training))


def count_distinct_microbatches(task: ForecastTask) -> int:
    """Return the smallest number of microbatches that suffices to extrapolate to all of them.

    If it is smaller than the number of all, two of these microbatches do the same work, and the step with them has the
    peak of the whole step, except for the bytes that each microbatch keeps for the whole step.
    """
    if task.dims.pp > 1 and task.recipe.layout.schedule != "1f1b":
        return task.microbatches  # the more microbatches, the more are in flight at the peak
    sufficient = _STEADY_MICROBATCHES if task.dims.pp == 1 else task.dims.pp + _EXTRA_PIPELINE_MICROBATCHES
    return min(task.microbatches, sufficient)


def min_peak_bytes(task: ForecastTask, parameter_count: int, dims: ParallelDims) -> int:
    """Return a lower bound of the peak in bytes: evenly sharded parameters, and training state if none is frozen."""
    element_bytes = 4 if task.recipe.model.dtype == "float32" else 2
    copies = 2 + (2 if task.optimizer in ("adam", "adamw") else 0)  # parameters and gradients, two moments of Adam
    if task.recipe.model.freeze or task.recipe.adapter is not None:
        copies = 1
    return math.ceil(parameter_count / (dims.tp * dims.pp * dims.dp_shard)) * element_bytes * copies


def has_steady_passes(rank: RankForecast) -> bool:
    """Return True if the second and the third microbatch do the same work."""
    return all(
        rank.op_counts_by_pass.get((part, 1)) == rank.op_counts_by_pass.get((part, 2)) is not None
        for part in ("forward", "backward")
    )


def make_candidate(task: ForecastTask, ranks: Sequence[RankForecast], extra_microbatches: int) -> Candidate:
    """Combine the forecasts of ranks.

    Args:
        task: Step with all microbatches.
        ranks: Forecasts of its ranks with fewer microbatches.
        extra_microbatches: Number of microbatches that did not run; each counts as the second one.
    """
    count = task.microbatches - extra_microbatches  # microbatches that ran
    all_counts = []
    for rank in ranks:
        rank_counts = rank.op_counts
        for part in ("forward", "backward") if extra_microbatches else ():
            rank_counts.add(rank.op_counts_by_pass[part, 1], extra_microbatches)
        all_counts.append(rank_counts)
    largest_counts = max(all_counts, key=lambda each: each.flops)
    largest_sender = max(all_counts, key=lambda each: sum(each.sent_bytes.values()))
    return Candidate(
        task,
        max(each.peak + extra_microbatches * _bytes_per_microbatch(each, count) for each in ranks),
        max(sum(each.timeline.between_steps_by_kind) for each in ranks),
        largest_counts.flops,
        largest_counts.recomputed_flops,
        Counter(largest_sender.sent_bytes),
        ranks[0].missing_inputs,
    )


def _bytes_per_microbatch(rank: RankForecast, count: int) -> int:
    """Return the bytes that a microbatch keeps for the whole step: its inputs and its pipeline buffers.

    `count` is the number of microbatches that ran.
    """
    state_kinds = (PARAMETERS, OPTIMIZER, GRADIENTS)
    kept_bytes = sum(
        size for kind, size in zip(KINDS, rank.timeline.between_steps_by_kind, strict=True) if kind not in state_kinds
    )
    return rank.input_bytes + kept_bytes // count
