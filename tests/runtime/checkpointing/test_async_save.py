"""What is saved behind a run is, to the byte, what it was when `save` returned; and whoever ends, ends."""

from __future__ import annotations

import atexit
import multiprocessing.process
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckptx.runtime.checkpointing import async_save as background_save
from ckptx.runtime.checkpointing.async_save import Saver
from ckptx.runtime.checkpointing.training_state import load_training_state
from tests.support import background_ranks, save_ranks, torch_dcp
from tests.support.background_ranks import blocked_writer
from tests.support.forked_programs import preloaded_context
from tests.support.pool import GlooPool
from tests.support.save_ranks import TP, Shape, load_sharded_model
from tests.support.slow import slow_but


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """HF checkpoints by recipe, written when first asked for."""
    made: dict[str, Path] = {}

    def written(name: str) -> Path:
        if name not in made:
            made[name] = save_ranks.write(name, tmp_path_factory.mktemp(name))
        return made[name]

    return written


CASES = [
    (name, shape)
    for name in ("llama-tied", "multi-query", "mixtral")
    for shape in (Shape(dp=2), TP, Shape(dp=2, tp=2), Shape())
]


@pytest.mark.parametrize(("name", "shape"), slow_but(CASES, [("llama-tied", Shape(dp=2)), ("multi-query", TP)]))
def test_the_bytes_are_those_of_a_save_that_waits(
    pool: GlooPool, checkpoints: Any, tmp_path: Path, name: str, shape: Shape
) -> None:
    pool.run(background_ranks.save_sync_and_async, shape.dp * shape.tp, checkpoints(name), tmp_path, shape)
    found, wanted = torch_dcp.file_bytes(tmp_path / "behind"), torch_dcp.file_bytes(tmp_path / "sync")
    assert found.keys() == wanted.keys() > {".metadata", "config.json", "__0_0.distcp"}
    assert [each for each, data in wanted.items() if found[each] != data] == []
    assert load_training_state(tmp_path / "behind")["counts"] == [1, 2]


def test_so_are_those_of_several_stages(pool: GlooPool, checkpoints: Any, tmp_path: Path) -> None:
    pool.run(background_ranks.save_two_stages_per_rank, 2, checkpoints("llama-untied"), tmp_path)
    assert torch_dcp.file_bytes(tmp_path / "behind") == torch_dcp.file_bytes(tmp_path / "sync")


def test_a_copy_that_is_missing_shows(pool: GlooPool, checkpoints: Any, tmp_path: Path) -> None:
    """The injected defect: the thread writes what the run has by then."""
    pool.run(uncopied, 2, checkpoints("llama-tied"), tmp_path)
    found, wanted = torch_dcp.file_bytes(tmp_path / "behind"), torch_dcp.file_bytes(tmp_path / "sync")
    assert all(found[name] != wanted[name] for name in ("__0_0.distcp", "__1_0.distcp"))


def uncopied(rank: int, world_size: int, hf: Path, out: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptx.runtime.checkpointing.snapshot._copy", lambda value: value)
        background_ranks.save_sync_and_async(rank, world_size, hf, out, Shape(dp=2))


def test_one_is_written_at_a_time_and_what_fails_fails_everywhere(
    pool: GlooPool, checkpoints: Any, tmp_path: Path
) -> None:
    answers = pool.run(background_ranks.save_repeatedly, 2, checkpoints("llama-tied"), tmp_path)
    first, second = answers
    assert first[0] == [["one"], ["one", "two"], ["five", "one", "two"]]
    assert second[0] == []
    assert [said[0].partition(":")[0] for _, said, _ in answers] == ["SpaceError", "SpaceError"]
    assert [threads for *_, threads in answers] == [0, 0]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["five", "one", "two"]


def test_what_comes_after_publication_fails_everywhere_too(pool: GlooPool, checkpoints: Any, tmp_path: Path) -> None:
    answers = pool.run(background_ranks.fail_after_publication, 2, checkpoints("llama-tied"), tmp_path / "saved")
    assert answers == ["latest: cannot be written"] * 2
    assert [each.name for each in tmp_path.iterdir()] == ["saved"]


def test_a_checkpoint_is_replaced_and_nothing_else_is(pool: GlooPool, checkpoints: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    answers = pool.run(background_ranks.save_over_existing, 2, checkpoints("llama-tied"), out)
    assert all("two: contains files that do not belong to a checkpoint: mine" in each for each in answers)
    assert load_training_state(out / "one")["step"] == 2
    assert (out / "one" / "notes.rst").read_text() == "carried along"
    assert sorted(each.name for each in out.iterdir()) == ["one", "two"]


# ------------------------------------------------------------------------------------ ends


def ended(how: Callable[..., None], hf: Path, out: Path) -> list[int]:
    """Two processes that each end in some way; their exit codes."""
    store = str(out / "store")
    processes = [preloaded_context().Process(target=_rank, args=(how, rank, store, hf, out)) for rank in range(2)]
    for each in processes:
        each.start()
    for each in processes:
        each.join(60)
    return [_exit_of(each) for each in processes]


def _exit_of(process: multiprocessing.process.BaseProcess) -> int:
    if process.exitcode is None:
        process.kill()
        process.join()
        return 999
    return process.exitcode


def _rank(how: Callable[..., None], rank: int, store: str, hf: Path, out: Path) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    sys.stderr = (out / f"stderr-{rank}").open("w")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        how(rank, hf, out)
    finally:
        for each in threading.enumerate():  # as an interpreter ends; multiprocessing leaves the last line out
            if each is not threading.main_thread() and not each.daemon:
                each.join()
        atexit._run_exitfuncs()
        sys.stderr.flush()


def forgets(rank: int, hf: Path, out: Path) -> None:
    at = load_sharded_model(hf, Shape(dp=2))
    saver = Saver()
    saver.save(at.model, at.optimizer, out / "saved")
    globals()["kept"] = saver


def ends_the_world(rank: int, hf: Path, out: Path) -> None:
    forgets(rank, hf, out)
    dist.destroy_process_group()


def fails(rank: int, hf: Path, out: Path) -> None:
    at = load_sharded_model(hf, Shape(dp=2))
    with blocked_writer() as go, Saver() as saver:
        saver.save(at.model, at.optimizer, out / "saved")
        go.set()
        raise RuntimeError("the step after")


def fails_alone(rank: int, hf: Path, out: Path) -> None:
    at = load_sharded_model(hf, Shape(dp=2))
    with Saver() as saver:
        saver.save(at.model, at.optimizer, out / "saved")
        if rank == 1:
            raise RuntimeError("the step after")
        dist.barrier()


def dies(rank: int, hf: Path, out: Path) -> None:
    at = load_sharded_model(hf, Shape(dp=2))
    if rank == 1:
        background_save.publish = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    with Saver() as saver:
        saver.save(at.model, at.optimizer, out / "saved")
        saver.wait()


@pytest.mark.parametrize(
    ("how", "codes", "is_published"),
    [
        (forgets, [0, 0], True),
        (ends_the_world, [0, 0], None),
        pytest.param(fails, [1, 1], True, marks=pytest.mark.slow),
        (fails_alone, [1, 1], True),
        (dies, [1, -signal.SIGKILL], False),
    ],
)
def test_nobody_waits_for_ever(
    checkpoints: Any, tmp_path: Path, how: Callable[..., None], codes: list[int], is_published: bool | None
) -> None:
    assert ended(how, checkpoints("llama-tied"), tmp_path) == codes
    if is_published is not None:
        assert (tmp_path / "saved").exists() == is_published
    if (tmp_path / "saved").exists():
        assert ".metadata" in os.listdir(tmp_path / "saved")
    elif how is ends_the_world:
        assert "saved: not saved: " in "".join((tmp_path / f"stderr-{rank}").read_text() for rank in range(2))
