"""What is sent from a stage to the next: tensors of fixed shapes, for every microbatch the same.

Buffers of a pipeline are made once. What differs between microbatches (features of as many images as there are, a mask
that only some have) is padded to the largest, and its true shape is sent along:

    header      (values, 1 + dims)      -1 for None, else 1; then the true shape
    values      each of the shape of its `PayloadSlot`

All of it is floating-point numbers: before torch 2.13 every buffer of a pipeline gets gradients, which no others have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ckptx.errors import UnsupportedError
from ckptx.runtime.parallel.pipeline.boundary_slots import BoundarySlot
from ckptx.runtime.torch_private import is_view

_MOST_DIMS = 8
_NONE = -1


class PayloadSlot(NamedTuple):
    """The room for one value.

    Attributes:
        shape: The largest of any microbatch, dim by dim.
        dtype: Of the value.
        is_trained: Whether gradients come back.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trained: bool

    @property
    def wire(self) -> torch.dtype:
        """The dtype it is sent in, which has all its values."""
        if self.dtype.is_floating_point:
            return self.dtype
        return torch.float64 if self.dtype.itemsize > 2 else torch.float32


def places_of(
    slots: Sequence[BoundarySlot], microbatches: Sequence[Sequence[PayloadSlot | None]]
) -> tuple[PayloadSlot, ...]:
    """The room for the values of every microbatch.

    Raises:
        UnsupportedError: Values of one slot have other dtypes or numbers of dims from microbatch to microbatch.
    """
    return tuple(_largest(slot, found) for slot, found in zip(slots, zip(*microbatches, strict=True), strict=True))


def _largest(slot: BoundarySlot, found: Sequence[PayloadSlot | None]) -> PayloadSlot:
    there = [each for each in found if each is not None]
    if not there:
        return PayloadSlot((0,), torch.float32, is_trained=False)
    if len({(len(each.shape), each.dtype) for each in there}) > 1:
        forms = " and ".join(sorted({f"{each.dtype} of {len(each.shape)} dims" for each in there}))
        raise UnsupportedError(
            f"{slot}: found {forms} in the microbatches of one step, needed one form; give microbatches of one kind, "
            "or leave out --pp"
        )
    shape = tuple(max(sizes) for sizes in zip(*(each.shape for each in there), strict=True))
    return PayloadSlot(shape, there[0].dtype, any(each.is_trained for each in there))


def place_of(slot: BoundarySlot, value: Any) -> PayloadSlot | None:
    """The room that a value needs.

    Raises:
        UnsupportedError: It is no tensor that can be sent.
    """
    if value is None:
        return None
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.is_complex() or value.dim() > _MOST_DIMS:
        raise UnsupportedError(
            f"{slot}: found a {type(value).__name__}, needed a plain tensor to send it between pipeline stages; leave "
            "out --pp"
        )
    return PayloadSlot(tuple(value.shape), value.dtype, value.requires_grad)


def receive_buffers(places: Sequence[PayloadSlot]) -> tuple[Tensor, ...]:
    """The payload of these places, on the meta device."""
    header = torch.empty((len(places), 1 + _MOST_DIMS), dtype=torch.float64, device="meta")
    values = (torch.empty(each.shape, dtype=each.wire, device="meta", requires_grad=each.is_trained) for each in places)
    return header, *values


def pack(values: Sequence[Any], places: Sequence[PayloadSlot], device: torch.device) -> tuple[Tensor, ...]:
    """The payload of one microbatch: contiguous, and nothing that the sender goes on with."""
    rows, tensors = rows_of(values), []
    for value, place in zip(values, places, strict=True):
        if value is None:
            empty = torch.zeros(place.shape, dtype=place.wire, device=device)
            tensors.append(empty.requires_grad_(place.is_trained))
            continue
        sent = value.view(torch.float64) if value.dtype is torch.int64 else value.to(place.wire)
        if tuple(sent.shape) != place.shape:
            room = sent.new_zeros(place.shape)
            room[tuple(map(slice, sent.shape))] = sent
            sent = room
        if sent is value or is_view(sent) or not sent.is_contiguous():
            sent = sent.clone(memory_format=torch.contiguous_format)
        tensors.append(sent)
    shape = (len(rows), 1 + _MOST_DIMS)
    header = torch.empty(shape, dtype=torch.float64, device=device)  # no view: that could not be detached
    return header.copy_(torch.tensor(rows, dtype=torch.float64).reshape(shape)), *tensors


def rows_of(values: Sequence[Any]) -> list[list[int]]:
    """The header of values, or of the places that they need."""
    return [
        [_NONE] * (1 + _MOST_DIMS) if each is None else [1, *each.shape, *[_NONE] * (_MOST_DIMS - len(each.shape))]
        for each in values
    ]


def unpack(
    payload: Sequence[Tensor], places: Sequence[PayloadSlot], rows: Sequence[Sequence[float]] | None = None
) -> tuple[Any, ...]:
    """The values of one microbatch, as they were packed.

    Args:
        payload: What arrived.
        places: As `pack` was given them.
        rows: Its header, where it is known; else it is read.
    """
    arrived = list(payload)
    trained = [index for index, tensor in enumerate(payload) if tensor.requires_grad]
    if trained:
        for index, tensor in zip(trained, _ReceivedTensors.apply(*(payload[index] for index in trained)), strict=True):
            arrived[index] = tensor
    header, *tensors = arrived
    values: list[Any] = []
    for row, tensor, place in zip(rows or header.detach().tolist(), tensors, places, strict=True):
        if row[0] == _NONE:
            values.append(None)
            continue
        shape = tuple(map(int, row[1 : 1 + len(place.shape)]))
        value = tensor if shape == place.shape else tensor[tuple(map(slice, shape))].contiguous()
        if not place.is_trained:
            value = value.detach()
            value = value.view(torch.int64) if place.dtype is torch.int64 else value.to(place.dtype)
        values.append(value)
    return tuple(values)


class _ReceivedTensors(torch.autograd.Function):  # type: ignore[misc]
    """Does nothing forward; every gradient that goes back is there, and contiguous, as receive buffers are."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(each.view_as(each) for each in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(each.contiguous() for each in gradients)
