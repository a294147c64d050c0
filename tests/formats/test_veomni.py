"""A DCP of VeOmni whose experts are in another order is recognized by its layout, and nothing else is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import ckptx
from ckptx.errors import UnsupportedError
from tests.support.models import EVERY, load, write
from tests.support.pool import GlooPool

EXPERTS = ".mlp.experts."


def save(rank: int, world_size: int, hf: Path, root: Path, fsdp_dim: int, leaf: str) -> None:
    """Save a model and its momentum as `restore_extra_parallel_dim` of VeOmni does, with EP and FSDP of two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep_fsdp", "ep"))

    def stated(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if EXPERTS not in name:
            placements: list[Placement] = [Shard(0), Replicate()]
            return distribute_tensor(tensor, mesh, placements, src_data_rank=None)
        ep_rank, fsdp_rank = rank % 2, rank // 2
        held = tensor.chunk(2)[ep_rank].chunk(2, fsdp_dim)[fsdp_rank].contiguous()
        return DTensor.from_local(held, mesh, [Shard(fsdp_dim), Shard(0)])

    tensors = {name: stated(name, each) for name, each in load(hf).state_dict().items()}
    state = {f"optimizer.state.{name}.{leaf}": each for name, each in tensors.items()}
    dcp.save({"model": tensors, **state}, checkpoint_id=root)
    dist.barrier()
    if not rank:
        (root / "extra_state").mkdir()
        torch.save({"global_step": 1}, root / "extra_state" / "extra_state_rank_0.pt")


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("veomni") / "hf"
    write(EVERY["qwen3-moe"], path)
    return path


def test_reordered_experts_are_refused(pool: GlooPool, hf: Path, tmp_path: Path) -> None:
    pool.run(save, 4, hf, tmp_path / "step", 0, "momentum_buffer")
    for convert in (lambda dst: ckptx.convert("to-hf", tmp_path / "step", dst, base=hf),
                    lambda dst: ckptx.reshard(tmp_path / "step", dst, base=hf, tp=2)):  # fmt: skip
        with pytest.raises(UnsupportedError, match="muon_expert_zero_comm stores experts in another order"):
            convert(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    # They are in another order, indeed: stock torch reads other values than the ranks had.
    name = next(name for name in load(hf).state_dict() if EXPERTS in name)
    read: dict[str, Any] = {"model": {name: torch.zeros_like(load(hf).state_dict()[name])}}
    dcp.load(read, checkpoint_id=tmp_path / "step", no_dist=True)
    stored, original = read["model"][name], load(hf).state_dict()[name]
    assert not torch.equal(stored, original)
    assert torch.equal(stored[np.argsort([0, 2, 1, 3])], original)


@pytest.mark.parametrize(("fsdp_dim", "leaf"), [(1, "momentum_buffer"), (1, "exp_avg"), (0, "exp_avg")])
def test_other_checkpoints_of_veomni_are_not(
    pool: GlooPool, hf: Path, tmp_path: Path, fsdp_dim: int, leaf: str
) -> None:
    """With other optimizers, dim 0 belongs to FSDP alone; here only the recognition is tested."""
    pool.run(save, 4, hf, tmp_path / "step", fsdp_dim, leaf)
    report = ckptx.convert("to-hf", tmp_path / "step", tmp_path / "out", base=hf)
    assert not report.exit
    assert ckptx.verify(hf, tmp_path / "out").ok == (fsdp_dim == 1)


def test_without_the_directory_of_veomni_nothing_is_refused(pool: GlooPool, hf: Path, tmp_path: Path) -> None:
    pool.run(save, 4, hf, tmp_path / "step", 0, "momentum_buffer")
    (tmp_path / "step" / "extra_state").rename(tmp_path / "elsewhere")
    assert not ckptx.convert("to-hf", tmp_path / "step", tmp_path / "out", base=hf).exit
