"""Norms of gradients, clipping and accumulation on meshes, against torch in one process."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import inf
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ckptx.errors import UsageError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.runtime.model.layers import canonical_name
from ckptx.runtime.parallel.distributed import mesh_of
from ckptx.runtime.parallel.gradients import NonFiniteGradients, clip_grad_norm, loss_divisor, sync_gradients
from ckptx.runtime.parallel.parallelize import parallelize
from ckptx.runtime.parallel.shards import find_local_shards, narrow_to
from ckptx.runtime.parallel.tensor_parallel.plans import find_plan
from tests.support.models import EVERY, Recipe, build, tokens
from tests.support.pool import GlooPool
from tests.support.save_ranks import multi_query
from tests.support.slow import slow_but

TP, DP, BOTH = ParallelDims(tp=2), ParallelDims(dp_shard=2), ParallelDims(tp=2, dp_shard=2)
REPLICAS = ParallelDims(tp=2, dp_replicate=2)
ORDERS = (2.0, inf, 3.0)
MOST = 0.05


def model_of(name: str) -> Any:
    recipe = EVERY[name] if name != "multi-query" else Recipe(multi_query, tokens)
    return build(recipe).float().eval()


def cut(name: str, dims: ParallelDims) -> tuple[Any, Any, Any]:
    """A model of a recipe on a mesh, the mesh, and what TP did."""
    mesh = mesh_of(dims, "cpu")
    model = model_of(name)
    plan = find_plan(model, {**model.config.to_dict(), "architectures": [type(model).__name__]})
    done = parallelize(model, mesh, plan if dims.tp > 1 else None)
    return model, mesh, done.layout


def loss_of(model: Any, row: int) -> torch.Tensor:
    return model(input_ids=(tokens()["input_ids"] + 3 * row) % 97).logits.float().pow(2).mean()  # type: ignore


def differences(model: Any, layout: Any, wanted: dict[str, torch.Tensor]) -> Iterator[float]:
    """How far what this rank has of each gradient is from that part of another one, which is whole."""
    for key, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        name, gradient = canonical_name(key), parameter.grad
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        for piece in find_local_shards(name, gradient, layout.local_regions(name) if layout is not None else None):
            difference = narrow_to(local, piece.local) - narrow_to(wanted[name], piece.region)
            yield float(difference.abs().max())


# ------------------------------------------------------------------------------------------------ norm


def expected(name: str, rows: int) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """For each order, the norm and the clipped gradients of the mean over rows, by torch on the model in one piece."""
    model = model_of(name)
    for row in range(rows):
        (loss_of(model, row) / rows).backward()
    gradients = {key: each.grad for key, each in model.named_parameters() if each.grad is not None}
    found = []
    for order in ORDERS:
        for key, gradient in gradients.items():
            model.get_parameter(key).grad = gradient.clone()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MOST, order)
        found.append((float(norm), {key: model.get_parameter(key).grad for key in gradients}))
    return found


def clipped(rank: int, world_size: int, name: str, dims: ParallelDims) -> list[tuple[float, float, float]]:
    """For each order of the norm: the norm, how far it is from torch's, and how far the furthest gradient."""
    model, _, layout = cut(name, dims)
    _, data, _ = dims.coordinates(rank)
    found = []
    for order, (wanted, gradients) in zip(ORDERS, expected(name, dims.dp), strict=True):
        model.zero_grad()
        loss_of(model, data).backward()
        total = clip_grad_norm(model if order == 2.0 else model.parameters(), MOST, order)
        assert type(total) is torch.Tensor and not total.shape
        furthest = max(differences(model, layout, gradients)) / MOST
        found.append((float(total), abs(float(total) - wanted) / wanted, furthest))
    return found


CASES = [("llama-tied", BOTH), ("multi-query", TP), ("mixtral", REPLICAS), ("phi3", DP)]
WIDE = [
    (name, dims)
    for name in ("llama-tied", "gpt2", "multi-query", "mixtral", "phi3", "t5", "qwen3", "deepseek-v3")
    for dims in (TP, DP, BOTH, REPLICAS, ParallelDims(dp_shard=2, dp_replicate=2))
    if (name, dims) not in CASES and name != "t5"
]


@pytest.mark.parametrize(("name", "dims"), [*CASES, *(pytest.param(*each, marks=pytest.mark.slow) for each in WIDE)])
def test_the_norm_is_that_of_one_process(pool: GlooPool, name: str, dims: ParallelDims) -> None:
    by_rank = pool.run(clipped, dims.world_size, name, dims)
    for each in zip(*by_rank, strict=True):
        assert len({total for total, _, _ in each}) == 1, "every rank clips by the same bits"
        assert max(norm for _, norm, _ in each) < 1e-5, "float32, added in another order"
        assert max(furthest for *_, furthest in each) < 1e-4


def kinds(rank: int, world_size: int) -> list[Any]:
    """Norms of gradients of every kind at once, each rank's own numbers chosen by hand."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    dp, tp = mesh.get_local_rank("dp_shard"), mesh.get_local_rank("tp")

    def parameter(mesh: Any, placements: Any, own: float, grads: Any = None) -> nn.Parameter:
        made = nn.Parameter(DTensor.from_local(torch.zeros(1), mesh, placements, run_check=False))
        made.grad = DTensor.from_local(torch.tensor([own]), mesh, grads or placements, run_check=False)
        return made

    plain, without = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    plain.grad = torch.tensor([1.0, -2.0])
    frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
    both = parameter(mesh, [Shard(0), Shard(0)], 3.0 + 2 * dp + tp)  # 3 4 5 6
    rows = parameter(mesh["dp_shard"], [Shard(0)], 7.0 + dp)  # 7 8
    columns = parameter(mesh["tp"], [Shard(0)], 9.0 + tp)  # 9 10
    summands = parameter(mesh["tp"], [Replicate()], 5.0 + tp, [Partial()])  # 11, by the sum of both
    half = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    half.grad = torch.full_like(half, 12.0)
    if rank:  # a gradient that one rank alone lacks
        both.grad = both.grad if rank != 3 else None
    every = [plain, without, frozen, both, rows, columns, summands, half, plain, rows]  # two of them twice
    return [float(clip_grad_norm(every, inf, order)) for order in (2.0, inf, 1.0)]


def test_every_kind_of_gradient_counts_once(pool: GlooPool) -> None:
    numbers = torch.tensor([1.0, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12], dtype=torch.float64)
    wanted = [float(torch.linalg.vector_norm(numbers, order)) for order in (2.0, inf, 1.0)]
    for found in pool.run(kinds, 4):
        assert found == pytest.approx(wanted, rel=1e-6)


def spoiled(rank: int, world_size: int) -> Any:
    """What is said of a NaN that one rank has, and what becomes of the gradients."""
    model, *_ = cut("llama-untied", BOTH)
    loss_of(model, 0).backward()
    norm = model.get_parameter("model.norm.weight").grad.to_local()
    if rank >= 2:  # a half of it, that both TP ranks have
        norm[0] = torch.nan
    before = norm.clone()
    said = ""
    try:
        clip_grad_norm(model, 1.0, error_if_nonfinite=True)
    except NonFiniteGradients as error:
        said = str(error)
    is_left = bool(torch.equal(before, norm) or rank >= 2)
    return said, is_left, float(clip_grad_norm(model, 1.0)), isinstance(NonFiniteGradients("x"), RuntimeError)


def test_a_norm_that_is_not_finite_is_refused_where_asked_by_name(pool: GlooPool) -> None:
    for rank, (said, is_left, total, is_runtime_error) in enumerate(pool.run(spoiled, 4)):
        where = "in model.norm.weight" if rank >= 2 else "on other ranks"
        assert f"the norm of order 2.0 is nan due to gradients {where}, must be finite" in said
        assert is_left and total != total and is_runtime_error


def test_nothing_to_clip_is_zero_and_a_norm_of_order_zero_is_refused() -> None:
    assert float(clip_grad_norm([nn.Parameter(torch.zeros(3))], 1.0)) == 0.0
    assert float(clip_grad_norm(nn.Identity(), 1.0)) == 0.0
    with pytest.raises(UsageError, match="norm_type is 0, must be above 0 or inf"):
        clip_grad_norm(nn.Identity(), 1.0, 0)


# ------------------------------------------------------------------------------------------------ accumulation


def labels_of(data: int, microbatch: int) -> torch.Tensor:
    """Other numbers of labels in each microbatch of each data rank."""
    labels = (tokens()["input_ids"] + data + 5 * microbatch) % 97
    labels[:, : 1 + 2 * data + microbatch] = -100
    return labels


def accumulated(rank: int, world_size: int, name: str, dims: ParallelDims, syncs: bool) -> tuple[float, float]:
    """Two microbatches: how far gradients and the mean loss are from those of one process with all rows in one."""
    model, mesh, layout = cut(name, dims)
    _, data, _ = dims.coordinates(rank)
    labels = [labels_of(data, index) for index in range(2)]
    items = loss_divisor(labels, mesh)
    losses = torch.zeros(())
    for index, each in enumerate(labels):
        if syncs:
            sync_gradients(model, index == 1)
        loss = model(input_ids=each.clamp(min=0), labels=each, num_items_in_batch=items).loss
        loss.backward()
        losses += loss.detach()
    every = torch.cat([labels_of(at, index) for at in range(dims.dp) for index in range(2)])
    reference = model_of(name)
    wanted = reference(input_ids=every.clamp(min=0), labels=every).loss
    wanted.backward()
    gradients = {key: each.grad for key, each in reference.named_parameters()}
    furthest = max(differences(model, layout, gradients)) / max(float(each.abs().max()) for each in gradients.values())
    torch.distributed.all_reduce(losses)
    return furthest, abs(float(losses) / world_size - float(wanted)) / float(wanted)


@pytest.mark.parametrize(
    ("dims", "syncs"),
    slow_but(product((BOTH, REPLICAS, DP, TP), (True, False)), [(BOTH, True), (DP, False), (TP, True)]),
)
def test_every_label_of_a_step_counts_the_same(pool: GlooPool, dims: ParallelDims, syncs: bool) -> None:
    for furthest, loss in pool.run(accumulated, dims.world_size, "llama-tied", dims, syncs):
        assert furthest < 1e-4, "float32, added in another order"
        assert loss < 1e-5
