"""State dicts of FSDP ranks, saved by each rank with `torch.save` as verl's checkpoint manager does."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    LocalStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

KINDS = ("fsdp2", "hsdp2", "fsdp1", "hsdp1", "sharded1", "local1", "fsdp2+tp")


class UnevenModel(nn.Module):
    """A model with uneven rows, a dimension of 1, tensors smaller than the world, buffers and tied embeddings."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=index == 0) for index in range(2))
        self.norm, self.one, self.head = nn.LayerNorm(6), nn.Linear(6, 1), nn.Linear(6, 13, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("inverse", torch.arange(3.0))
        self.register_buffer("steps", torch.tensor(7))

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.layers)


def _mesh(kind: str, world_size: int) -> DeviceMesh | None:
    if kind in ("sharded1", "local1"):
        return None
    if kind.startswith("hsdp"):
        return init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("ddp", "fsdp"))
    if kind == "fsdp2+tp":
        return init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("fsdp", "tp"))
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))


def state_dict_of_rank(model: nn.Module, blocks: list[nn.Module], kind: str, world_size: int) -> dict[str, Any]:
    """Shard a model in one of the supported ways, and return the state dict that this rank saves."""
    mesh = _mesh(kind, world_size)
    if kind in ("fsdp2", "hsdp2", "fsdp2+tp"):
        assert mesh is not None
        if kind == "fsdp2+tp":
            for block in blocks:  # one dimension sharded twice, and rows with columns
                parallelize_module(block, mesh["tp"], ColwiseParallel() if block is blocks[0] else RowwiseParallel())
            mesh = mesh["fsdp"]
        for block in blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh).state_dict()
    is_local = kind == "local1"
    wrapped = FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        device_id=torch.device("cpu"),
        use_orig_params=not is_local,
        auto_wrap_policy=CustomPolicy(lambda module: any(module is block for block in blocks)),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD if kind == "hsdp1" else ShardingStrategy.FULL_SHARD,
    )
    to, config = StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=False)
    if is_local:
        to, config = StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig()
    with FullyShardedDataParallel.state_dict_type(wrapped, to, config):
        return wrapped.state_dict()


def save_uneven_model(rank: int, world_size: int, kind: str, tied: bool, out: Path) -> dict[str, torch.Tensor]:
    """Save the shards of the uneven model on this rank; return its full state dict."""
    torch.manual_seed(1)
    model = UnevenModel(tied)
    return _save(rank, world_size, kind, model, model.blocks, out)


def save_pretrained_model(rank: int, world_size: int, kind: str, hf: Path, out: Path) -> dict[str, torch.Tensor]:
    """Save the shards of a transformers model on this rank, as an actor with its config in `huggingface/`."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(rank)
    model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)
    if rank == 0:
        model.config.save_pretrained(out / "huggingface")
    return _save(rank, world_size, kind, model, list(model.model.layers), out)


def _save(
    rank: int, world_size: int, kind: str, model: nn.Module, blocks: list[nn.Module], out: Path
) -> dict[str, torch.Tensor]:
    full = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = state_dict_of_rank(model, blocks, kind, world_size)
        out.mkdir(parents=True, exist_ok=True)
        torch.save(state, out / f"model_world_size_{world_size}_rank_{rank}.pt")
    optimizer = torch.optim.AdamW(model.parameters())
    torch.save(optimizer.state_dict(), out / f"optim_world_size_{world_size}_rank_{rank}.pt")
    torch.save({"lr_scheduler": {}, "rng": {}}, out / f"extra_state_world_size_{world_size}_rank_{rank}.pt")
    if rank == 0:
        version = 2 if "2" in kind else 1
        (out / "fsdp_config.json").write_text(json.dumps({"FSDP_version": version, "world_size": world_size}))
    dist.barrier()
    return full
