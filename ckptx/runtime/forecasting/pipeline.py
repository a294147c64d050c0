"""Pipeline stages without neighbors: received tensors are created with the shapes in which they were sent.

The ranks of a pipeline are forecast one after another. The shapes that the stages of one rank send are recorded, and
the stages of the next rank receive tensors of these shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ckptx.runtime.memory.storage_ledger import PIPELINE_P2P, StorageLedger
from ckptx.runtime.parallel.pipeline.boundaries import Batch
from ckptx.runtime.parallel.pipeline.payload import PayloadSlot, make_header, unpack
from ckptx.runtime.parallel.pipeline.pipeline import Pipeline, TorchStage
from ckptx.runtime.parallel.pipeline.run import StageRunner
from ckptx.runtime.torch_private import local_tensor, storage_key

# Number of a stage -> shape and dtype of each value from the previous stage; None for a value that is not a tensor.
StageInputSlots = dict[int, list[PayloadSlot | None]]


class _IsolatedStage(TorchStage):
    """A stage that does not synchronize with other stages, and labels what it sends and receives."""

    def __init__(self, *args: Any, ledger: StorageLedger, kept_gradients: set[int], **settings: Any) -> None:
        """Create a stage.

        Args:
            args: Arguments of `TorchStage`.
            ledger: Ledger in which communication buffers are labeled.
            kept_gradients: Keys of the storages of gradients that stages of this rank keep until the next step; shared
                by these stages.
            settings: Keyword arguments of `TorchStage`.
        """
        super().__init__(*args, **settings)
        self._ledger, self._kept_gradients = ledger, kept_gradients

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._label_tensors(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._label_tensors(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        operations = self._label_tensors(super().get_bwd_recv_ops(bwd_chunk_id))
        self._kept_gradients.update(_storage_key(each.tensor) for each in operations)
        return operations

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._label_tensors(super().get_bwd_send_ops(bwd_chunk_id))

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """Take the gradients of the next stage, on the same rank, in place of receive buffers.

        These gradients stay until the same microbatch of the next step, so that only the first step has these receive
        buffers. To forecast a later step, each buffer gets the size of its gradient in the ledger. The size is 0 if the
        storage of the gradient is kept anyway, because the next stage passes on a gradient that it received, or because
        several inputs share one.
        """
        for info, gradient in zip(self.grad_recv_info[mb_index], next_stage_bwd_outputs, strict=True):
            if gradient is None or _storage_key(info.buffer) in self._kept_gradients:
                continue
            is_kept = _storage_key(gradient) in self._kept_gradients
            self._ledger.set_size([info.buffer], 0 if is_kept else local_tensor(gradient).untyped_storage().nbytes())
            self._kept_gradients.add(_storage_key(gradient))
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _label_tensors(self, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        self._ledger.label((each.tensor for each in operations), PIPELINE_P2P)
        return operations

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        """Return the vote of all stages for static shapes (1), without receiving it; torch 2.13 and later call this."""
        return torch.ones(1, dtype=torch.int32)


class IsolatedPipeline(Pipeline):
    """A `Pipeline` on a rank without neighbors; all microbatches have equal shapes."""

    def __init__(self, *args: Any, input_slots: StageInputSlots, ledger: StorageLedger) -> None:
        """Create a pipeline that records its communication buffers.

        Args:
            args: Arguments of `Pipeline`.
            input_slots: Known inputs of stages, those of this rank included; the values that its stages send are added.
            ledger: Ledger in which communication buffers are labeled.
        """
        self._input_slots, self._ledger = input_slots, ledger
        self.stage_class = partial(_IsolatedStage, ledger=ledger, kept_gradients=set())
        super().__init__(*args)

    @classmethod
    def make_factory(cls, input_slots: StageInputSlots, ledger: StorageLedger) -> Callable[..., IsolatedPipeline]:
        """Return a function with the signature that `PipelinePlan.pipeline` expects of a pipeline class."""
        return lambda *args: cls(*args, input_slots=input_slots, ledger=ledger)

    def _check_ties(self) -> None:
        """Skip the check: there are no values that could be compared."""

    def _measure_payloads(self, batches: Sequence[Batch]) -> None:
        """Measure the first batch only, because all have equal shapes."""
        super()._measure_payloads(batches[:1])

    def _send(self, values: tuple[Any, ...], stage: int) -> None:
        """Record the shapes of the values as the inputs of a stage, and send nothing."""
        self._input_slots[stage] = [_make_payload_slot(each) for each in values]

    def _receive(self, stage: int) -> tuple[Any, ...]:
        """Return new tensors with the recorded shapes of the inputs of a stage."""
        return tuple(map(_create_received, self._input_slots[stage]))

    def _pack(self, runner: StageRunner, sent_values: Sequence[Any]) -> tuple[Tensor, ...]:
        with self._ledger.label_all(PIPELINE_P2P):
            return super()._pack(runner, sent_values)

    def _unpack(self, runner: StageRunner, payload: Sequence[Tensor]) -> tuple[Any, ...]:
        self._ledger.label(payload, PIPELINE_P2P)
        return unpack(payload, self._payload_slots[runner.number], make_header(self._input_slots[runner.number]))


def _storage_key(tensor: Tensor) -> int:
    return storage_key(local_tensor(tensor).untyped_storage())


def _make_payload_slot(value: Any) -> PayloadSlot | None:
    return PayloadSlot(tuple(value.shape), value.dtype, value.requires_grad) if isinstance(value, Tensor) else None


def _create_received(slot: PayloadSlot | None) -> Any:
    if slot is None:
        return None
    return torch.empty(slot.shape, dtype=slot.dtype, requires_grad=slot.requires_grad)
