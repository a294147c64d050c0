"""Which tensors are alive: whatever else a process holds."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ckptx.runtime.memory.measured_memory import measure_step
from ckptx.runtime.parallel.live_tensors import iter_live_tensors


def test_tensors_without_storage_are_left_out() -> None:
    held = torch.ones(3)
    sparse = [torch.eye(3).to_sparse()]
    with FakeTensorMode():
        fake = torch.ones(3)
    found = {id(each) for each in iter_live_tensors()}
    assert id(held) in found
    assert not {id(each) for each in (*sparse, fake)} & found


def test_a_step_beside_sparse_tensors_is_measured() -> None:
    sparse, device = torch.eye(3).to_sparse(), torch.device("cpu")
    kept = []
    taken = measure_step(
        lambda: kept.append(torch.ones(1000) + torch.sparse.mm(sparse, torch.ones(3, 1)).sum()), (), device
    )
    assert taken.between_steps - taken.before_step >= 4000
    assert taken.peak >= taken.between_steps
