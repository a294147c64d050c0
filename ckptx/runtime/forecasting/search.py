"""Search the layouts of a number of GPUs that fit, with least recomputation and least communication.

Every layout runs the same step: the same global batch over all GPUs. Modes of activation checkpointing are tried from
least to most recomputation; the first that fits is used, with its best number of microbatches: fewer microbatches
gather parameters less often, but leave a pipeline idle for longer. Candidates run with few layers, few microbatches
and, of a pipeline, few ranks; the best one is then forecast with every stage.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from msgspec import structs

from ckptx.errors import CkptxError, Defect, UsageError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.processes.fork import in_children
from ckptx.runtime.forecasting.ranks import KnownBoundaries, ranks_of
from ckptx.runtime.forecasting.run import RankForecast
from ckptx.runtime.forecasting.task import Task
from ckptx.runtime.memory.reserve import reserve_bytes
from ckptx.runtime.memory.storage_ledger import GRADIENTS, KINDS, OPTIMIZER, PARAMETERS
from ckptx.runtime.model.build import build_model
from ckptx.runtime.parallel.pipeline.schedules import find_schedule

MODES = ("none", "selective", "submodule", "full")  # in ascending order of recomputation
NODE = 8  # GPUs with a fast interconnect: TP stays within them
_STEADY = 4  # microbatches without a pipeline: the first, two identical ones, the last
_FILLED = 3  # microbatches of a pipeline beyond one for each of its ranks
_CONFIRMED = 3  # candidates that are forecast in full, until one of them fits

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedDims:
    """Dimensions that are not searched.

    Attributes:
        tp: TP ranks; None to search, as for the others.
        pp: Pipeline ranks.
        dp_shard: FSDP2 ranks.
        dp_replicate: Replicas.
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
        recomputed: Those of `flops` that are recomputed.
        sent: Bytes by collective, on the rank that sends most.
        missing: Kinds of input that the model has a tower for, but the step lacks.
        is_checked: True if every stage was forecast, and the extrapolation of layers was validated.
    """

    task: Task
    peak: int
    between_steps: int
    flops: int
    recomputed: int
    sent: Mapping[str, int]
    missing: tuple[str, ...] = ()
    is_checked: bool = False

    @property
    def idle(self) -> float:
        """Fraction of a step in which pipeline ranks are idle."""
        layout = self.task.recipe.layout
        return find_schedule(layout.schedule).bubble_fraction(layout.pp, self.task.microbatches)

    @property
    def order(self) -> tuple[float, int, int]:
        """Sort key, best first: least overhead in time, least communication, least memory."""
        useful = (1 - self.recomputed / self.flops if self.flops else 1.0) * (1 - self.idle)
        return round(1 / useful, 3), sum(self.sent.values()), self.peak

    def fits(self, memory: int) -> bool:
        """Return True if the step fits, reserve included."""
        return self.peak + reserve_bytes(self.peak) <= memory


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """A layout search.

    Attributes:
        task: Step, in any layout.
        gpus: Number of GPUs.
        memory: Memory per GPU, in bytes.
        fixed: Dimensions that are not searched.
        directory: Directory for temporary files; None for the default.
    """

    task: Task
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
        least: Lowest peak in bytes of the candidates, or a lower bound if none was run.
        refused: Reason why the mesh is impossible; empty if it is not.
        tried: Number of candidates that were run.
    """

    dims: ParallelDims
    best: Candidate | None = None
    least: int = 0
    refused: str = ""
    tried: int = 0


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Result of a layout search.

    Attributes:
        architecture: Name of the model class.
        parameters: Number of parameters of the whole model.
        outcomes: Results of all meshes; those that fit come first, best first.
    """

    architecture: str
    parameters: int
    outcomes: tuple[MeshResult, ...]


def search(space: SearchSpace) -> SearchResult:
    """Search all meshes, several in parallel.

    Raises:
        UsageError: No mesh has the given dimensions.
        InputError, UnsupportedError: The model cannot be built.
    """
    meshes = layouts(space.gpus, space.fixed)
    trust = space.task.recipe.model.trust_remote_code
    model: Any = build_model(space.task.source, trust_remote_code=trust)
    parameters = sum(each.numel() for each in model.parameters())
    together: dict[tuple[int, int], list[ParallelDims]] = {}
    for number, dims in enumerate(meshes):  # group meshes with equal pp, whose stages send the same
        together.setdefault((dims.pp, number if dims.pp == 1 else 0), []).append(dims)
    calls = [(space, each, parameters) for _, each in sorted(together.items(), reverse=True)]
    outcomes = [each for found in in_children(outcomes_of, calls) for each in found]
    fitting = sorted((each for each in outcomes if each.best is not None), key=_order)
    rest = [each for each in outcomes if each.best is None]
    for number, outcome in enumerate(fitting[:_CONFIRMED]):
        fitting[number] = confirmed(outcome, space.memory)
        if fitting[number].best is not None:
            break
    rest += [each for each in fitting if each.best is None]
    fitting = sorted((each for each in fitting if each.best is not None), key=_order)
    rest.sort(key=lambda each: meshes.index(each.dims))
    return SearchResult(str(model.config.architectures[0]), parameters, (*fitting, *rest))


def outcomes_of(space: SearchSpace, meshes: Sequence[ParallelDims], parameters: int) -> list[MeshResult]:
    """Return the results of some meshes, one after another.

    Args:
        space: Search to run.
        meshes: Meshes with the same number of stages.
        parameters: Number of parameters of the model.
    """
    known_boundaries: KnownBoundaries = {}
    return [_outcome(space, dims, parameters, known_boundaries) for dims in meshes]


def _outcome(space: SearchSpace, dims: ParallelDims, parameters: int, known_boundaries: KnownBoundaries) -> MeshResult:
    """Return the first mode that fits a mesh, with its best number of microbatches."""
    task, fixed = space.task, space.fixed
    least = least_bytes(task, parameters, dims)
    if least + reserve_bytes(least) > space.memory:
        return MeshResult(dims, least=least)
    counts = list(microbatches_of(task, dims, fixed))
    if not counts:
        return MeshResult(
            dims, refused="the batch of a data-parallel rank is smaller than one microbatch per pipeline rank"
        )
    smallest, tried = math.inf, 0
    for mode in (fixed.mode,) if fixed.mode is not None else MODES:
        best = None
        for count in counts:  # in descending order: more microbatches take less memory
            try:
                candidate = _candidate(
                    with_layout(task, dims, mode, count), validate_extrapolation=False, few_ranks=True, in_place=True,
                    known_boundaries=known_boundaries, directory=space.directory,
                )  # fmt: skip
            except Defect:
                raise
            except CkptxError as error:
                return MeshResult(dims, refused=str(error), tried=tried)
            tried += 1
            smallest = min(smallest, candidate.peak)
            _logger.info("%s, %s, %d microbatches: %d bytes", dims, mode, count, candidate.peak)
            if not candidate.fits(space.memory):
                break
            best = candidate if best is None else min(best, candidate, key=lambda each: each.order)
            if dims.dp_shard == 1:
                break  # without FSDP nothing is gathered, so fewer microbatches would not send less
        if best is not None:
            return MeshResult(dims, best, best.peak, tried=tried)
    return MeshResult(dims, least=int(smallest), tried=tried)


def confirmed(outcome: MeshResult, memory: int) -> MeshResult:
    """Forecast the mesh again with every stage, and with the extrapolation of layers validated."""
    assert outcome.best is not None
    best = replace(_candidate(outcome.best.task), is_checked=True)
    tried = outcome.tried + 1
    return MeshResult(outcome.dims, best if best.fits(memory) else None, best.peak, tried=tried)


def _candidate(task: Task, **how: Any) -> Candidate:
    count = most_that_differ(task)
    ranks = ranks_of(with_microbatches(task, count), **how)
    if count < task.microbatches and not all(map(has_steady_turns, ranks)):
        count, ranks = task.microbatches, ranks_of(task, **how)
    return candidate_of(task, ranks, task.microbatches - count)


def _order(outcome: MeshResult) -> tuple[float, int, int]:
    assert outcome.best is not None
    return outcome.best.order


def layouts(gpus: int, fixed: FixedDims) -> list[ParallelDims]:
    """Return every mesh of a number of GPUs; TP stays within a node unless it is fixed.

    Raises:
        UsageError: No mesh has the given dimensions.
    """
    found = [
        ParallelDims(tp=tp, pp=pp, dp_shard=rest // fixed.dp_replicate, dp_replicate=fixed.dp_replicate)
        for tp in divisors(gpus)
        if fixed.tp in (None, tp) and (tp <= NODE or fixed.tp == tp)
        for pp in divisors(gpus // tp)
        if fixed.pp in (None, pp)
        for rest in (gpus // tp // pp,)
        if rest % fixed.dp_replicate == 0 and fixed.dp_shard in (None, rest // fixed.dp_replicate)
    ]
    if not found:
        raise UsageError(
            f"--gpus {gpus}: no mesh of this many GPUs has the given dimensions, whose product must divide it; leave "
            "one of them out"
        )
    return found


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, in ascending order."""
    return [each for each in range(1, number + 1) if number % each == 0]


def microbatches_of(task: Task, dims: ParallelDims, fixed: FixedDims) -> Iterator[int]:
    """Yield the possible numbers of microbatches per data-parallel rank, for microbatches of 1, 2, 4, ... sequences."""
    rows, rest = divmod(task.recipe.training.global_batch, dims.dp)
    if rest:
        return
    sizes: Iterable[int] = (2**power for power in range(rows.bit_length()))
    for size in sizes:
        if rows % size == 0 and rows // size >= dims.pp and fixed.microbatches in (None, rows // size):
            yield rows // size


def with_layout(task: Task, dims: ParallelDims, mode: str, microbatches: int) -> Task:
    """Return the same step on another mesh."""
    recipe = task.recipe
    layout = structs.replace(
        recipe.layout, tp=dims.tp, pp=dims.pp, dp_shard=dims.dp_shard, dp_replicate=dims.dp_replicate,
        activation_checkpointing=cast(Any, mode),
    )  # fmt: skip
    task = replace(task, recipe=structs.replace(recipe, layout=layout))
    return with_microbatches(task, microbatches, recipe.training.global_batch // dims.dp // microbatches)


def with_microbatches(task: Task, count: int, rows: int | None = None) -> Task:
    """Return the step with `count` microbatches of `rows` sequences; None keeps the microbatch size."""
    recipe = task.recipe
    rows = task.microbatch if rows is None else rows
    training = structs.replace(
        recipe.training,
        global_batch=rows * count * task.dims.dp,
        local_batch=rows * count if task.dims.pp > 1 else rows,
        microbatch=rows,
    )
    return replace(task, recipe=structs.replace(recipe, training=training))


def most_that_differ(task: Task) -> int:
    """Return the fewest microbatches that reach the peak memory of any larger number and include two identical ones."""
    if task.dims.pp > 1 and task.recipe.layout.schedule != "1f1b":
        return task.microbatches  # the number in flight grows with them
    most = _STEADY if task.dims.pp == 1 else task.dims.pp + _FILLED
    return min(task.microbatches, most)


def least_bytes(task: Task, parameters: int, dims: ParallelDims) -> int:
    """Return a lower bound of the peak: evenly sharded parameters, gradients and optimizer state."""
    size = 4 if task.recipe.model.dtype == "float32" else 2
    copies = 2 + (2 if task.optimizer in ("adam", "adamw") else 0)
    if task.recipe.model.freeze:
        copies = 1
    return math.ceil(parameters / (dims.tp * dims.pp * dims.dp_shard)) * size * copies


def has_steady_turns(rank: RankForecast) -> bool:
    """Return True if the second and the third microbatch do the same work."""
    return all(rank.turns.get((part, 1)) == rank.turns.get((part, 2)) is not None for part in ("forward", "backward"))


def candidate_of(task: Task, ranks: Sequence[RankForecast], more: int) -> Candidate:
    """Combine the forecasts of ranks, adding `more` microbatches to those that ran."""
    count = task.microbatches - more  # microbatches that ran
    work = []
    for rank in ranks:
        tally = rank.work
        for part in ("forward", "backward") if more else ():
            tally.add(rank.turns[part, 1], more)
        work.append(tally)
    most = max(work, key=lambda each: each.flops)
    sender = max(work, key=lambda each: sum(each.sent.values()))
    return Candidate(
        task,
        max(each.peak + more * _of_microbatch(each, count) for each in ranks),
        max(sum(each.timeline.between) for each in ranks),
        most.flops,
        most.recomputed,
        Counter(sender.sent),
        ranks[0].missing,
    )


def _of_microbatch(rank: RankForecast, count: int) -> int:
    """Return the bytes that a microbatch keeps for the whole step: its inputs and its pipeline buffers."""
    states = (PARAMETERS, OPTIMIZER, GRADIENTS)
    kept = sum(size for kind, size in zip(KINDS, rank.timeline.between, strict=True) if kind not in states)
    return rank.inputs + kept // count
