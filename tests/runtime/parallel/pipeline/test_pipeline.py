"""Stages on gloo ranks under torch's schedules: logits, losses and gradients are those of the unsplit model."""

from __future__ import annotations

import logging
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from ckptx.layout.parallel_dims import ParallelDims
from ckptx.runtime.parallel.distributed import mesh_of
from ckptx.runtime.parallel.pipeline import pipeline as under_test
from tests.support.microbatches import image_microbatches
from tests.support.pool import GlooPool
from tests.support.slow import slow_but
from tests.support.staged_models import (
    PIPELINE_MODELS,
    RankStages,
    UnsplitResults,
    build_deep_model,
    build_rank_stages,
    compare_with_unsplit,
    gradients_of,
    loss_of,
    max_relative_difference,
    microbatches,
    run_one_step,
    run_unsplit,
)

SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble")
SPLIT = ("interleavedzerobubble", "zbvzerobubble")
# Where what a stage received meets what it computed from parameters alone (a decoder and its encoder's states), or a
# parameter is used at several depths (streams of Gemma3n), torch goes backward through a graph it has freed: see
# `test_torch_frees_what_lies_between_two_uses_of_a_parameter`.
NEVER_SPLIT = ("t5", "bart", "whisper", "gemma3n")
MATRIX = [
    (schedule, name)
    for schedule, name in product(SCHEDULES, PIPELINE_MODELS)
    if schedule not in SPLIT or name not in NEVER_SPLIT
]  # fmt: skip
CLOSE = 3e-7  # float32: gradients of several uses of one parameter, and of microbatches, are summed in another order


def assert_right(found: list[Any], count: int) -> None:
    """Every rank's part of a step of so many microbatches."""
    for is_equal, gradients, _, loss in found:
        assert is_equal
        assert gradients < CLOSE
        assert loss < 1e-6, "of a loss about 1, summed in another order"
    assert sorted(seen for *_, seen, _ in found) == [0] * (len(found) - 1) + [count]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("schedule", "name"), MATRIX)
def test_a_step_gives_what_the_unsplit_model_gives(pool: GlooPool, schedule: str, name: str) -> None:
    assert_right(pool.run(run_one_step, 2, name, schedule, 4), 4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("schedule", "name"),
    list(product(("1f1b", "gpipe", "zbvzerobubble"), ("llama-tied", "gemma4-shared-kv", "qwen3-vl"))),
)
def test_three_ranks_of_a_pipeline(pool: GlooPool, schedule: str, name: str) -> None:
    assert_right(pool.run(run_one_step, 3, name, schedule, 6), 6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "schedule"),
    list(
        product(
            ("gemma3-vlm", "qwen3-vl", "llava", "qwen2.5-vl", "mllama", "gemma4-audio"),
            ("gpipe", "1f1b", "interleaved1f1b", "zbvzerobubble"),
        )
    ),
)
def test_images_in_some_microbatches_and_none_in_others(pool: GlooPool, name: str, schedule: str) -> None:
    assert_right(pool.run(run_one_step, 2, name, schedule, 4, image_microbatches(name)), 4)


def test_text_that_goes_by_the_first_layer_of_a_stage(pool: GlooPool) -> None:
    assert_right(pool.run(run_one_step, 2, "mllama", "1f1b", 4, image_microbatches("mllama"), "1 | rest"), 4)


def train(rank: int, world_size: int, schedule: str, is_summed: bool) -> dict[str, Tensor]:
    """Ten steps of AdamW; the copies of the tied parameter that are here, by name."""
    sum_gradients = under_test.sum_gradients
    if not is_summed:
        under_test.sum_gradients = lambda *_: None
    try:
        batches = microbatches("llama-tied", 4)
        run = build_rank_stages("llama-tied", schedule, batches[:1], count=4)
        parameters = [each for model in run.models.values() for each in model.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        for _ in range(10):
            run.step(batches)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        under_test.sum_gradients = sum_gradients
    names = {"model.embed_tokens.weight", "lm_head.weight"}
    return {
        name: each.detach() for model in run.models.values() for name, each in model.named_parameters() if name in names
    }


def trained(pool: GlooPool, schedule: str, is_summed: bool = True) -> tuple[Tensor, Tensor]:
    found: dict[str, Tensor] = {}
    for each in pool.run(train, 2, schedule, is_summed):
        found |= each
    return found["model.embed_tokens.weight"], found["lm_head.weight"]


@pytest.mark.parametrize("schedule", ["1f1b", "zbvzerobubble"])
def test_tied_embeddings_stay_equal_when_trained(pool: GlooPool, schedule: str) -> None:
    embedding, head = trained(pool, schedule)
    assert torch.equal(embedding, head)
    assert not torch.equal(embedding, build_deep_model("llama-tied").lm_head.weight), "something was learned"


def test_without_the_sum_tied_embeddings_part(pool: GlooPool) -> None:
    embedding, head = trained(pool, "1f1b", is_summed=False)
    assert float((embedding - head).abs().max()) > 1e-3, "ten steps of 1e-3"


def same(rank: int, world_size: int, name: str) -> tuple[list[float], list[float]]:
    """The losses of a forward alone, and of a step."""
    batches = microbatches(name, 4)
    run = build_rank_stages(name, "interleaved1f1b", batches[:1], count=4)
    return [float(each) for each in run.pipeline.forward(batches, run.loss)], [
        float(each) for each in run.step(batches)
    ]


def test_forward_alone_gives_the_losses_of_a_step(pool: GlooPool) -> None:
    found = pool.run(same, 2, "gemma4-shared-kv")
    assert found[0] == ([], [])
    forward, step = found[1]
    assert len(step) == 4
    assert forward == step


def accumulate(
    rank: int,
    world_size: int,
    name: str,
    schedule: str,
    lengths: tuple[int, ...],
    dp_shard: int = 1,
    is_cured: bool = True,
    reshards: bool = False,
) -> tuple[bool, float]:
    """Steps over microbatches of these lengths, whose gradients add up; like `away`, over all of them.

    Args:
        rank: Of this process.
        world_size: Processes in all.
        name: Of the recipe.
        schedule: Its name.
        lengths: Of the tokens, step by step.
        dp_shard: FSDP2 over so many ranks, each with microbatches of its own.
        is_cured: Without, stages do what torch's do when they are made.
        reshards: Whether FSDP2 frees the parameters of a layer after forward, as it does without stages.
    """
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.ERROR)
    mesh = mesh_of(ParallelDims(pp=world_size // dp_shard, dp_shard=dp_shard), "cpu") if dp_shard > 1 else None
    here = mesh["dp_shard"].get_local_rank() if mesh is not None else 0
    cured = under_test.TorchStage._post_metadata_inference_cleanup
    if not is_cured:
        under_test.TorchStage._post_metadata_inference_cleanup = PipelineStage._post_metadata_inference_cleanup
    try:
        run: RankStages | None = None
        total: dict[str, Tensor] = {}
        is_equal = True
        for length in lengths:
            batches = [{"input_ids": each["input_ids"][:, :length]} for each in microbatches(name, 4 * dp_shard)]
            whole = run_unsplit(build_deep_model(name), batches)
            for key, gradient in whole.gradients.items():
                total[key] = total[key] + gradient if key in total else gradient
            own = slice(4 * here, 4 * here + 4)
            run = run or build_rank_stages(name, schedule, batches[:1], mesh=mesh, count=4)
            for module in (each for model in run.models.values() for each in model.modules()):
                if reshards and isinstance(module, FSDPModule):
                    module.set_reshard_after_forward(True)
            run.step(batches[own])
            is_equal &= compare_with_unsplit(run, UnsplitResults(whole.logits[own], {}))[0]
        assert run is not None
        return is_equal, compare_with_unsplit(run, UnsplitResults(whole.logits[own], total))[1]
    finally:
        under_test.TorchStage._post_metadata_inference_cleanup = cured


@pytest.mark.parametrize("name", ["llama-tied", pytest.param("gemma4-shared-kv", marks=pytest.mark.slow)])
def test_another_sequence_length_keeps_what_was_accumulated(pool: GlooPool, name: str) -> None:
    for is_equal, gradients in pool.run(accumulate, 2, name, "1f1b", (7, 5, 7)):
        assert is_equal
        assert gradients < CLOSE


@pytest.mark.parametrize(
    ("schedule", "name", "lengths"),
    slow_but(
        [
            (*each, lengths)
            for each in (("1f1b", "llama-tied"), ("interleaved1f1b", "gemma4-shared-kv"))
            for lengths in ((7,), (7, 7), (7, 5))
        ],
        [],  # the test below has one that is right
    ),
)
def test_fsdp_and_stages(pool: GlooPool, schedule: str, name: str, lengths: tuple[int, ...]) -> None:
    for is_equal, gradients in pool.run(accumulate, 4, name, schedule, lengths, 2):
        assert is_equal
        assert gradients < CLOSE


def test_torchs_own_stages_drop_what_fsdp_accumulated(pool: GlooPool) -> None:
    found = pool.run(accumulate, 4, "llama-untied", "1f1b", (7, 5), 2, False)
    assert all(is_equal for is_equal, _ in found), "in silence"
    assert max(gradients for _, gradients in found) > 0.1
    for _, gradients in pool.run(accumulate, 4, "llama-untied", "1f1b", (7, 5), 2):
        assert gradients < CLOSE


def test_fsdp_with_a_split_backward_is_wrong_in_torch(pool: GlooPool) -> None:
    """Gradients of weights are summed into parameters that FSDP2 has freed meanwhile."""
    found = pool.run(accumulate, 4, "llama-untied", "zbvzerobubble", (7,), 2, True, True)
    assert all(is_equal for is_equal, _ in found), "in silence"
    assert max(gradients for _, gradients in found) > 0.1


def whole_backward(rank: int, world_size: int, function: str, *args: Any) -> Any:
    """One of the functions above, with stages that torch lets compute all gradients when those of inputs are due."""
    made = under_test.TorchStage.__init__

    def make(self: Any, *given: Any, **settings: Any) -> None:
        made(self, *given, **settings, dw_builder=lambda: lambda: None)

    under_test.TorchStage.__init__ = make
    try:
        return {"one_step": run_one_step, "accumulate": accumulate}[function](rank, world_size, *args)
    finally:
        under_test.TorchStage.__init__ = made


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "schedule"), list(product(NEVER_SPLIT, (*SPLIT, "dualpipev"))))
def test_classes_that_cannot_be_split_are_right_when_torch_does_not(pool: GlooPool, name: str, schedule: str) -> None:
    assert_right(pool.run(whole_backward, 2, "one_step", name, schedule, 4), 4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", SPLIT)
def test_fsdp_is_right_when_torch_does_not_split_the_backward(pool: GlooPool, schedule: str) -> None:
    for is_equal, gradients in pool.run(whole_backward, 4, "accumulate", "llama-untied", schedule, (7, 5), 2):
        assert is_equal
        assert gradients < CLOSE


def backward_in_two_parts(model: nn.Module, received: Tensor) -> dict[str, Tensor]:
    """What torch does for a stage under a schedule of zero bubbles."""
    sent = list(model(received))
    weights = list(model.parameters())
    _, groups = stage_backward_input(sent, [torch.ones_like(each) for each in sent], [received], iter(weights))
    stage_backward_weight(iter(weights), groups)
    return gradients_of(model)


class TwoDepths(nn.Module):  # type: ignore[misc]
    """Adds one bias before a layer, and again behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bias, self.linear = nn.Linear(3, 3, bias=False), nn.Linear(3, 3)

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        bias = self.bias(torch.ones(3)).exp()
        return (self.linear(hidden * bias).exp() * bias,)


class Aside(TwoDepths):
    """Sends, besides, what it computed from a parameter and nothing that it received."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        return self.linear(hidden), self.bias(torch.ones(3))


class Overlapping(nn.Module):  # type: ignore[misc]
    """Adds one parameter at two places, and at each of them another one as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.both = (nn.Parameter(torch.ones(3)) for _ in range(3))

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        return (hidden + (self.first + self.both) + (self.second + self.both),)


def test_torch_counts_gradients_twice_where_uses_of_parameters_overlap() -> None:
    """In silence."""
    found = backward_in_two_parts(Overlapping(), torch.ones(2, 3, requires_grad=True))
    whole = Overlapping()
    whole(torch.ones(2, 3))[0].sum().backward()
    wanted = gradients_of(whole)
    assert torch.equal(found["both"], 2 * wanted["both"])
    assert max(float((found[name] / wanted[name]).max()) for name in ("first", "second")) == 2


def test_torch_frees_what_lies_between_two_uses_of_a_parameter() -> None:
    """Then the gradients of other weights between them cannot be computed; it says so."""
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        backward_in_two_parts(TwoDepths(), torch.ones(2, 3, requires_grad=True))


def test_torch_loses_gradients_of_what_is_sent_without_having_met_what_was_received() -> None:
    """In silence."""
    model = Aside()
    found = backward_in_two_parts(model, torch.ones(2, 3, requires_grad=True))
    assert "bias.weight" not in found
    whole = Aside()
    torch.stack([each.sum() for each in whole(torch.ones(2, 3))]).sum().backward()
    wanted = gradients_of(whole)
    assert bool(wanted.pop("bias.weight").any())
    assert max_relative_difference(wanted, found) == 0


def test_the_measure_itself_sees_a_gradient_that_is_lacking_or_wrong() -> None:
    model = build_deep_model("llama-untied", 2)
    (batch,) = microbatches("llama-untied", 1)
    wanted = run_unsplit(model, [batch]).gradients
    name = "model.layers.1.mlp.up_proj.weight"
    assert max_relative_difference(wanted, wanted) == 0
    assert max_relative_difference(wanted, {key: value for key, value in wanted.items() if key != name}) == float("inf")
    assert max_relative_difference(wanted, wanted | {name: wanted[name] * 1.001}) == pytest.approx(1e-3, rel=1e-2)
    assert max_relative_difference(wanted, wanted | {name: wanted[name] * float("nan")}) == float("inf")
    assert loss_of(torch.ones(2, 3) * 2, 4) == 1
