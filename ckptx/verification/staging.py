"""The checkpoint's side as pipeline stages: how it is cut, what travels, and the stages of this rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ckptx.layout.stages import StageMap
from ckptx.report.report import Log
from ckptx.runtime.distributed import Process
from ckptx.runtime.pipeline.carry import Carry
from ckptx.runtime.pipeline.cut import carry_of
from ckptx.runtime.pipeline.pipeline import Pipeline
from ckptx.runtime.pipeline.schedules import Schedule, check_schedule, find_schedule
from ckptx.runtime.pipeline.stage import make_stage
from ckptx.runtime.pipeline.ties import Tie, tied_over
from ckptx.verification.divergence import Outputs, kept
from ckptx.verification.execution import Outcome, arguments, compared, failing, loss_of, whole
from ckptx.verification.inputs.batch import Inputs, inputs_for
from ckptx.verification.side import Built, Seen, Side


@dataclass(frozen=True, slots=True)
class Staging:
    """How a model is cut into pipeline stages.

    Attributes:
        schedule: In which order they run.
        stages: Who has what.
        carry: What travels.
        ties: Parameters of several stages.
        microbatches: Of each step.
    """

    schedule: Schedule
    stages: StageMap
    carry: Carry
    ties: tuple[Tie, ...]
    microbatches: int

    def stage_of(self, row: Mapping[str, Any]) -> int | None:
        """The stage of a difference: that of its tensor; the last one of what the whole model gives."""
        if row["level"] == "config":
            return None
        last = self.stages.pp - 1
        return last if row["level"] == "forward" else self.stages.stage_of(row.get("model_name", row["name"]))

    @property
    def copies(self) -> dict[str, str]:
        """Names of copies on later stages -> what the whole model calls them."""
        return {name: tie.name for tie in self.ties for name in tie.copies.values()}


def stage_the(side: Side, seen: Seen, process: Process, log: Log) -> Staging:
    """Cuts a side; every rank calls it.

    Args:
        side: Whose model.
        seen: What is known of it.
        process: Of this rank.
        log: Is told of a pipeline that cannot be filled.

    Raises:
        UnsupportedError: It cannot be cut, or not so.
        UsageError: Options do not go together.
    """
    options = side.options
    dims, schedule = options.dims, find_schedule(options.schedule)
    microbatches = options.microbatches or dims.pp * schedule.stages
    check_schedule(
        schedule,
        pp=dims.pp,
        microbatches=microbatches,
        data_parallel=dims.dp,
        activation_checkpointing=options.activation_checkpointing,
        sequence_parallel=False,
    )
    model, stacks = side.stacked()
    stages = StageMap(stacks, dims.pp * schedule.stages, options.pp_split, type(model).__name__)
    if microbatches < stages.pp:
        log.note(
            f"--microbatches {microbatches}: do not fill {stages.pp} pipeline stages, so that a rank waits "
            f"{schedule.bubble_fraction(dims.pp, microbatches):.0%} of a step at best; speed is no matter here"
        )
    carry = carry_of(model, stages, schedule, small_batches(model, seen), compared)
    return Staging(schedule, stages, carry, tuple(tied_over(model, stages)), microbatches)


def small_batches(model: nn.Module, seen: Seen) -> Callable[[nn.Module], list[dict[str, torch.Tensor]]]:
    """Makes inputs of every kind that a model takes, with padding and without, for a small one of its class."""

    def batches(small: nn.Module) -> list[dict[str, torch.Tensor]]:
        config = {**small.config.to_dict(), "architectures": model.config.architectures}
        return [
            inputs_for(config, rows=2, seed=int(padded), is_padded=padded).batch for padded in {False, seen.takes_mask}
        ]

    return batches


class Stages:
    """The stages of this rank, which together run as one model.

    Attributes:
        built: By number, in ascending order.
    """

    def __init__(self, side: Side, mesh: DeviceMesh, staging: Staging) -> None:
        rank, size = mesh["pp"].get_local_rank(), mesh["pp"].size()
        self._staging, self._group, self._device = staging, mesh.get_group("pp"), torch.device(mesh.device_type)
        self._pipeline: Pipeline | None = None
        self._batches: Sequence[Inputs] = ()
        self._logits: dict[int, torch.Tensor] = {}
        self.built: dict[int, Built] = {}
        for number in staging.schedule.stages_of(rank, size):

            def cut(model: nn.Module, number: int = number) -> None:
                make_stage(model, staging.stages, number, staging.carry.forms, mesh.device_type)

            self.built[number] = side.build(mesh, cut)

    def run(self, batches: Sequence[Inputs], *, backward: bool) -> Outcome:
        """One step; logits and the loss are there on the ranks that have the last stage."""
        models = {number: built.model for number, built in self.built.items()}
        for model in models.values():
            model.eval()
            model.zero_grad(set_to_none=True)
        self._batches, self._logits = batches, {}
        given = [arguments(model, each) for each in batches]
        with failing(model):
            pipeline = self._pipeline_of(models)
            losses = pipeline.step(given, self._loss) if backward else pipeline.forward(given, self._loss)
        outcome = Outcome(logits=[self._logits[index] for index in sorted(self._logits)])
        outcome.loss = sum(map(float, losses)) if losses else math.nan  # in the order of the reference
        return outcome

    def _pipeline_of(self, models: Mapping[int, nn.Module]) -> Pipeline:
        """Made once: it gives the models another `forward`."""
        if self._pipeline is None:
            staging = self._staging
            self._pipeline = Pipeline(
                models, staging.stages, staging.carry, staging.schedule, self._group, self._device, staging.ties
            )
        return self._pipeline

    def _loss(self, output: Any, index: int) -> torch.Tensor:
        found = compared(self.built[max(self.built)].model, output)
        self._logits[index] = whole(found.detach())
        return loss_of(found, self._batches[index]) / len(self._batches)

    def observed(self, inputs: Inputs) -> Iterator[Outputs]:
        """What calls of modules give, of one stage after another, on the first rank; nothing on the others.

        All ranks run the same batch.
        """
        found: dict[int, Outputs] = {number: {} for number in self.built}
        with ExitStack() as stack:
            for number, built in self.built.items():
                stack.enter_context(kept(built.model, found[number], self._staging.stages, number))
            self.run([inputs], backward=False)
        here, first, size = dist.get_rank(), 0, dist.get_world_size(self._group)
        if first not in dist.get_process_group_ranks(self._group):
            return
        for number in range(self._staging.stages.pp):
            owner = dist.get_global_rank(self._group, self._staging.schedule.rank_of(number, size))
            said = [found.get(number)]
            if owner != first and here == owner:
                dist.send_object_list(said, dst=first, group=self._group, device=self._device)
            elif owner != first and here == first:
                dist.recv_object_list(said, src=owner, group=self._group, device=self._device)
            if here == first:
                assert said[0] is not None
                yield said[0]
