"""FSDP2 that computes in bfloat16 inside of stages: gradients are those of FSDP2 without stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from ckptx.errors import UnsupportedError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.runtime.parallel.distributed import data_index, mesh_of
from ckptx.runtime.parallel.gradients import sync_gradients
from ckptx.runtime.parallel.parallelize import parallelize
from ckptx.runtime.parallel.pipeline.plan import plan_pipeline
from tests.support.models import Inputs
from tests.support.pool import GlooPool
from tests.support.staged_models import (
    build_deep_model,
    build_rank_stages,
    gradients_of,
    loss_of,
    max_relative_difference,
    microbatches,
    output_of,
)

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
COUNT = 4
Found = tuple[list[Tensor], dict[str, Tensor], set[str]]


def batches_of(name: str, length: int) -> list[Inputs]:
    """Of all data ranks, with texts of a length, or as they are."""
    found = microbatches(name, 2 * COUNT)
    if length:
        for index, batch in enumerate(found):
            batch["input_ids"] = (torch.arange(2 * length).reshape(2, length) * 5 + 7 * index) % 80 + 3
    return found


def staged(rank: int, world_size: int, name: str, schedule: str, length: int, policy: Any = POLICY) -> Found:
    """Logits of this data rank, gradients of this stage, and the dtypes that are sent."""
    mesh = mesh_of(ParallelDims(pp=2, dp_shard=2), "cpu")
    batches = batches_of(name, length)
    run = build_rank_stages(name, schedule, batches[:1], mesh=mesh, count=COUNT, mixed_precision=policy)
    begin = COUNT * data_index(mesh)
    run.step(batches[begin : begin + COUNT])
    gradients: dict[str, Tensor] = {}
    for model in run.models.values():
        assert {each.dtype for each in model.parameters()} == {torch.float32}
        gradients |= gradients_of(model)
    sent = {str(place.dtype) for places in run.pipeline._payload_slots.values() for place in places}
    return [run.logits[index] for index in sorted(run.logits)], gradients, sent


def whole(rank: int, world_size: int, name: str, length: int) -> Found:
    """The same without stages."""
    mesh = mesh_of(ParallelDims(dp_shard=2), "cpu")
    model = build_deep_model(name)
    parallelize(model, mesh, None, mixed_precision=POLICY)
    logits = []
    for index, batch in enumerate(batches_of(name, length)[COUNT * rank : COUNT * rank + COUNT]):
        sync_gradients(model, index == COUNT - 1)
        logits.append(output_of(model(**batch)))
        loss_of(logits[-1], COUNT).backward()
    return [each.detach() for each in logits], gradients_of(model), set()


_WHOLE: dict[tuple[str, int], list[Found]] = {}


def without_stages(pool: GlooPool, name: str, length: int) -> list[Found]:
    """`whole` on two ranks, which two tests of this file want alike."""
    if (name, length) not in _WHOLE:
        _WHOLE[name, length] = pool.run(whole, 2, name, length)
    return _WHOLE[name, length]


@pytest.mark.parametrize(
    ("name", "schedule", "length", "sent"),
    [
        pytest.param("llama-untied", "1f1b", 0, {"torch.bfloat16"}, marks=pytest.mark.slow),
        ("llama-tied", "interleaved1f1b", 297, {"torch.bfloat16"}),  # of which bfloat16 makes 296
        pytest.param("gemma4-ple", "1f1b", 0, {"torch.bfloat16"}, marks=pytest.mark.slow),
        pytest.param("qwen3-vl", "1f1b", 0, {"torch.bfloat16"}, marks=pytest.mark.slow),
        pytest.param("gemma3-vlm", "gpipe", 0, {"torch.bfloat16"}, marks=pytest.mark.slow),
        pytest.param("t5", "1f1b", 0, {"torch.bfloat16"}, marks=pytest.mark.slow),
        pytest.param("mixtral", "1f1b", 0, {"torch.bfloat16"}, marks=pytest.mark.slow),
    ],
)
def test_stages_compute_what_the_model_computes_in_bfloat16(
    pool: GlooPool, name: str, schedule: str, length: int, sent: set[str]
) -> None:
    by_rank = pool.run(staged, 4, name, schedule, length)
    one = without_stages(pool, name, length)
    gradients = one[0][1]
    for rank, (logits, found, dtypes) in enumerate(by_rank):
        assert dtypes == sent
        assert max_relative_difference({key: gradients[key] for key in found}, found) < 1e-2, (
            "bfloat16 has 8 bits; ties are summed later"
        )
        wanted = one[rank % 2][0]
        assert all(map(torch.equal, logits, wanted))
    assert sum(bool(logits) for logits, *_ in by_rank) == 2


def test_without_mixed_precision_the_measure_sees_what_bfloat16_rounds(pool: GlooPool) -> None:
    found = pool.run(staged, 4, "llama-untied", "1f1b", 0, MixedPrecisionPolicy())
    one = without_stages(pool, "llama-untied", 0)
    assert found[0][2] == {"torch.float32"}
    for _, gradients, _ in found:
        assert max_relative_difference({key: one[0][1][key] for key in gradients}, gradients) > 1e-2


def refused(rank: int, world_size: int) -> str:
    """What is said of a schedule that FSDP2 does not go with, on one data rank that mixes precisions."""
    dims = ParallelDims(pp=2)
    mesh, model = mesh_of(dims, "cpu"), build_deep_model("llama-untied")
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    cut = plan_pipeline(model, config, dims, microbatches=COUNT, schedule="zbvzerobubble")
    models = cut.models(model, mesh)
    for each in models.values():
        parallelize(each, mesh, None, mixed_precision=POLICY)
    try:
        cut.pipeline(models, mesh)
    except UnsupportedError as error:
        return str(error)
    return ""


def test_a_split_backward_is_refused_with_mixed_precision_on_one_data_rank_too(pool: GlooPool) -> None:
    for said in pool.run(refused, 2):
        assert said.startswith("--schedule zbvzerobubble: with FSDP2 (which manages these stages)")
