"""The checkpoint as pipeline stages: how it is split, what the stages exchange, and the stages of this rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ckptx.report.report import Log
from ckptx.runtime.parallel.pipeline.pipeline import Pipeline
from ckptx.runtime.parallel.pipeline.plan import PipelinePlan, plan_pipeline_of_stacks
from ckptx.runtime.parallel.pipeline.stage import make_stage
from ckptx.runtime.parity.divergence import OutputsByCall, record_outputs
from ckptx.runtime.parity.execution import (
    StepResult,
    compute_loss,
    full_tensor,
    logits_or_hidden_states,
    make_forward_arguments,
    translate_model_errors,
)
from ckptx.runtime.parity.inputs.batch import Inputs, make_inputs
from ckptx.runtime.parity.model_loaders import ModelFacts, ModelLoader, ShardedMetaModel


def plan_stages(loader: ModelLoader, facts: ModelFacts, log: Log) -> PipelinePlan:
    """Return the plan that splits a model into pipeline stages; every rank calls it.

    Args:
        loader: Loader of the model, the checked one or the reference.
        facts: Facts about that model.
        log: Log that receives a note if the microbatches do not fill the pipeline.

    Raises:
        UnsupportedError: It cannot be split into stages, or not in this way.
        UsageError: Two options conflict.
    """
    options = loader.options
    model, stacks = loader.build_with_stacks()
    plan = plan_pipeline_of_stacks(
        model,
        stacks,
        options.dims,
        microbatches=options.microbatches,
        schedule=options.schedule,
        split=options.pp_split,
        activation_checkpointing=options.checkpointing_mode,
        make_batches=make_batch_factory(model, facts),
        get_output=logits_or_hidden_states,
    )
    if plan.microbatches < plan.stages.count:
        log.note(
            f"--microbatches {plan.microbatches} does not fill {plan.stages.count} pipeline stages: each rank is idle "
            f"for about {plan.schedule.bubble_fraction(options.dims.pp, plan.microbatches):.0%} of a step, which "
            "affects speed only"
        )
    return plan


def find_stage_of_difference(plan: PipelinePlan, difference: Mapping[str, Any]) -> int | None:
    """Return the stage of a difference in the report: that of its tensor, or the last one for an output of the model.

    None for a difference of the configs.
    """
    if difference["level"] == "config":
        return None
    if difference["level"] == "forward":
        return plan.stages.count - 1
    return plan.stages.stage_of(difference.get("model_name", difference["name"]))


def make_batch_factory(model: nn.Module, facts: ModelFacts) -> Callable[[nn.Module], list[dict[str, torch.Tensor]]]:
    """Return the `make_batches` of `plan_pipeline`, which makes inputs of all kinds that the class takes.

    It makes one batch without padding, and for a class with an attention mask one with padding.
    """

    def batches(small: nn.Module) -> list[dict[str, torch.Tensor]]:
        config = {**small.config.to_dict(), "architectures": model.config.architectures}
        return [
            make_inputs(config, batch_size=2, seed=int(padded), is_padded=padded).batch
            for padded in {False, facts.takes_mask}
        ]

    return batches


class LocalStages:
    """The pipeline stages of this rank.

    Attributes:
        meta_models: Stages by number, in ascending order.
    """

    def __init__(self, loader: ModelLoader, mesh: DeviceMesh, plan: PipelinePlan) -> None:
        rank, size = mesh["pp"].get_local_rank(), mesh["pp"].size()
        self._plan, self._mesh, self._group = plan, mesh, mesh.get_group("pp")
        self._pipeline: Pipeline | None = None
        self._batches: Sequence[Inputs] = ()  # microbatches of the step that is running
        self._logits: dict[int, torch.Tensor] = {}  # index of a microbatch -> its logits, on the rank of the last stage
        self.meta_models: dict[int, ShardedMetaModel] = {}
        for number in plan.schedule.stages_of(rank, size):

            def make(model: nn.Module, number: int = number) -> None:
                make_stage(model, plan.stages, number, plan.boundaries.output_structures, mesh.device_type)

            self.meta_models[number] = loader.build_parallel(mesh, make)

    def run(self, batches: Sequence[Inputs], *, backward: bool) -> StepResult:
        """Run one step; on a rank without the last stage, the result has no logits, and its loss is NaN."""
        models = {number: each.model for number, each in self.meta_models.items()}
        for model in models.values():
            model.eval()
            model.zero_grad(set_to_none=True)
        self._batches, self._logits = batches, {}
        last_model = models[max(models)]
        arguments = [make_forward_arguments(last_model, each) for each in batches]
        with translate_model_errors(last_model):
            if self._pipeline is None:  # only once, because it replaces `forward` of the models
                self._pipeline = self._plan.pipeline(models, self._mesh)
            pipeline = self._pipeline
            losses = pipeline.step(arguments, self._loss) if backward else pipeline.forward(arguments, self._loss)
        result = StepResult(logits=[self._logits[index] for index in sorted(self._logits)])
        result.loss = sum(map(float, losses)) if losses else math.nan  # in the order of the reference
        return result

    def _loss(self, output: Any, index: int) -> torch.Tensor:
        """Return the loss of a microbatch, scaled for the step, and store its logits."""
        logits = logits_or_hidden_states(self.meta_models[max(self.meta_models)].model, output)
        self._logits[index] = full_tensor(logits.detach())
        return compute_loss(logits, self._batches[index]) / len(self._batches)

    def iter_module_outputs(self, inputs: Inputs) -> Iterator[OutputsByCall]:
        """Yield the outputs of module calls, stage by stage, on the first rank; nothing on the others.

        All ranks must call it with the same batch.
        """
        outputs_by_stage: dict[int, OutputsByCall] = {number: {} for number in self.meta_models}
        with ExitStack() as stack:
            for number, each in self.meta_models.items():
                stack.enter_context(record_outputs(each.model, outputs_by_stage[number], self._plan.stages, number))
            self.run([inputs], backward=False)
        own_rank, first_rank, size = dist.get_rank(), 0, dist.get_world_size(self._group)
        if first_rank not in dist.get_process_group_ranks(self._group):
            return
        for number in range(self._plan.stages.count):
            stage_rank = dist.get_global_rank(self._group, self._plan.schedule.rank_of(number, size))
            outputs = [outputs_by_stage.get(number)]
            if stage_rank != first_rank and own_rank == stage_rank:
                dist.send_object_list(
                    outputs, dst=first_rank, group=self._group, device=torch.device(self._mesh.device_type)
                )
            elif stage_rank != first_rank and own_rank == first_rank:
                dist.recv_object_list(
                    outputs, src=stage_rank, group=self._group, device=torch.device(self._mesh.device_type)
                )
            if own_rank == first_rank:
                assert outputs[0] is not None
                yield outputs[0]
