"""Functions of the ranks in tests of adapters: train a LoRA adapter under FSDP2, and save it as trainers do."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import save_fsdp_model
from peft import PeftModel
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def _load(model: Path, adapter: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = transformers.AutoModelForCausalLM.from_pretrained(model)
        return PeftModel.from_pretrained(base, adapter, is_trainable=True)


def _sharded(model: Path, adapter: Path, world_size: int) -> Any:
    """Return a model with an adapter in float32, sharded by FSDP2 layer by layer."""
    peft_model = _load(model, adapter).float()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
    for layer in peft_model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(peft_model, mesh=mesh)


def _step(model: torch.nn.Module, rank: int) -> None:
    """Train one step, so that the adapter is not the one on disk."""
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.05)
    model(input_ids=torch.arange(3, 17).reshape(2, 7) + rank).logits.float().square().mean().backward()
    optimizer.step()


def _gathered(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the trained tensors of the adapter, whole, on every rank."""
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    state = get_model_state_dict(model)
    whole = {}
    for name, tensor in state.items():
        if name in trained:
            whole[name] = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return {name: tensor.detach().clone() for name, tensor in whole.items()}


def save_dcp(rank: int, world_size: int, model: Path, adapter: Path, out: Path) -> dict[str, torch.Tensor]:
    """Shard a model with an adapter by FSDP2, train a step, and save its state dict with stock DCP.

    Returns:
        The trained tensors of the adapter, whole.
    """
    peft_model = _sharded(model, adapter, world_size)
    _step(peft_model, rank)
    dcp.save({"model": get_model_state_dict(peft_model)}, checkpoint_id=out)
    return _gathered(peft_model)


def save_with_accelerate(rank: int, world_size: int, model: Path, adapter: Path, out: Path) -> dict[str, torch.Tensor]:
    """Train an adapter under FSDP2, and save it with accelerate's `save_fsdp_model`, as Trainer does.

    Returns:
        The trained tensors of the adapter, whole.
    """
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # the process group exists already
    peft_model = _sharded(model, adapter, world_size)  # accelerate itself shards on GPUs only
    _step(peft_model, rank)
    with mock.patch.dict(os.environ, variables):
        save_fsdp_model(plugin, Accelerator(cpu=True), peft_model, str(out), adapter_only=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    return _gathered(peft_model)


def save_rank_files(rank: int, world_size: int, model: Path, adapter: Path, out: Path) -> dict[str, torch.Tensor]:
    """Shard a model with an adapter by FSDP2, and save the state dict of each rank, as verl does.

    Returns:
        The trained tensors of the adapter, whole.
    """
    peft_model = _sharded(model, adapter, world_size)
    _step(peft_model, rank)
    torch.save(peft_model.state_dict(), out / f"model_world_size_{world_size}_rank_{rank}.pt")
    return _gathered(peft_model)
