"""Shard, train, save and load a model on several ranks with torch, without ckptx.

The functions run in the workers of a `GlooPool`.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support import models
from tests.support.pool import GlooPool
from tests.support.torch_dcp import raw


def shard(model: Any, dp: int, tp: int) -> Any:
    """Shard with FSDP2 over `dp` ranks and TP over `tp` ranks, as torchtitan does; a size of 1 omits the axis."""
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    if tp > 1:
        plan: dict[str, Any] = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        }
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            plan[f"model.layers.*.{name}"] = ColwiseParallel()
        for name in ("mlp.gate_proj", "mlp.up_proj"):
            # A local output would lose the information that its shards are uneven.
            plan[f"model.layers.*.{name}"] = ColwiseParallel(use_local_output=False)
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"model.layers.*.{name}"] = RowwiseParallel()
        parallelize_module(model, mesh["tp"], plan)
    if dp > 1:
        options = {"mesh": mesh["dp"], "mp_policy": MixedPrecisionPolicy()}
        for layer in model.model.layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)
    return model


def shard_replicated(model: Any, world_size: int) -> Any:
    """Shard with HSDP: two groups of ranks have the same shards."""
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(model, mesh=mesh)


def shard_columns(model: Any, world_size: int) -> Any:
    """Shard with FSDP2 along the last dimension where torch allows it, which requires even shards."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))

    def last_dim(parameter: torch.Tensor) -> Shard:
        return Shard(0 if parameter.shape[-1] % world_size else parameter.dim() - 1)

    return fully_shard(model, mesh=mesh, shard_placement_fn=last_dim)


def save_otherwise_sharded(rank: int, world_size: int, hf: Path, out: Path, how: str) -> None:
    """Train the model of `hf` one step, sharded by `shard_replicated` or `shard_columns`, and save it."""
    shard_model = {"replicated": shard_replicated, "columns": shard_columns}[how]
    model = shard_model(models.load(hf), world_size)
    step(model)
    state = get_model_state_dict(model)
    save({"model": state}, out / "dcp")
    full = {name: _full(tensor) for name, tensor in state.items()}
    if rank == 0:
        save_file({name: tensor.clone() for name, tensor in full.items()}, out / "expected.safetensors")


def step(model: Any) -> torch.optim.Optimizer:
    """Train one step of AdamW, so that every parameter changes and has state."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    tokens = models.tokens()["input_ids"]
    model(input_ids=tokens, use_cache=False).logits.float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


class App(Stateful):
    """Model and optimizer under one key, as in the PyTorch tutorial for DCP."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._parts = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(*self._parts)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("this state is only saved")


def train_and_save(
    rank: int, world_size: int, hf: Path, out: Path, dp: int, tp: int, layout: str, threads: int
) -> dict[str, int]:
    """Train the model of `hf` one step, and save it to `out/dcp` in the layout of a trainer.

    Rank 0 writes the full model to `out/expected.safetensors`.

    Returns:
        {"sharded": number of DTensors in the state dict of the model}.
    """
    assert dp * tp == world_size
    model = shard(models.load(hf), dp, tp)
    optimizer = step(model)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    if layout == "bare":
        save(model_state, out / "dcp", threads)
    elif layout == "model-optim":
        save({"model": model_state, "optim": optimizer_state}, out / "dcp", threads)
    elif layout == "state":
        save({"state": {"model": model_state, "optimizers": optimizer_state}, "step": 1}, out / "dcp", threads)
    elif layout == "app":
        save({"app": App(model, optimizer)}, out / "dcp", threads)
    elif layout == "accelerate":
        save({"model": model_state}, out / "dcp" / "pytorch_model_fsdp_0", threads)
        save({"optimizer": optimizer_state}, out / "dcp" / "optimizer_0", threads)
    elif layout == "two-directories":
        save(model_state, out / "dcp" / "model", threads)
        save(optimizer_state, out / "dcp" / "optim", threads)
    elif layout == "flattened":
        flat = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))[1]
        save({"model": model_state, "optimizer": flat}, out / "dcp", threads)
    else:
        raise ValueError(layout)
    full = {name: _full(tensor) for name, tensor in model_state.items()}
    if rank == 0:
        save_file({name: tensor.clone() for name, tensor in full.items()}, out / "expected.safetensors")
    return {"sharded": sum(isinstance(tensor, DTensor) for tensor in model_state.values())}


_TRAINED: dict[tuple[bytes, int, int, str, int], Path] = {}


def trained_once(pool: GlooPool, hf: Path, out: Path, dp: int, tp: int, layout: str, threads: int = 1) -> Path:
    """Run `train_and_save` with output in `out`, or copy the output of an earlier test with the same arguments.

    Returns:
        Path of the checkpoint.
    """
    content = hashlib.blake2b(b"".join(each.read_bytes() for each in sorted(hf.iterdir()))).digest()
    key = (content, dp, tp, layout, threads)
    if key in _TRAINED:
        shutil.copytree(_TRAINED[key] / "dcp", out / "dcp")
        shutil.copy(_TRAINED[key] / "expected.safetensors", out)
    else:
        pool.run(train_and_save, dp * tp, hf, out, dp, tp, layout, threads)
        _TRAINED[key] = out
    return out / "dcp"


def save(state: dict[str, Any], path: Path, threads: int = 1) -> None:
    """Save a state dict with stock `dcp.save`; `threads` is the number of files per rank."""
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, thread_count=threads))


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().contiguous()


def load_and_compare(
    rank: int, world_size: int, hf: Path, checkpoint: Path, dp: int, tp: int, untie: bool = False
) -> list[str]:
    """Load a DCP with stock `dcp.load` into a sharded model with other weights.

    Args:
        hf: HF checkpoint with the expected weights.
        checkpoint: DCP to load.
        dp: Number of FSDP2 ranks.
        tp: Number of TP ranks.
        untie: Use a separate head, so that `lm_head.weight` is loaded in addition to the embedding.

    Returns:
        Names that differ from `hf`, bit for bit; "nothing was sharded" is appended if no parameter was sharded.
    """
    config = models.transformers.AutoConfig.from_pretrained(hf)
    if untie:
        config.tie_word_embeddings = False
    dtype = config.dtype
    model = models.transformers.LlamaForCausalLM(config).to(dtype)
    models.randomize(model, seed=99)
    model = shard(model, dp, tp)
    state = get_model_state_dict(model)
    dcp.load(state, storage_reader=dcp.FileSystemReader(checkpoint))
    expected = models.read_hf(hf)
    if untie:
        assert "lm_head.weight" in state
        expected.setdefault("lm_head.weight", expected["model.embed_tokens.weight"])
    assert state.keys() >= expected.keys()
    wrong = [name for name, tensor in expected.items() if raw(state[name]) != raw(tensor)]
    sharded = [t for t in state.values() if isinstance(t, DTensor) and any(isinstance(p, Shard) for p in t.placements)]
    return wrong if sharded else [*wrong, "nothing was sharded"]
