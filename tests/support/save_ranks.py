"""Functions of the ranks in tests of `save`: shard a model, train it or set its state, save it, and resume.

`set_optimizer_state` does not train. It computes the optimizer moments from each element of the parameters, so that the
full moments are known from the checkpoint for every sharding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from ckptx.errors import CkptxError
from ckptx.formats.hf.reader import read_json
from ckptx.runtime.checkpointing.load import load
from ckptx.runtime.checkpointing.reading import open_source
from ckptx.runtime.checkpointing.save import load_optimizer, save
from ckptx.runtime.model.build import build_model, materialize
from ckptx.runtime.parallel.parallelize import parallelize
from ckptx.runtime.parallel.tensor_parallel.apply import TensorParallelLayout
from ckptx.runtime.parallel.tensor_parallel.plans import find_plan
from tests.support.models import EVERY, Recipe, build, tokens
from tests.support.tensor_parallel import compute
from tests.support.torch_dcp import raw

MARKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp_avg": lambda value: value * 2,
    "exp_avg_sq": lambda value: value.abs() + 1,
}
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Shape(NamedTuple):
    """Parallelism of a model.

    Attributes:
        dp: Number of FSDP2 ranks.
        tp: Number of TP ranks.
        replicate: Number of replicas of the FSDP2 shards (HSDP).
        checkpointing: Activation checkpointing mode.
        compiled: Compile the layers.
    """

    dp: int = 1
    tp: int = 1
    replicate: int = 1
    checkpointing: str = "none"
    compiled: bool = False


TP = Shape(tp=2)


class ShardedModel(NamedTuple):
    """A model that was loaded on a rank, with its optimizer.

    Attributes:
        model: Model with the shards of this rank.
        optimizer: AdamW optimizer with two parameter groups.
        layout: Sharding of the parameters under TP; None without TP.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    layout: TensorParallelLayout | None


def load_sharded_model(source: Path, shape: Shape) -> ShardedModel:
    """Load the model of a checkpoint with ckptx, and create an optimizer without state."""
    sizes, names = (shape.replicate, shape.dp, shape.tp), ("dp_replicate", "dp_shard", "tp")
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    with open_source(source) as opened:
        model = build_model(source, untied=opened.find_untied_names())
    plan = find_plan(model, read_json(source / "config.json")) if shape.tp > 1 else None
    made = parallelize(model, mesh, plan, activation_checkpointing=shape.checkpointing, compile=shape.compiled)
    materialize(model)
    regions = made.layout.local_regions if made.layout is not None else None
    load(model, source, regions=regions)
    return ShardedModel(model, optimizer_of(model), made.layout)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Create AdamW with two parameter groups."""
    matrices = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() <= 1]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, foreach=False)


def set_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Set the optimizer state as after three steps; `MARKS` computes the moments from the parameters."""
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                marks = {key: function(parameter.detach()) for key, function in MARKS.items()}
                optimizer.state[parameter] = {"step": torch.tensor(3.0), **marks}


def train_one_step(at: ShardedModel, index: int) -> None:
    """Train one step; each data-parallel rank has different tokens."""
    ids = (tokens()["input_ids"] + index + 7 * dp_rank(at.model)) % 101
    at.model.train()
    compute(at.model, {"input_ids": ids})[1].backward()
    at.optimizer.step()
    at.optimizer.zero_grad()


def dp_rank(model: nn.Module) -> int:
    """Return the FSDP2 rank of this process; 0 if the model is not sharded with FSDP2."""
    meshes = (getattr(parameter, "device_mesh", None) for parameter in model.parameters())
    mesh = next((each for each in meshes if each is not None and "dp_shard" in (each.mesh_dim_names or ())), None)
    return 0 if mesh is None else int(mesh.get_local_rank("dp_shard"))


def save_with_known_state(rank: int, world_size: int, hf: Path, out: Path, shape: Shape) -> None:
    """Save the loaded model and the known optimizer state to `out`."""
    at = load_sharded_model(hf, shape)
    set_optimizer_state(at.optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        save(at.model, at.optimizer, out, layout=at.layout, step=3, base=hf)


def reshard_through_load(rank: int, world_size: int, source: Path, out: Path, shape: Shape) -> None:
    """Load a checkpoint of another mesh, and save it again."""
    at = load_sharded_model(source, shape)
    load_optimizer(at.optimizer, at.model, source, layout=at.layout)
    save(at.model, at.optimizer, out, layout=at.layout, step=3)


def save_without_layout(rank: int, world_size: int, hf: Path, out: Path, by: str) -> str | None:
    """Save with only the placements of DTensors.

    Args:
        by: "stock" for `dcp.save`, or "save" for `save` without the TP layout.

    Returns:
        The error message; None if the save succeeded.
    """
    at = load_sharded_model(hf, TP)
    set_optimizer_state(at.optimizer)
    state = {"model": at.model.state_dict(), "optim": get_optimizer_state_dict(at.model, at.optimizer, options=_FLAT)}
    try:
        if by == "stock":
            dcp.save(state, checkpoint_id=out)
        else:
            save(at.model, at.optimizer, out)
    except (CkptxError, CheckpointException) as error:
        return str(error)
    return None


def save_two_steps(rank: int, world_size: int, hf: Path, out: Path, shape: Shape) -> dict[str, bytes]:
    """Save after one step, and after a second one.

    Returns:
        Bytes of the parameters and first moments after the first step, gathered by torch.
    """
    at = load_sharded_model(hf, shape)
    train_one_step(at, 0)
    save(at.model, at.optimizer, out / "one", layout=at.layout, step=1, base=hf)
    gathered = {name: raw(value) for name, value in at.model.state_dict().items()}
    moments = get_optimizer_state_dict(at.model, at.optimizer)["state"]
    gathered |= {f"{name}.exp_avg": raw(state["exp_avg"]) for name, state in moments.items()}
    train_one_step(at, 1)
    save(at.model, at.optimizer, out / "two", layout=at.layout, step=2, base=hf)
    return gathered


def resume_and_save(rank: int, world_size: int, source: Path, out: Path, shape: Shape, by: str) -> None:
    """Load `source/one`, save it again to `out/one`, and train the second step.

    Args:
        by: Library that loads the optimizer, "ckptx" or "torch".
    """
    at = load_sharded_model(source / "one", shape)
    if by == "ckptx":
        load_optimizer(at.optimizer, at.model, source / "one", layout=at.layout)
    else:
        state = {"optim": get_optimizer_state_dict(at.model, at.optimizer, options=_FLAT), "step": 0}
        dcp.load(state, storage_reader=dcp.FileSystemReader(source / "one"))
        assert state["step"] == 1
        set_optimizer_state_dict(at.model, at.optimizer, state["optim"], options=_FLAT)
    save(at.model, at.optimizer, out / "one", layout=at.layout, step=1)
    train_one_step(at, 1)
    save(at.model, at.optimizer, out / "two", layout=at.layout, step=2)


def resume_without_optimizer(rank: int, world_size: int, hf: Path, out: Path) -> None:
    """Load an optimizer from a checkpoint that has only the model."""
    at = load_sharded_model(hf, Shape())
    save(at.model, None, out / "one")
    load_optimizer(at.optimizer, at.model, out / "one")


def save_stage(rank: int, world_size: int, hf: Path, out: Path) -> None:
    """Save a model with two layers, one per rank; the embedding is on the first rank, the head on the last."""
    model: Any = build_model(hf)
    model.model.layers[1 - rank] = nn.Identity()
    if rank:
        model.model.embed_tokens = nn.Identity()
    else:
        model.model.norm = model.lm_head = nn.Identity()
    materialize(model)
    load(model, hf)
    optimizer = optimizer_of(model)
    set_optimizer_state(optimizer)
    save(model, optimizer, out, step=3)


def save_and_return_error(rank: int, world_size: int, hf: Path, out: Path, how: str) -> str:
    """Return the class and message of the error of `save` on this rank, or "saved"."""
    at = load_sharded_model(hf, Shape(dp=world_size))
    optimizer: Any = at.optimizer
    set_optimizer_state(optimizer)
    first = next(iter(optimizer.state))
    if how == "another model":
        optimizer = optimizer_of(nn.Linear(3, 3))
    elif how == "plain state" and rank:
        optimizer.state[first]["exp_avg"] = optimizer.state[first]["exp_avg"].to_local()
    elif how == "nested state":
        optimizer.state[first]["exp_avg"] = {"a": torch.zeros(1)}
    full = OSError(28, "No space left on device")
    fails = mock.patch("torch.distributed.checkpoint.filesystem._write_item", side_effect=full)
    with fails if how == "full disk" and rank else mock.MagicMock():
        try:
            save(at.model, optimizer, out)
        except CkptxError as error:
            return f"{type(error).__name__}: {error}"
    return "saved"


def multi_query() -> Any:
    """Build a GPT-BigCode, with q, k and v in one matrix and one key-value head, so that groups differ in width."""
    config = transformers.GPTBigCodeConfig(
        vocab_size=101, n_embd=32, n_head=4, n_layer=2, n_positions=64, multi_query=True, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPTBigCodeForCausalLM(config)


def write(name: str, path: Path) -> Path:
    """Write an HF checkpoint of a recipe in float32."""
    recipe = EVERY[name] if name != "multi-query" else Recipe(multi_query, tokens)
    build(recipe).float().save_pretrained(path)
    return path
