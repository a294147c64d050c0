"""Run one training step on one rank, on tensors that have shapes and sizes but no values (`ShapeTensors`)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from msgspec import structs
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ckptx.errors import CkptxError, UnsupportedError
from ckptx.layout.stages import StageMap
from ckptx.mapping.names import pattern_of
from ckptx.runtime.forecasting.counting import OpCounter, OpCounts, sum_op_counts
from ckptx.runtime.forecasting.fake_process_group import fake_process_group
from ckptx.runtime.forecasting.pipeline import IsolatedPipeline, StageInputSlots
from ckptx.runtime.forecasting.step import StepSpec, make_step_batches, make_step_inputs, make_step_optimizer
from ckptx.runtime.forecasting.task import ForecastTask
from ckptx.runtime.forecasting.timeline import MemoryTimeline, build_timeline
from ckptx.runtime.memory.shape_tensors import ShapeTensors
from ckptx.runtime.memory.storage_ledger import OPTIMIZER, PARAMETERS, StorageLedger
from ckptx.runtime.model.build import allocate_storage, build_model
from ckptx.runtime.model.layers import canonical_name, layer_groups
from ckptx.runtime.model.model_errors import translate_runtime_errors
from ckptx.runtime.parallel.distributed import RankContext
from ckptx.runtime.parallel.pipeline.boundaries import StageBoundaries
from ckptx.runtime.parallel.pipeline.plan import GetOutput, MakeBatches, find_and_check_boundaries
from ckptx.runtime.parallel.pipeline.schedules import Schedule
from ckptx.runtime.parity.inputs.batch import Inputs
from ckptx.runtime.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    clear_sharding_caches,
)
from ckptx.runtime.training.rank_model import RankModel, build_rank_model_on_meta


@dataclass(slots=True)
class BoundaryCache:
    """Facts that one forked process finds and later ones need.

    Attributes:
        stage_boundaries: Boundaries between pipeline stages; None until they are found.
        input_slots: Inputs of the stages whose previous stage has run; see `StageInputSlots`.
    """

    stage_boundaries: StageBoundaries | None = None
    input_slots: StageInputSlots = field(default_factory=dict)

    def find_boundaries(
        self,
        model: nn.Module,
        stages: StageMap,
        schedule: Schedule,
        make_batches: MakeBatches,
        get_output: GetOutput,
    ) -> StageBoundaries:
        """Find stage boundaries on a small model with values, once; this is a `BoundaryFinder` of `plan_pipeline`."""
        if self.stage_boundaries is None:
            self.stage_boundaries = find_and_check_boundaries(
                model, stages, make_batches, get_output, split_backward=schedule.splits_backward
            )
        return self.stage_boundaries


@dataclass(frozen=True, slots=True)
class RankForecast:
    """Forecast of one rank.

    Attributes:
        architecture: Name of the model class.
        parameter_count: Number of parameters of the whole model.
        missing_inputs: Kinds of input that the model has a tower for, but the step lacks.
        stages: Numbers of the pipeline stages of this rank; (0,) without a pipeline.
        timeline: Memory over the step.
        op_counts_by_pass: (name of the phase, index of the pass) -> operations and communication; see `StepPhase`.
        checkpointed_layers: Number of layers of this rank that recompute activations.
        input_bytes: Bytes of the inputs and labels of a microbatch.
        omitted_layers: Number of layers of this rank that did not run, but were extrapolated from those that ran.
        gathered_modules: Name patterns of the modules whose TP shards are gathered around their forward pass.
        has_sharded_logits: True if the output head keeps its logits sharded over the vocabulary.
        has_sharded_parameters: True if TP shards a parameter.
    """

    architecture: str
    parameter_count: int
    missing_inputs: tuple[str, ...]
    stages: tuple[int, ...]
    timeline: MemoryTimeline
    op_counts_by_pass: Mapping[tuple[str, int], OpCounts]
    checkpointed_layers: int
    input_bytes: int = 0
    omitted_layers: int = 0
    gathered_modules: tuple[str, ...] = ()
    has_sharded_logits: bool = False
    has_sharded_parameters: bool = False

    @property
    def peak(self) -> int:
        """Peak bytes of the step."""
        return sum(self.timeline.peak_segment.peak_by_kind)

    @property
    def op_counts(self) -> OpCounts:
        """Operations and communication of the whole step: a new object, which the caller may change."""
        return sum_op_counts(self.op_counts_by_pass.values())


def run_rank(task: ForecastTask, pipeline_rank: int, cache: BoundaryCache) -> tuple[RankForecast, BoundaryCache]:
    """Return the forecast of a step for a pipeline rank, and the updated cache.

    Of the global ranks that share these pipeline stages, it is the forecast of the first, which has the largest shards.

    Args:
        task: Step to run.
        pipeline_rank: Rank within the pipeline.
        cache: Facts from earlier stages.

    Raises:
        UnsupportedError: The class cannot run in this layout, or its shapes depend on values.
    """
    return run_rank_tasks([(task, cache)], pipeline_rank)[0]


def run_rank_tasks(
    tasks: Sequence[tuple[ForecastTask, BoundaryCache]], pipeline_rank: int
) -> list[tuple[RankForecast, BoundaryCache]]:
    """Return what `run_rank` returns, for several tasks with the same mesh, which run one after another.

    The tasks share a process group and a mesh, so that DTensor determines the sharding of each operation's result only
    once.
    """
    with _fake_rank(tasks[0][0], pipeline_rank) as rank_context:
        return [(_run_task(task, rank_context, cache), cache) for task, cache in tasks]


def _run_task(task: ForecastTask, rank_context: RankContext, cache: BoundaryCache) -> RankForecast:
    whole_model = build_model(task.source, trust_remote_code=task.recipe.model.trust_remote_code)
    parameters = sum(each.numel() for each in whole_model.parameters())
    config = {**whole_model.config.to_dict(), "architectures": whole_model.config.architectures}
    inputs = make_step_inputs(task, config)
    rank_model = _build_rank_model(task, rank_context, cache)
    ledger, op_counter = StorageLedger(), OpCounter()

    def on_operation(*operation: Any) -> None:
        ledger.record_operation(*operation)
        op_counter.record_operation(ledger.current_phase, *operation)

    with _run_on_shapes(rank_model, on_operation), ledger.watch(rank_model.models):
        begin, end = _run_step(rank_model, task, inputs, ledger, op_counter, cache.input_slots)
        layer_names = [
            layer.name for model in rank_model.models for group in layer_groups(model).values() for layer in group
        ]
        timeline = build_timeline(ledger.events[:end], begin, layer_names)
    layout = rank_model.layout
    return RankForecast(
        architecture=str(config["architectures"][0]),
        parameter_count=parameters,
        missing_inputs=inputs.missing,
        stages=tuple(rank_model.stages),
        timeline=timeline,
        op_counts_by_pass=op_counter.op_counts_by_pass,
        checkpointed_layers=rank_model.checkpointed_layer_count,
        input_bytes=sum(each.nbytes for each in (*inputs.batch.values(), inputs.labels)),
        gathered_modules=() if layout is None else tuple(dict.fromkeys(map(pattern_of, layout.gathered_modules))),
        has_sharded_logits=layout is not None and bool(layout.sharded_head),
        has_sharded_parameters=layout is not None and any(each is not None for each in layout.placements.values()),
    )


def find_task_boundaries(task: ForecastTask) -> StageBoundaries | None:
    """Return the stage boundaries of a task.

    Returns:
        None without a pipeline, or if the boundaries cannot be found: then `run_rank` raises the reason.
    """
    cache = BoundaryCache()
    try:
        with _fake_rank(task, 0) as rank_context:
            _build_rank_model(task, rank_context, cache)
    except CkptxError:
        return None
    return cache.stage_boundaries


def find_sent_shapes(task: ForecastTask, stage_count: int, stage_index: int, cache: BoundaryCache) -> BoundaryCache:
    """Record the shapes that a stage sends if each stage has a rank of its own, and return the updated cache.

    Args:
        task: Step to run.
        stage_count: Number of pipeline stages.
        stage_index: Index of the stage, from 0.
        cache: Facts from earlier stages.

    Raises:
        UnsupportedError: See `run_rank`.
    """
    layout = structs.replace(task.recipe.layout, pp=stage_count, schedule="gpipe")
    task = replace(task, recipe=structs.replace(task.recipe, layout=layout))
    with _fake_rank(task, stage_index) as rank_context:
        rank_model = _build_rank_model(task, rank_context, cache)
        model = rank_model.models[0]
        inputs = make_step_inputs(task, {**model.config.to_dict(), "architectures": model.config.architectures})
        with _run_on_shapes(rank_model, lambda *_: None):
            allocate_storage(model, torch.device("cpu"))
            _make_pipeline(rank_model, cache.input_slots, StorageLedger()).run_one_batch(
                make_step_batches(task, inputs)[0]
            )
    return cache


@contextmanager
def _fake_rank(task: ForecastTask, pipeline_rank: int) -> Iterator[RankContext]:
    """Make this process the first of the global ranks of a pipeline rank, within the block."""
    clear_sharding_caches()  # they refer to the mesh of an earlier process group
    with (
        fake_process_group(pipeline_rank * task.dims.ranks_per_stage, task.dims.world_size) as rank_context,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # torch warns about groups of one rank; real problems raise errors
        yield rank_context


def _build_rank_model(task: ForecastTask, rank_context: RankContext, cache: BoundaryCache) -> RankModel:
    """Return the parallelized model of a rank, on the meta device."""
    return build_rank_model_on_meta(task.recipe, task.source, rank_context, find_boundaries=cache.find_boundaries)


@contextmanager
def _run_on_shapes(rank_model: RankModel, on_operation: Callable[..., None]) -> Iterator[None]:
    """Run the block on tensors without values; shapes that depend on values raise an `UnsupportedError`."""
    name = rank_model.models[0].config.architectures[0]  # FSDP2 gives a model another class
    try:
        with ShapeTensors(on_operation):
            yield
    except CkptxError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode) as error:
        raise UnsupportedError(
            f"{name}: its shapes depend on values that are unknown before it runs ({error}), so that its memory cannot "
            "be forecast; a forecast requires shapes that follow from those of the inputs"
        ) from error


def _run_step(
    rank_model: RankModel,
    task: ForecastTask,
    inputs: Inputs,
    ledger: StorageLedger,
    op_counter: OpCounter,
    input_slots: StageInputSlots,
) -> tuple[int, int]:
    """Run one step; return the index of its first event in `ledger.events`, and the index after its last.

    One-time work runs before the step: the optimizer creates its state, and a pipeline its communication buffers.
    """
    for model in rank_model.models:
        allocate_storage(model, torch.device("cpu"))
        for name, buffer in model.named_buffers():
            ledger.label([buffer], PARAMETERS, canonical_name(name))
    # Names on this rank, not in the whole model: a tied output head on the last stage is not named like the embedding.
    names: dict[Tensor, str] = {}
    for model in rank_model.models:
        names |= {parameter: canonical_name(name) for name, parameter in model.named_parameters()}
    for parameter, name in names.items():
        ledger.label([parameter], PARAMETERS, name)
    optimizer = make_step_optimizer(task, [*names])
    if optimizer is not None:
        _create_optimizer_state(optimizer, names, ledger)
    if rank_model.pipeline_plan is not None:
        rank_model.pipeline = _make_pipeline(rank_model, input_slots, ledger)
        with translate_runtime_errors(rank_model.models[0]):
            rank_model.pipeline.prepare(make_step_batches(task, inputs)[: rank_model.pipeline_plan.microbatches])
    begin = len(ledger.events)
    ledger.reset_passes()
    op_counter.reset()
    StepSpec(rank_model, task, inputs, optimizer).run(ledger)
    return begin, len(ledger.events)


def _create_optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], ledger: StorageLedger
) -> None:
    """Create the optimizer state as the first step does.

    Here state is created for all trained parameters. In the step, the state of a parameter without a gradient gets size
    0 in the ledger, because a real optimizer creates none for it.

    Args:
        optimizer: Optimizer of the step.
        names: Parameter -> name.
        ledger: Ledger in which the state is labeled.
    """
    trained = optimizer.param_groups[0]["params"]
    for each in trained:
        each.grad = torch.empty_like(each)
    optimizer.step()
    optimizer.zero_grad()

    def state_of(parameter: Tensor) -> list[Tensor]:
        return [each for each in optimizer.state[parameter].values() if isinstance(each, Tensor)]

    def exclude_idle_state(*_: Any) -> None:
        for each in trained:
            if each.grad is None:
                ledger.set_size(state_of(each), 0)

    for each in trained:
        ledger.label(state_of(each), OPTIMIZER, names[each])
    optimizer.register_step_pre_hook(exclude_idle_state)


def _make_pipeline(rank_model: RankModel, input_slots: StageInputSlots, ledger: StorageLedger) -> IsolatedPipeline:
    assert rank_model.pipeline_plan is not None
    pipeline = rank_model.pipeline_plan.pipeline(
        rank_model.stages, rank_model.mesh, IsolatedPipeline.make_factory(input_slots, ledger)
    )
    assert isinstance(pipeline, IsolatedPipeline)
    return pipeline
