"""Which layouts of so many GPUs fit, with the least that is computed again and the least that is sent.

Every layout does the same step: the same rows, over all GPUs. Of the modes of activation checkpointing the first that
fits is taken, from what recomputes least to what recomputes most, and for it the microbatches that are best: fewer of
them gather parameters less often, and leave a pipeline idle for longer. Candidates run with few layers, of a pipeline
few ranks, and few microbatches; the best one is then forecast with every stage.
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
from ckptx.runtime.forecasting.ranks import Carries, ranks_of
from ckptx.runtime.forecasting.run import RankForecast
from ckptx.runtime.forecasting.task import Task
from ckptx.runtime.memory.reserve import reserved
from ckptx.runtime.memory.storage_ledger import GRADIENTS, KINDS, OPTIMIZER, PARAMETERS
from ckptx.runtime.model.build import build_model
from ckptx.runtime.parallel.pipeline.schedules import find_schedule

MODES = ("none", "selective", "submodule", "full")  # from what recomputes least
NODE = 8  # GPUs that are near each other: TP stays among so many
_STEADY = 4  # microbatches without a pipeline: the first, two alike, the last
_FILLED = 3  # those of a pipeline beyond one for each of its ranks
_CONFIRMED = 3  # rows at the top that are forecast with everything, until one of them fits

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedDims:
    """What is not searched.

    Attributes:
        tp: Ranks that share each tensor; None is searched, as with the others.
        pp: Pipeline ranks.
        dp_shard: FSDP2 ranks.
        dp_replicate: Replicas.
        microbatches: Of a step, on each data rank.
        mode: Of activation checkpointing.
    """

    tp: int | None = None
    pp: int | None = None
    dp_shard: int | None = None
    dp_replicate: int = 1
    microbatches: int | None = None
    mode: str | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to run the step.

    Attributes:
        task: All of it.
        peak: Bytes of tensors of the rank with the most.
        between_steps: And between steps.
        flops: Of a step, on the rank that computes most.
        recomputed: Those of them that are computed a second time.
        sent: Bytes by collective, of the rank that sends most.
        missing: What the model has a tower for, and rows of the step lack.
        is_whole: Whether every stage was forecast, and layers that were left out held against others.
    """

    task: Task
    peak: int
    between_steps: int
    flops: int
    recomputed: int
    sent: Mapping[str, int]
    missing: tuple[str, ...] = ()
    is_whole: bool = False

    @property
    def idle(self) -> float:
        """The part of a step in which ranks of a pipeline wait for each other."""
        layout = self.task.recipe.layout
        return find_schedule(layout.schedule).bubble_fraction(layout.pp, self.task.microbatches)

    @property
    def order(self) -> tuple[float, int, int]:
        """The first is the best: least time beside what has to be computed, least sent, least memory."""
        useful = (1 - self.recomputed / self.flops if self.flops else 1.0) * (1 - self.idle)
        return round(1 / useful, 3), sum(self.sent.values()), self.peak

    def fits(self, memory: int) -> bool:
        """Whether it does, with what is kept free."""
        return self.peak + reserved(self.peak) <= memory


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """What is searched for.

    Attributes:
        task: The step, with any layout.
        gpus: How many there are.
        memory: Of each, in bytes.
        pins: What is not searched.
        directory: For files that are gone with the search.
    """

    task: Task
    gpus: int
    memory: int
    pins: FixedDims
    directory: Path | None = None


@dataclass(frozen=True, slots=True)
class MeshResult:
    """What was found of one mesh.

    Attributes:
        dims: The mesh.
        best: The way to run the step that is taken; None where none fits.
        least: Bytes of the smallest step that was looked at, or that it cannot be below.
        refused: Why it cannot be.
        tried: Steps that were looked at.
    """

    dims: ParallelDims
    best: Candidate | None = None
    least: int = 0
    refused: str = ""
    tried: int = 0


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search found.

    Attributes:
        architecture: The class of the model.
        parameters: Of the whole model.
        outcomes: Of every mesh, those that fit first, the best of them first.
    """

    architecture: str
    parameters: int
    outcomes: tuple[MeshResult, ...]


def search(question: SearchSpace) -> SearchResult:
    """Looks at every mesh, several side by side.

    Raises:
        UsageError: There is no such mesh.
        InputError, UnsupportedError: The model cannot be built.
    """
    meshes = layouts(question.gpus, question.pins)
    trust = question.task.recipe.model.trust_remote_code
    model: Any = build_model(question.task.source, trust_remote_code=trust)
    parameters = sum(each.numel() for each in model.parameters())
    together: dict[tuple[int, int], list[ParallelDims]] = {}
    for number, dims in enumerate(meshes):  # those of as many stages, whose stages send the same
        together.setdefault((dims.pp, number if dims.pp == 1 else 0), []).append(dims)
    calls = [(question, each, parameters) for _, each in sorted(together.items(), reverse=True)]
    outcomes = [each for found in in_children(outcomes_of, calls) for each in found]
    fitting = sorted((each for each in outcomes if each.best is not None), key=_order)
    rest = [each for each in outcomes if each.best is None]
    for number, outcome in enumerate(fitting[:_CONFIRMED]):
        fitting[number] = confirmed(outcome, question.memory)
        if fitting[number].best is not None:
            break
    rest += [each for each in fitting if each.best is None]
    fitting = sorted((each for each in fitting if each.best is not None), key=_order)
    rest.sort(key=lambda each: meshes.index(each.dims))
    return SearchResult(str(model.config.architectures[0]), parameters, (*fitting, *rest))


def outcomes_of(question: SearchSpace, meshes: Sequence[ParallelDims], parameters: int) -> list[MeshResult]:
    """What is found of meshes with as many stages, one after another.

    Args:
        question: What is searched for.
        meshes: All of one number of stages.
        parameters: Of the model.
    """
    carries: Carries = {}
    return [_outcome(question, dims, parameters, carries) for dims in meshes]


def _outcome(question: SearchSpace, dims: ParallelDims, parameters: int, carries: Carries) -> MeshResult:
    """The first mode that fits a mesh, with the microbatches that are best for it."""
    task, pins = question.task, question.pins
    least = least_bytes(task, parameters, dims)
    if least + reserved(least) > question.memory:
        return MeshResult(dims, least=least)
    counts = list(microbatches_of(task, dims, pins))
    if not counts:
        return MeshResult(
            dims, refused="its data ranks have too few rows for a microbatch on each rank of the pipeline"
        )
    smallest, tried = math.inf, 0
    for mode in (pins.mode,) if pins.mode is not None else MODES:
        best = None
        for count in counts:  # the most first: they take least
            try:
                candidate = _candidate(
                    with_layout(task, dims, mode, count), is_tried=False, few_ranks=True, in_place=True,
                    carries=carries, directory=question.directory,
                )  # fmt: skip
            except Defect:
                raise
            except CkptxError as error:
                return MeshResult(dims, refused=str(error), tried=tried)
            tried += 1
            smallest = min(smallest, candidate.peak)
            _logger.info("%s, %s, %d microbatches: %d bytes", dims, mode, count, candidate.peak)
            if not candidate.fits(question.memory):
                break
            best = candidate if best is None else min(best, candidate, key=lambda each: each.order)
            if dims.dp_shard == 1:
                break  # nothing is gathered, so fewer would send as much
        if best is not None:
            return MeshResult(dims, best, best.peak, tried=tried)
    return MeshResult(dims, least=int(smallest), tried=tried)


def confirmed(outcome: MeshResult, memory: int) -> MeshResult:
    """The same mesh, forecast with every stage, and with layers that are held against others."""
    assert outcome.best is not None
    best = replace(_candidate(outcome.best.task), is_whole=True)
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


def layouts(gpus: int, pins: FixedDims) -> list[ParallelDims]:
    """Every mesh of so many GPUs; TP stays within a node unless it is pinned.

    Raises:
        UsageError: There is none.
    """
    found = [
        ParallelDims(tp=tp, pp=pp, dp_shard=rest // pins.dp_replicate, dp_replicate=pins.dp_replicate)
        for tp in divisors(gpus)
        if pins.tp in (None, tp) and (tp <= NODE or pins.tp == tp)
        for pp in divisors(gpus // tp)
        if pins.pp in (None, pp)
        for rest in (gpus // tp // pp,)
        if rest % pins.dp_replicate == 0 and pins.dp_shard in (None, rest // pins.dp_replicate)
    ]
    if not found:
        raise UsageError(
            f"--gpus {gpus}: found no mesh of so many GPUs with the sizes that are given, needed one whose product it "
            "is; leave one of them out"
        )
    return found


def divisors(number: int) -> list[int]:
    """Of a number, in ascending order."""
    return [each for each in range(1, number + 1) if number % each == 0]


def microbatches_of(task: Task, dims: ParallelDims, pins: FixedDims) -> Iterator[int]:
    """How many there may be on each data rank, the most first: of one row, two, four, ... each."""
    rows, rest = divmod(task.recipe.training.global_batch, dims.dp)
    if rest:
        return
    sizes: Iterable[int] = (2**power for power in range(rows.bit_length()))
    for size in sizes:
        if rows % size == 0 and rows // size >= dims.pp and pins.microbatches in (None, rows // size):
            yield rows // size


def with_layout(task: Task, dims: ParallelDims, mode: str, microbatches: int) -> Task:
    """The same step on another mesh."""
    recipe = task.recipe
    layout = structs.replace(
        recipe.layout, tp=dims.tp, pp=dims.pp, dp_shard=dims.dp_shard, dp_replicate=dims.dp_replicate,
        activation_checkpointing=cast(Any, mode),
    )  # fmt: skip
    task = replace(task, recipe=structs.replace(recipe, layout=layout))
    return with_microbatches(task, microbatches, recipe.training.global_batch // dims.dp // microbatches)


def with_microbatches(task: Task, count: int, rows: int | None = None) -> Task:
    """The step with so many microbatches, of as many rows each as before when `rows` is left out."""
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
    """As many microbatches as take the most memory that any number of them takes, and have two that are alike."""
    if task.dims.pp > 1 and task.recipe.layout.schedule != "1f1b":
        return task.microbatches  # how many are on the way grows with them
    most = _STEADY if task.dims.pp == 1 else task.dims.pp + _FILLED
    return min(task.microbatches, most)


def least_bytes(task: Task, parameters: int, dims: ParallelDims) -> int:
    """No rank with the most takes less: parameters, gradients and the state of the optimizer, cut evenly."""
    size = 4 if task.recipe.model.dtype == "float32" else 2
    copies = 2 + (2 if task.optimizer in ("adam", "adamw") else 0)
    if task.recipe.model.freeze:
        copies = 1
    return math.ceil(parameters / (dims.tp * dims.pp * dims.dp_shard)) * size * copies


def has_steady_turns(rank: RankForecast) -> bool:
    """Whether microbatches that are neither the first nor the last compute and send the same."""
    return all(rank.turns.get((part, 1)) == rank.turns.get((part, 2)) is not None for part in ("forward", "backward"))


def candidate_of(task: Task, ranks: Sequence[RankForecast], more: int) -> Candidate:
    """What ranks take together, with so many microbatches more than ran."""
    count = task.microbatches - more  # that ran
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
        max(sum(each.course.between) for each in ranks),
        most.flops,
        most.recomputed,
        Counter(sender.sent),
        ranks[0].missing,
    )


def _of_microbatch(rank: RankForecast, count: int) -> int:
    """Bytes that each of so many microbatches takes for the whole step: its rows, and what a pipeline keeps for it."""
    states = (PARAMETERS, OPTIMIZER, GRADIENTS)
    kept = sum(size for kind, size in zip(KINDS, rank.course.between, strict=True) if kind not in states)
    return rank.inputs + kept // count
