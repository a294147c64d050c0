"""Ranks in separate processes that save a small model and are killed, and ranks that save after them."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from ckptx.layout.parallel_dims import ParallelDims
from ckptx.robustness_suite.kills import kill_at, record_operations
from ckptx.robustness_suite.surviving_steps import SurvivingSteps, check_steps
from ckptx.runtime.checkpointing.async_save import Saver
from ckptx.runtime.checkpointing.save import save
from ckptx.runtime.checkpointing.training_state import PerRank
from ckptx.runtime.parallel.distributed import all_gather_object, mesh_of
from ckptx.runtime.parallel.randomness import RandomState, seed
from ckptx.runtime.training.checkpoints import StepDirectories
from tests.support.forked_programs import fresh

RANKS = 2
KEEP = 2
_SECONDS = 90

Save = Callable[["Trained", Path, int], None]


class Trained(NamedTuple):
    """State that a rank saves."""

    model: Any
    optimizer: torch.optim.Optimizer
    mesh: Any


def trained(step: int) -> Trained:
    """Return a model on two data-parallel ranks and an optimizer, with values that depend on the step."""
    mesh = mesh_of(ParallelDims(dp_shard=RANKS), "cpu")
    seed(step, mesh)
    model = fully_shard(nn.Sequential(nn.Linear(40, 64), nn.Linear(64, 40)), mesh=mesh["dp_shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * step)
    for each in model.parameters():
        each.grad = torch.full_like(each, float(step))
    optimizer.step()
    return Trained(model, optimizer, mesh)


def settings(at: Trained, root: Path, step: int) -> dict[str, Any]:
    """Return a saver that updates `latest` and removes an old step after each save."""
    steps = StepDirectories(root)

    def then() -> None:
        steps.mark_latest(step)
        steps.retain(KEEP)

    state = {"samples": 8 * step, "rng": PerRank(RandomState())}
    return {
        "step": step, "base": root / "beside", "training_state": state, "mesh": at.mesh, "on_published": then,
        "overwrite": True,
    }  # fmt: skip


def waiting(at: Trained, root: Path, step: int) -> None:
    """Save in the foreground."""
    save(at.model, at.optimizer, StepDirectories(root).path(step), **settings(at, root, step))


def behind(at: Trained, root: Path, step: int) -> None:
    """Save in the background, while the run continues."""
    with Saver() as saver:
        saver.save(at.model, at.optimizer, StepDirectories(root).path(step), **settings(at, root, step))
        with torch.no_grad():
            for each in at.model.parameters():
                each.fill_(0)
        saver.wait()


HOW: dict[str, Save] = {"sync": waiting, "async": behind}


class Kill(NamedTuple):
    """The operation at which ranks are killed.

    Attributes:
        rank: Rank that performs the operation.
        at: Name of the operation.
        everyone: Kill all ranks, not only this one.
    """

    rank: int
    at: str
    everyone: bool


def start(root: Path) -> None:
    """Save steps 3 and 6."""
    (root / "beside").mkdir(parents=True)
    (root / "beside" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    for step in (3, 6):
        assert run(root, step, waiting) == [0, 0]


def rehearsed(start: Path, root: Path, how: Save, step: int = 9) -> tuple[list[list[str]], SurvivingSteps]:
    """Run a save that is not killed; return the operations of each rank, and the remaining files."""
    shutil.copytree(start, root)
    assert run(root, step, how, note=root.parent / f"{root.name}.names") == [0, 0]
    found = [json.loads((root.parent / f"{root.name}.names-{rank}").read_text()) for rank in range(RANKS)]
    left = check_steps(root, good_step=step)
    assert left.violations == [], left.violations
    return found, left


def killed(start: Path, root: Path, how: Save, kill: Kill, known: dict[int, str]) -> tuple[list[int], SurvivingSteps]:
    """Kill a save, then save the same step again; return the exit codes, and the files that the killed save left."""
    shutil.copytree(start, root)
    codes = run(root, 9, how, kill=kill)

    def next_save() -> int:
        if run(root, 9, waiting) != [0, 0]:
            raise AssertionError("the next save failed")
        return 9

    return codes, check_steps(root, good_step=6, expected_digests=known, next_save=next_save)


def run(root: Path, step: int, how: Save, *, kill: Kill | None = None, note: Path | None = None) -> list[int]:
    """Start two new ranks that save one step; return their exit codes."""
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory, "store"))
        ranks = [
            fresh().Process(target=_rank, args=(rank, store, root, step, how, kill, note)) for rank in range(RANKS)
        ]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(_SECONDS)
        codes = []
        for each in ranks:
            if each.exitcode is None:
                each.kill()
                each.join()
                raise AssertionError(f"rank {len(codes)} did not end within {_SECONDS} s")
            codes.append(each.exitcode)
        return codes


def _rank(rank: int, store: str, root: Path, step: int, how: Save, kill: Kill | None, note: Path | None) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if kill is not None:
        sys.stderr = io.StringIO()  # gloo logs a long error on the other rank
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    at = trained(step)
    others = [pid for pid in all_gather_object(os.getpid()) if pid != os.getpid()]
    if kill is not None and kill.rank == rank:
        with kill_at(root, kill.at, others if kill.everyone else ()):
            how(at, root, step)
        raise AssertionError(f"did not reach the operation {kill.at}")
    with record_operations(root) as names:
        how(at, root, step)
    if note is not None:
        Path(f"{note}-{rank}").write_text(json.dumps(names))
    dist.destroy_process_group()
