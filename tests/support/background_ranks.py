"""Functions of the ranks in tests of background saves: save in the foreground and the background, and change the state.

`held` blocks the writer thread until the run has continued, so that a missing copy changes the saved bytes.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from ckptx.errors import CkptxError, OutputError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.runtime.checkpointing import async_save as background_save
from ckptx.runtime.checkpointing.async_save import Saver
from ckptx.runtime.checkpointing.load import load
from ckptx.runtime.checkpointing.save import save
from ckptx.runtime.checkpointing.training_state import PerRank
from ckptx.runtime.model.build import build_model, materialize
from ckptx.runtime.parallel.distributed import mesh_of
from ckptx.runtime.parallel.randomness import RandomState
from tests.support.save_ranks import Shape, cut, mark, optimizer_of


@contextmanager
def held() -> Iterator[threading.Event]:
    """Block the writer threads until the event is set, or until the end of the block."""
    go, publish = threading.Event(), background_save.publish

    def later(*args: Any, **settings: Any) -> None:
        go.wait(60)
        publish(*args, **settings)

    with mock.patch.object(background_save, "publish", later):
        try:
            yield go
        finally:
            go.set()


def spoil(model: nn.Module, optimizer: Any, state: dict[str, Any]) -> None:
    """Change all state that a run may change while a background save writes."""
    with torch.no_grad():
        for each in (*model.parameters(), *model.buffers()):
            each.fill_(7)
    for each in optimizer.state.values():
        for value in each.values():
            value.fill_(7)
    for group in optimizer.param_groups:
        group["lr"] = 7.0
        if isinstance(group["betas"], list):
            group["betas"][0] = 0.7
    state["counts"].append(7)
    state["seen"].fill_(7)
    torch.rand(7)


def both_ways(rank: int, world_size: int, hf: Path, out: Path, shape: Shape) -> None:
    """Save to `out/sync` in the foreground and to `out/behind` in the background."""
    at = cut(hf, shape)
    mark(at.optimizer)
    at.optimizer.param_groups[0]["betas"] = [0.9, 0.95]
    mesh = mesh_of(ParallelDims(tp=shape.tp, dp_shard=shape.dp), "cpu")
    state = {
        "counts": [1, 2], "seen": torch.arange(5), "rng": PerRank(RandomState()), "rank": PerRank({"rank": rank}),
    }  # fmt: skip
    beside = out / f"beside-{rank}"
    shutil.copytree(hf, beside)
    what: dict[str, Any] = {"layout": at.layout, "step": 3, "base": beside, "training_state": state, "mesh": mesh}
    save(at.model, at.optimizer, out / "sync", **what)
    with held() as go, Saver() as saver:
        saver.save(at.model, at.optimizer, out / "behind", **what)
        assert not (out / "behind").exists()
        shutil.rmtree(beside)
        spoil(at.model, at.optimizer, {**state, "seen": state["seen"]})
        go.set()


def several_stages(rank: int, world_size: int, hf: Path, out: Path) -> None:
    """Save with two stages on each of two ranks: embedding and second layer, first layer and head."""
    models = []
    for stage in (rank, rank + 2):
        model: Any = build_model(hf)
        for index in range(2):
            if stage != index + 1:
                model.model.layers[index] = nn.Identity()
        if stage:
            model.model.embed_tokens = nn.Identity()
        if stage < 3:
            model.model.norm = model.lm_head = nn.Identity()
        materialize(model)
        load(model, hf)
        models.append(model)
    optimizer = optimizer_of(nn.ModuleList(models))
    mark(optimizer)
    save(models, optimizer, out / "sync", step=3, base=hf)
    with held() as go, Saver() as saver:
        saver.save(models, optimizer, out / "behind", step=3, base=hf)
        for model in models:
            spoil(model, optimizer, {"counts": [], "seen": torch.zeros(1)})
        go.set()


def one_after_the_other(rank: int, world_size: int, hf: Path, out: Path) -> list[Any]:
    """Save three times, the second time on a full disk; return the result of each save, and the number of threads."""
    at = cut(hf, Shape(dp=world_size))
    mark(at.optimizer)
    torch.distributed.barrier()
    before, said, order = len(os.listdir("/proc/self/task")), [], []

    def then() -> None:
        order.append(sorted(path.name for path in out.iterdir()))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with Saver() as saver:
        with held() as go:
            saver.save(at.model, at.optimizer, out / "one", on_published=then)
            assert not order
            threading.Timer(0.2, go.set).start()
            saver.save(at.model, at.optimizer, out / "two", on_published=then)  # waits for the first save
            assert (out / "one").is_dir()
        saver.wait()
        fails = mock.patch("torch.distributed.checkpoint.filesystem._write_item", full)
        with fails if rank == 1 else mock.MagicMock():
            saver.save(at.model, at.optimizer, out / "three", on_published=then)
            try:
                saver.save(at.model, at.optimizer, out / "four", on_published=then)
            except CkptxError as error:
                said.append(f"{type(error).__name__}: {error}")
        saver.save(at.model, at.optimizer, out / "five", on_published=then)
    del saver
    return [order, said, len(os.listdir("/proc/self/task")) - before]


def after_publication(rank: int, world_size: int, hf: Path, out: Path) -> str:
    """Return the errors that the ranks get if `then` fails."""
    at = cut(hf, Shape())

    def then() -> None:
        raise OutputError("latest: cannot be written")

    with Saver() as saver:
        saver.save(at.model, None, out, on_published=then)
        try:
            saver.wait()
        except OutputError as error:
            return str(error)
    return ""


def replaced(rank: int, world_size: int, hf: Path, out: Path) -> str:
    """Save over a checkpoint, and over a directory that is not one; return the error."""
    at, beside = cut(hf, Shape()), out.parent / f"beside-{rank}"
    shutil.copytree(hf, beside)
    (beside / "notes.rst").write_text("carried along")
    save(at.model, None, out / "one", step=1, base=beside)
    save(at.model, None, out / "one", step=2, base=beside, overwrite=True)
    torch.distributed.barrier()
    if rank == 0:
        (out / "two").mkdir()
        (out / "two" / "mine").write_text("mine")
    torch.distributed.barrier()
    try:
        save(at.model, None, out / "two", overwrite=True)
    except OutputError as error:
        return str(error)
    return ""
