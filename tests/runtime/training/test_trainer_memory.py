"""The memory in the log of a training run is that of the report."""

from __future__ import annotations

import pytest
import torch

from ckptx.runtime.training import trainer


def test_memory_of_a_cpu_rank_is_its_peak_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ru_maxrss` is not: it keeps what the program before an exec took."""
    monkeypatch.setattr(trainer, "peak_memory", lambda: 3 << 30)
    assert trainer._read_peak_gib(torch.device("cpu")) == 3.0
