"""Dropout under tensor parallelism: whole activations are dropped alike on all ranks, cut ones each in its own way."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from ckptx.errors import InputError, UsageError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.runtime.parallel.distributed import mesh_of
from ckptx.runtime.parallel.parallelize import parallelize
from ckptx.runtime.parallel.randomness import RandomState, seed
from ckptx.runtime.parallel.tensor_parallel import dropout
from ckptx.runtime.parallel.tensor_parallel.apply import apply_tensor_parallel
from ckptx.runtime.parallel.tensor_parallel.plans import find_plan
from tests.support.models import EVERY, build
from tests.support.pool import GlooPool
from tests.support.tensor_parallel import compute, config_of, pad_inputs

P = 0.25
MODES = ("full", "submodule", "selective")


def dropping(name: str, attention: str = "eager") -> Any:
    """A model of a recipe in training mode, with dropout wherever its class can drop."""
    model = build(EVERY[name]).float()
    model.config.use_cache = False
    for module in model.modules():
        if "config" in module.__dict__:  # the stacks of T5 have configs of their own
            module.config._attn_implementation = attention
        if isinstance(module, nn.Dropout):
            module.p = P
        for key, value in vars(module).items():
            if "dropout" in key and isinstance(value, float):
                setattr(module, key, P)
    return model.train()


def cut(model: Any, world_size: int, sequence_parallel: bool = False) -> None:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    apply_tensor_parallel(model, mesh, find_plan(model, config_of(model), None, sequence_parallel))


# ------------------------------------------------------------------------------------------------ masks


@contextmanager
def masks(made: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Every dropout multiplies with what `made` says."""

    def dropped(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return x * made(x) / (1 - p) if training and p else x

    with mock.patch("torch.nn.functional.dropout", dropped):
        yield


def recorded(rank: int, world_size: int, name: str, sequence_parallel: bool, defect: str) -> Any:
    """How far the logits are from those of the model in one piece, which drops what the ranks drop together.

    Returns:
        The difference, and by number of ranks that have a slice each of what is dropped (1: whole) how often.
    """
    inputs = EVERY[name].inputs()
    if sequence_parallel:
        inputs = pad_inputs(inputs, world_size)
    model = dropping(name)
    whole = copy.deepcopy(model)
    with mock.patch.object(dropout, defect, lambda *_, **__: None) if defect else mock.MagicMock():
        cut(model, world_size, sequence_parallel)
    torch.manual_seed(5)
    own: list[torch.Tensor] = []

    def drawn(x: torch.Tensor) -> torch.Tensor:
        own.append(torch.empty_like(x).bernoulli_(1 - P).detach())
        return own[-1]

    with masks(drawn):
        found = compute(model, inputs)[0]
    state = torch.get_rng_state()
    every: list[Any] = [None] * world_size
    dist.all_gather_object(every, own)
    states: list[Any] = [None] * world_size
    dist.all_gather_object(states, state)
    assert all(torch.equal(each, state) for each in states), "the default generators went on differently"
    calls = iter(zip(*every, strict=True))
    kinds: dict[int, int] = {}

    def together(x: torch.Tensor) -> torch.Tensor:
        parts = next(calls)
        dims = [dim for dim in range(x.dim()) if parts[0].shape[dim] != x.shape[dim]]
        kinds[world_size if dims else 1] = kinds.get(world_size if dims else 1, 0) + 1
        if not dims:
            assert all(torch.equal(each, parts[0]) for each in parts), "what is whole is dropped differently"
            return parts[0]
        assert not torch.equal(parts[0], parts[1]), "slices are dropped alike"
        return torch.cat(parts, dims[0])

    with masks(together):
        wanted = compute(whole, inputs)[0]
    found = found.full_tensor() if isinstance(found, DTensor) else found
    return float((found - wanted).detach().abs().max() / wanted.detach().abs().max()), kinds


# Name, whether the sequence is cut, and which kinds of activations are dropped: 1 whole, 2 cut.
MASKS = [
    ("gpt-neox", False, {1, 2}), ("t5", False, {1}), ("llama-tied", False, {2}), ("gpt2", False, {1}),
    ("phi3", True, {1, 2}), ("starcoder2", True, {1, 2}),
]  # fmt: skip
WIDE = [
    ("mixtral", False, {2}), ("starcoder2", False, {1, 2}), ("qwen3", True, {2}), ("bert-mlm", False, {1}),
    ("whisper", False, {1}), ("opt", False, {1}), ("deepseek-v3", False, {2}), ("gpt-oss", False, {1}),
    ("granite", True, {2}), ("bart", False, {1}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "sequence", "kinds"), [*MASKS, *(pytest.param(*each, marks=pytest.mark.slow) for each in WIDE)]
)
def test_masks_of_whole_activations_are_equal_and_of_cut_ones_differ(
    pool: GlooPool, name: str, sequence: bool, kinds: set[int]
) -> None:
    for furthest, found in pool.run(recorded, 2, name, sequence, ""):
        assert furthest < 1e-4, "float32, added in another order"
        assert set(found) == kinds


@pytest.mark.parametrize(
    ("name", "defect", "said"),
    [
        ("gpt-neox", "_use_own_stream_after", "slices are dropped alike"),
        ("starcoder2", "_use_shared_stream_before", "went on differently|what is whole is dropped differently"),
        ("phi3", "_use_own_stream_within", "slices are dropped alike"),
    ],
)
def test_an_injected_defect_is_found(pool: GlooPool, name: str, defect: str, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        pool.run(recorded, 2, name, name == "phi3", defect)


# ------------------------------------------------------------------------------------------------ training


def trained(
    rank: int,
    world_size: int,
    name: str,
    dims: ParallelDims,
    attention: str,
    checkpointing: str,
    compiled: bool = False,
) -> Any:
    """Three steps: gradients of the last, whole parameters that ranks of one TP group hold differently, generators."""
    mesh = mesh_of(dims, "cpu")
    model = dropping(name, attention)
    plan = find_plan(model, config_of(model))
    parallelize(model, mesh, plan, activation_checkpointing=checkpointing, compile=compiled)
    assert all(module.training for module in model.modules()), "parallel, and still in training mode"
    seed(3, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        compute(model, EVERY[name].inputs())[1].backward()
        optimizer.step()
    drifted = []
    for key, parameter in model.named_parameters():
        is_cut = isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ())
        if not is_cut:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            first = local.detach().clone()
            dist.broadcast(first, dist.get_global_rank(mesh.get_group("tp"), 0), group=mesh.get_group("tp"))
            drifted += [] if torch.equal(first, local) else [key]
    gradients = [each.grad.to_local() if isinstance(each.grad, DTensor) else each.grad for each in model.parameters()]
    return drifted, [each.numpy() for each in gradients if each is not None], torch.get_rng_state().numpy()


@pytest.mark.parametrize(
    ("name", "attention", "dims", "modes"),
    [
        ("gpt-neox", "sdpa", ParallelDims(tp=2), MODES),
        ("llama-tied", "sdpa", ParallelDims(tp=2, dp_shard=2), MODES[:1]),
        pytest.param("llama-tied", "sdpa", ParallelDims(tp=2, dp_shard=2), MODES[1:], marks=pytest.mark.slow),
        pytest.param("gpt2", "eager", ParallelDims(tp=2), MODES, marks=pytest.mark.slow),
        pytest.param("t5", "eager", ParallelDims(tp=2), MODES, marks=pytest.mark.slow),
        pytest.param("mixtral", "eager", ParallelDims(tp=2, dp_shard=2), MODES, marks=pytest.mark.slow),
    ],
)
def test_what_ranks_hold_whole_stays_equal_and_masks_are_computed_again(
    pool: GlooPool, name: str, attention: str, dims: ParallelDims, modes: tuple[str, ...]
) -> None:
    kept = pool.run(trained, dims.world_size, name, dims, attention, "none")
    assert [drifted for drifted, _, _ in kept] == [[]] * dims.world_size
    for mode in modes:
        again = pool.run(trained, dims.world_size, name, dims, attention, mode)
        for (_, gradients, state), (drifted, others, other) in zip(kept, again, strict=True):
            assert not drifted
            assert np.array_equal(state, other), mode
            assert all(map(np.array_equal, gradients, others)), mode
    states = [state.tobytes() for *_, state in kept]
    for rank, state in enumerate(states):
        same = {other for other, each in enumerate(states) if each == state}
        assert same == {other for other in range(dims.world_size) if other // dims.tp == rank // dims.tp}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_compiled_layers_drop_alike_what_is_whole(pool: GlooPool, mode: str) -> None:
    found = pool.run(trained, 2, "gpt-neox", ParallelDims(tp=2), "sdpa", mode, True)
    assert [drifted for drifted, _, _ in found] == [[], []]


def seeded_by_rank(rank: int, world_size: int) -> str:
    model = dropping("gpt2")
    cut(model, world_size)
    torch.manual_seed(rank)
    with torch.no_grad():
        compute(model.eval(), EVERY["gpt2"].inputs())  # nothing is dropped here
        try:
            compute(model.train(), EVERY["gpt2"].inputs())
        except UsageError as error:
            return str(error)
    return ""


def test_generators_that_differ_are_refused_before_the_first_step(pool: GlooPool) -> None:
    for said in pool.run(seeded_by_rank, 2):
        assert said.startswith("dropout: the RNG states of TP ranks 0 and 1 differ, must be equal")


def test_a_model_that_drops_nothing_is_left_alone() -> None:
    model = build(EVERY["llama-tied"])
    assert not dropout.has_dropout(model)
    assert dropout.has_dropout(dropping("llama-tied"))
    model.config.attention_dropout = 0.1
    assert dropout.has_dropout(model)


@pytest.mark.parametrize(
    ("nested", "expected"),
    [({"dropout": 0.1}, True), ({"dropout": 0.0, 3: 1}, False), (None, False), ({"attention_dropout": True}, False)],
)
def test_a_nested_config_may_be_a_plain_dict(nested: Any, expected: bool) -> None:
    """As that of the vision tower of Idefics."""
    model = build(EVERY["llama-tied"])
    assert not dropout.has_dropout(model)
    model.config = SimpleNamespace(sub_configs={"vision_config": object}, vision_config=nested)
    assert dropout.has_dropout(model) is expected


# ------------------------------------------------------------------------------------------------ states


def seeds(rank: int, world_size: int) -> list[int]:
    flat, deep = ParallelDims(tp=2, dp_shard=2), ParallelDims(tp=2, dp_replicate=2)
    return [seed(number, mesh_of(dims, "cpu")) for dims, number in ((flat, 1), (deep, 1), (flat, 2))]


def test_tp_ranks_begin_alike_and_others_do_not(pool: GlooPool) -> None:
    for found in zip(*pool.run(seeds, 4), strict=True):
        assert found[0] == found[1] and found[2] == found[3] and found[0] != found[2]
    first, *_, other = pool.run(seeds, 4)[0]
    assert first != other


def test_a_state_brings_back_every_generator() -> None:
    def drawn() -> tuple[float, ...]:
        return (
            random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn()),
            float(torch.rand(())), float(torch.randn(())),
        )  # fmt: skip

    drawn()
    kept = RandomState()
    state = kept.state_dict()
    first = drawn()
    assert drawn() != first
    kept.load_state_dict(state)
    assert kept.state_dict().keys() == state.keys()
    assert drawn() == first
    with pytest.raises(InputError, match="the state of python is missing, found numpy, torch"):
        kept.load_state_dict({key: state[key] for key in ("numpy", "torch")})
