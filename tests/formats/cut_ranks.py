"""What ranks do with cut checkpoints, by stock torch and transformers alone; run in the workers of a `GlooPool`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers.distributed import DistributedConfig

from tests.support import models
from tests.support.torch_dcp import raw

Plan = Mapping[str, tuple[int, int | None]]


def tensors_to_save() -> dict[str, torch.Tensor]:
    """Uneven shapes, fewer rows than ranks, one row, no dim, several dtypes."""
    made = {}
    for i, (name, dtype, shape) in enumerate(
        [
            ("uneven", torch.bfloat16, (101, 6)),
            ("few", torch.float32, (2, 3)),
            ("one", torch.float16, (1, 8)),
            ("cube", torch.int64, (5, 2, 3)),
            ("vector", torch.float32, (7,)),
            ("bytes", torch.float8_e4m3fn, (9, 4)),
            ("scalar", torch.float64, ()),
            ("flags", torch.bool, (3, 5)),
        ]
    ):
        generator = torch.Generator().manual_seed(i)
        made[name] = (torch.randn(shape, generator=generator) * 8).to(dtype)
    return made


def placements_of(tensor: torch.Tensor, how: str, world_size: int) -> tuple[tuple[int, ...], list[Any]]:
    """The mesh and the placements of a tensor on it."""
    last = Shard(tensor.dim() - 1)
    return {
        "rows": ((world_size,), [Shard(0)]),
        "columns": ((world_size,), [last]),
        "replicated": ((world_size,), [Replicate()]),
        "hybrid": ((2, world_size // 2), [Replicate(), Shard(0)]),
        "grid": ((2, world_size // 2), [Shard(0), last if tensor.dim() > 1 else Replicate()]),
    }[how]


def save_sharded(rank: int, world_size: int, out: Path, how: str) -> None:
    """Saves `tensors_to_save` from DTensors with torch's writer of sharded safetensors."""
    state = {}
    for name, tensor in tensors_to_save().items():
        shape, placements = placements_of(tensor, how, world_size)
        names = ("outer", "inner")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        if tensor.dim() == 0:
            state[name] = tensor
        else:
            state[name] = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(out), save_distributed=True))


def load_as_dtensors(
    rank: int, world_size: int, checkpoint: Path, expected: Path, plan: Plan, tp: int, kind: str
) -> list[str]:
    """Loads the tensors of each rank's stage as DTensors over `tp` ranks.

    Args:
        rank: Of pp x tp ranks.
        world_size: Their number.
        checkpoint: What to load.
        expected: A safetensors file of the whole tensors.
        plan: Name -> stage, and the dim to shard, None to replicate.
        tp: Ranks of a stage.
        kind: "dcp" or "sharded".

    Returns:
        Names whose local shard is not, bit for bit, what torch cuts out of the whole tensor.
    """
    mesh = init_device_mesh("cpu", (world_size // tp, tp), mesh_dim_names=("pp", "tp"))["tp"]
    whole = models.read_file(expected)
    wanted: dict[str, DTensor] = {}
    state: dict[str, Any] = {}
    for name, (stage, dim) in plan.items():
        if stage == rank // tp:
            wanted[name] = distribute_tensor(whole[name], mesh, [Replicate() if dim is None else Shard(dim)])
            state[name] = torch.zeros_like(wanted[name])
    assert state
    reader = dcp.FileSystemReader(checkpoint) if kind == "dcp" else dcp.HuggingFaceStorageReader(str(checkpoint))
    dcp.load(state, storage_reader=reader)
    return [name for name, tensor in wanted.items() if raw(state[name].to_local()) != raw(tensor.to_local())]


def distributed(hf: Path, how: str, world_size: int) -> Any:
    """The model of an HF checkpoint over `how` ("tp", "pp" or "fsdp").

    `from_pretrained` with a `distributed_config` asks for accelerate, which has nothing to do on CPUs; these are the
    steps it takes.
    """
    model = models.load(hf)
    config = DistributedConfig(**{f"{how}_size": world_size})
    config, _, mesh = type(model).prepare_distribute_model(config)
    return type(model).maybe_distribute_model(model, config, mesh)


def load_pretrained(rank: int, world_size: int, checkpoint: Path, hf: Path, how: str) -> list[str]:
    """Loads sharded safetensors into a distributed model of other weights; names of parameters that are wrong after."""
    from transformers.distributed.checkpoint import _load_model_checkpoint_distributed

    model = distributed(hf, how, world_size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    _load_model_checkpoint_distributed(model, str(checkpoint))
    whole = models.read_hf(hf)
    state = get_model_state_dict(model)
    assert state
    assert how == "pp" or any(isinstance(tensor, DTensor) for tensor in state.values())
    return [name for name, tensor in state.items() if raw(tensor) != raw(whole[name])]


def save_pretrained(rank: int, world_size: int, hf: Path, out: Path, how: str) -> None:
    """Saves the distributed model of an HF checkpoint with `distributed_checkpoint=True`."""
    distributed(hf, how, world_size).save_pretrained(out, distributed_checkpoint=True)


def write_expected(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """The whole tensors, for `load_as_dtensors`."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path
