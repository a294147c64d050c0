"""Which tensors are alive: whatever else a process holds."""

from __future__ import annotations

import pytest
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


class Allocator:
    """The statistics of a GPU's allocator: tensors, and workspaces that the first matrix product allocates."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, workspaces: int) -> None:
        self.tensors, self.peak, self.workspaces, self.size_of_workspaces = 1000, 0, workspaces, workspaces
        for name in ("reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", self.clear, raising=False)

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.memory_allocated(device)

    def memory_allocated(self, device: torch.device) -> int:
        return self.tensors + self.workspaces

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak

    def clear(self) -> None:
        self.workspaces = 0

    def step(self) -> None:
        self.workspaces = self.size_of_workspaces
        self.peak = max(self.peak, self.tensors + 500 + self.workspaces)
        self.tensors += 20


@pytest.mark.parametrize("workspaces", [0, 64 << 20])
def test_workspaces_are_measured_beside_the_tensors(monkeypatch: pytest.MonkeyPatch, workspaces: int) -> None:
    allocator = Allocator(monkeypatch, workspaces)
    measured = measure_step(allocator.step, (), torch.device("cuda"))
    assert measured == (1500, 1020, 1000, workspaces)
