"""The program of docs/training.md, run as it is written: what goes on from a save is what never stopped, to the bit."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from hashlib import blake2b
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

import ckptx
from tests.support import torch_dcp
from tests.support.import_tool import ROOT
from tests.support.models import EVERY, build
from tests.support.pool import GlooPool


def program() -> str:
    """As a reader copies it."""
    found = re.search(r"cat > train\.py << 'END'\n(.*?)^END$", (ROOT / "docs" / "training.md").read_text(), re.S | re.M)
    assert found is not None
    return found[1]


WRITTEN = 10  # steps of the program, of which it saves the fifth and the last


def of_steps(steps: int) -> tuple[tuple[str, str], ...]:
    """Changes that have it take so many steps, and save half way; the rates are those of ten."""
    if steps == WRITTEN:
        return ()
    return ("while step < 10", f"while step < {steps}"), ("step % 5 == 0", f"step % {steps // 2} == 0")


def test_the_loop_fits_on_a_screen() -> None:
    assert len(program().split("with process_group", 1)[1].splitlines()) <= 40


def digest(tensors: Any) -> str:
    """Of the bytes that this rank has."""
    found = blake2b(digest_size=16)
    for each in tensors:
        local = each.to_local() if isinstance(each, DTensor) else each
        found.update(local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def run(rank: int, world_size: int, directory: Path, arguments: list[str], *changes: tuple[str, str]) -> Any:
    """The program on one rank.

    Args:
        rank: Of this process.
        world_size: Their number.
        directory: With MODEL-dropout in it.
        arguments: Of the program.
        changes: Lines of the program that are others, for another mesh or an injected defect.

    Returns:
        Losses in the order of the backward passes, digests of gradients, parameters and states after each step of the
        optimizer, what was printed.
    """
    losses: list[str] = []
    steps: list[tuple[str, str, str]] = []
    backward = torch.Tensor.backward

    def noting(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        losses.append(self.item().hex())
        backward(self, *args, **kwargs)

    def stepped(optimizer: Any, *_: Any) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        states = [each for key in parameters for _, each in sorted(optimizer.state[key].items())]
        steps.append((digest(each.grad for each in parameters), digest(parameters), digest(states)))

    hook = register_optimizer_step_post_hook(stepped)
    before, printed = Path.cwd(), io.StringIO()
    source = program()
    for line, other in changes:
        assert line in source
        source = source.replace(line, other)
    try:
        os.chdir(directory)
        with (
            mock.patch.object(torch.Tensor, "backward", noting),
            mock.patch.object(sys, "argv", ["train.py", *arguments]),
            contextlib.redirect_stdout(printed),
        ):
            exec(compile(source, "train.py", "exec"), {"__name__": "__main__"})
    finally:
        os.chdir(before)
        hook.remove()
    return losses, steps, printed.getvalue()


def write_model(directory: Path, name: str, rate: float = 0.1) -> None:
    """The MODEL-dropout of the page, with dropout of a rate."""
    model = build(EVERY[name]).float()
    model.save_pretrained(directory / "MODEL-dropout")
    path = directory / "MODEL-dropout" / "config.json"
    config = json.loads(path.read_text())
    dropouts = [key for key, value in config.items() if re.search("dropout|pdrop", key) and isinstance(value, float)]
    assert dropouts
    path.write_text(json.dumps({**config, **dict.fromkeys(dropouts, rate)}))


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("starcoder2", 2),
        *(
            pytest.param(name, WRITTEN, marks=pytest.mark.slow)
            for name in ("starcoder2", "qwen3", "gpt2", "mixtral", "gpt-neox")
        ),
    ],
)
def test_what_goes_on_is_what_never_stopped(pool: GlooPool, tmp_path: Path, name: str, count: int) -> None:
    write_model(tmp_path, name)
    half = count // 2
    first = pool.run(run, 4, tmp_path, ["run"], *of_steps(count))
    pool.stop()  # fresh processes
    again = pool.run(run, 4, tmp_path, ["again", f"run/step-{half}"], *of_steps(count))
    for (losses, steps, said), (later_losses, later_steps, later_said) in zip(first, again, strict=True):
        assert (len(losses), len(steps)) == (2 * count, count)
        assert later_losses == losses[2 * half :]
        assert later_steps == steps[half:]
        assert later_said.splitlines() == said.splitlines()[half:]
    assert len({losses[0] for losses, *_ in first}) == 2, "each data rank has its data"
    last, other = (tmp_path / out / f"step-{count}" for out in ("run", "again"))
    torch_dcp.assert_same_tensors(torch_dcp.load(other), torch_dcp.load(last))
    assert ckptx.verify(last, other).exit == 0
    state: dict[str, Any] = {"step": None, "training_state": {"scheduler": None}}
    dcp.load(state, storage_reader=dcp.FileSystemReader(other), no_dist=True)
    assert (state["step"], state["training_state"]["scheduler"]["last_epoch"]) == (count, count)


MESH = "ParallelDims(tp=2, dp_shard=2)"


@pytest.mark.slow
def test_replicas_go_on_as_well(pool: GlooPool, tmp_path: Path) -> None:
    write_model(tmp_path, "starcoder2")
    change = (MESH, "ParallelDims(tp=2, dp_replicate=2)")
    first = pool.run(run, 4, tmp_path, ["run"], change)
    again = pool.run(run, 4, tmp_path, ["again", "run/step-5"], change)
    for before, later in zip(first, again, strict=True):
        assert (later[0], later[1]) == (before[0][10:], before[1][5:])
    torch_dcp.assert_same_tensors(
        torch_dcp.load(tmp_path / "again" / "step-10"), torch_dcp.load(tmp_path / "run" / "step-10")
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dims", ["tp=1, dp_shard=2", "dp_replicate=2"])
def test_another_number_of_tp_ranks_goes_on_with_the_same_data(pool: GlooPool, tmp_path: Path, dims: str) -> None:
    """Without dropout: what is cut would be dropped otherwise."""
    write_model(tmp_path, "qwen3", rate=0.0)
    first = pool.run(run, 4, tmp_path, ["run"], *of_steps(4))
    again = pool.run(run, 2, tmp_path, ["again", "run/step-2"], (MESH, f"ParallelDims({dims})"), *of_steps(4))
    for before, later in zip(first[::2], again, strict=True):
        found, wanted = ([float.fromhex(each) for each in losses] for losses in (later[0], before[0][4:]))
        assert found == pytest.approx(wanted, rel=1e-4), "float32, added in another order"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (('"rng": PerRank(RandomState(context.device))', '"lost": 1'), "losses"),
        (('"batches": PerRank(batches)', '"lost": 1'), "losses"),
        (("load_optimizer(optimizer, model, resumed, layout=tp_layout)", "pass"), "steps"),
        (('"scheduler": scheduler', '"lost": 1'), "steps"),
    ],
)
def test_what_is_not_restored_is_seen(pool: GlooPool, tmp_path: Path, change: tuple[str, str], named: str) -> None:
    """Injected defects: the comparison above would fail. Two ranks have all that is lost."""
    write_model(tmp_path, "qwen3")
    changes = (MESH, "ParallelDims(dp_shard=2)"), change, *of_steps(4)
    first = pool.run(run, 2, tmp_path, ["run"], *changes)
    again = pool.run(run, 2, tmp_path, ["again", "run/step-2"], *changes)
    if named == "losses":
        assert any(later[0] != before[0][4:] for before, later in zip(first, again, strict=True))
    assert all(later[1] != before[1][2:] for before, later in zip(first, again, strict=True))
