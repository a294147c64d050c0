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
from ckptx.runtime.training.assembly import AssembledModel, lay_out


@dataclass(slots=True)
class SharedFacts:
    """What one fork finds and the next needs.

    Attributes:
        carry: What travels between the stages of a pipeline.
        boundaries: What each stage is given.
    """

    carry: StageBoundaries | None = None
    boundaries: Boundaries = field(default_factory=dict)

    def find_boundaries(
        self, model: nn.Module, stages: StageMap, schedule: Schedule, batches: Any, output: Any
    ) -> StageBoundaries:
        """What `plan_pipeline_of_stacks` takes: found once, on a small model that has values."""
        if self.carry is None:
            self.carry = find_and_check_boundaries(
                model, stages, batches, output, split_backward=schedule.splits_backward
            )
        return self.carry


@dataclass(frozen=True, slots=True)
class RankForecast:
    """What a rank will take.

    Attributes:
        architecture: The class of the model.
        parameters: Of the whole model.
        missing: What the model has a tower for, and rows of the step lack.
        stages: Its pipeline stages by number; 0 alone without a pipeline.
        course: Its bytes over the step.
        turns: What it computes and sends in each pass: its part of the step, and which one.
        wrapped_layers: Layers that compute again.
        inputs: Bytes of the rows of a microbatch.
        left_out: Layers that did not run, as others are alike.
    """

    architecture: str
    parameters: int
    missing: tuple[str, ...]
    stages: tuple[int, ...]
    course: MemoryTimeline
    turns: Mapping[tuple[str, int], Tally]
    wrapped_layers: int
    inputs: int = 0
    left_out: int = 0

    @property
    def peak(self) -> int:
        """The most bytes of the step."""
        return sum(self.course.worst.most)

    @property
    def work(self) -> Tally:
        """What it computes and sends in the step."""
        return sum_of(self.turns.values())


def run_rank(task: Task, pipeline_rank: int, known: SharedFacts) -> tuple[RankForecast, SharedFacts]:
    """Runs a step on the first of the ranks that share pipeline stages: it has the largest part of what is cut.

    Args:
        task: What is done.
        pipeline_rank: Which pipeline stages.
        known: From the stages before.

    Raises:
        UnsupportedError: The class cannot run like that, or computes by values that nobody knows before.
    """
    whole_model = build_model(task.source, trust_remote_code=task.recipe.model.trust_remote_code)
    parameters = sum(each.numel() for each in whole_model.parameters())
    config = {**whole_model.config.to_dict(), "architectures": whole_model.config.architectures}
    inputs = inputs_of(task, config)
    with _laid_out(task, pipeline_rank, known) as assembled:
        ledger, counts = StorageLedger(), Counts()

        def see(*operation: Any) -> None:
            ledger.record_operation(*operation)
            counts.record_operation(ledger.moment, *operation)

        with _shapes(assembled, see), ledger.watching(assembled.models):
            begin, end = _one_step(assembled, task, inputs, ledger, counts, known.boundaries)
            layers = [
                layer.name for model in assembled.models for group in layer_groups(model).values() for layer in group
            ]
            course = timeline_of(ledger.events[:end], begin, layers)
        found = RankForecast(
            architecture=str(config["architectures"][0]),
            parameters=parameters,
            missing=inputs.missing,
            stages=tuple(assembled.stages),
            course=course,
            turns=counts.by_turn,
            wrapped_layers=assembled.wrapped_layers,
            inputs=sum(each.nbytes for each in (*inputs.batch.values(), inputs.labels)),
        )
        return found, known


def walk_stage(task: Task, stages: int, number: int, known: SharedFacts) -> SharedFacts:
    """Finds what a stage sends, as one of a pipeline whose ranks have one stage each.

    Args:
        task: What is done.
        stages: How many there are.
        number: Which.
        known: From those before.

    Raises:
        UnsupportedError: As `run_rank`.
    """
    layout = structs.replace(task.recipe.layout, pp=stages, schedule="gpipe")
    task = replace(task, recipe=structs.replace(task.recipe, layout=layout))
    with _laid_out(task, number, known) as assembled:
        model = assembled.models[0]
        inputs = inputs_of(task, {**model.config.to_dict(), "architectures": model.config.architectures})
        with _shapes(assembled, lambda *_: None):
            give_storage(model, torch.device("cpu"))
            _pipeline(assembled, known.boundaries, StorageLedger()).run_one_batch(batches_of(task, inputs)[0])
    return known


@contextmanager
def _laid_out(task: Task, pipeline_rank: int, known: SharedFacts) -> Iterator[AssembledModel]:
    """The stages of a rank, without storage."""
    with fake_world(pipeline_rank * task.dims.per_stage, task.dims.world_size) as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about groups of one rank; what counts is said in errors
        yield lay_out(task.recipe, task.source, place, find_boundaries=known.find_boundaries)


@contextmanager
def _shapes(assembled: AssembledModel, see: Callable[..., None]) -> Iterator[None]:
    """Within it there are shapes alone; what cannot be known without values is said in our words."""
    name = assembled.models[0].config.architectures[0]  # FSDP2 gives a model another class
    try:
        with ShapeTensors(see):
            yield
    except CkptxError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode) as error:
        raise UnsupportedError(
            f"{name}: computes by values that are not known before it runs ({error}), needed a class whose shapes "
            "follow from those of its inputs; its memory cannot be forecast"
        ) from error


def _one_step(
    assembled: AssembledModel, task: Task, inputs: Inputs, ledger: StorageLedger, counts: Counts, boundaries: Boundaries
) -> tuple[int, int]:
    """Runs it; the numbers of its first event, and of the first after it.

    Before it is what happens once: the optimizer gets its state, and a pipeline the room for what is sent.
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
    """Lets the optimizer make its state, as the first step does; what gets no gradient in the step has none."""
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
