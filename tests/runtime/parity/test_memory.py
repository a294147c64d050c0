"""How much a reference may take, asked before anything has storage."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckptx.options.verify import RunOptions
from ckptx.runtime.parallel.distributed import RankContext
from ckptx.runtime.parity import memory
from ckptx.runtime.parity.model_loaders import ModelFacts
from ckptx.runtime.parity.routing import Routing

GIB = 1 << 30
CPU = torch.device("cpu")


def seen(nbytes: int, stored: int) -> ModelFacts:
    config = {"architectures": ["LlamaForCausalLM"]}
    return ModelFacts(config, frozenset(), {}, {}, frozenset(), Routing({}, {}), True, frozenset(), nbytes, stored)


@pytest.fixture
def has_10_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "read_free_bytes", lambda device: 10 * GIB)


def allowed(nbytes: int, ranks: int = 1, **options: Any) -> tuple[int, int] | None:
    """Of a model with so many GiB of weights, on so many ranks of TP."""
    settings = RunOptions(tp=ranks, **options)
    return memory.find_memory_limits(seen(nbytes * GIB, nbytes * GIB // 2), settings, RankContext(0, ranks, CPU))


@pytest.mark.usefixtures("has_10_gib")
def test_a_reference_may_take_nine_tenths_of_what_is_free_or_what_the_user_says() -> None:
    assert allowed(99) == (9 * GIB, 9 * GIB)
    assert allowed(99, reference_memory=20 * GIB) == (20 * GIB, 20 * GIB)  # the user may know better
    assert allowed(99, ranks=4, reference_memory=20 * GIB) == (20 * GIB, 20 * GIB)


@pytest.mark.usefixtures("has_10_gib")
def test_the_ranks_of_this_machine_need_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks each holds half of the weights, and as much gradients; on one machine both, else one."""
    assert allowed(4, ranks=2) == (9 * GIB, 5 * GIB)
    assert allowed(6, ranks=2) == (0, 3 * GIB), "gradients of the reference would not fit beside a rank"
    assert allowed(6, ranks=2, backward=False) == (9 * GIB, 6 * GIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert allowed(3, ranks=2) == (9 * GIB, 3 * GIB)
    assert allowed(4, ranks=2) == (0, 1 * GIB)
    assert allowed(6, ranks=2) == (0, 0)


def test_only_what_would_help_is_advised() -> None:
    few, many = seen(20 * GIB, 10 * GIB), seen(20 * GIB, 20 * GIB)
    first, second = memory.advise_to_save_memory(few, RunOptions())
    assert first == "--no-backward (whole reference: 20.00 GiB)"
    assert second.startswith("--compute-dtype auto") and "20.00 GiB" in second
    assert memory.advise_to_save_memory(many, RunOptions()) == [first]
    assert memory.advise_to_save_memory(few, RunOptions(compute_dtype="auto", backward=False)) == []


def test_what_is_free_here_is_known() -> None:
    free = memory.read_free_bytes(CPU)
    assert free is not None and free > 1 << 20


def test_where_nobody_says_what_is_free_nothing_is_cut(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "gone")
    assert memory.read_free_bytes(CPU) is None
    assert allowed(1 << 30) is None


@pytest.mark.parametrize(("limit", "free"), [("max", None), (str(7 * GIB), 4 * GIB)])
def test_a_control_group_may_allow_less(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, limit: str, free: int | None
) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{5 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {3 * GIB}\ninactive_file {2 * GIB}\n")
    assert memory._read_cgroup_free_bytes() == free
