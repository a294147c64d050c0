"""What is sent between stages: it arrives as it was, and nobody's tensors become those of another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor

from ckptx.errors import UnsupportedError
from ckptx.runtime.parallel.pipeline.boundary_slots import BoundarySlot, PathStep
from ckptx.runtime.parallel.pipeline.payload import (
    PayloadSlot,
    make_payload_slot,
    make_receive_buffers,
    merge_payload_slots,
    pack,
    unpack,
)

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.int64, torch.int32, torch.uint8)


def slots(count: int) -> list[BoundarySlot]:
    return [BoundarySlot(f"layers.{index}", 0, (PathStep("hidden_states"),)) for index in range(count)]


def places(*microbatches: list[Any]) -> tuple[PayloadSlot, ...]:
    those = slots(len(microbatches[0]))
    found = [[make_payload_slot(slot, value) for slot, value in zip(those, each, strict=True)] for each in microbatches]
    return merge_payload_slots(those, found)


def travel(values: list[Any], room: tuple[PayloadSlot, ...]) -> tuple[Any, ...]:
    """What arrives, by way of buffers as a pipeline has them."""
    buffers = [torch.empty(each.shape, dtype=each.dtype) for each in make_receive_buffers(room)]
    sent = pack(values, room, CPU)
    for buffer, each in zip(buffers, sent, strict=True):
        assert (buffer.shape, buffer.dtype) == (each.shape, each.dtype)
        assert each.is_contiguous()
        buffer.copy_(each.detach())
    return unpack([buffer.requires_grad_(each.requires_grad) for buffer, each in zip(buffers, sent, strict=True)], room)


def assert_equal(found: Any, wanted: Any) -> None:
    if wanted is None:
        assert found is None
        return
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert torch.equal(found, wanted)


@some.composite
def ragged(draw: Any) -> list[list[Tensor | None]]:
    """Values of three microbatches: of each slot one dtype and number of dims, or None."""
    columns = []
    for _ in range(draw(some.integers(1, 4))):
        dtype, dims = draw(some.sampled_from(DTYPES)), draw(some.integers(0, 3))
        column: list[Tensor | None] = []
        for _ in range(3):
            shape = draw(some.lists(some.integers(0, 3), min_size=dims, max_size=dims))
            value = (torch.randn(shape) * 3).to(dtype)
            if draw(some.booleans()) and dims > 1:
                value = value.transpose(0, 1)
            if draw(some.booleans()) and dims:
                value = torch.cat([value, value])[: value.shape[0]]
            column.append(None if draw(some.integers(0, 3)) == 0 else value)
        columns.append(column)
    return [list(row) for row in zip(*columns, strict=True)]


@given(ragged())
def test_values_of_any_sizes_arrive_as_they_were(microbatches: list[list[Tensor | None]]) -> None:
    room = places(*microbatches)
    for values in microbatches:
        for found, wanted in zip(travel(values, room), values, strict=True):
            assert_equal(found, wanted)


def test_what_is_in_no_microbatch_takes_no_room() -> None:
    room = places([None, torch.ones(2)], [None, torch.ones(3)])
    assert room == (PayloadSlot((0,), torch.float32, False), PayloadSlot((3,), torch.float32, False))
    assert travel([None, torch.ones(2)], room)[0] is None


def test_no_values_at_all_are_an_empty_header() -> None:
    (header,) = pack([], (), CPU)
    assert header.shape == (0, 9)
    assert unpack([header], ()) == ()


@pytest.mark.parametrize(
    ("value", "wire"),
    [
        (torch.tensor([True, False]), torch.float32),
        (torch.tensor([0, 7, 255], dtype=torch.uint8), torch.float32),
        (torch.tensor([-(2**15), 2**15 - 1], dtype=torch.int16), torch.float32),
        (torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32), torch.float64),
        (torch.tensor([-(2**63), 2**63 - 1, 2**53 + 1, 0, -1]), torch.float64),
    ],
)
def test_what_is_no_float_is_sent_as_one_and_comes_back_to_the_last_bit(value: Tensor, wire: torch.dtype) -> None:
    room = places([value])
    assert (room[0].dtype, room[0].wire_dtype) == (value.dtype, wire)
    assert pack([value], room, CPU)[1].dtype is wire
    (found,) = travel([value], room)
    assert found.dtype is value.dtype
    assert torch.equal(found, value)


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, 3),
        torch.ones(2, 3).requires_grad_(),
        torch.ones(4, 3)[:2],
        torch.ones(3, 2).t(),
        torch.ones(1).expand(2, 3),
        (torch.ones(4, 3, requires_grad=True) * 2)[:2],
    ],
    ids=["plain", "leaf", "view", "transposed", "expanded", "view of what was computed"],
)
def test_nothing_of_the_sender_is_sent_itself(value: Tensor) -> None:
    room = places([value])
    header, sent = pack([value], room, CPU)
    assert sent.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()
    assert sent.is_contiguous()
    assert not sent._is_view(), "torch detaches what it has sent, in place"
    assert not header._is_view()
    sent.detach_().fill_(7)
    assert bool((value == value.flatten()[0]).all())
    assert not bool((value == 7).any())


def test_gradients_come_back_whole_and_contiguous() -> None:
    room = places([torch.ones(2, 3, requires_grad=True)])
    sent = pack([torch.ones(2, 3, requires_grad=True)], room, CPU)
    arrived = [each.detach().requires_grad_(each.requires_grad) for each in sent]
    (value,) = unpack(arrived, room)
    (value.t() @ torch.ones(2, 1) * torch.arange(3.0)[:, None]).sum().backward()
    assert arrived[1].grad is not None
    assert arrived[1].grad.is_contiguous()
    assert torch.equal(arrived[1].grad, torch.arange(3.0).expand(2, 3))


def test_what_nobody_used_has_a_gradient_of_zeros() -> None:
    values = [torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True), torch.ones(1)]
    room = places(values)
    arrived = [each.detach().requires_grad_(each.requires_grad) for each in pack(values, room, CPU)]
    first, _, plain = unpack(arrived, room)
    assert not plain.requires_grad
    first.sum().backward()
    assert [None if each.grad is None else each.grad.tolist() for each in arrived[1:]] == [[1, 1], [0, 0, 0], None]


def test_padding_and_none_have_gradients_of_zeros() -> None:
    room = places([torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)], [torch.ones(3), None])
    values = [torch.ones(2, requires_grad=True), None]
    sent = pack(values, room, CPU)
    assert [each.requires_grad for each in sent] == [False, True, True]
    arrived = [each.detach().requires_grad_(each.requires_grad) for each in sent]
    (value, nothing) = unpack(arrived, room)
    assert nothing is None
    (value * 5).sum().backward()
    assert arrived[1].grad is not None
    assert arrived[1].grad.tolist() == [5, 5, 0]
    assert arrived[2].grad is not None
    assert arrived[2].grad.tolist() == [0, 0]


def test_gradients_reach_what_was_padded() -> None:
    value = torch.ones(2, requires_grad=True)
    room = places([value], [torch.ones(4)])
    _, sent = pack([value], room, CPU)
    sent.backward(torch.arange(4.0))
    assert value.grad is not None
    assert value.grad.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (torch.ones(2, dtype=torch.float64), "have torch.float32 of 1 dims and torch.float64 of 1 dims"),
        (torch.ones(2, 2), "have torch.float32 of 1 dims and torch.float32 of 2 dims"),
    ],
)
def test_values_of_two_forms_are_refused(other: Tensor, said: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        places([torch.ones(2)], [other])
    assert said in str(caught.value)
    assert str(caught.value).startswith("layers.0(hidden_states): ")


@pytest.mark.parametrize(
    ("value", "kind"),
    [(7, "int"), ("sdpa", "str"), (torch.ones(1, dtype=torch.complex64), "Tensor"), (torch.ones([1] * 9), "Tensor")],
    ids=["int", "str", "complex", "nine dims"],
)
def test_what_cannot_be_sent_is_refused(value: Any, kind: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        make_payload_slot(slots(1)[0], value)
    assert f"layers.0(hidden_states): cannot send a {kind} between pipeline stages, expected a plain" in str(
        caught.value
    )
