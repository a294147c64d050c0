"""Runs the stages of this rank under a schedule of torch, one step at a time.

Every rank has the inputs of every microbatch. torch's schedule gets only the indices of the microbatches; each stage
looks up the inputs by index, so that the number of images may differ between microbatches. The last stage computes the
loss itself and gives torch a scalar; logits stay on the rank that computed them.
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
from ckptx.runtime.model.tiny_model import make_text_batch
from ckptx.runtime.parallel.gradients import PipelineStages, clip_grad_norm
from ckptx.runtime.parallel.mixed_inputs import MixedInputs
from ckptx.runtime.parallel.pipeline.boundaries import Batch, StageBoundaries
from ckptx.runtime.parallel.pipeline.payload import (
    PayloadSlot,
    make_payload_slot,
    make_receive_buffers,
    merge_payload_slots,
    pack,
    unpack,
)
from ckptx.runtime.parallel.pipeline.run import StageRunner
from ckptx.runtime.parallel.pipeline.schedules import Schedule
from ckptx.runtime.parallel.pipeline.ties import (
    Tie,
    check_copies_are_equal,
    find_later_copies,
    sum_gradients,
    take_gradients,
)

_logger = logging.getLogger(__name__)

Loss = Callable[[Any, int], Tensor]  # from the output of the model and the index of the microbatch


class TorchStage(PipelineStage):  # type: ignore[misc]
    """A stage as torch's schedules run it."""

    def __init__(self, run: Callable[..., Any], *args: Any, **settings: Any) -> None:
        """Create a stage that calls `run` for each microbatch.

        Args:
            run: Called with the model as a callable, the received payload, and the index of the microbatch as a tensor
                with one element.
            args: Arguments of `PipelineStage`.
            settings: Keyword arguments of `PipelineStage`.
        """
        super().__init__(*args, **settings)
        self._run = run

    def forward_maybe_with_nosync(self, *payload: Tensor, microbatch: Tensor) -> Any:
        """Run the forward of one microbatch, whose index torch's schedule passes as a tensor with one element."""
        return self._run(super().forward_maybe_with_nosync, payload, microbatch)

    def _post_metadata_inference_cleanup(self) -> None:
        """Do nothing: torch would drop the gradients that FSDP2 has accumulated."""


class Pipeline:
    """The stages of this rank, which run under a schedule together with those of the other ranks.

    Attributes:
        runners: The stages of this rank, in ascending order of their numbers.
        stage_class: Class of the stages that torch's schedule gets, or a function that creates one.
    """

    stage_class: Callable[..., TorchStage] = TorchStage

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
        """Prepare the stages of this rank to run under a schedule.

        Args:
            models: The stages of this rank by number, already parallel; their `forward` is replaced.
            stages: Assignment of layers to stages.
            boundaries: Values that stages send each other.
            schedule: Schedule that runs the stages.
            group: Ranks of the pipeline.
            device: Device of the models.
            ties: From `find_ties_across_stages`; the gradients of their copies are summed at the end of each step.

        Raises:
            InputError: The copies of a tied parameter have different values.
            UnsupportedError: The copies of a tied parameter are sharded differently.
        """
        self.runners = [StageRunner(model, stages, number, boundaries) for number, model in sorted(models.items())]
        self._stages, self._schedule, self._group, self._device = stages, schedule, group, device
        self._ties, self._models = ties, dict(models)
        self._batches: Sequence[Batch] = ()  # microbatches of the step that is running
        self._loss: Loss | None = None  # loss function of the step that is running
        self._payload_slots: dict[int, tuple[PayloadSlot, ...]] = {}  # stage -> buffers for its inputs
        self._current_schedule: tuple[Any, Any] = (None, None)  # shapes of the microbatches, torch's schedule for them
        self._mixed_inputs = [MixedInputs(runner.model) for runner in self.runners]
        for runner in self.runners:
            runner.model.forward = self._wrap_forward(runner, runner.model.forward)
        self._check_ties()

    def prepare(self, batches: Sequence[Batch]) -> None:
        """Build torch's schedule, with buffers for microbatches of these shapes; every rank of the run calls it.

        The microbatches run forward once, to measure the values between stages. Without this call, the first `step`
        does all this.
        """
        self._get_schedule(batches)

    def step(self, batches: Sequence[Batch], loss: Loss) -> list[Tensor]:
        """Run forward and backward of every microbatch; every rank of the run calls it.

        Gradients are added to those of earlier steps.

        Args:
            batches: The microbatches, without labels; the same on every rank of the pipeline. Only the first stage uses
                floating-point inputs such as pixel values.
            loss: Returns the loss from the model's output and the index of the microbatch, scaled for the step:
                gradients are those of the sum over the microbatches. The rank of the last stage calls it.

        Returns:
            The losses on the rank of the last stage; an empty list elsewhere.

        Raises:
            UsageError: The inputs contain labels, or differ between ranks of the pipeline.
            UnsupportedError: A value between stages cannot be sent, or its dtype or number of dims differs between
                microbatches. Or stage boundaries are unknown for a microbatch, or data ranks have different kinds of
                inputs and the model cannot run on text alone.
        """
        self._check_inputs(batches)
        self._batches, self._loss = batches, loss
        inputs_differ = self._gather_if_inputs_differ(batches)
        torch_schedule = self._get_schedule(batches)
        indices = torch.arange(len(batches), device=self._device)
        losses: list[Tensor] = []
        schedule_inputs = (indices,) if self.runners[0].number == 0 else ()
        is_last = self.runners[-1].number == self._stages.count - 1
        earlier_gradients = take_gradients(self._ties, self._models)
        for each in self._mixed_inputs:
            each.set_zero_fill(inputs_differ)
            if inputs_differ:
                each.gather()
                each.add_zeros(reduces_gradients=False)
        torch_schedule.step(
            *schedule_inputs,
            microbatch=indices,
            target=indices if is_last else None,
            losses=losses if is_last else None,
            return_outputs=False,
        )
        self._batches, self._loss = (), None
        ranks = {number: self._rank_of_stage(number) for number in range(self._stages.count)}
        sum_gradients(self._ties, self._models, ranks, self._group, earlier_gradients)
        return [each.detach() for each in losses]

    def forward(self, batches: Sequence[Batch], loss: Loss) -> list[Tensor]:
        """Run only the forward pass, one microbatch after another, without gradients.

        Arguments and return value are those of `step`, but the inputs are not checked.
        """
        losses: list[Tensor] = []
        self._gather_if_inputs_differ(batches)
        with torch.no_grad():
            for index, batch in enumerate(batches):

                def collect_loss(runner: StageRunner, output: Any, index: int = index) -> None:
                    if runner.number == self._stages.count - 1:
                        losses.append(loss(output, index))

                self.run_one_batch(batch, collect_loss)
        return losses

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the gradients of all stages by the norm of the whole model; every rank calls it.

        A parameter that is tied across stages counts once. Arguments, return value and exceptions are those of
        `gradients.clip_grad_norm`; the norm is bit-identical on every rank of every stage.
        """
        stages = PipelineStages(self._group, self._device, find_later_copies(self._ties, self._models))
        return clip_grad_norm(self._models.values(), max_norm, norm_type, error_if_nonfinite, stages)

    def run_one_batch(
        self, batch: Batch, on_output: Callable[[StageRunner, Any], None] | None = None
    ) -> list[list[PayloadSlot | None]]:
        """Run one microbatch forward through all stages, one after another, without a schedule.

        Args:
            batch: The microbatch.
            on_output: Called with each stage of this rank and the output of its model; None for no call.

        Returns:
            For each stage, the shape and dtype (`PayloadSlot`) of each input that this rank sends or receives, None for
            an input that is None; an empty list for the first stage, and for stages whose inputs this rank neither
            sends nor receives.

        Raises:
            UnsupportedError: A value between stages cannot be sent, or stage boundaries are unknown for the microbatch.
        """
        slots_by_stage: dict[int, list[PayloadSlot | None]] = {}
        values: tuple[Any, ...] = ()
        for runner in self.runners:
            if runner.number and self._rank_of_stage(runner.number - 1) != dist.get_rank():
                values = self._receive(runner.number)
            if runner.number:
                slots_by_stage[runner.number] = list(map(make_payload_slot, runner.input_slots, values))
            output, sent_values = runner.model(stage_inputs=(batch, _OpaqueValues(values)))
            if on_output is not None:
                on_output(runner, output)
            if runner.output_slots:
                slots_by_stage[runner.number + 1] = list(map(make_payload_slot, runner.output_slots, sent_values))
                values = tuple(_detach_value(each) for each in sent_values)
                if self._rank_of_stage(runner.number + 1) != dist.get_rank():
                    self._send(values, runner.number + 1)
        return [slots_by_stage.get(number, []) for number in range(self._stages.count)]

    def _check_ties(self) -> None:
        check_copies_are_equal(self._ties, self._models, self._group)

    def _check_inputs(self, batches: Sequence[Batch]) -> None:
        """Refuse inputs with which training would silently be wrong.

        Raises:
            UsageError: The inputs contain labels, or differ between ranks of the pipeline.
        """
        if any("labels" in batch for batch in batches):
            raise UsageError(
                "Pipeline.step: the inputs, which every stage gets, contain labels; only the loss may use them; pass "
                "make_loss(labels, num_items)"
            )
        checksum = torch.zeros((), dtype=torch.int64, device=self._device)
        for index, batch in enumerate(batches, 1):
            for name in sorted(batch):
                if not batch[name].is_floating_point():  # only the first stage uses others, such as pixel values
                    values = batch[name].to(self._device, torch.int64).flatten()
                    checksum += index * (values * torch.arange(1, len(values) + 1, device=self._device)).sum()
        bounds = torch.stack([checksum, -checksum])
        dist.all_reduce(bounds, dist.ReduceOp.MAX, self._group)
        if int(bounds.sum()):
            raise UsageError(
                "Pipeline.step: the microbatches differ between ranks of one pipeline, all of its stages require the "
                "same; choose them by data_index(mesh), not by rank"
            )

    def _gather_if_inputs_differ(self, batches: Sequence[Batch]) -> bool:
        """Return True if inputs differ between data ranks; if so, gather the modules that only some may call."""
        if not self._mixed_inputs[0].inputs_differ(batches):
            return False
        if not self._mixed_inputs[0].is_prepared:
            with ExitStack() as stack:
                for each in self._mixed_inputs:
                    stack.enter_context(each.prepare())
                self.run_one_batch(make_text_batch(self.runners[0].model))
        for each in self._mixed_inputs:
            each.gather()
        return True

    def _rank_of_stage(self, stage: int) -> int:
        """Return the global rank of a stage; -1 for a negative stage."""
        size = dist.get_world_size(self._group)
        return dist.get_global_rank(self._group, self._schedule.rank_of(stage, size)) if stage >= 0 else -1

    def _send(self, values: tuple[Any, ...], stage: int) -> None:
        """Send values of any kind to a stage."""
        payload = [(each.cpu(), each.requires_grad) if isinstance(each, Tensor) else (each, False) for each in values]
        dist.send_object_list([payload], dst=self._rank_of_stage(stage), group=self._group, device=self._device)

    def _receive(self, stage: int) -> tuple[Any, ...]:
        """Return the values that the previous stage sent to a stage."""
        payload: list[Any] = [None]
        dist.recv_object_list(payload, src=self._rank_of_stage(stage - 1), group=self._group, device=self._device)
        return tuple(
            value.to(self._device).requires_grad_(requires_grad) if isinstance(value, Tensor) else value
            for value, requires_grad in payload[0]
        )

    def _wrap_forward(self, runner: StageRunner, stock_forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward that replaces the model's own, so that FSDP2 gathers and casts around the whole stage."""

        def forward(*, stage_inputs: tuple[Batch, _OpaqueValues]) -> tuple[Any, tuple[Any, ...]]:
            batch, opaque_values = stage_inputs
            return runner(stock_forward, batch, opaque_values.values)

        return forward

    def _make_microbatch_function(self, runner: StageRunner) -> Callable[..., Any]:
        """Return a function that runs one microbatch from its received payload to the next payload or the loss."""

        def run(model: Callable[..., Any], payload: Sequence[Tensor], microbatch: Tensor) -> Any:
            index = int(microbatch)
            values = self._unpack(runner, payload) if runner.number else ()
            output, sent_values = model(stage_inputs=(self._batches[index], _OpaqueValues(values)))
            if runner.number == self._stages.count - 1:
                assert self._loss is not None
                return self._loss(output, index)
            return self._pack(runner, sent_values)

        return run

    def _pack(self, runner: StageRunner, sent_values: Sequence[Any]) -> tuple[Tensor, ...]:
        return pack(sent_values, self._payload_slots[runner.number + 1], self._device)

    def _unpack(self, runner: StageRunner, payload: Sequence[Tensor]) -> tuple[Any, ...]:
        return unpack(payload, self._payload_slots[runner.number])

    def _get_schedule(self, batches: Sequence[Batch]) -> Any:
        """Return torch's schedule, built again if on any rank the shape of an input changed since the last step.

        A schedule has buffers of fixed shapes, and cannot run microbatches of other shapes.
        """
        signature = [{name: tuple(value.shape) for name, value in batch.items()} for batch in batches]
        is_new = torch.tensor(int(signature != self._current_schedule[0]), device=self._device)
        if dist.get_world_size() > 1:  # all ranks must measure payloads together
            dist.all_reduce(is_new, op=dist.ReduceOp.MAX)
        if int(is_new):
            self._measure_payloads(batches)
            self._current_schedule = signature, self._build_schedule(len(batches))
        return self._current_schedule[1]

    def _measure_payloads(self, batches: Sequence[Batch]) -> None:
        """Run the microbatches forward, without a schedule, and set `_payload_slots`; RNG states are kept."""
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            slots_by_batch = [self.run_one_batch(batch) for batch in batches]
        for runner in self.runners:
            for module in runner.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
            for number, slots in ((runner.number, runner.input_slots), (runner.number + 1, runner.output_slots)):
                self._payload_slots[number] = (
                    merge_payload_slots(slots, [each[number] for each in slots_by_batch]) if slots else ()
                )

    def _build_schedule(self, microbatches: int) -> Any:
        """Return a new schedule of torch for this many microbatches of the shapes in `_payload_slots`."""
        stages = [
            self.stage_class(
                self._make_microbatch_function(runner),
                runner.model,
                runner.number,
                self._stages.count,
                self._device,
                input_args=make_receive_buffers(self._payload_slots[runner.number])
                if runner.number
                else torch.empty(1, dtype=torch.int64),  # the first stage gets the index of the microbatch
                output_args=make_receive_buffers(self._payload_slots[runner.number + 1])
                if runner.output_slots
                else torch.empty(()),  # the last stage returns the loss
                group=self._group,
            )
            for runner in self.runners
        ]
        size = dist.get_world_size(self._group)
        _logger.info("%s: stages %s of %d, %d microbatches", self._schedule.name,
                     [each.number for each in self.runners], self._stages.count, microbatches)  # fmt: skip
        for stage in stages:
            stage.stage_index_to_group_rank = {
                number: self._schedule.rank_of(number, size) for number in range(self._stages.count)
            }
        return self._schedule.cls(
            stages if self._schedule.stages_per_rank > 1 else stages[0],
            n_microbatches=microbatches,
            loss_fn=lambda output, _: output,  # the output of the last stage is the loss
            scale_grads=False,  # `loss` is scaled for the step, see `step`
        )


class _OpaqueValues:
    """Values from another stage, hidden from FSDP2, which casts the inputs of a model under mixed precision."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values


def _detach_value(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
