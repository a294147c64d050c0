"""Norms of gradients over pipeline stages, against torch's own on the model in one piece."""

from __future__ import annotations

from functools import cache
from math import inf
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from ckptx.layout.parallel_dims import ParallelDims
from ckptx.runtime.model.layers import canonical_name
from ckptx.runtime.parallel.distributed import data_index, mesh_of
from ckptx.runtime.parallel.gradients import NonFiniteGradients
from ckptx.runtime.parallel.pipeline import pipeline as under_test
from tests.support.pool import GlooPool
from tests.support.staged_models import (
    RankStages,
    build_deep_model,
    build_rank_stages,
    gradients_of,
    loss_of,
    max_relative_difference,
    microbatches,
    output_of,
)

ORDERS = (2.0, inf, 3.0)
MOST = 0.05
COUNT = 4  # microbatches of a data rank


Expected = list[tuple[float, dict[str, Tensor]]]


@cache
def expected(name: str, rows: int, *orders: float) -> Expected:
    """For each order: the norm and the clipped gradients of the model in one piece, by torch."""
    model = build_deep_model(name)
    for batch in microbatches(name, rows):
        loss_of(output_of(model(**batch)), rows).backward()
    gradients = {key: each.grad.clone() for key, each in model.named_parameters() if each.grad is not None}
    found = []
    for order in orders:
        for key, gradient in gradients.items():
            model.get_parameter(key).grad = gradient.clone()
        found.append((float(nn.utils.clip_grad_norm_(model.parameters(), MOST, order)), gradients_of(model)))
    return found


def stepped(name: str, schedule: str, dims: ParallelDims) -> RankStages:
    """The stages of this rank after one step."""
    mesh = mesh_of(dims, "cpu")
    batches = microbatches(name, COUNT * dims.dp)
    run = build_rank_stages(name, schedule, batches[:1], mesh=mesh, count=COUNT)
    begin = COUNT * data_index(mesh)
    run.step(batches[begin : begin + COUNT])
    return run


def clipped(
    rank: int, world_size: int, name: str, schedule: str, dims: ParallelDims, by_torch: Expected
) -> list[tuple[str, float, float]]:
    """For each order: the norm, how far it is from torch's, and how far the furthest gradient."""
    run = stepped(name, schedule, dims)
    parameters = [each for model in run.models.values() for each in model.parameters() if each.grad is not None]
    gradients = [each.grad.clone() for each in parameters]
    found = []
    for order, (wanted, whole) in zip(ORDERS, by_torch, strict=True):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        total = run.pipeline.clip_grad_norm(MOST, order)
        assert type(total) is Tensor and not total.shape and total.dtype is torch.float32
        here: dict[str, Tensor] = {}
        for model in run.models.values():
            here |= gradients_of(model)
        away = max_relative_difference({key: whole[key] for key in here}, here)
        found.append((float(total).hex(), abs(float(total) - wanted) / wanted, away))
    return found


CASES = [
    ("llama-tied", "zbvzerobubble", ParallelDims(pp=2)),
    ("llama-untied", "interleaved1f1b", ParallelDims(pp=2)),
    ("llama-tied", "1f1b", ParallelDims(pp=2, tp=2)),
    ("llama-tied", "1f1b", ParallelDims(pp=2, dp_shard=2)),
]
WIDE = [
    (name, schedule, dims)
    for name in ("llama-tied", "llama-untied", "gemma4-shared-kv", "mixtral")
    for schedule in ("gpipe", "1f1b", "interleaved1f1b", "zbvzerobubble")
    for dims in (
        ParallelDims(pp=2), ParallelDims(pp=4), ParallelDims(pp=2, tp=2), ParallelDims(pp=2, dp_shard=2),
        ParallelDims(pp=2, dp_replicate=2),
    )
    if (name, schedule, dims) not in CASES
    and not (schedule == "zbvzerobubble" and dims.dp > 1)
    and not (dims.pp == 4 and schedule in ("interleaved1f1b", "zbvzerobubble"))  # six layers
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "schedule", "dims"), [*CASES, *(pytest.param(*each, marks=pytest.mark.slow) for each in WIDE)]
)
def test_the_norm_is_that_of_the_model_in_one_piece(
    pool: GlooPool, name: str, schedule: str, dims: ParallelDims
) -> None:
    by_rank = pool.run(clipped, dims.world_size, name, schedule, dims, expected(name, COUNT * dims.dp, *ORDERS))
    for each in zip(*by_rank, strict=True):
        assert len({total for total, _, _ in each}) == 1, "every rank of every stage clips by the same bits"
        assert max(norm for _, norm, _ in each) < 1e-5, "float32, added in another order"
        assert max(away for *_, away in each) < 2e-4, "of the largest of each; TP adds in another order"


def counted(rank: int, world_size: int, schedule: str, is_once: bool) -> tuple[float, float]:
    """The norm, with or without what says which copies of a tie are counted elsewhere; and that of the tie alone."""
    run = stepped("llama-tied", schedule, ParallelDims(pp=2))
    copies = [
        each
        for model in run.models.values()
        for name, each in model.named_parameters()
        if canonical_name(name) in ("model.embed_tokens.weight", "lm_head.weight")
    ]
    tie = float(torch.linalg.vector_norm(copies[0].grad)) if copies else 0.0
    given = {} if is_once else {"find_later_copies": lambda *_: []}
    with mock.patch.multiple(under_test, **given) if given else mock.MagicMock():
        return float(run.pipeline.clip_grad_norm(inf)), tie


@pytest.mark.parametrize("schedule", ["1f1b", "zbvzerobubble"])
def test_a_tie_that_counted_twice_would_be_seen(pool: GlooPool, schedule: str) -> None:
    """Of copies on two ranks, and of two on one rank."""
    once, tie = pool.run(counted, 2, schedule, True)[0]
    twice, _ = pool.run(counted, 2, schedule, False)[0]
    assert twice == pytest.approx((once**2 + tie**2) ** 0.5, rel=1e-6)
    assert twice > 1.001 * once
    assert once == pytest.approx(expected("llama-tied", COUNT, 2.0)[0][0], rel=1e-6)


def spoiled(rank: int, world_size: int) -> Any:
    """What is said of a NaN on the second stage, and what becomes of the gradients."""
    run = stepped("llama-untied", "1f1b", ParallelDims(pp=2))
    ((_, model),) = run.models.items()
    if rank == 1:
        model.get_parameter("model.norm.weight").grad[0] = torch.inf
    before = {name: each.grad.clone() for name, each in model.named_parameters()}
    said = ""
    try:
        run.pipeline.clip_grad_norm(1.0, error_if_nonfinite=True)
    except NonFiniteGradients as error:
        said = str(error)
    is_left = all(torch.equal(before[name], each.grad) for name, each in model.named_parameters())
    total = run.pipeline.clip_grad_norm(1.0)
    return (
        said,
        is_left,
        float(total),
        bool(model.get_parameter("model.layers.0.mlp.up_proj.weight").grad.any()) if rank == 0 else False,
    )


def test_a_norm_that_is_not_finite_is_refused_on_every_stage(pool: GlooPool) -> None:
    for rank, (said, is_left, total, is_anything_left) in enumerate(pool.run(spoiled, 2)):
        where = "in model.norm.weight" if rank else "on other ranks"
        assert f"the norm of order 2.0 is inf due to gradients {where}, must be finite" in said
        assert is_left
        assert total == inf
        assert not is_anything_left, "divided by infinity, as torch does"
