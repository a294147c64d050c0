"""Plans the pipeline stages of a model: the split, the values at each boundary, and the stages of a rank."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from ckptx.architecture.find import find_architecture
from ckptx.errors import UnsupportedError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.layout.stages import Stack, StageMap
from ckptx.runtime.model.tiny_model import text_for, tiny_model
from ckptx.runtime.parallel.distributed import broadcast_object, raise_on_all_ranks
from ckptx.runtime.parallel.pipeline.boundaries import Batch, StageBoundaries, discover_boundaries
from ckptx.runtime.parallel.pipeline.dry_run import dry_run_stages
from ckptx.runtime.parallel.pipeline.pipeline import Pipeline
from ckptx.runtime.parallel.pipeline.schedules import Schedule, check_schedule, find_schedule, fsdp_refusal
from ckptx.runtime.parallel.pipeline.stage import make_stage
from ckptx.runtime.parallel.pipeline.ties import Tie, ties_across_stages

Batches = Callable[[nn.Module], Sequence[Batch]]
Output = Callable[[nn.Module, Any], Tensor]
BoundaryFinder = Callable[[nn.Module, StageMap, Schedule, Batches, Output], StageBoundaries]


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """The split of a model into pipeline stages, and the schedule that runs them.

    Attributes:
        schedule: Schedule that runs the stages.
        stages: Assignment of layers to stages.
        boundaries: Values that stages send each other.
        ties: Parameters that several stages share.
        microbatches: Microbatches per step.
    """

    schedule: Schedule
    stages: StageMap
    boundaries: StageBoundaries
    ties: tuple[Tie, ...]
    microbatches: int

    @property
    def copies(self) -> dict[str, str]:
        """Names of copies on later stages -> the name in the whole model."""
        return {name: tie.name for tie in self.ties for name in tie.copies.values()}

    def models(self, whole: nn.Module, mesh: DeviceMesh) -> dict[int, nn.Module]:
        """Return the stages of this rank by number, without storage, ready for `parallelize`.

        Args:
            whole: The model that was split, on the meta device; left unchanged.
            mesh: Mesh from `mesh_of`.
        """
        found = {}
        for number in self.schedule.stages_of(mesh["pp"].get_local_rank(), mesh["pp"].size()):
            found[number] = copy.deepcopy(whole)
            make_stage(found[number], self.stages, number, self.boundaries.forms, mesh.device_type)
        return found

    def pipeline(
        self, models: Mapping[int, nn.Module], mesh: DeviceMesh, kind: Callable[..., Pipeline] = Pipeline
    ) -> Pipeline:
        """Return the pipeline that runs the stages; every rank calls it once its stages are loaded.

        Args:
            models: The stages of this rank, by number.
            mesh: Mesh from `mesh_of`.
            kind: Class of the pipeline, called with the arguments of `Pipeline`.

        Raises:
            InputError, UnsupportedError: See `Pipeline`; also for a schedule that cannot be combined with FSDP2, which
                mixed precision needs even on one data rank.
        """
        is_managed = any(isinstance(each, FSDPModule) for model in models.values() for each in model.modules())
        if is_managed and self.schedule.splits_backward:
            raise UnsupportedError(fsdp_refusal(self.schedule, "which manages these stages"))
        device = torch.device(mesh.device_type)
        return kind(models, self.stages, self.boundaries, self.schedule, mesh.get_group("pp"), device, self.ties)


def text_batches(model: nn.Module) -> list[dict[str, Tensor]]:
    """Return a batch of text, and a second one with padding if the class takes an attention mask."""
    batch = text_for(model)
    if "input_ids" not in batch or "attention_mask" not in inspect.signature(type(model).forward).parameters:
        return [batch]
    mask = torch.ones_like(batch["input_ids"])
    mask[0, -3:] = 0
    return [batch, {**batch, "attention_mask": mask}]


def logits_of(model: nn.Module, output: Any) -> Tensor:
    """Return the logits from the output of a language model."""
    found: Tensor = output.logits
    return found


def plan_pipeline(
    model: nn.Module,
    config: Mapping[str, Any],
    dims: ParallelDims,
    *,
    microbatches: int,
    schedule: str = "1f1b",
    split: str = "even",
    activation_checkpointing: str = "none",
    batches: Batches = text_batches,
    output: Output = logits_of,
    find_boundaries: BoundaryFinder | None = None,
) -> PipelinePlan:
    """Plan how a model is split into stages; every rank calls it.

    Args:
        model: The whole model, on the meta device, before anything made it parallel.
        config: Contents of its `config.json`.
        dims: Sizes of the mesh.
        microbatches: Microbatches per step.
        schedule: Name of a schedule, see `schedules`.
        split: Rule or layer counts of the stages, see `ckptx.layout.stages`.
        activation_checkpointing: The value that `parallelize` will get.
        batches: Makes arguments of each kind that will come (with a mask, with an image) for a small model of the
            class; the values that its stages need for them are what these stages send each other.
        output: Takes the tensor to compare from the output of the model.
        find_boundaries: Finds the values at the boundaries; None means `boundaries_from_rank_0`, which every rank must
            call.

    Raises:
        UnsupportedError: The model cannot be split, or not in this way.
        UsageError: There is no such schedule or split, or there are too few microbatches.
    """
    architecture = find_architecture(config)
    stacks = architecture.stacks(config) if architecture is not None else ()
    return plan_pipeline_of_stacks(
        model,
        stacks,
        dims,
        microbatches=microbatches,
        schedule=schedule,
        split=split,
        activation_checkpointing=activation_checkpointing,
        batches=batches,
        output=output,
        find_boundaries=find_boundaries,
    )


def plan_pipeline_of_stacks(
    model: nn.Module,
    stacks: Sequence[Stack],
    dims: ParallelDims,
    *,
    microbatches: int | None,
    schedule: str,
    split: str,
    activation_checkpointing: str,
    batches: Batches,
    output: Output,
    find_boundaries: BoundaryFinder | None = None,
) -> PipelinePlan:
    """Plan a pipeline like `plan_pipeline`, for known layer stacks; None means one microbatch per stage."""
    chosen = find_schedule(schedule)
    number = microbatches or dims.pp * chosen.stages
    check_schedule(
        chosen,
        pp=dims.pp,
        microbatches=number,
        data_parallel=dims.dp,
        activation_checkpointing=activation_checkpointing,
        sequence_parallel=False,
    )
    stages = StageMap(stacks, dims.pp * chosen.stages, split, type(model).__name__)
    boundaries = (find_boundaries or boundaries_from_rank_0)(model, stages, chosen, batches, output)
    return PipelinePlan(chosen, stages, boundaries, tuple(ties_across_stages(model, stages)), number)


def boundaries_from_rank_0(
    model: nn.Module, stages: StageMap, schedule: Schedule, batches: Batches, output: Output
) -> StageBoundaries:
    """Return the boundaries that `find_and_check_boundaries` finds on rank 0, on every rank."""
    found = None
    with raise_on_all_ranks():
        if dist.get_rank() == 0:
            found = find_and_check_boundaries(model, stages, batches, output, split_backward=schedule.splits_backward)
    boundaries: StageBoundaries = broadcast_object(found)
    return boundaries


def find_and_check_boundaries(
    model: nn.Module, stages: StageMap, batches: Batches, output: Output, *, split_backward: bool = False
) -> StageBoundaries:
    """Discover the boundaries with a small model of the class, and check them with a dry run."""
    small = tiny_model(model.config, type(model))
    given = batches(small)
    found = discover_boundaries(small, stages, given, lambda each: output(small, each))
    dry_run_stages(small, stages, found, given, lambda each: output(small, each), split_backward=split_backward)
    return found
