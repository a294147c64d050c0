"""Data ranks of FSDP2 with other kinds of inputs in one microbatch: gradients are those of one process."""

from __future__ import annotations

import logging
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ckptx.errors import UnsupportedError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.runtime.model.tiny_model import make_text_batch
from ckptx.runtime.parallel.distributed import data_index, mesh_of
from ckptx.runtime.parallel.gradients import clip_grad_norm
from ckptx.runtime.parallel.mixed_inputs import MixedInputs
from ckptx.runtime.parallel.parallelize import parallelize
from ckptx.runtime.parallel.tensor_parallel.plans import find_plan
from ckptx.runtime.parity.execution import full_tensor
from ckptx.runtime.parity.inputs.batch import make_inputs
from tests.support.models import EVERY, Inputs, randomize
from tests.support.pool import GlooPool
from tests.support.staged_models import (
    UnsplitResults,
    build_deep_model,
    build_rank_stages,
    compare_with_unsplit,
    gradients_of,
    loss_of,
    max_relative_difference,
    microbatches,
    output_of,
    run_unsplit,
)
from tests.support.vision_models import tiny

CLOSE = 3e-7  # float32: gradients of data ranks are summed in another order
WIDE = 1e-6  # of Mllama, whose tower rounds otherwise under FSDP2, also with images on all ranks
LAYERS = 3  # Mllama looks at images in the second
# Of those that may be given text alone.
MULTIMODAL = [
    name
    for name, recipe in EVERY.items()
    if {"input_ids", "pixel_values"} <= recipe.inputs().keys()
    or {"input_ids", "input_features"} <= recipe.inputs().keys()
]
FSDP, HSDP = ParallelDims(dp_shard=2), ParallelDims(dp_replicate=2)


def cut(name: str, dims: ParallelDims, checkpointing: str = "none") -> tuple[Any, int]:
    """A model of a recipe on a mesh, and which data rank this is."""
    mesh = mesh_of(dims, "cpu")
    model = build_deep_model(name, LAYERS)
    plan = find_plan(model, {**model.config.to_dict(), "architectures": [type(model).__name__]})
    parallelize(model, mesh, plan if dims.tp > 1 else None, activation_checkpointing=checkpointing)
    return model, data_index(mesh)


def trained(
    rank: int,
    world_size: int,
    name: str,
    pictured: list[int],
    dims: ParallelDims,
    count: int = 1,
    checkpointing: str = "none",
) -> tuple[bool, float]:
    """A step of so many microbatches on each data rank: are the logits equal, and how far are the gradients."""
    batches = microbatches(name, count * dims.dp, pictured)
    unsplit = run_unsplit(build_deep_model(name, LAYERS), batches)
    model, index = cut(name, dims, checkpointing)
    mixed, is_equal = MixedInputs(model), True
    for number in range(count):
        own = number * dims.dp + index
        with mixed.microbatch(batches[own], is_last=number == count - 1):
            logits = output_of(model(**batches[own]))
            is_equal &= torch.equal(logits.detach(), unsplit.logits[own])
            loss_of(logits, count).backward()
    return is_equal, max_relative_difference(unsplit.gradients, gradients_of(model))


def assert_right(found: list[tuple[bool, float]], name: str = "") -> None:
    for is_equal, gradients in found:
        assert is_equal
        assert gradients < (CLOSE if name != "mllama" else WIDE)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("pictured", [[0], [1]])
@pytest.mark.parametrize("name", MULTIMODAL)
def test_an_image_on_one_data_rank_and_none_on_the_other(pool: GlooPool, name: str, pictured: list[int]) -> None:
    assert_right(pool.run(trained, 2, name, pictured, FSDP), name)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("pictured", [[0], [3], [0, 1, 4], [1, 2, 3], [0, 1]], ids=str)
@pytest.mark.parametrize("name", ["gemma3-vlm", "qwen3-vl", "mllama"])
def test_gradients_of_several_microbatches_are_reduced_once_each(
    pool: GlooPool, name: str, pictured: list[int]
) -> None:
    """The last of them has images on one rank, on both, or on none; so have those before."""
    assert_right(pool.run(trained, 2, name, pictured, FSDP, 3), name)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("dims", [FSDP, HSDP, ParallelDims(dp_replicate=2, dp_shard=2)], ids=str)
@pytest.mark.parametrize("name", ["qwen2.5-vl", "gemma4-vlm", "mllama"])
def test_replicas_and_checkpointed_layers(pool: GlooPool, name: str, dims: ParallelDims, checkpointing: str) -> None:
    assert_right(pool.run(trained, dims.world_size, name, [1], dims, 1, checkpointing), name)


def norms(rank: int, world_size: int, name: str, pictured: list[int]) -> tuple[float, float]:
    """The norm of all gradients under TP and FSDP2, and in one process."""
    dims = ParallelDims(tp=2, dp_shard=2)
    batches = microbatches(name, dims.dp, pictured)
    model, index = cut(name, dims)
    with MixedInputs(model).microbatch(batches[index]):
        loss_of(full_tensor(output_of(model(**batches[index]))), 1).backward()
    expected = build_deep_model(name, LAYERS)
    for batch in batches:
        loss_of(output_of(expected(**batch)), dims.dp).backward()
    return float(clip_grad_norm(model, inf)), float(clip_grad_norm(expected, inf))


@pytest.mark.parametrize("name", ["qwen2.5-vl", pytest.param("gemma3-vlm", marks=pytest.mark.slow)])
def test_tensor_parallel_ranks_have_the_inputs_of_their_data_rank(pool: GlooPool, name: str) -> None:
    for found, expected in pool.run(norms, 4, name, [0]):
        assert found == pytest.approx(expected, rel=1e-5)  # float32: sums in another order


def with_experts_for_images(rank: int, world_size: int, pictured: list[int]) -> tuple[bool, float]:
    """Three microbatches of a model whose layers have experts that only tokens of images are sent to."""
    model = randomize(tiny("ernie4_5_vl_moe").float()).eval()
    image = make_inputs({**model.config.to_dict(), "architectures": [type(model).__name__]}).batch
    batches = [image if number in pictured else make_text_batch(model) for number in range(6)]
    unsplit = run_unsplit(model, batches)
    parallelize(model, mesh_of(FSDP, "cpu"), None)
    mixed, is_equal = MixedInputs(model), True
    for number in range(3):
        with mixed.microbatch(batches[2 * number + rank], is_last=number == 2):
            logits = output_of(model(**batches[2 * number + rank]))
            is_equal &= torch.equal(logits.detach(), unsplit.logits[2 * number + rank])
            loss_of(logits, 3).backward()
    return is_equal, max_relative_difference(unsplit.gradients, gradients_of(model))


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="torch fills in gradients from 2.13 on"
)
@pytest.mark.sampled(1)
@pytest.mark.parametrize("pictured", [[4], [0], [1, 4]], ids=str)
def test_experts_for_images_in_layers_that_all_ranks_call(pool: GlooPool, pictured: list[int]) -> None:
    assert_right(pool.run(with_experts_for_images, 2, pictured))


def in_stages(
    rank: int, world_size: int, name: str, schedule: str, steps: list[list[int]]
) -> tuple[bool, float, list[float]]:
    """Steps of 4 microbatches on each of two data ranks: are logits equal, how far are gradients, losses forward."""
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.ERROR)
    mesh = mesh_of(ParallelDims(pp=2, dp_shard=2), "cpu")
    here, is_equal, total = 4 * data_index(mesh), True, dict[str, Tensor]()
    kinds = [microbatches(name, 1)[0], microbatches(name, 1, [])[0]]
    run = build_rank_stages(name, schedule, kinds, mesh=mesh, count=4)
    for pictured in steps:
        batches = microbatches(name, 8, pictured)
        unsplit = run_unsplit(build_deep_model(name), batches)
        for key, gradient in unsplit.gradients.items():
            total[key] = total[key] + gradient if key in total else gradient
        own = slice(here, here + 4)
        forward = run.pipeline.forward(batches[own], run.loss)
        losses = run.step(batches[own])
        assert list(map(float, forward)) == list(map(float, losses))
        is_equal &= compare_with_unsplit(run, UnsplitResults(unsplit.logits[own], {}))[0]
    return is_equal, compare_with_unsplit(run, UnsplitResults(unsplit.logits[own], total))[1], list(map(float, losses))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved1f1b"])
@pytest.mark.parametrize("steps", [[[1]], [[0, 6]], [[], [5, 6], [0, 1, 4, 5]]], ids=str)
@pytest.mark.parametrize("name", ["gemma3-vlm", "qwen3-vl", "mllama"])
def test_stages_whose_data_ranks_have_images_in_other_microbatches(
    pool: GlooPool, name: str, steps: list[list[int]], schedule: str
) -> None:
    found = pool.run(in_stages, 4, name, schedule, steps)
    assert_right([(is_equal, gradients) for is_equal, gradients, _ in found], name)
    assert any(losses for *_, losses in found)


def without_images(rank: int, world_size: int, name: str) -> tuple[bool, bool, list[str]]:
    """Do ranks differ with text alone, and with an image on each; what has a gradient with text alone."""
    model, index = cut(name, FSDP)
    mixed = MixedInputs(model)
    texts = microbatches(name, 2, [])
    with mixed.microbatch(texts[index]):
        loss_of(output_of(model(**texts[index])), 1).backward()
    return mixed.inputs_differ(texts), mixed.inputs_differ(microbatches(name, 2)), list(gradients_of(model))


def test_where_ranks_are_alike_nothing_is_done(pool: GlooPool) -> None:
    for text, images, reached in pool.run(without_images, 2, "gemma3-vlm"):
        assert (text, images) == (False, False)
        assert reached
        assert not [name for name in reached if "vision" in name or "projector" in name]


def evaluated(rank: int, world_size: int, name: str) -> tuple[bool, bool, bool]:
    """Forward alone, in training mode: are logits equal, is the mode as before, are gradients there."""
    batches = microbatches(name, 2, [1])
    unsplit = run_unsplit(build_deep_model(name, LAYERS), batches)
    model, index = cut(name, FSDP)
    model.train()
    with torch.no_grad(), MixedInputs(model).microbatch(batches[index]):
        logits = output_of(model(**batches[index]))
    is_training = all(each.training for each in model.modules())
    return torch.equal(logits, unsplit.logits[index]), is_training, bool(gradients_of(model))


def test_a_forward_alone_leaves_no_gradients(pool: GlooPool) -> None:
    assert pool.run(evaluated, 2, "qwen2.5-vl") == [(True, True, False)] * 2


def refused(rank: int, world_size: int) -> str:
    model, index = cut("llava", FSDP)
    model.register_forward_pre_hook(_only_images, with_kwargs=True)
    batches = microbatches("llava", 2, [0])
    try:
        with MixedInputs(model).microbatch(batches[index]):
            return ""
    except UnsupportedError as error:
        return str(error)


def _only_images(module: nn.Module, args: Any, kwargs: Inputs) -> None:
    if "pixel_values" not in kwargs:
        raise ValueError("there is no image")


def test_a_model_that_needs_an_image_is_refused(pool: GlooPool) -> None:
    for said in pool.run(refused, 2):
        assert "LlavaForConditionalGeneration: cannot run on text alone (there is no image)" in said
        assert "give every data-parallel rank the same kinds of inputs" in said
