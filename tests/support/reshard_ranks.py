"""What ranks do with cut checkpoints: DTensors and trainers of stock torch, run in the workers of a `GlooPool`."""

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
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from tests.support import models, training
from tests.support.stock import raw

Plan = Mapping[str, tuple[int, int | None]]

_opened: list[str] | None = None  # what is opened while somebody looks
_is_watching = False


@contextmanager
def watched_opens() -> Iterator[list[str]]:
    """Paths of every file that this process opens meanwhile."""
    global _opened, _is_watching
    if not _is_watching:  # such a hook stays for the life of the process
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
    """Loads the tensors of this rank's stage as DTensors over `tp` ranks, by stock `dcp.load`.

    Args:
        rank: pp * tp + its place among the tp ranks.
        world_size: pp * tp.
        checkpoint: A DCP.
        whole: A safetensors file of the whole tensors.
        plan: Name -> stage, and the dim to shard, None to replicate.
        tp: Ranks of a stage.

    Returns:
        Names whose local shard is not what torch cuts out of the whole tensor, and the files of the checkpoint opened.
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


def load_fsdp(rank: int, world_size: int, hf: Path, checkpoint: Path, dp: int, tp: int) -> tuple[list[str], list[str]]:
    """Loads a model after TP and FSDP2; names that are wrong, and the files of the checkpoint opened."""
    with watched_opens() as opened:
        wrong = training.load_and_compare(rank, world_size, hf, checkpoint, dp, tp)
    return wrong, inside(checkpoint, opened)


def inside(root: Path, paths: list[str]) -> list[str]:
    """Those of the paths that lie in a directory, seen from there."""
    return sorted({str(Path(path).relative_to(root)) for path in paths if Path(path).is_relative_to(root)})


def _local(tensor: torch.Tensor, whole: torch.Tensor | None = None) -> torch.Tensor:
    """The local part of a tensor, or the same part of another; without asking other ranks."""
    if not isinstance(tensor, DTensor):
        return tensor if whole is None else whole
    if whole is not None:
        tensor = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
    return tensor.to_local()


# A trainer with TP and PP


def stage_of_llama(hf: Path, stage: int, first: int, stop: int, last: bool, mesh: DeviceMesh) -> nn.Module:
    """The part of a Llama that one pipeline stage has, over TP, with other weights than `hf`; its names are global.

    A last stage has a head of its own, tied or not.
    """
    config = models.transformers.AutoConfig.from_pretrained(hf)
    config.tie_word_embeddings = False
    model = models.randomise(models.transformers.LlamaForCausalLM(config).to(config.dtype), seed=99)
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
    """Loads model and AdamW of this rank's stage by stock torch, into live modules.

    Args:
        rank: pp * tp + its place among the tp ranks.
        world_size: pp * tp.
        hf: HF checkpoint that says how large the model is.
        checkpoint: A DCP of {"model", "optim"}, as `get_state_dict` gives them.
        whole: A `torch.save` of every whole tensor by its name in the checkpoint.
        stages: First layer and stop of each stage.
        prefix: Key of the optimizer.

    Returns:
        Names that were asked for, names that are not, bit for bit, the tensors of `whole`, and the files opened.
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
