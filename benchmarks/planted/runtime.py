"""What can be wrong in the parallel model while every byte is right: what modules do that are cut, and their gradients.

Each function gives one that plants. Modules are counted in the order of the model; all are meant where no index is
given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functions
from torch import nn

from benchmarks.planted.defect import Built, InRuntime
from benchmarks.planted.planting import (
    Forward,
    around,
    cut_linears,
    entering,
    leaving,
    module_of,
    modules_of,
    norms_of,
    with_gradient,
)
from ckptx.layout.placement import ceil_chunks
from ckptx.runtime.parallel.shards import to_local_shard
from ckptx.runtime.parallel.tensor_parallel import styles
from ckptx.runtime.parallel.tensor_parallel.collectives import TpRanks, copy_to_ranks, sum_over_ranks
from ckptx.runtime.parallel.tensor_parallel.styles import swap_parameters

# ------------------------------------------------------------------------------------------------------- row-parallel


def _row_parallel(index: int | None, compute: Callable[[torch.Tensor, torch.Tensor, Any, TpRanks], Any]) -> InRuntime:
    """Row-parallel modules that compute something else of their input, the own part of the weight, and the bias."""

    def plant(built: Built) -> None:
        for module in cut_linears(built, 1, index):

            def replaced(x: torch.Tensor, module: nn.Module = module) -> Any:
                weight, bias = module._parameters["weight"], module._parameters.get("bias")
                return compute(x, to_local_shard(weight), bias, built.ranks)

            module.forward = replaced

    return plant


def sum_forgotten(index: int | None = None) -> InRuntime:
    """Each rank goes on with its own summand."""
    return _row_parallel(index, lambda x, weight, bias, ranks: functions.linear(x, weight, bias))


def bias_on_every_rank(index: int | None = None) -> InRuntime:
    """The bias is in every summand."""
    return _row_parallel(index, lambda x, weight, bias, ranks: sum_over_ranks(functions.linear(x, weight, bias), ranks))


def bias_dropped(index: int | None = None) -> InRuntime:
    """No bias."""
    return _row_parallel(index, lambda x, weight, bias, ranks: sum_over_ranks(functions.linear(x, weight), ranks))


def bias_on_rank_0(index: int | None = None) -> InRuntime:
    """After the sum, the bias is added on one rank alone."""

    def compute(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, ranks: TpRanks) -> torch.Tensor:
        found = sum_over_ranks(functions.linear(x, weight), ranks)
        return found if ranks.rank else found + bias

    return _row_parallel(index, compute)


def output_scaled(index: int, by: float) -> InRuntime:
    """A row-parallel module gives (1 + by) times what it should."""

    def plant(built: Built) -> None:
        for module in cut_linears(built, 1, index):
            leaving(module, lambda found: found * (1 + by))

    return plant


# ----------------------------------------------------------------------------------------------------- column-parallel


def gradient_not_summed(index: int | None = None) -> InRuntime:
    """What enters a column-parallel module gets the gradient of this rank's columns alone."""

    def plant(built: Built) -> None:
        for module in cut_linears(built, 0, index):
            del module.forward
            styles.colwise(module, built.ranks, is_sequence_parallel=True)

    return plant


def gradient_summed_twice(index: int) -> InRuntime:
    """What enters a column-parallel module gets its gradient once for each rank."""

    def plant(built: Built) -> None:
        for module in cut_linears(built, 0, index):
            entering(module, lambda x: copy_to_ranks(x, built.ranks))

    return plant


def gradient_lost(index: int, part: float) -> InRuntime:
    """What enters a column-parallel module gets but a part of its gradient."""

    def plant(built: Built) -> None:
        for module in cut_linears(built, 0, index):
            entering(module, lambda x: with_gradient(x, 1 - part))

    return plant


# --------------------------------------------------------------------------------------------- norms, words and experts


def norm_gradient_doubled(index: int | None = None) -> InRuntime:
    """As a gradient that is whole on every rank, and summed over the ranks all the same."""

    def plant(built: Built) -> None:
        for module in norms_of(built, index):

            def make(stock: Forward, module: nn.Module = module) -> Forward:
                def replaced(x: torch.Tensor) -> Any:
                    with swap_parameters([(module, "weight", with_gradient(module._parameters["weight"], 2.0))]):
                        return stock(x)

                return replaced

            around(module, make)

    return plant


def partial_norms(built: Built) -> None:
    """Norms of queries and keys see the heads of one rank, and their gradient is not summed."""
    for module in modules_of(built, "q_norm", "k_norm"):
        del module.forward


def vocabulary_offset(built: Built) -> None:
    """Rank 1 looks its tokens up one row too early."""
    _looked_up(built, lambda ids, begin, rows: (ids - begin - 1).clamp(0, rows - 1), is_masked=True)


def foreign_tokens_not_masked(built: Built) -> None:
    """A rank gives some row of its own for the tokens of others."""
    _looked_up(built, lambda ids, begin, rows: (ids - begin).clamp(0, rows - 1), is_masked=False)


def _looked_up(built: Built, row_of: Callable[[torch.Tensor, int, int], torch.Tensor], *, is_masked: bool) -> None:
    module, ranks = module_of(built, "embed_tokens"), built.ranks

    def make(stock: Forward) -> Forward:
        def replaced(ids: torch.Tensor) -> torch.Tensor:
            if is_masked and not ranks.rank:
                found: torch.Tensor = stock(ids)
                return found
            weight = module._parameters["weight"]
            begin, rows = ceil_chunks(weight.shape[0], ranks.size)[ranks.rank]
            found = functions.embedding(row_of(ids, begin, rows), to_local_shard(weight))
            is_foreign = (ids < begin) | (ids >= begin + rows)
            return sum_over_ranks(found.masked_fill(is_foreign[..., None], 0) if is_masked else found, ranks)

        return replaced

    around(module, make)


def experts_summed_twice(built: Built) -> None:
    """What enters the experts gets its gradient once for each rank."""
    for module in modules_of(built, "mlp.experts"):
        entering(module, lambda x: copy_to_ranks(x, built.ranks))
