"""Runs the stages of this rank under a schedule of torch, one step at a time.

Every rank has the inputs of every microbatch. What torch is given is the number of a microbatch, cut from a range: each
stage looks up what it needs, so that microbatches may have any number of images, in any order of the schedule. The last
stage computes the loss itself and gives torch a number; logits stay where they were computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from ckptx.errors import UsageError
from ckptx.layout.stages import StageMap
from ckptx.runtime.model.tiny_model import text_for
from ckptx.runtime.parallel.gradients import PipelineStages, clip_grad_norm
from ckptx.runtime.parallel.mixed_inputs import MixedInputs
from ckptx.runtime.parallel.pipeline.boundaries import Batch, StageBoundaries
from ckptx.runtime.parallel.pipeline.payload import PayloadSlot, pack, place_of, places_of, receive_buffers, unpack
from ckptx.runtime.parallel.pipeline.run import StageRun
from ckptx.runtime.parallel.pipeline.schedules import Schedule
from ckptx.runtime.parallel.pipeline.ties import (
    Tie,
    check_copies_are_equal,
    later_copies,
    sum_gradients,
    take_gradients,
)

_logger = logging.getLogger(__name__)

Loss = Callable[[Any, int], Tensor]


class TorchStage(PipelineStage):  # type: ignore[misc]
    """A stage as torch's schedules run it."""

    def __init__(self, run: Callable[..., Any], *args: Any, **settings: Any) -> None:
        """With `run` in the place of what torch does with a microbatch: it is given the model, to call it."""
        super().__init__(*args, **settings)
        self._run = run

    def forward_maybe_with_nosync(self, *payload: Tensor, number: Tensor) -> Any:
        return self._run(super().forward_maybe_with_nosync, payload, number)

    def _post_metadata_inference_cleanup(self) -> None:
        """Nothing: torch would drop the gradients that FSDP2 has summed up so far."""


class Pipeline:
    """The stages of this rank.

    Attributes:
        parts: In ascending order of their numbers.
        stage_class: What torch is given.
    """

    stage_class = TorchStage

    def __init__(
        self,
        models: Mapping[int, nn.Module],
        stages: StageMap,
        boundaries: StageBoundaries,
        schedule: Schedule,
        group: dist.ProcessGroup,
        device: torch.device,
        ties: Sequence[Tie] = (),
    ) -> None:
        """Args:
        models: The stages of this rank by number, parallel by now; their `forward` becomes another.
        stages: How the model is cut.
        boundaries: The values that travel between stages.
        schedule: In which order.
        group: The ranks of the pipeline.
        device: Where the models are.
        ties: From `ties_across_stages`; the gradients of their copies are summed at the end of each step.

        Raises:
            UnsupportedError: Copies are not cut alike.
        """
        self.parts = [StageRun(model, stages, number, boundaries) for number, model in sorted(models.items())]
        self._stages, self._schedule, self._group, self._device = stages, schedule, group, device
        self._ties, self._models = ties, dict(models)
        self._batches: Sequence[Batch] = ()
        self._loss: Loss | None = None
        self._places: dict[int, tuple[PayloadSlot, ...]] = {}
        self._prepared: tuple[Any, Any] = (None, None)
        self._mixed = [MixedInputs(part.model) for part in self.parts]
        for part in self.parts:
            part.model.forward = self._forward_of(part, part.model.forward)
        self._check_ties()

    def prepare(self, batches: Sequence[Batch]) -> None:
        """Makes room for microbatches of these shapes, which the first `step` does by itself."""
        self._runner(batches)

    def step(self, batches: Sequence[Batch], loss: Loss) -> list[Tensor]:
        """Forward and backward of every microbatch; gradients are added to those that are there.

        Args:
            batches: The microbatches, without labels; the same on every rank of the pipeline.
            loss: Of what the model gave for a microbatch of this number, as it counts in the step: gradients are those
                of the sum over the microbatches. The rank of the last stage calls it.

        Returns:
            The losses, on the rank that has the last stage; nothing elsewhere.

        Raises:
            UsageError: There are labels among the inputs, or ranks of the pipeline have other inputs.
        """
        self._check(batches)
        self._batches, self._loss = batches, loss
        is_mixed = self._gather_mixed(batches)
        runner = self._runner(batches)
        numbers = torch.arange(len(batches), device=self._device)
        losses: list[Tensor] = []
        arguments = (numbers,) if self.parts[0].number == 0 else ()
        is_last = self.parts[-1].number == self._stages.pp - 1
        held = take_gradients(self._ties, self._models)
        for each in self._mixed:
            each.fill(is_mixed)
            if is_mixed:
                each.gather()
                each.add_zeros(is_reduced=False)
        runner.step(
            *arguments, number=numbers, target=numbers if is_last else None, losses=losses if is_last else None,
            return_outputs=False,
        )  # fmt: skip
        self._batches, self._loss = (), None
        ranks = {number: self._peer(number) for number in range(self._stages.pp)}
        sum_gradients(self._ties, self._models, ranks, self._group, held)
        return [each.detach() for each in losses]

    def forward(self, batches: Sequence[Batch], loss: Loss) -> list[Tensor]:
        """Forward alone, one microbatch after another; takes and gives what `step` does."""
        losses: list[Tensor] = []
        self._gather_mixed(batches)
        with torch.no_grad():
            for index, batch in enumerate(batches):

                def see(part: StageRun, output: Any, index: int = index) -> None:
                    if part.number == self._stages.pp - 1:
                        losses.append(loss(output, index))

                self.run_one_batch(batch, see)
        return losses

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clips the gradients of all stages by the norm of the whole model's; every rank calls it.

        What ties over stages share counts once. Arguments, what it returns and raises are those of
        `gradients.clip_grad_norm`; the same bits on every rank of every stage.
        """
        stages = PipelineStages(self._group, self._device, later_copies(self._ties, self._models))
        return clip_grad_norm(self._models.values(), max_norm, norm_type, error_if_nonfinite, stages)

    def run_one_batch(
        self, batch: Batch, see: Callable[[StageRun, Any], None] | None = None
    ) -> list[list[PayloadSlot | None]]:
        """Runs one microbatch forward through all stages, one after another, without a schedule.

        Args:
            batch: The microbatch.
            see: Is shown each stage of this rank with what its model gave.

        Returns:
            For each boundary between stages that this rank knows, what its values take; None for the others.
        """
        found: dict[int, list[PayloadSlot | None]] = {}
        values: tuple[Any, ...] = ()
        for part in self.parts:
            if part.number and self._peer(part.number - 1) != dist.get_rank():
                values = self._receive(part.number)
            if part.number:
                found[part.number] = list(map(place_of, part.input_slots, values))
            output, sent = part.model(given=(batch, _OpaqueValues(values)))
            if see is not None:
                see(part, output)
            if part.output_slots:
                found[part.number + 1] = list(map(place_of, part.output_slots, sent))
                values = tuple(_detached(each) for each in sent)
                if self._peer(part.number + 1) != dist.get_rank():
                    self._send(values, part.number + 1)
        return [found.get(number, []) for number in range(self._stages.pp)]

    def _check_ties(self) -> None:
        check_copies_are_equal(self._ties, self._models, self._group)

    def _check(self, batches: Sequence[Batch]) -> None:
        """Refuses what would be trained on in silence, and be wrong."""
        if any("labels" in batch for batch in batches):
            raise UsageError(
                "Pipeline.step: found labels among the inputs, which every stage is given, needed them in the loss "
                "alone; pass token_losses(labels, items)"
            )
        number = torch.zeros((), dtype=torch.int64, device=self._device)
        for index, batch in enumerate(batches, 1):
            for name in sorted(batch):
                if not batch[name].is_floating_point():  # pixels may be on the first stage alone
                    values = batch[name].to(self._device, torch.int64).flatten()
                    number += index * (values * torch.arange(1, len(values) + 1, device=self._device)).sum()
        largest = torch.stack([number, -number])
        dist.all_reduce(largest, dist.ReduceOp.MAX, self._group)
        if int(largest.sum()):
            raise UsageError(
                "Pipeline.step: ranks of one pipeline have other microbatches, needed the same on all of its stages; "
                "choose them by data_index(mesh), not by rank"
            )

    def _gather_mixed(self, batches: Sequence[Batch]) -> bool:
        """Gathers what data ranks differ in calling, where they do; whether they do."""
        if not self._mixed[0].differ(batches):
            return False
        if not self._mixed[0].is_prepared:
            with ExitStack() as stack:
                for each in self._mixed:
                    stack.enter_context(each.preparing())
                self.run_one_batch(text_for(self.parts[0].model))
        for each in self._mixed:
            each.gather()
        return True

    def _peer(self, stage: int) -> int:
        """The rank, among all, that has a stage."""
        size = dist.get_world_size(self._group)
        return dist.get_global_rank(self._group, self._schedule.rank_of(stage, size)) if stage >= 0 else -1

    def _send(self, values: tuple[Any, ...], stage: int) -> None:
        """Sends values to a stage, whatever they are."""
        said = [(each.cpu(), each.requires_grad) if isinstance(each, Tensor) else (each, False) for each in values]
        dist.send_object_list([said], dst=self._peer(stage), group=self._group, device=self._device)

    def _receive(self, stage: int) -> tuple[Any, ...]:
        """What the stage before this one sent."""
        said: list[Any] = [None]
        dist.recv_object_list(said, src=self._peer(stage - 1), group=self._group, device=self._device)
        return tuple(
            value.to(self._device).requires_grad_(is_trained) if isinstance(value, Tensor) else value
            for value, is_trained in said[0]
        )

    def _forward_of(self, part: StageRun, own: Callable[..., Any]) -> Callable[..., Any]:
        """What the model is called with in every case, so that FSDP2 gathers and casts around it."""

        def forward(*, given: tuple[Batch, _OpaqueValues]) -> tuple[Any, tuple[Any, ...]]:
            batch, sealed = given
            return part(own, batch, sealed.values)

        return forward

    def _chunk_of(self, part: StageRun) -> Callable[..., Any]:
        """Runs one microbatch under a schedule: from what arrived to what is sent, or to the loss."""

        def run(model: Callable[..., Any], payload: Sequence[Tensor], number: Tensor) -> Any:
            index = int(number)
            values = self._unpacked(part, payload) if part.number else ()
            output, sent = model(given=(self._batches[index], _OpaqueValues(values)))
            if part.number == self._stages.pp - 1:
                assert self._loss is not None
                return self._loss(output, index)
            return self._packed(part, sent)

        return run

    def _packed(self, part: StageRun, sent: Sequence[Any]) -> tuple[Tensor, ...]:
        return pack(sent, self._places[part.number + 1], self._device)

    def _unpacked(self, part: StageRun, payload: Sequence[Tensor]) -> tuple[Any, ...]:
        return unpack(payload, self._places[part.number])

    def _runner(self, batches: Sequence[Batch]) -> Any:
        """The schedule of torch, made anew when something has another shape than in the step before.

        One that exists cannot take other shapes, and its stages drop the gradients of FSDP2 when they begin.
        """
        signature = [{name: tuple(value.shape) for name, value in batch.items()} for batch in batches]
        is_new = torch.tensor(int(signature != self._prepared[0]), device=self._device)
        if dist.get_world_size() > 1:  # looking at shapes is collective
            dist.all_reduce(is_new, op=dist.ReduceOp.MAX)
        if int(is_new):
            self._measure(batches)
            self._prepared = signature, self._made(len(batches))
        return self._prepared[1]

    def _measure(self, batches: Sequence[Batch]) -> None:
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            found = [self.run_one_batch(batch) for batch in batches]
        for part in self.parts:
            for module in part.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
            for number, slots in ((part.number, part.input_slots), (part.number + 1, part.output_slots)):
                self._places[number] = places_of(slots, [each[number] for each in found]) if slots else ()

    def _made(self, microbatches: int) -> Any:
        stages = [
            self.stage_class(
                self._chunk_of(part),
                part.model,
                part.number,
                self._stages.pp,
                self._device,
                input_args=receive_buffers(self._places[part.number])
                if part.number
                else torch.empty(1, dtype=torch.int64),
                output_args=receive_buffers(self._places[part.number + 1]) if part.output_slots else torch.empty(()),
                group=self._group,
            )
            for part in self.parts
        ]
        size = dist.get_world_size(self._group)
        _logger.info("%s: stages %s of %d, %d microbatches", self._schedule.name, [each.number for each in self.parts],
                     self._stages.pp, microbatches)  # fmt: skip
        for stage in stages:
            stage.stage_index_to_group_rank = {
                number: self._schedule.rank_of(number, size) for number in range(self._stages.pp)
            }
        return self._schedule.cls(
            stages if self._schedule.stages > 1 else stages[0],
            n_microbatches=microbatches,
            loss_fn=lambda output, _: output,
            scale_grads=False,
        )


class _OpaqueValues:
    """What arrived from another stage, hidden from FSDP2: with mixed precision it casts what a model is given."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values


def _detached(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
