"""What torch and transformers give each rank of a mesh: asked rank by rank, in one process that only plays them.

That process is a fresh one, since torch remembers what it computed for process groups that are gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.forked_programs import preloaded_context

Shape = tuple[int, ...]
Elements = np.ndarray[Any, np.dtype[np.int64]]  # the local tensor of a rank, each element its index in the whole tensor


@contextmanager
def _as_rank(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def numbered(shape: Shape) -> torch.Tensor:
    """A tensor whose elements are their own row-major indices."""
    return torch.arange(int(np.prod(shape))).reshape(shape)


def fsdp_inside_tp(shape: Shape, dim: int | None, tp: int, dp: int) -> list[Elements]:
    """What each rank of a (dp, tp) mesh holds after TP with `Shard(dim)`, or `Replicate`, and `fully_shard`."""
    held = []
    for rank in range(tp * dp):
        with _as_rank(rank, tp * dp):
            mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
            placement = Replicate() if dim is None else Shard(dim)
            module = nn.Module()
            whole = distribute_tensor(numbered(shape).double(), mesh["tp"], [placement], src_data_rank=None)
            module.weight = nn.Parameter(whole)
            fully_shard(module, mesh=mesh["dp"])
            held.append(module.weight.to_local().detach().long().numpy())
    return held


class Experts(NamedTuple):
    """A tensor of experts on a mesh.

    Attributes:
        shape: Shape of the whole tensor, experts first.
        tp, dp_shard, ep: Sizes of the mesh.
        dim: Dim that FSDP shards inside of an EP rank.
    """

    shape: Shape
    tp: int
    dp_shard: int
    ep: int
    dim: int


def experts_by_rank(case: Experts) -> list[Elements]:
    """Return the elements that each rank of a stage holds after EP with `Shard(0)` and `fully_shard` on one dim."""
    shape, tp, dp_shard, ep, dim = case
    held = []
    for rank in range(tp * dp_shard):
        with _as_rank(rank, tp * dp_shard):
            mesh = init_device_mesh("cpu", (tp * dp_shard // ep, ep), mesh_dim_names=("efsdp", "ep"))
            module = nn.Module()
            whole = distribute_tensor(numbered(shape).double(), mesh["ep"], [Shard(0)], src_data_rank=None)
            module.weight = nn.Parameter(whole)
            fully_shard(module, mesh=mesh["efsdp"], shard_placement_fn=lambda _: Shard(dim))
            held.append(module.weight.to_local().detach().long().numpy())
    return held


class Asked(NamedTuple):
    """What a test file wants to know, so that one process answers it all.

    Attributes:
        fsdp: Cases (shape, dim or None, tp, dp).
        sharded: Cases (shape, dim, tp) of a plain DTensor.
        packed: Cases (n, tp) of two fused halves.
        stages: Cases (layers, stages).
        models: Names of recipes, asked at each of `sizes`.
        sizes: TP sizes.
        experts: Tensors of experts.
    """

    fsdp: list[tuple[Shape, int | None, int, int]]
    sharded: list[tuple[Shape, int, int]]
    packed: list[tuple[int, int]]
    stages: list[tuple[int, int]]
    models: list[str]
    sizes: tuple[int, ...]
    experts: tuple[Experts, ...] = ()


class Model(NamedTuple):
    """A model: its plan, the shapes of its parameters, and by TP size what each rank reads of each of them."""

    plan: dict[str, str]
    shapes: dict[str, Shape]
    held: dict[int, list[dict[str, Elements]]]


class Answers(NamedTuple):
    """By case: what each rank holds, where DTensor says its shard lies, which spans it reads, layers per stage.

    And the names of all styles, and what each rank holds of tensors of experts.
    """

    fsdp: list[list[Elements]]
    sharded: list[list[tuple[Shape, Shape]]]
    packed: list[list[list[tuple[int, int]]]]
    stages: list[list[tuple[int, int]]]
    models: dict[str, Model]
    styles: list[str]
    experts: list[list[Elements]]


def ask(asked: Asked) -> Answers:
    """The answers of torch and transformers, from a fresh process."""
    with preloaded_context().Pool(1) as pool:
        return pool.apply(_answer, (asked,))


def _answer(asked: Asked) -> Answers:
    return Answers(
        [fsdp_inside_tp(*case) for case in asked.fsdp],
        [_sharded(*case) for case in asked.sharded],
        [_packed(*case) for case in asked.packed],
        [_stages(*case) for case in asked.stages],
        {name: _model_by_rank(name, asked.sizes) for name in asked.models},
        _styles(),
        [experts_by_rank(case) for case in asked.experts],
    )


def _styles() -> list[str]:
    from tests.support.transformers_version import parallel_styles

    return parallel_styles()


def _sharded(shape: Shape, dim: int, tp: int) -> list[tuple[Shape, Shape]]:
    return [_compute_local_shape_and_global_offset(shape, (tp,), [rank], [Shard(dim)]) for rank in range(tp)]


def _packed(n: int, tp: int) -> list[list[tuple[int, int]]]:
    from transformers.distributed.sharding_utils import DtensorShardOperation

    slices = DtensorShardOperation._compute_strided_slice
    return [slices(None, [(0, n)], rank, tp, 2) for rank in range(tp)]


def _stages(layers: int, pp: int) -> list[tuple[int, int]]:
    from transformers.distributed.pipeline_parallel import PipelineStage

    return [PipelineStage.layer_range_for_rank(SimpleNamespace(pp_size=pp), rank, layers) for rank in range(pp)]


def _model_by_rank(name: str, sizes: tuple[int, ...]) -> Model:
    from tests.support.models import RECIPES, WIDE

    def make() -> Any:
        with torch.device("meta"):
            model = {**RECIPES, **WIDE}[name].model()
        for tied in model.all_tied_weights_keys:  # a name of its own for each, as when both are on disk
            module, _, leaf = tied.rpartition(".")
            parameter = model.get_parameter(tied)
            setattr(model.get_submodule(module), leaf, nn.Parameter(torch.empty_like(parameter)))
        return model

    plan = dict(make().tp_plan)
    shapes = {key: tuple(value.shape) for key, value in make().named_parameters()}
    by_size: dict[int, list[dict[str, Elements]]] = {}
    for tp in sizes:
        by_size[tp] = []
        for rank in range(tp):
            with _as_rank(rank, tp):
                by_size[tp].append(_read(make(), init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))))
    return Model(plan, shapes, by_size)


def _read(model: Any, mesh: DeviceMesh) -> dict[str, Elements]:
    """What this rank reads of each parameter, as `from_pretrained` reads it."""
    from transformers.distributed.sharding_utils import DtensorShardOperation

    from tests.support.transformers_version import shard_with_transformers

    shard_with_transformers(model, mesh)
    read = {}
    for name, parameter in model.named_parameters():
        source = numbered(tuple(parameter.shape))
        if isinstance(parameter, DTensor):
            source = DtensorShardOperation(parameter).shard_tensor(source)
        read[name] = source.numpy()
    return read
