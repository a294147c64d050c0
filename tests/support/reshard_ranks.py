"""Load sharded checkpoints on ranks with DTensors and trainers of torch, in the workers of a `GlooPool`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from tests.support import models, torch_training
from tests.support.torch_dcp import raw

Plan = Mapping[str, tuple[int, int | None]]

_opened: list[str] | None = None  # opened files while a block watches, else None
_is_watching = False


@contextmanager
def watched_opens() -> Iterator[list[str]]:
    """Record the paths of all files that this process opens in the block."""
    global _opened, _is_watching
    if not _is_watching:  # an audit hook cannot be removed
        sys.addaudithook(_note)
        _is_watching = True
    _opened = []
    try:
        yield _opened
    finally:
        _opened = None


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opened is not None and isinstance(arguments[0], (str, bytes)):
        _opened.append(arguments[0] if isinstance(arguments[0], str) else arguments[0].decode())


def load_stage(
    rank: int, world_size: int, checkpoint: Path, whole: Path, plan: Plan, tp: int
) -> tuple[list[str], list[str]]:
    """Load the tensors of this rank's stage as DTensors over `tp` ranks with stock `dcp.load`.

    Args:
        rank: Global rank, stage * tp + TP rank.
        world_size: Number of ranks, pp * tp.
        checkpoint: DCP to load.
        whole: Safetensors file with the full tensors.
        plan: Name -> stage, and the dimension to shard; None to replicate.
        tp: Number of TP ranks per stage.

    Returns:
        Names whose local shard differs from torch's shard of the full tensor, and the opened files of the checkpoint.
    """
    mesh = init_device_mesh("cpu", (world_size // tp, tp), mesh_dim_names=("pp", "tp"))["tp"]
    tensors = models.read_file(whole)
    wanted: dict[str, DTensor] = {}
    for name, (stage, dim) in plan.items():
        if stage == rank // tp:
            placement = Replicate() if dim is None else Shard(dim)
            wanted[name] = distribute_tensor(tensors[name], mesh, [placement], src_data_rank=None)
    state: dict[str, Any] = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    with watched_opens() as opened:
        dcp.load(state, storage_reader=dcp.FileSystemReader(checkpoint))
    wrong = [name for name, tensor in wanted.items() if raw(state[name].to_local()) != raw(tensor.to_local())]
    return wrong, inside(checkpoint, opened)


def load_experts(
    rank: int, world_size: int, checkpoint: Path, whole: Path, names: list[str], ep: int, dim: int
) -> tuple[list[str], list[str]]:
    """Load tensors of experts after EP and `fully_shard` on one dim of an EP rank's experts, with stock `dcp.load`.

    Args:
        rank: Rank in the stage.
        world_size: Number of ranks of the stage.
        checkpoint: DCP to load.
        whole: Safetensors file with the full tensors.
        names: Tensors to load, each with all experts of a layer.
        ep: Number of EP ranks.
        dim: Dim that FSDP shards.

    Returns:
        Names whose local shard differs from torch's shard of the full tensor, and the opened files of the checkpoint.
    """
    mesh = init_device_mesh("cpu", (world_size // ep, ep), mesh_dim_names=("efsdp", "ep"))
    tensors = models.read_file(whole)

    def sharded(tensor: torch.Tensor) -> DTensor:
        module = nn.Module()
        over_ep = distribute_tensor(tensor, mesh["ep"], [Shard(0)], src_data_rank=None)
        module.weight = nn.Parameter(over_ep, requires_grad=False)
        if world_size > ep:
            fully_shard(module, mesh=mesh["efsdp"], shard_placement_fn=lambda _: Shard(dim))
        weight: Any = module.weight
        return weight.detach() if isinstance(weight, DTensor) else weight

    wanted = {name: sharded(tensors[name]) for name in names}
    state: dict[str, Any] = {name: sharded(torch.zeros_like(tensors[name])) for name in names}
    with watched_opens() as opened:
        dcp.load(state, storage_reader=dcp.FileSystemReader(checkpoint))
    wrong = [name for name, tensor in wanted.items() if raw(state[name].to_local()) != raw(tensor.to_local())]
    return wrong, inside(checkpoint, opened)


def load_fsdp(rank: int, world_size: int, hf: Path, checkpoint: Path, dp: int, tp: int) -> tuple[list[str], list[str]]:
    """Load a model with TP and FSDP2; return the names that differ, and the opened files of the checkpoint."""
    with watched_opens() as opened:
        wrong = torch_training.load_and_compare(rank, world_size, hf, checkpoint, dp, tp)
    return wrong, inside(checkpoint, opened)


def inside(root: Path, paths: list[str]) -> list[str]:
    """Return the paths in a directory, relative to it."""
    return sorted({str(Path(path).relative_to(root)) for path in paths if Path(path).is_relative_to(root)})


def _local(tensor: torch.Tensor, whole: torch.Tensor | None = None) -> torch.Tensor:
    """Return the local shard of a tensor, or the same region of another tensor, without communication."""
    if not isinstance(tensor, DTensor):
        return tensor if whole is None else whole
    if whole is not None:
        tensor = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
    return tensor.to_local()


# A trainer with TP and PP


def stage_of_llama(hf: Path, stage: int, first: int, stop: int, last: bool, mesh: DeviceMesh) -> nn.Module:
    """Build one pipeline stage of a Llama under TP, with global names and other weights than `hf`.

    The last stage has a separate head, tied or not.
    """
    config = models.transformers.AutoConfig.from_pretrained(hf)
    config.tie_word_embeddings = False
    model = models.randomize(models.transformers.LlamaForCausalLM(config).to(config.dtype), seed=99)
    inner: Any = model.model
    layers = {str(i): layer for i, layer in enumerate(inner.layers) if first <= i < stop}
    inner.layers = nn.ModuleDict(layers)
    plan: dict[str, ParallelStyle] = {}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"model.layers.*.{name}"] = RowwiseParallel()
    if stage:
        inner.embed_tokens = None
    else:
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    if last:
        plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    else:
        inner.norm = model.lm_head = None
    parallelize_module(model, mesh, plan)
    return model


def load_training(
    rank: int, world_size: int, hf: Path, checkpoint: Path, whole: Path, stages: list[tuple[int, int]], prefix: str
) -> dict[str, list[str]]:
    """Load model and AdamW state of this rank's stage with torch into existing modules.

    Args:
        rank: Global rank, stage * tp + TP rank.
        world_size: Number of ranks, pp * tp.
        hf: HF checkpoint with the config of the model.
        checkpoint: DCP of {"model", "optim"}, as `get_state_dict` returns them.
        whole: File of `torch.save` with every full tensor by its name in the checkpoint.
        stages: First layer and end (exclusive) of each stage.
        prefix: Key of the optimizer state.

    Returns:
        Names that were requested, names that differ from `whole`, and the opened files.
    """
    tp = world_size // len(stages)
    mesh = init_device_mesh("cpu", (len(stages), tp), mesh_dim_names=("pp", "tp"))["tp"]
    stage = rank // tp
    model = stage_of_llama(hf, stage, *stages[stage], stage == len(stages) - 1, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, foreach=False)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, prefix: optimizer_state}
    with watched_opens() as opened:
        dcp.load(state, storage_reader=dcp.FileSystemReader(checkpoint))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state[prefix])
    expected = torch.load(whole, weights_only=True)
    held: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        held[f"model.{name}"] = parameter
        for key, value in optimizer.state[parameter].items():
            held[f"{prefix}.state.{name}.{key}"] = value
    wrong = [name for name, tensor in held.items() if raw(_local(tensor)) != raw(_local(tensor, expected[name]))]
    assert all(group["lr"] == 1e-2 for group in optimizer.param_groups)
    sharded = [name for name, tensor in held.items() if isinstance(tensor, DTensor) and tensor.placements[0].is_shard()]
    dist.barrier()
    return {"asked": sorted(held), "wrong": wrong, "sharded": sharded, "files": inside(checkpoint, opened)}
