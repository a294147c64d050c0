"""Plans the pipeline stages of a model: the split, the values at each boundary, and the stages of a rank."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from ckptx.architecture.lookup import find_architecture
from ckptx.errors import UnsupportedError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.layout.stages import Stack, StageMap
from ckptx.runtime.model.tiny_model import make_text_batch, tiny_model
from ckptx.runtime.parallel.distributed import broadcast_object, raise_on_all_ranks
from ckptx.runtime.parallel.pipeline.boundaries import Batch, StageBoundaries, discover_boundaries
from ckptx.runtime.parallel.pipeline.dry_run import dry_run_stages
from ckptx.runtime.parallel.pipeline.pipeline import Pipeline
from ckptx.runtime.parallel.pipeline.schedules import Schedule, check_schedule, find_schedule, make_fsdp_refusal
from ckptx.runtime.parallel.pipeline.stage import make_stage
from ckptx.runtime.parallel.pipeline.ties import Tie, find_ties_across_stages

MakeBatches = Callable[[nn.Module], Sequence[Batch]]  # model -> batches for it, one of each kind
GetOutput = Callable[[nn.Module, Any], Tensor]  # see `get_output` of `plan_pipeline`
BoundaryFinder = Callable[[nn.Module, StageMap, Schedule, MakeBatches, GetOutput], StageBoundaries]


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """The split of a model into pipeline stages, and the schedule that runs them.

    Attributes:
        schedule: Schedule that runs the stages.
        stages: Assignment of layers to stages.
        boundaries: Values that stages send each other.
        ties: Parameters that several stages share.
        microbatches: Microbatches per step and data-parallel rank.
    """

    schedule: Schedule
    stages: StageMap
    boundaries: StageBoundaries
    ties: tuple[Tie, ...]
    microbatches: int

    @property
    def names_of_copies(self) -> dict[str, str]:
        """Name of each copy of a parameter that several stages share -> its first name in the whole model."""
        return {name: tie.name for tie in self.ties for name in tie.copies.values()}

    def models(self, whole_model: nn.Module, mesh: DeviceMesh) -> dict[int, nn.Module]:
        """Make the stages of this rank: number -> model without storage, ready for `parallelize`.

        Args:
            whole_model: The model that was split, on the meta device; left unchanged.
            mesh: Mesh from `mesh_of`.

        Raises:
            UnsupportedError: A module other than a layer belongs to several stages.
        """
        models = {}
        for number in self.schedule.stages_of(mesh["pp"].get_local_rank(), mesh["pp"].size()):
            models[number] = copy.deepcopy(whole_model)
            make_stage(models[number], self.stages, number, self.boundaries.output_structures, mesh.device_type)
        return models

    def pipeline(
        self, models: Mapping[int, nn.Module], mesh: DeviceMesh, pipeline_class: Callable[..., Pipeline] = Pipeline
    ) -> Pipeline:
        """Return the pipeline that runs the stages; every rank calls it once its stages are loaded.

        Args:
            models: The stages of this rank, by number.
            mesh: Mesh from `mesh_of`.
            pipeline_class: Class of the pipeline, called with the arguments of `Pipeline`.

        Raises:
            InputError: See `Pipeline`.
            UnsupportedError: See `Pipeline`. Or the schedule cannot be combined with FSDP2, which mixed precision
                requires even on one data rank.
        """
        uses_fsdp = any(isinstance(each, FSDPModule) for model in models.values() for each in model.modules())
        if uses_fsdp and self.schedule.splits_backward:
            raise UnsupportedError(make_fsdp_refusal(self.schedule, "which manages these stages"))
        device = torch.device(mesh.device_type)
        return pipeline_class(
            models, self.stages, self.boundaries, self.schedule, mesh.get_group("pp"), device, self.ties
        )


def make_text_batches(model: nn.Module) -> list[dict[str, Tensor]]:
    """Return a batch of text, and for a class with an attention mask a second one that masks the last three tokens."""
    batch = make_text_batch(model)
    if "input_ids" not in batch or "attention_mask" not in inspect.signature(type(model).forward).parameters:
        return [batch]
    mask = torch.ones_like(batch["input_ids"])
    mask[0, -3:] = 0
    return [batch, {**batch, "attention_mask": mask}]


def get_logits(model: nn.Module, output: Any) -> Tensor:
    """Return the logits from the output of a language model."""
    logits: Tensor = output.logits
    return logits


def plan_pipeline(
    model: nn.Module,
    config: Mapping[str, Any],
    dims: ParallelDims,
    *,
    microbatches: int,
    schedule: str = "1f1b",
    split: str = "even",
    activation_checkpointing: str = "none",
    make_batches: MakeBatches = make_text_batches,
    get_output: GetOutput = get_logits,
    find_boundaries: BoundaryFinder | None = None,
    custom_code_dir: Path | None = None,
) -> PipelinePlan:
    """Plan how a model is split into stages; every rank calls it.

    Args:
        model: The whole model, on the meta device, before it is parallelized.
        config: Contents of its `config.json`.
        dims: Sizes of the mesh.
        microbatches: Microbatches per step and data-parallel rank.
        schedule: Name of a schedule, see `schedules`.
        split: Rule or layer counts of the stages, see `ckptx.layout.stages`.
        activation_checkpointing: Mode that `parallelize` will get.
        make_batches: Returns batches for a small model of the class, one of each kind that training will use (with a
            mask, with an image); the stages send each other the values that these batches require.
        get_output: Returns the tensor that must be the same with and without stages, given a model and its output.
        find_boundaries: Finds the values that stages send each other; None means `find_boundaries_on_rank_0`.
        custom_code_dir: Directory of the custom code that the model was built from; None for a class of transformers.

    Raises:
        UnsupportedError: The model cannot be split, or not with this schedule.
        UsageError: There is no such schedule or split, or the number of microbatches is invalid for the schedule.
    """
    architecture = find_architecture(config, config_dir=custom_code_dir, trust_remote_code=custom_code_dir is not None)
    stacks = architecture.stacks(config) if architecture is not None else ()
    return plan_pipeline_of_stacks(
        model,
        stacks,
        dims,
        microbatches=microbatches,
        schedule=schedule,
        split=split,
        activation_checkpointing=activation_checkpointing,
        make_batches=make_batches,
        get_output=get_output,
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
    make_batches: MakeBatches,
    get_output: GetOutput,
    find_boundaries: BoundaryFinder | None = None,
) -> PipelinePlan:
    """Plan a pipeline like `plan_pipeline`, for a model whose layer lists are known.

    Args:
        model: See `plan_pipeline`.
        stacks: Layer lists of the model in forward order; empty if they are unknown.
        dims: See `plan_pipeline`.
        microbatches: Microbatches per step and data-parallel rank; None means one per stage.
        schedule: See `plan_pipeline`.
        split: See `plan_pipeline`.
        activation_checkpointing: See `plan_pipeline`.
        make_batches: See `plan_pipeline`.
        get_output: See `plan_pipeline`.
        find_boundaries: See `plan_pipeline`.

    Raises:
        UnsupportedError: See `plan_pipeline`. Or there are several stages, and `stacks` is empty.
        UsageError: See `plan_pipeline`.
    """
    resolved_schedule = find_schedule(schedule)
    microbatch_count = dims.pp * resolved_schedule.stages_per_rank if microbatches is None else microbatches
    check_schedule(
        resolved_schedule,
        pp=dims.pp,
        microbatches=microbatch_count,
        data_parallel=dims.dp,
        activation_checkpointing=activation_checkpointing,
        sequence_parallel=False,
    )
    stages = StageMap(stacks, dims.pp * resolved_schedule.stages_per_rank, split, type(model).__name__)
    boundaries = (find_boundaries or find_boundaries_on_rank_0)(
        model, stages, resolved_schedule, make_batches, get_output
    )
    return PipelinePlan(
        resolved_schedule, stages, boundaries, tuple(find_ties_across_stages(model, stages)), microbatch_count
    )


def find_boundaries_on_rank_0(
    model: nn.Module, stages: StageMap, schedule: Schedule, make_batches: MakeBatches, get_output: GetOutput
) -> StageBoundaries:
    """Return the boundaries that `find_and_check_boundaries` finds on rank 0; every rank of the run calls it.

    Raises:
        UnsupportedError: See `find_and_check_boundaries`; raised on every rank.
    """
    own_boundaries = None
    with raise_on_all_ranks():
        if dist.get_rank() == 0:
            own_boundaries = find_and_check_boundaries(
                model, stages, make_batches, get_output, split_backward=schedule.splits_backward
            )
    boundaries: StageBoundaries = broadcast_object(own_boundaries)
    return boundaries


def find_and_check_boundaries(
    model: nn.Module,
    stages: StageMap,
    make_batches: MakeBatches,
    get_output: GetOutput,
    *,
    split_backward: bool = False,
) -> StageBoundaries:
    """Return the values that stages must send each other, found with a small model and checked with a dry run of it.

    Args:
        model: Whole model, whose class and config give the small model.
        stages: Assignment of layers to stages.
        make_batches: See `plan_pipeline`.
        get_output: See `plan_pipeline`.
        split_backward: Compute gradients of inputs and of weights separately in the dry run, as zero-bubble schedules
            do.

    Raises:
        UnsupportedError: The stages cannot compute what the model computes.
    """
    small_model = tiny_model(model.config, type(model))
    small_batches = make_batches(small_model)
    boundaries = discover_boundaries(small_model, stages, small_batches, lambda each: get_output(small_model, each))
    dry_run_stages(
        small_model,
        stages,
        boundaries,
        small_batches,
        lambda each: get_output(small_model, each),
        split_backward=split_backward,
    )
    return boundaries
