"""Pipeline stages whose neighbours are not there: what would arrive is made in the form in which it was sent.

Ranks of a pipeline are forecast one after another. What the stages of one send is remembered, as the room it takes, and
those of the next are given it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ckptx.runtime.memory.storage_ledger import CARRIED, StorageLedger
from ckptx.runtime.parallel.pipeline.boundaries import Batch
from ckptx.runtime.parallel.pipeline.payload import PayloadSlot, header_rows, unpack
from ckptx.runtime.parallel.pipeline.pipeline import Pipeline, TorchStage
from ckptx.runtime.parallel.pipeline.run import StageRun

Boundaries = dict[int, list[PayloadSlot | None]]  # what each stage is given by the one before it


class _IsolatedStage(TorchStage):
    """Has no other stages to agree with."""

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        """All of them know the shapes, as this one does; asked since torch 2.13."""
        return torch.ones(1, dtype=torch.int32)


class IsolatedPipeline(Pipeline):
    """`Pipeline` on a rank whose neighbours are not there; all microbatches have one shape."""

    stage_class = _IsolatedStage

    def __init__(self, *args: Any, boundaries: Boundaries, ledger: StorageLedger) -> None:
        """Args:
        args: As `Pipeline` takes them.
        boundaries: What is known; what these stages send is added.
        ledger: Is told what is carried.
        """
        self._boundaries, self._ledger = boundaries, ledger
        super().__init__(*args)

    @classmethod
    def maker(cls, boundaries: Boundaries, ledger: StorageLedger) -> Callable[..., IsolatedPipeline]:
        """What `Cut.pipeline` makes one with."""
        return lambda *args: cls(*args, boundaries=boundaries, ledger=ledger)

    def _check_ties(self) -> None:
        """Nothing: there are no values that could be alike."""

    def _measure_payloads(self, batches: Sequence[Batch]) -> None:
        """One says what all of them take."""
        super()._measure_payloads(batches[:1])

    def _send(self, values: tuple[Any, ...], stage: int) -> None:
        self._boundaries[stage] = [_place_of(each) for each in values]

    def _receive(self, stage: int) -> tuple[Any, ...]:
        return tuple(map(_made, self._boundaries[stage]))

    def _pack(self, part: StageRun, sent: Sequence[Any]) -> tuple[Tensor, ...]:
        with self._ledger.labelled(CARRIED):
            return super()._pack(part, sent)

    def _unpack(self, part: StageRun, payload: Sequence[Tensor]) -> tuple[Any, ...]:
        self._ledger.label(payload, CARRIED)
        return unpack(payload, self._payload_slots[part.number], header_rows(self._boundaries[part.number]))


def _place_of(value: Any) -> PayloadSlot | None:
    return PayloadSlot(tuple(value.shape), value.dtype, value.requires_grad) if isinstance(value, Tensor) else None


def _made(place: PayloadSlot | None) -> Any:
    if place is None:
        return None
    return torch.empty(place.shape, dtype=place.dtype, requires_grad=place.is_trained)
