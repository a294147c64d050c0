"""A snapshot of a trainer's state: whatever changes is one of its items, and nothing that is equal differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, product
from math import inf, nan
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckptx.catalog.region import Region
from ckptx.robustness_suite.trainer_items import collect_items, finite_text, shard_digests, tensor_digest
from ckptx.runtime.parallel.randomness import RandomState
from ckptx.runtime.training.sampler import Sampler

Keys = set[tuple[str, str]]


class StubTrainer:
    """A trainer of a small model after two steps, with what a snapshot reads."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        parameters = [*self.model.named_parameters()]
        groups = [{"params": [each for _, each in parameters[:2]]}, {"params": [each for _, each in parameters[2:]]}]
        self.optimizer = torch.optim.AdamW(groups, foreach=False)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.regions: dict[str, tuple[Region, ...]] = {}
        self.rank_model = SimpleNamespace(
            models=[self.model], parameters=lambda: parameters, full_name=lambda name: f"whole.{name}",
            layout=SimpleNamespace(local_regions=self.regions.get),
        )  # fmt: skip
        self.sampler = Sampler(10, seed=1, global_batch=4)
        self.random_state = RandomState(torch.device("cpu"))
        self.completed_steps = 0
        self.next_order: list[int] | None = None
        self.batches = [{"input_ids": torch.arange(4), "labels": torch.ones(4)}, {"input_ids": torch.zeros(4)}]
        for _ in range(2):
            self.model(torch.randn(4, 2)).pow(2).sum().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.sampler.next_step()
            self.completed_steps += 1

    def next_indices(self) -> list[int]:
        return self.next_order or [1, 2, 3, 4]

    def next_batches(self) -> list[dict[str, torch.Tensor]]:
        return self.batches


@pytest.fixture
def trainer() -> Any:
    return StubTrainer()


def changed(trainer: Any, change: Callable[[Any], object]) -> Keys:
    """The items that a change changes, adds or removes."""
    before = collect_items(trainer)
    assert collect_items(trainer) == before, "reading the state changes nothing"
    change(trainer)
    after = collect_items(trainer)
    return {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}


NAMES = [name for name, _ in StubTrainer().model.named_parameters()]
FLOAT_STATE = [name for name, value in StubTrainer().model.state_dict().items() if value.is_floating_point()]
GROUP_KEYS = [key for key in StubTrainer().optimizer.param_groups[0] if key not in ("params", "lr")]


def parameter(trainer: Any, name: str) -> Any:
    return trainer.model.state_dict(keep_vars=True)[name]


def set_last(tensor: Any, value: float) -> None:
    with torch.no_grad():
        tensor.view(-1)[-1] = value


@pytest.mark.parametrize("name", [*StubTrainer().model.state_dict()])
def test_one_element_of_the_model(trainer: Any, name: str) -> None:
    assert changed(trainer, lambda each: set_last(parameter(each, name), 7)) == {("model", name)}


def test_the_names_of_the_model(trainer: Any) -> None:
    def add(each: Any) -> None:
        each.model.register_buffer("more", torch.ones(1))

    assert changed(trainer, add) == {(oracle, "more") for oracle in ("model", "names", "finite")}


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("name", NAMES)
def test_one_element_of_a_moment(trainer: Any, name: str, key: str) -> None:
    def change(each: Any) -> None:
        set_last(each.optimizer.state[parameter(each, name)][key], 7)

    assert changed(trainer, change) == {("moments", f"{name}.{key}")}


@pytest.mark.parametrize("name", NAMES)
def test_the_optimizer_steps_of_a_parameter_and_its_state(trainer: Any, name: str) -> None:
    def count(each: Any) -> None:
        each.optimizer.state[parameter(each, name)]["step"] += 1

    assert changed(trainer, count) == {("adam step", name)}
    lost = changed(trainer, lambda each: each.optimizer.state.pop(parameter(each, name)))
    assert lost == {("adam step", name)} | {
        (oracle, f"{name}.{key}") for oracle in ("moments", "finite") for key in ("exp_avg", "exp_avg_sq")
    }


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("key", GROUP_KEYS)
def test_each_setting_of_a_param_group(trainer: Any, group: int, key: str) -> None:
    """Betas and eps, too: a resume that forgets one trains on, and differently."""

    def change(each: Any) -> None:
        each.optimizer.param_groups[group][key] = ("changed", 0.5)

    assert {"betas", "eps", "weight_decay"} <= set(GROUP_KEYS)
    assert changed(trainer, change) == {("param groups", f"{name}.{key}") for name in NAMES[2 * group : 2 * group + 2]}


def test_one_of_two_betas(trainer: Any) -> None:
    def change(each: Any) -> None:
        first, _ = each.optimizer.param_groups[0]["betas"]
        each.optimizer.param_groups[0]["betas"] = (first, 0.5)

    assert changed(trainer, change) == {("param groups", f"{name}.betas") for name in NAMES[:2]}


@pytest.mark.parametrize("group", [0, 1])
def test_the_learning_rate_of_each_param_group(trainer: Any, group: int) -> None:
    def change(each: Any) -> None:
        each.optimizer.param_groups[group]["lr"] *= 1 + 2**-52

    assert changed(trainer, change) == {("learning rate", "lr")}


def test_position_of_the_run(trainer: Any) -> None:
    assert changed(trainer, lambda each: setattr(each, "completed_steps", 3)) == {("step", "step")}
    last = changed(trainer, lambda each: setattr(each.scheduler, "last_epoch", 7))
    assert last == {("scheduler", "last_epoch")}
    seen = changed(trainer, lambda each: each.sampler.next_step())
    assert seen == {("samples", "samples")}


def test_the_samples_of_the_next_step(trainer: Any) -> None:
    """In their order, and apart from how many were seen: another seed or shuffle has the same count."""
    for order in ([4, 3, 2, 1], [1, 2, 3, 5]):
        assert changed(trainer, lambda each, order=order: setattr(each, "next_order", order)) == {
            ("samples", "of the next step")
        }


@pytest.mark.parametrize(("index", "name"), [(0, "input_ids"), (0, "labels"), (1, "input_ids")])
def test_the_batches_of_the_next_step(trainer: Any, index: int, name: str) -> None:
    key = ("batch", f"microbatch {index}: {name}")
    assert changed(trainer, lambda each: set_last(each.batches[index][name], 9)) == {key}
    without = collect_items(trainer, with_batch=False)
    assert {oracle for oracle, _ in collect_items(trainer).keys() - without.keys()} == {"batch"}


@pytest.mark.parametrize(("kind", "draw"), [("torch", lambda: torch.rand(1)), ("numpy", lambda: np.random.rand())])
def test_random_numbers(trainer: Any, kind: str, draw: Callable[[], object]) -> None:
    assert changed(trainer, lambda each: draw()) == {("rng", kind)}


# ---------------------------------------------------------------------------------------------------- not finite


@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize("name", FLOAT_STATE)
def test_parameters_have_to_be_finite_and_buffers_may_have_infinities(trainer: Any, name: str, value: float) -> None:
    set_last(parameter(trainer, name), value)
    is_allowed = name not in NAMES and value == value
    said = "finite" if is_allowed else "1 NaN" if value != value else "1 infinite"
    assert collect_items(trainer)["finite", name] == said


@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_moments_have_to_be_finite(trainer: Any, key: str, value: float) -> None:
    set_last(trainer.optimizer.state[parameter(trainer, NAMES[1])][key], value)
    found = collect_items(trainer)
    assert found["finite", f"{NAMES[1]}.{key}"] == ("1 NaN" if value != value else "1 infinite")
    assert found["finite", f"{NAMES[0]}.{key}"] == "finite"


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("nans", "infinities"), product(range(3), range(3)))
@pytest.mark.parametrize("allowed", [False, True])
def test_nan_and_infinity_are_counted_in_every_dtype(
    dtype: torch.dtype, nans: int, infinities: int, allowed: bool
) -> None:
    values = [1.0, *[nan] * nans, *[inf, -inf][:infinities]]
    texts = [f"{nans} NaN"] * (nans > 0) + [f"{infinities} infinite"] * (infinities > 0 and not allowed)
    assert finite_text(torch.tensor(values, dtype=dtype), may_be_infinite=allowed) == (", ".join(texts) or "finite")


def test_what_is_no_number_with_a_point_is_finite() -> None:
    for value in (torch.tensor([1, 2]), torch.tensor([True]), 3, None, "nan", torch.empty(0)):
        assert finite_text(value) == "finite"


# ------------------------------------------------------------------------------------------------------- digests


def same_bytes() -> Iterator[torch.Tensor]:
    """Tensors of 24 zero bytes in every dtype and shape that they can have, and empty ones."""
    for dtype in (torch.float32, torch.int32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
        count = 24 // dtype.itemsize
        shapes = [(count,), (1, count), (count, 1), *((size, count // size) for size in (2, 3) if count % size == 0)]
        for shape in dict.fromkeys(shapes):
            yield torch.zeros(shape, dtype=dtype)
        for shape in ((0,), (0, 3), (3, 0)):
            yield torch.zeros(shape, dtype=dtype)


def test_equal_bytes_of_another_dtype_or_shape_differ() -> None:
    tensors = [*same_bytes()]
    digests = [tensor_digest(each) for each in tensors]
    for (first, one), (second, other) in combinations(zip(tensors, digests, strict=True), 2):
        assert one != other, (first.dtype, first.shape, second.dtype, second.shape)


def test_a_digest_is_of_values_in_order_and_not_of_strides() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    assert tensor_digest(whole.t()) == tensor_digest(whole.t().contiguous())
    assert tensor_digest(whole[:, ::2]) == tensor_digest(whole[:, ::2].clone())
    assert tensor_digest(whole) != tensor_digest(whole.flip(0))
    assert tensor_digest(torch.tensor(0.0)) != tensor_digest(torch.tensor(-0.0)), "bits, not values"
    assert tensor_digest(nn.Parameter(whole)) == tensor_digest(whole)


VALUES: list[Any] = [
    1, 1.0, True, "1", None, (), [1], [1, 2], [[1], 2], {}, {"a": 1}, {"a": 2}, {"b": 1}, {"a": [1]},
    torch.tensor([1]), [torch.tensor([1])], {"a": torch.tensor([1])}, {"a": torch.tensor([2])},
]  # fmt: skip


def test_plain_values_differ_with_all_that_is_in_them() -> None:
    for first, second in combinations(VALUES, 2):
        assert tensor_digest(first) != tensor_digest(second), (first, second)
    assert tensor_digest({"a": 1, "b": (2, 3)}) == tensor_digest({"b": [2, 3], "a": 1}), "in any order"


# -------------------------------------------------------------------------------------------------------- shards


def test_shards_are_known_by_their_names_and_regions(trainer: Any) -> None:
    trainer.regions |= {"0.weight": (Region((0, 0), (1, 2)), Region((2, 0), (1, 2)))}
    found = shard_digests(trainer)
    state = trainer.model.state_dict()
    parts = dict.fromkeys(state, "whole") | {"0.weight": "(0, 0)+(1, 2); (2, 0)+(1, 2)"}
    assert found == {(f"whole.{name}", parts[name]): tensor_digest(value) for name, value in state.items()}


def test_without_a_layout_every_rank_has_whole_tensors(trainer: Any) -> None:
    trainer.rank_model.layout = None
    assert {part for _, part in shard_digests(trainer)} == {"whole"}
