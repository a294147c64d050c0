"""Operations that take other memory on tensors without storage than on real ones, unless somebody sees to it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ckptx.runtime.forecasting.fake_process_group import fake_process_group
from ckptx.runtime.memory.shape_tensors import ShapeTensors
from ckptx.runtime.memory.storage_ledger import KINDS, OPTIMIZER, PARAMETERS, StorageLedger
from tests.support.measured_steps import forecast_in_this_process, task_of, write_config

_LARGE = (1024, 2048)
_NBYTES = 1024 * 2048 * 4


def most_of(ledger: StorageLedger) -> int:
    """The most bytes that lived at once."""
    now = most = 0
    for life, is_birth in ledger.events:
        now += life.nbytes if is_birth else -life.nbytes
        most = max(most, now)
    return most


@pytest.mark.parametrize(("is_contiguous", "tensors"), [(True, 2), (False, 3)])
def test_softmax_copies_what_is_not_contiguous(is_contiguous: bool, tensors: int) -> None:
    ledger = StorageLedger()
    with ShapeTensors(ledger.record_operation):
        x = torch.empty(*_LARGE)
        y = torch.log_softmax(x if is_contiguous else x.t(), -1)
    assert most_of(ledger) == tensors * _NBYTES
    assert y.shape == (_LARGE if is_contiguous else _LARGE[::-1])
    assert ledger.nbytes == 2 * _NBYTES


def test_waiting_for_a_collective_makes_nothing() -> None:
    ledger = StorageLedger()
    with ShapeTensors(ledger.record_operation):
        x = torch.empty(*_LARGE)
        y = torch.ops._c10d_functional.wait_tensor(x)
    assert y is x
    assert most_of(ledger) == _NBYTES


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_groups_of_rows_in_every_dtype(dtype: torch.dtype) -> None:
    """As the experts of a model are computed, forward and backward."""
    groups, rows, inner, outer = 4, 64, 32, 16
    with ShapeTensors():
        x = torch.empty(rows, inner, dtype=dtype, requires_grad=True)
        weight = torch.empty(groups, outer, inner, dtype=dtype, requires_grad=True)
        ends = torch.arange(1, groups + 1, dtype=torch.int32) * (rows // groups)
        y = torch.nn.functional.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
        y.square().sum().backward()
    assert (y.shape, y.dtype) == ((rows, outer), dtype)
    assert x.grad is not None
    assert weight.grad is not None
    assert (x.grad.shape, weight.grad.shape) == (x.shape, weight.shape)


def test_what_ranks_agree_on_is_what_this_one_says() -> None:
    found = [None] * 4
    with fake_process_group(1, 4), ShapeTensors():
        dist.all_gather_object(found, "a state")
    assert found == ["a state"] * 4


def test_what_gets_no_gradient_has_no_state(tmp_path: Path) -> None:
    """A tower that rows of text do not reach: neither moments nor counts of steps, which the optimizer makes late."""
    model = forecast_in_this_process(task_of(write_config("qwen2.5-vl", tmp_path), "dp1", "none"))[0]
    between = dict(zip(KINDS, model.timeline.between_steps, strict=True))
    text = forecast_in_this_process(task_of(write_config("llama", tmp_path), "dp1", "none"))[0]
    state = dict(zip(KINDS, text.timeline.between_steps, strict=True))
    tower = between[PARAMETERS] - state[PARAMETERS]
    assert tower > 0
    assert between[OPTIMIZER] == pytest.approx(state[OPTIMIZER], rel=1e-3)  # biases of its attention
