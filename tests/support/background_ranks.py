"""Functions of the ranks in tests of background saves: save in the foreground and the background, and change the state.

`blocked_writer` blocks the writer thread until the run has continued, so that a missing copy changes the saved bytes.
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
from tests.support.save_ranks import Shape, load_sharded_model, optimizer_of, set_optimizer_state


@contextmanager
def blocked_writer() -> Iterator[threading.Event]:
    """Block the writer threads until the event is set, or until the end of the block."""
    release, publish = threading.Event(), background_save.publish

    def publish_later(*args: Any, **settings: Any) -> None:
        release.wait(60)
        publish(*args, **settings)

    with mock.patch.object(background_save, "publish", publish_later):
        try:
            yield release
        finally:
            release.set()


def overwrite_state(model: nn.Module, optimizer: Any, state: dict[str, Any]) -> None:
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


def save_sync_and_async(rank: int, world_size: int, hf: Path, out: Path, shape: Shape) -> None:
    """Save to `out/sync` in the foreground and to `out/behind` in the background."""
    at = load_sharded_model(hf, shape)
    set_optimizer_state(at.optimizer)
    at.optimizer.param_groups[0]["betas"] = [0.9, 0.95]
    mesh = mesh_of(ParallelDims(tp=shape.tp, dp_shard=shape.dp), "cpu")
    state = {
        "counts": [1, 2], "seen": torch.arange(5), "rng": PerRank(RandomState()), "rank": PerRank({"rank": rank}),
    }  # fmt: skip
    beside = out / f"beside-{rank}"
    shutil.copytree(hf, beside)
    arguments: dict[str, Any] = {"layout": at.layout, "step": 3, "base": beside, "training_state": state, "mesh": mesh}
    save(at.model, at.optimizer, out / "sync", **arguments)
    with blocked_writer() as release, Saver() as saver:
        saver.save(at.model, at.optimizer, out / "behind", **arguments)
        assert not (out / "behind").exists()
        shutil.rmtree(beside)
        overwrite_state(at.model, at.optimizer, {**state, "seen": state["seen"]})
        release.set()


def save_two_stages_per_rank(rank: int, world_size: int, hf: Path, out: Path) -> None:
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
    set_optimizer_state(optimizer)
    save(models, optimizer, out / "sync", step=3, base=hf)
    with blocked_writer() as release, Saver() as saver:
        saver.save(models, optimizer, out / "behind", step=3, base=hf)
        for model in models:
            overwrite_state(model, optimizer, {"counts": [], "seen": torch.zeros(1)})
        release.set()


def save_repeatedly(rank: int, world_size: int, hf: Path, out: Path) -> list[Any]:
    """Save three times, the second time on a full disk; return the names in `out` after each publication, the
    errors, and the change of the number of threads.
    """
    at = load_sharded_model(hf, Shape(dp=world_size))
    set_optimizer_state(at.optimizer)
    torch.distributed.barrier()
    threads_before, errors, listings = len(os.listdir("/proc/self/task")), [], []

    def on_published() -> None:
        listings.append(sorted(path.name for path in out.iterdir()))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with Saver() as saver:
        with blocked_writer() as release:
            saver.save(at.model, at.optimizer, out / "one", on_published=on_published)
            assert not listings
            threading.Timer(0.2, release.set).start()
            saver.save(at.model, at.optimizer, out / "two", on_published=on_published)  # waits for the first save
            assert (out / "one").is_dir()
        saver.wait()
        fails = mock.patch("torch.distributed.checkpoint.filesystem._write_item", full)
        with fails if rank == 1 else mock.MagicMock():
            saver.save(at.model, at.optimizer, out / "three", on_published=on_published)
            try:
                saver.save(at.model, at.optimizer, out / "four", on_published=on_published)
            except CkptxError as error:
                errors.append(f"{type(error).__name__}: {error}")
        saver.save(at.model, at.optimizer, out / "five", on_published=on_published)
    del saver
    return [listings, errors, len(os.listdir("/proc/self/task")) - threads_before]


def fail_after_publication(rank: int, world_size: int, hf: Path, out: Path) -> str:
    """Return the errors that the ranks get if the callback after publication fails."""
    at = load_sharded_model(hf, Shape())

    def on_published() -> None:
        raise OutputError("latest: cannot be written")

    with Saver() as saver:
        saver.save(at.model, None, out, on_published=on_published)
        try:
            saver.wait()
        except OutputError as error:
            return str(error)
    return ""


def save_over_existing(rank: int, world_size: int, hf: Path, out: Path) -> str:
    """Save over a checkpoint, and over a directory that is not one; return the error."""
    at, beside = load_sharded_model(hf, Shape()), out.parent / f"beside-{rank}"
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
