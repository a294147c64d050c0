"""Load or save a checkpoint with NeMo AutoModel's `Checkpointer`, on the ranks of torchrun.

    torchrun --nproc-per-node=2 automodel_ranks.py save STEP VALUES
    torchrun --nproc-per-node=2 automodel_ranks.py load FORMAT PATH VALUES
    torchrun --nproc-per-node=2 automodel_ranks.py resume STEP VALUES

save: write a step after two steps of AdamW, and its values. load: load weights into a model of other values. resume:
load weights and optimizer state of a step. VALUES is the safetensors file with the full tensors of rank 0.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nemo_automodel.components.checkpoint.checkpointing import Checkpointer, CheckpointingConfig
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def make_checkpointer(path: Path, kind: str = "safetensors") -> Checkpointer:
    """Return the checkpointer of a data-parallel run."""
    config = CheckpointingConfig(checkpoint_dir=str(path), model_save_format=kind, model_cache_dir=str(path))
    return Checkpointer(config, dp_rank=dist.get_rank(), tp_rank=0, pp_rank=0)


def make_model(seed: int) -> tuple[Qwen3ForCausalLM, torch.optim.Optimizer]:
    """Return a model sharded over the ranks, and its optimizer."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer) -> None:
    """Run two steps."""
    for step in range(2):
        tokens = torch.arange(step, step + 8)[None]
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def full_values(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """Return full parameters by name, and the moments of the optimizer as `NAME.exp_avg`."""
    values: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        states = {} if optimizer is None else optimizer.state[parameter]
        tensors = {name: parameter, **{f"{name}.{key}": each for key, each in states.items()}}
        for key, each in tensors.items():
            values[key] = (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone().contiguous()
    return values


def main() -> None:
    """Run the command, and write the values on rank 0."""
    command, *arguments = sys.argv[1:]
    dist.init_process_group("gloo")
    model, optimizer = make_model(seed=0 if command == "save" else 1)
    if command == "save":
        step = Path(arguments[0])
        train(model, optimizer)
        checkpointer = make_checkpointer(step.parent)
        checkpointer.save_model(model, str(step))
        checkpointer.save_optimizer(optimizer, model, str(step))
    elif command == "load":
        kind, path = arguments[:2]
        checkpointer = make_checkpointer(Path(path), kind)
        checkpointer.load_model(model, path)
    else:
        step = Path(arguments[0])
        train(model, optimizer)
        checkpointer = make_checkpointer(step.parent, "torch_save")
        checkpointer.load_model(model, str(step / "model"))
        checkpointer.load_optimizer(optimizer, model, str(step))
    values = full_values(model, None if command == "load" else optimizer)
    if dist.get_rank() == 0:
        save_file(values, arguments[-1])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
