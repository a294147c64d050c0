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
from tests.support.forked_programs import preloaded_context

RANKS = 2
KEEP = 2  # number of steps that remain after a save
_TIMEOUT = 90  # seconds

Save = Callable[["Trained", Path, int], None]


class Trained(NamedTuple):
    """State that a rank saves.

    Attributes:
        model: Model sharded with FSDP2.
        optimizer: Its AdamW optimizer, after one step.
        mesh: Mesh with two data-parallel ranks.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    mesh: Any


def train_one_step(step: int) -> Trained:
    """Return a model on two data-parallel ranks and its optimizer, with values that depend on the step."""
    mesh = mesh_of(ParallelDims(dp_shard=RANKS), "cpu")
    seed(step, mesh)
    model = fully_shard(nn.Sequential(nn.Linear(40, 64), nn.Linear(64, 40)), mesh=mesh["dp_shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * step)
    for each in model.parameters():
        each.grad = torch.full_like(each, float(step))
    optimizer.step()
    return Trained(model, optimizer, mesh)


def save_arguments(state: Trained, root: Path, step: int) -> dict[str, Any]:
    """Return the arguments of `save`, with a callback that updates `latest` and removes an old step."""
    steps = StepDirectories(root)

    def on_published() -> None:
        steps.mark_latest(step)
        steps.retain(KEEP)

    training_state = {"samples": 8 * step, "rng": PerRank(RandomState())}
    return {
        "step": step, "base": root / "beside", "training_state": training_state, "mesh": state.mesh,
        "on_published": on_published, "overwrite": True,
    }  # fmt: skip


def save_in_foreground(state: Trained, root: Path, step: int) -> None:
    """Save in the foreground."""
    save(state.model, state.optimizer, StepDirectories(root).path(step), **save_arguments(state, root, step))


def save_in_background(state: Trained, root: Path, step: int) -> None:
    """Save in the background, while the run continues."""
    with Saver() as saver:
        saver.save(state.model, state.optimizer, StepDirectories(root).path(step), **save_arguments(state, root, step))
        with torch.no_grad():
            for each in state.model.parameters():
                each.fill_(0)
        saver.wait()


SAVES: dict[str, Save] = {"sync": save_in_foreground, "async": save_in_background}


class Kill(NamedTuple):
    """The operation at which ranks are killed.

    Attributes:
        rank: Rank that performs the operation.
        at: Name of the operation.
        all_ranks: Kill all ranks, not only this one.
    """

    rank: int
    at: str
    all_ranks: bool


def save_first_steps(root: Path) -> None:
    """Save steps 3 and 6."""
    (root / "beside").mkdir(parents=True)
    (root / "beside" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    for step in (3, 6):
        assert run(root, step, save_in_foreground) == [0, 0]


def run_without_kill(start: Path, root: Path, save_step: Save, step: int = 9) -> tuple[list[list[str]], SurvivingSteps]:
    """Run a save that is not killed; return the operations of each rank, and the remaining files."""
    shutil.copytree(start, root)
    assert run(root, step, save_step, note=root.parent / f"{root.name}.names") == [0, 0]
    operations = [json.loads((root.parent / f"{root.name}.names-{rank}").read_text()) for rank in range(RANKS)]
    surviving = check_steps(root, good_step=step)
    assert surviving.violations == [], surviving.violations
    return operations, surviving


def run_killed_save(
    start: Path, root: Path, save_step: Save, kill: Kill, expected_digests: dict[int, str]
) -> tuple[list[int], SurvivingSteps]:
    """Kill a save, then save the same step again; return the exit codes, and the files that the killed save left."""
    shutil.copytree(start, root)
    codes = run(root, 9, save_step, kill=kill)

    def next_save() -> int:
        if run(root, 9, save_in_foreground) != [0, 0]:
            raise AssertionError("the next save failed")
        return 9

    return codes, check_steps(root, good_step=6, expected_digests=expected_digests, next_save=next_save)


def run(root: Path, step: int, save_step: Save, *, kill: Kill | None = None, note: Path | None = None) -> list[int]:
    """Start two new ranks that save one step, and return their exit codes.

    Args:
        root: Directory of the steps.
        step: Step to save.
        save_step: Function that saves, one of `SAVES`.
        kill: Operation at which ranks are killed; None for none.
        note: Path of the files with the names of all operations, with "-RANK" appended; None to write none.
    """
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory, "store"))
        ranks = [
            preloaded_context().Process(target=_rank, args=(rank, store, root, step, save_step, kill, note))
            for rank in range(RANKS)
        ]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(_TIMEOUT)
        codes = []
        for each in ranks:
            if each.exitcode is None:
                each.kill()
                each.join()
                raise AssertionError(f"rank {len(codes)} did not end within {_TIMEOUT} s")
            codes.append(each.exitcode)
        return codes


def _rank(rank: int, store: str, root: Path, step: int, save_step: Save, kill: Kill | None, note: Path | None) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if kill is not None:
        sys.stderr = io.StringIO()  # gloo logs a long error on the other rank
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    state = train_one_step(step)
    others = [pid for pid in all_gather_object(os.getpid()) if pid != os.getpid()]
    if kill is not None and kill.rank == rank:
        with kill_at(root, kill.at, others if kill.all_ranks else ()):
            save_step(state, root, step)
        raise AssertionError(f"did not reach the operation {kill.at}")
    with record_operations(root) as names:
        save_step(state, root, step)
    if note is not None:
        Path(f"{note}-{rank}").write_text(json.dumps(names))
    dist.destroy_process_group()
