"""Runs that cannot fit are refused before anything has storage, with what they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckptx.errors import EnvironmentProblem
from ckptx.runtime.distributed import Process
from ckptx.verification import memory
from ckptx.verification.routing import Routing
from ckptx.verification.side import RunOptions, Seen

GIB = 1 << 30
CPU = torch.device("cpu")


def seen(nbytes: int, stored: int) -> Seen:
    config = {"architectures": ["LlamaForCausalLM"]}
    return Seen(config, frozenset(), {}, {}, frozenset(), Routing({}, {}), True, frozenset(), nbytes, stored)


@pytest.fixture
def has_10_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_free", lambda device: 10 * GIB)


@pytest.mark.usefixtures("has_10_gib")
@pytest.mark.parametrize(
    ("nbytes", "options", "fits"),
    [(5, {}, True), (6, {}, False), (6, {"backward": False}, True), (11, {"backward": False}, False)],
)
def test_weights_and_gradients_must_fit(nbytes: int, options: dict[str, Any], fits: bool) -> None:
    def check(rank: int) -> None:
        memory.check(seen(nbytes * GIB, nbytes * GIB // 2), RunOptions(**options), Process(rank, 2, CPU))

    check(1)  # has no reference
    if fits:
        check(0)
        return
    with pytest.raises(EnvironmentProblem) as refused:
        check(0)
    said = str(refused.value)
    assert "LlamaForCausalLM: rank 0" in said and "10.00 GiB are free on cpu" in said
    assert ("--no-backward" in said) == options.get("backward", True)
    assert "--compute-dtype auto" in said


@pytest.mark.usefixtures("has_10_gib")
def test_only_what_would_help_is_advised() -> None:
    with pytest.raises(EnvironmentProblem) as refused:
        memory.check(seen(20 * GIB, 20 * GIB), RunOptions(), Process(0, 1, CPU))
    assert "40.00 GiB for weights and gradients" in str(refused.value)
    assert "--no-backward (20.00 GiB)" in str(refused.value)
    assert "--compute-dtype" not in str(refused.value)


def test_what_is_free_here_is_known() -> None:
    free = memory._free(CPU)
    assert free is not None and free > 1 << 20


def test_where_nobody_says_what_is_free_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "gone")
    assert memory._free(CPU) is None
    memory.check(seen(1 << 60, 1 << 59), RunOptions(), Process(0, 1, CPU))


@pytest.mark.parametrize(("limit", "free"), [("max", None), (str(7 * GIB), 4 * GIB)])
def test_a_control_group_may_allow_less(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, limit: str, free: int | None
) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{5 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {3 * GIB}\ninactive_file {2 * GIB}\n")
    assert memory._within_group() == free
