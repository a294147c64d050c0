"""The payload that a stage sends to the next: tensors of fixed shapes, the same for every microbatch.

The buffers of a pipeline are allocated once. A value whose shape differs between microbatches (features of any number
of images, an optional mask) is padded to the largest shape, and its true shape is sent along:

    header      (values, 1 + _MAX_DIMS)     one row per value: -1 for None, else 1; then the true shape, padded with -1
    values      each of the shape of its `PayloadSlot`

All of it is floating-point: before torch 2.13 every buffer of a pipeline gets gradients, which only floats can have.
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

_MAX_DIMS = 8  # of a value that can be sent
_NONE_MARK = -1  # in the header: first column of the row of None; also in columns of dims that a value does not have


class PayloadSlot(NamedTuple):
    """The buffer for the value of one slot, or what one value requires of it.

    Attributes:
        shape: Size of each dim; of a merged slot the largest over all microbatches.
        dtype: Dtype of the value.
        requires_grad: True if gradients are sent back.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def wire_dtype(self) -> torch.dtype:
        """The dtype that is sent, which can represent every value of `dtype` (int64 by its bits)."""
        if self.dtype.is_floating_point:
            return self.dtype
        return torch.float64 if self.dtype.itemsize > 2 else torch.float32


def merge_payload_slots(
    slots: Sequence[BoundarySlot], microbatches: Sequence[Sequence[PayloadSlot | None]]
) -> tuple[PayloadSlot, ...]:
    """Return one buffer per slot that is large enough for every microbatch; an empty one if all its values are None.

    Args:
        slots: Slots between two stages, for messages.
        microbatches: For each microbatch, what the value of each slot requires; None for a value that is None.

    Raises:
        UnsupportedError: The dtype or the number of dims of a slot differs between microbatches.
    """
    return tuple(
        _merge_payload_slot(slot, candidates)
        for slot, candidates in zip(slots, zip(*microbatches, strict=True), strict=True)
    )


def _merge_payload_slot(slot: BoundarySlot, candidates: Sequence[PayloadSlot | None]) -> PayloadSlot:
    payload_slots = [each for each in candidates if each is not None]
    if not payload_slots:
        return PayloadSlot((0,), torch.float32, requires_grad=False)
    if len({(len(each.shape), each.dtype) for each in payload_slots}) > 1:
        descriptions = " and ".join(sorted({f"{each.dtype} of {len(each.shape)} dims" for each in payload_slots}))
        raise UnsupportedError(
            f"{slot}: the microbatches of one step have {descriptions}, expected one dtype and number of dims; use "
            "microbatches of one kind, or leave out --pp"
        )
    shape = tuple(max(sizes) for sizes in zip(*(each.shape for each in payload_slots), strict=True))
    return PayloadSlot(shape, payload_slots[0].dtype, any(each.requires_grad for each in payload_slots))


def make_payload_slot(slot: BoundarySlot, value: Any) -> PayloadSlot | None:
    """Return the buffer that a value requires; None if the value is None.

    Raises:
        UnsupportedError: The value is not a tensor that can be sent.
    """
    if value is None:
        return None
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.is_complex() or value.dim() > _MAX_DIMS:
        raise UnsupportedError(
            f"{slot}: cannot send a {type(value).__name__} between pipeline stages, expected a plain tensor; leave "
            "out --pp"
        )
    return PayloadSlot(tuple(value.shape), value.dtype, value.requires_grad)


def make_receive_buffers(slots: Sequence[PayloadSlot]) -> tuple[Tensor, ...]:
    """Return the header and a tensor per slot, on the meta device, from which torch allocates its buffers."""
    header = torch.empty((len(slots), 1 + _MAX_DIMS), dtype=torch.float64, device="meta")
    values = (
        torch.empty(each.shape, dtype=each.wire_dtype, device="meta", requires_grad=each.requires_grad)
        for each in slots
    )
    return header, *values


def pack(values: Sequence[Any], slots: Sequence[PayloadSlot], device: torch.device) -> tuple[Tensor, ...]:
    """Return the payload of one microbatch: contiguous tensors that share no memory with the sender's values.

    Args:
        values: Values of all slots, each a tensor or None.
        slots: Slots from `merge_payload_slots`, in the same order.
        device: Device of the payload.
    """
    rows, tensors = make_header(values), []
    for value, payload_slot in zip(values, slots, strict=True):
        if value is None:
            zeros = torch.zeros(payload_slot.shape, dtype=payload_slot.wire_dtype, device=device)
            tensors.append(zeros.requires_grad_(payload_slot.requires_grad))
            continue
        tensor = value.view(torch.float64) if value.dtype is torch.int64 else value.to(payload_slot.wire_dtype)
        if tuple(tensor.shape) != payload_slot.shape:
            padded = tensor.new_zeros(payload_slot.shape)
            padded[tuple(map(slice, tensor.shape))] = tensor
            tensor = padded
        if tensor is value or is_view(tensor) or not tensor.is_contiguous():
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        tensors.append(tensor)
    shape = (len(rows), 1 + _MAX_DIMS)
    header = torch.empty(shape, dtype=torch.float64, device=device)  # not a view, which could not be detached
    return header.copy_(torch.tensor(rows, dtype=torch.float64).reshape(shape)), *tensors


def make_header(values: Sequence[Any]) -> list[list[int]]:
    """Return the rows of the header, one per value, for values or their `PayloadSlot`s."""
    return [
        [_NONE_MARK] * (1 + _MAX_DIMS)
        if each is None
        else [1, *each.shape, *[_NONE_MARK] * (_MAX_DIMS - len(each.shape))]
        for each in values
    ]


def unpack(
    payload: Sequence[Tensor], slots: Sequence[PayloadSlot], rows: Sequence[Sequence[float]] | None = None
) -> tuple[Any, ...]:
    """Return the values of one microbatch that were packed.

    Args:
        payload: Received tensors: the header, then one per slot.
        slots: Slots that were passed to `pack`.
        rows: Rows of the header, from `make_header`; None reads them from the payload.
    """
    received = list(payload)
    grad_indices = [index for index, tensor in enumerate(payload) if tensor.requires_grad]
    if grad_indices:
        for index, tensor in zip(
            grad_indices, _ReceivedTensors.apply(*(payload[index] for index in grad_indices)), strict=True
        ):
            received[index] = tensor
    header, *tensors = received
    values: list[Any] = []
    for row, tensor, payload_slot in zip(rows or header.detach().tolist(), tensors, slots, strict=True):
        if row[0] == _NONE_MARK:
            values.append(None)
            continue
        shape = tuple(map(int, row[1 : 1 + len(payload_slot.shape)]))
        value = tensor if shape == payload_slot.shape else tensor[tuple(map(slice, shape))].contiguous()
        if not payload_slot.requires_grad:
            value = value.detach()
            value = value.view(torch.int64) if payload_slot.dtype is torch.int64 else value.to(payload_slot.dtype)
        values.append(value)
    return tuple(values)


class _ReceivedTensors(torch.autograd.Function):  # type: ignore[misc]
    """Identity; in the backward pass every tensor gets a contiguous gradient, as receive buffers require."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(each.view_as(each) for each in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(each.contiguous() for each in gradients)
