"""One step of a training run on one rank, on tensors without storage."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from msgspec import structs
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ckptx.errors import CkptxError, UnsupportedError
from ckptx.layout.stages import StageMap
from ckptx.runtime.forecasting.counting import Counts, Tally, sum_of
from ckptx.runtime.forecasting.fake_world import fake_world
from ckptx.runtime.forecasting.pipeline import Boundaries, IsolatedPipeline
from ckptx.runtime.forecasting.step import StepSpec, batches_of, inputs_of, optimizer_of
from ckptx.runtime.forecasting.task import Task
from ckptx.runtime.forecasting.timeline import MemoryTimeline, timeline_of
from ckptx.runtime.memory.shape_tensors import ShapeTensors
from ckptx.runtime.memory.storage_ledger import OPTIMIZER, PARAMETERS, StorageLedger
from ckptx.runtime.model.build import build_model, give_storage
from ckptx.runtime.model.layers import layer_groups
from ckptx.runtime.parallel.pipeline.boundaries import StageBoundaries
from ckptx.runtime.parallel.pipeline.plan import find_and_check_boundaries
from ckptx.runtime.parallel.pipeline.schedules import Schedule
from ckptx.runtime.parity.inputs.batch import Inputs
from ckptx.runtime.torch_private import DataDependentOutputException, DynamicOutputShapeException
from ckptx.runtime.training.assembly import AssembledModel, build_on_mesh


@dataclass(slots=True)
class SharedFacts:
    """Facts that one forked process finds and later ones need.

    Attributes:
        stage_boundaries: Boundaries between pipeline stages; None until they are found.
        boundaries: Shapes of the inputs of each stage.
    """

    stage_boundaries: StageBoundaries | None = None
    boundaries: Boundaries = field(default_factory=dict)

    def find_boundaries(
        self, model: nn.Module, stages: StageMap, schedule: Schedule, batches: Any, output: Any
    ) -> StageBoundaries:
        """Find stage boundaries for `plan_pipeline_of_stacks`, once, on a small model with values."""
        if self.stage_boundaries is None:
            self.stage_boundaries = find_and_check_boundaries(
                model, stages, batches, output, split_backward=schedule.splits_backward
            )
        return self.stage_boundaries


@dataclass(frozen=True, slots=True)
class RankForecast:
    """Forecast of one rank.

    Attributes:
        architecture: Name of the model class.
        parameters: Number of parameters of the whole model.
        missing: Kinds of input that the model has a tower for, but the step lacks.
        stages: Numbers of its pipeline stages; (0,) without a pipeline.
        timeline: Memory over the step.
        turns: Work of each pass, by part of the step and number of the pass.
        wrapped_layers: Layers that recompute activations.
        inputs: Bytes of the inputs of a microbatch.
        left_out: Number of repeated layers that did not run.
    """

    architecture: str
    parameters: int
    missing: tuple[str, ...]
    stages: tuple[int, ...]
    timeline: MemoryTimeline
    turns: Mapping[tuple[str, int], Tally]
    wrapped_layers: int
    inputs: int = 0
    left_out: int = 0

    @property
    def peak(self) -> int:
        """Peak bytes of the step."""
        return sum(self.timeline.worst.most)

    @property
    def work(self) -> Tally:
        """Work of the whole step."""
        return sum_of(self.turns.values())


def run_rank(task: Task, pipeline_rank: int, known: SharedFacts) -> tuple[RankForecast, SharedFacts]:
    """Run a step on the first of the ranks that share pipeline stages, which has the largest shards.

    Args:
        task: Step to run.
        pipeline_rank: Rank within the pipeline.
        known: Facts from earlier stages.

    Raises:
        UnsupportedError: The class cannot run in this layout, or its shapes depend on values.
    """
    whole_model = build_model(task.source, trust_remote_code=task.recipe.model.trust_remote_code)
    parameters = sum(each.numel() for each in whole_model.parameters())
    config = {**whole_model.config.to_dict(), "architectures": whole_model.config.architectures}
    inputs = inputs_of(task, config)
    with _parallelized(task, pipeline_rank, known) as assembled:
        ledger, counts = StorageLedger(), Counts()

        def on_operation(*operation: Any) -> None:
            ledger.record_operation(*operation)
            counts.record_operation(ledger.current_phase, *operation)

        with _shapes(assembled, on_operation), ledger.watch(assembled.models):
            begin, end = _one_step(assembled, task, inputs, ledger, counts, known.boundaries)
            layers = [
                layer.name for model in assembled.models for group in layer_groups(model).values() for layer in group
            ]
            timeline = timeline_of(ledger.events[:end], begin, layers)
        found = RankForecast(
            architecture=str(config["architectures"][0]),
            parameters=parameters,
            missing=inputs.missing,
            stages=tuple(assembled.stages),
            timeline=timeline,
            turns=counts.by_turn,
            wrapped_layers=assembled.wrapped_layers,
            inputs=sum(each.nbytes for each in (*inputs.batch.values(), inputs.labels)),
        )
        return found, known


def walk_stage(task: Task, stages: int, number: int, known: SharedFacts) -> SharedFacts:
    """Find the shapes that a stage sends, in a pipeline with one stage per rank.

    Args:
        task: Step to run.
        stages: Number of stages.
        number: Number of this stage.
        known: Facts from earlier stages.

    Raises:
        UnsupportedError: See `run_rank`.
    """
    layout = structs.replace(task.recipe.layout, pp=stages, schedule="gpipe")
    task = replace(task, recipe=structs.replace(task.recipe, layout=layout))
    with _parallelized(task, number, known) as assembled:
        model = assembled.models[0]
        inputs = inputs_of(task, {**model.config.to_dict(), "architectures": model.config.architectures})
        with _shapes(assembled, lambda *_: None):
            give_storage(model, torch.device("cpu"))
            _pipeline(assembled, known.boundaries, StorageLedger()).run_one_batch(batches_of(task, inputs)[0])
    return known


@contextmanager
def _parallelized(task: Task, pipeline_rank: int, known: SharedFacts) -> Iterator[AssembledModel]:
    """Parallelize the model of a rank, without storage."""
    with fake_world(pipeline_rank * task.dims.per_stage, task.dims.world_size) as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about groups of one rank; real problems raise errors
        yield build_on_mesh(task.recipe, task.source, place, find_boundaries=known.find_boundaries)


@contextmanager
def _shapes(assembled: AssembledModel, on_operation: Callable[..., None]) -> Iterator[None]:
    """Run the block on tensors without storage; shapes that depend on values raise an `UnsupportedError`."""
    name = assembled.models[0].config.architectures[0]  # FSDP2 gives a model another class
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


def _one_step(
    assembled: AssembledModel, task: Task, inputs: Inputs, ledger: StorageLedger, counts: Counts, boundaries: Boundaries
) -> tuple[int, int]:
    """Run one step; returns the numbers of its first event and of the first event after it.

    One-time work comes before: the optimizer creates its state, and a pipeline its communication buffers.
    """
    for model in assembled.models:
        give_storage(model, torch.device("cpu"))
        ledger.label([*model.parameters(), *model.buffers()], PARAMETERS)
    parameters = [each for _, each in assembled.parameters()]
    optimizer = optimizer_of(task, parameters)
    if optimizer is not None:
        _give_state(optimizer, ledger)
    if assembled.pipeline_plan is not None:
        assembled.pipeline = _pipeline(assembled, boundaries, ledger)
        assembled.pipeline.prepare(batches_of(task, inputs)[: assembled.pipeline_plan.microbatches])
    begin = len(ledger.events)
    ledger.begin()
    counts.begin()
    StepSpec(assembled, task, inputs, optimizer).run(ledger)
    return begin, len(ledger.events)


def _give_state(optimizer: torch.optim.Optimizer, ledger: StorageLedger) -> None:
    """Create the optimizer state as the first step does; parameters without a gradient in the step lose it again."""
    trained = optimizer.param_groups[0]["params"]
    for each in trained:
        each.grad = torch.empty_like(each)
    optimizer.step()
    optimizer.zero_grad()

    def state_of(parameter: Tensor) -> list[Tensor]:
        return [each for each in optimizer.state[parameter].values() if isinstance(each, Tensor)]

    def forget_the_idle(*_: Any) -> None:
        for each in trained:
            if each.grad is None:
                ledger.forget(state_of(each))

    for each in trained:
        ledger.label(state_of(each), OPTIMIZER)
    optimizer.register_step_pre_hook(forget_the_idle)


def _pipeline(assembled: AssembledModel, boundaries: Boundaries, ledger: StorageLedger) -> IsolatedPipeline:
    assert assembled.pipeline_plan is not None
    found = assembled.pipeline_plan.pipeline(
        assembled.stages, assembled.mesh, IsolatedPipeline.maker(boundaries, ledger)
    )
    assert isinstance(found, IsolatedPipeline)
    return found
