"""Functions of the ranks in replays of torch's tests, without ckptx; they run in the workers of a `GlooPool`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor, zeros

from tests.support.torch_dcp import raw

Placed = Sequence[Placement]

ONE_D: list[Placed] = [[Shard(0)], [Replicate()]]
TWO_D: list[Placed] = [
    [Replicate(), Replicate()], [Replicate(), Shard(0)], [Shard(0), Replicate()], [Shard(0), Shard(0)]
]  # fmt: skip


def square() -> torch.Tensor:
    """Return the tensor of torch's tests."""
    return torch.arange(16, dtype=torch.float).view(4, 4)


def mesh_of(dims: int, world_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world_size,) if dims == 1 else (2, world_size // 2))


def save_placed(rank: int, world_size: int, out: Path, dims: int) -> None:
    """Save the tensor with each placement on a mesh with `dims` dimensions, named by its index."""
    mesh = mesh_of(dims, world_size)
    placements = ONE_D if dims == 1 else TWO_D
    state = {
        f"dtensor_{at}": distribute_tensor(square(), mesh, placed, src_data_rank=None)
        for at, placed in enumerate(placements)
    }
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(out), save_distributed=True))


def load_placed(rank: int, world_size: int, checkpoint: Path, names: Sequence[str], dims: int) -> list[str]:
    """Load each name with each placement on a mesh with `dims` dimensions; return those that differ from the tensor."""
    mesh = mesh_of(dims, world_size)
    wrong = []
    for placed in ONE_D if dims == 1 else TWO_D:
        state = {name: zeros([4, 4], device_mesh=mesh, placements=placed) for name in names}
        dcp.load(state, storage_reader=reader_of(checkpoint))
        wrong += [f"{name} at {placed}" for name, found in state.items() if not found.full_tensor().equal(square())]
    return wrong


def reader_of(checkpoint: Path) -> Any:
    if (checkpoint / ".metadata").exists():
        return dcp.FileSystemReader(checkpoint)
    return dcp.HuggingFaceStorageReader(str(checkpoint))


def save_one_element(rank: int, world_size: int, out: Path) -> None:
    """Shard a tensor with one element over all ranks; all shards except one are empty."""
    mesh = init_device_mesh("cpu", (world_size,))
    state = {"dtensor": distribute_tensor(torch.tensor([0.625]), mesh, [Shard(0)], src_data_rank=None)}
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(out), save_distributed=True))


def load_one_element(rank: int, world_size: int, checkpoint: Path) -> float:
    mesh = init_device_mesh("cpu", (2, world_size // 2))
    state = {"dtensor": zeros([1], device_mesh=mesh, placements=[Shard(0), Shard(0)])}
    dcp.load(state, storage_reader=reader_of(checkpoint))
    return float(state["dtensor"].full_tensor()[0])


def save_rows_and_columns(rank: int, world_size: int, out: Path) -> None:
    """Save the tensor sharded by rows, and again by columns."""
    mesh = init_device_mesh("cpu", (world_size,))
    state = {
        name: distribute_tensor(square(), mesh, [Shard(dim)], src_data_rank=None)
        for dim, name in enumerate(("dtensor", "dtensor_col"))
    }
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(out), save_distributed=True))


class Uneven(nn.Module):
    """Layers whose sizes are not divisible by small numbers of ranks."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (5, 10, 15, 30, 5)
        for at, (inner, outer) in enumerate(pairwise(sizes), start=1):
            self.add_module(f"net{at}", nn.Linear(inner, outer))


def uneven() -> Uneven:
    torch.manual_seed(0)
    return Uneven()


def save_model(rank: int, world_size: int, out: Path) -> None:
    """Save a nested state as trainers do, sharded over the ranks."""
    model = uneven()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=out)


def load_model(rank: int, world_size: int, checkpoint: Path, prefix: str) -> list[str]:
    """Load into a sharded model; return the names that differ from those of `uneven`."""
    expected = uneven().state_dict()
    model = Uneven()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-1)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    state = {f"{prefix}{name}": tensor for name, tensor in get_model_state_dict(model).items()}
    dcp.load(state, checkpoint_id=checkpoint)
    return [name for name, tensor in state.items() if raw(tensor) != raw(expected[name.removeprefix(prefix)])]
