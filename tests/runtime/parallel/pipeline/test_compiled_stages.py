"""Compiled layers inside of stages: what travels is put around what is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from itertools import product
from unittest import mock

import pytest
import torch
from torch import nn

from ckptx.layout.parallel_dims import ParallelDims
from ckptx.runtime.parallel.distributed import data_index, mesh_of
from ckptx.runtime.parallel.pipeline import call_hooks as taps
from tests.support.models import Inputs
from tests.support.pool import GlooPool
from tests.support.staged_models import (
    build_deep_model,
    build_rank_stages,
    compare_with_unsplit,
    microbatches,
    run_unsplit,
)

COUNT = 4
MODES = ("none", "full", "selective")
CLOSE = 1e-6  # float32, two steps: gradients of several uses of one parameter are summed in another order


@contextmanager
def compiler() -> Iterator[None]:
    """One that traces, and computes with torch's own operations."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with mock.patch.object(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager")):
        yield
    torch._dynamo.reset()


def batches_of(name: str, dp: int, lengths: tuple[int, ...]) -> list[Inputs]:
    found = microbatches(name, COUNT * dp)
    for batch, length in zip(found, lengths * dp, strict=False):
        batch["input_ids"] = batch["input_ids"][:, :length]
    return found


def compiled(
    rank: int,
    world_size: int,
    name: str,
    schedule: str,
    mode: str,
    dims: ParallelDims,
    lengths: tuple[int, ...] = (),
    is_around: bool = True,
) -> tuple[bool, float, int]:
    """Two steps with compiled layers: are logits equal, how far are gradients of both, how many frames were traced.

    Args:
        rank: Of this process.
        world_size: Their number.
        name: Of the recipe.
        schedule: Its name.
        mode: Of activation checkpointing.
        dims: Of the mesh.
        lengths: Of the texts of the microbatches.
        is_around: Whether hooks are put around what is compiled; without, in it.
    """
    mesh = mesh_of(dims, "cpu")
    batches = batches_of(name, dims.dp, lengths)
    whole = run_unsplit(build_deep_model(name), batches)
    kinds = [batches[0]]
    plain = {} if is_around else {"_CompiledCallHooks": lambda module, _, before, after: (
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True), module.register_forward_hook(after)
    )}  # fmt: skip
    with compiler(), mock.patch.multiple(taps, **plain) if plain else mock.MagicMock():
        run = build_rank_stages(
            name, schedule, kinds, mesh=mesh, count=COUNT, activation_checkpointing=mode, compile=True
        )
        begin = COUNT * data_index(mesh)
        for _ in range(2):
            run.step(batches[begin : begin + COUNT])
        frames = torch._dynamo.utils.counters["frames"]["total"]
    own = slice(begin, begin + COUNT)
    doubled = {key: 2 * gradient for key, gradient in whole.gradients.items()}
    is_equal, gradients = compare_with_unsplit(run, type(whole)(whole.logits[own], doubled))
    return is_equal, gradients, frames


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule", "mode"),
    [
        *product(("llama-tied",), ("1f1b", "interleaved1f1b"), MODES),
        *product(("gemma4-ple", "gemma4-shared-kv", "t5", "qwen3-vl", "mixtral"), ("1f1b",), MODES),
        ("llama-untied", "zbvzerobubble", "none"),
        ("llama-untied", "zbvzerobubble", "full"),
    ],
)
def test_compiled_stages_compute_what_the_model_in_one_piece_does(
    pool: GlooPool, name: str, schedule: str, mode: str
) -> None:
    for is_equal, gradients, frames in pool.run(compiled, 2, name, schedule, mode, ParallelDims(pp=2)):
        assert frames > 0
        assert is_equal
        assert gradients < CLOSE


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_microbatches_of_several_lengths(pool: GlooPool, mode: str) -> None:
    """Of which the compiler makes a second graph, with sizes that are not known."""
    for is_equal, gradients, frames in pool.run(
        compiled, 2, "llama-tied", "1f1b", mode, ParallelDims(pp=2), (7, 5, 6, 4)
    ):
        assert frames > 1
        assert is_equal
        assert gradients < CLOSE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dims", "mode"), list(product((ParallelDims(pp=2, tp=2), ParallelDims(pp=2, dp_shard=2)), MODES))
)
def test_compiled_stages_under_tp_and_fsdp2(pool: GlooPool, dims: ParallelDims, mode: str) -> None:
    for is_equal, gradients, frames in pool.run(compiled, 4, "llama-tied", "1f1b", mode, dims):
        assert frames > 0
        assert is_equal or dims.tp > 1
        assert gradients < 2e-5, "TP adds in another order"


@pytest.mark.slow
def test_hooks_are_not_traced(pool: GlooPool) -> None:
    """Injected where hooks usually are: frames that the compiler looks at, with all that they refer to."""
    around, within = (
        pool.run(compiled, 2, "llama-untied", "1f1b", "none", ParallelDims(pp=2), (), is_around)
        for is_around in (True, False)
    )
    assert [frames for *_, frames in around] == [1, 1], "those of a layer, of which all have the same code"
    assert all(frames > 1 for *_, frames in within)
