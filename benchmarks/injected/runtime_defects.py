"""Defects of the parallel model with correct weights: forward passes and gradients of sharded modules.

Each function takes a model, or returns a function that does, and injects one defect. An index counts modules in the
order of the model; None means all modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functions
from torch import nn

from benchmarks.injected.defect import InjectionTarget, RuntimeInjection
from benchmarks.injected.inject import (
    Forward,
    change_input,
    change_output,
    find_module,
    find_modules,
    find_norms,
    scale_gradient,
    sharded_linears,
    wrap_forward,
)
from ckptx.layout.placement import ceil_chunks
from ckptx.runtime.parallel.shards import to_local_shard
from ckptx.runtime.parallel.tensor_parallel import styles
from ckptx.runtime.parallel.tensor_parallel.collectives import TpRanks, copy_to_ranks, sum_over_ranks
from ckptx.runtime.parallel.tensor_parallel.styles import swap_parameters

# ------------------------------------------------------------------------------------------------------- row-parallel


def _row_parallel(
    index: int | None, compute: Callable[[torch.Tensor, torch.Tensor, Any, TpRanks], Any]
) -> RuntimeInjection:
    """Replace the forward pass of row-parallel modules by a function of input, local weight shard and bias."""

    def inject(target: InjectionTarget) -> None:
        for module in sharded_linears(target, 1, index):

            def replaced(x: torch.Tensor, module: nn.Module = module) -> Any:
                weight, bias = module._parameters["weight"], module._parameters.get("bias")
                return compute(x, to_local_shard(weight), bias, target.ranks)

            module.forward = replaced

    return inject


def skip_output_all_reduce(index: int | None = None) -> RuntimeInjection:
    """Omit the all-reduce, so that each rank continues with its partial sum."""
    return _row_parallel(index, lambda x, weight, bias, ranks: functions.linear(x, weight, bias))


def add_bias_on_every_rank(index: int | None = None) -> RuntimeInjection:
    """Add the bias on every rank before the all-reduce."""
    return _row_parallel(index, lambda x, weight, bias, ranks: sum_over_ranks(functions.linear(x, weight, bias), ranks))


def drop_bias(index: int | None = None) -> RuntimeInjection:
    """Omit the bias."""
    return _row_parallel(index, lambda x, weight, bias, ranks: sum_over_ranks(functions.linear(x, weight), ranks))


def add_bias_on_rank_0(index: int | None = None) -> RuntimeInjection:
    """Add the bias after the all-reduce, but on rank 0 only."""

    def compute(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, ranks: TpRanks) -> torch.Tensor:
        found = sum_over_ranks(functions.linear(x, weight), ranks)
        return found if ranks.rank else found + bias

    return _row_parallel(index, compute)


def scale_output(index: int, by: float) -> RuntimeInjection:
    """Multiply the output of a row-parallel module by (1 + by)."""

    def inject(target: InjectionTarget) -> None:
        for module in sharded_linears(target, 1, index):
            change_output(module, lambda found: found * (1 + by))

    return inject


# ----------------------------------------------------------------------------------------------------- column-parallel


def skip_input_gradient_all_reduce(index: int | None = None) -> RuntimeInjection:
    """Omit the all-reduce of the input gradient of column-parallel modules."""

    def inject(target: InjectionTarget) -> None:
        for module in sharded_linears(target, 0, index):
            del module.forward
            styles.install_colwise(module, target.ranks, is_sequence_parallel=True)

    return inject


def repeat_input_gradient_all_reduce(index: int) -> RuntimeInjection:
    """All-reduce the input gradient of a column-parallel module twice."""

    def inject(target: InjectionTarget) -> None:
        for module in sharded_linears(target, 0, index):
            change_input(module, lambda x: copy_to_ranks(x, target.ranks))

    return inject


def reduce_input_gradient(index: int, part: float) -> RuntimeInjection:
    """Lose the fraction `part` of the input gradient of a column-parallel module."""

    def inject(target: InjectionTarget) -> None:
        for module in sharded_linears(target, 0, index):
            change_input(module, lambda x: scale_gradient(x, 1 - part))

    return inject


# ---------------------------------------------------------------------------------------- norms, embeddings and experts


def double_norm_gradient(index: int | None = None) -> RuntimeInjection:
    """Double the gradient of norms, as an all-reduce of a replicated gradient would."""

    def inject(target: InjectionTarget) -> None:
        for module in find_norms(target, index):

            def make(stock: Forward, module: nn.Module = module) -> Forward:
                def replaced(x: torch.Tensor) -> Any:
                    with swap_parameters([(module, "weight", scale_gradient(module._parameters["weight"], 2.0))]):
                        return stock(x)

                return replaced

            wrap_forward(module, make)

    return inject


def skip_qk_norm_gradient_all_reduce(target: InjectionTarget) -> None:
    """Omit the all-reduce of the gradients of query and key norms, which see only the heads of one rank."""
    for module in find_modules(target, "q_norm", "k_norm"):
        del module.forward


def shift_embedding_rows(target: InjectionTarget) -> None:
    """Shift the embedding rows that rank 1 looks up by one."""
    _replace_lookup(target, lambda ids, begin, rows: (ids - begin - 1).clamp(0, rows - 1), is_masked=True)


def skip_token_mask(target: InjectionTarget) -> None:
    """Do not mask tokens of other ranks, so that each rank adds an embedding row for them."""
    _replace_lookup(target, lambda ids, begin, rows: (ids - begin).clamp(0, rows - 1), is_masked=False)


def _replace_lookup(
    target: InjectionTarget, row_of: Callable[[torch.Tensor, int, int], torch.Tensor], *, is_masked: bool
) -> None:
    """Replace the lookup of the token embedding, whose rows are sharded over the ranks.

    Args:
        target: The parallel model.
        row_of: Returns the row in the local shard for each token id; its other arguments are the first row of this
            rank and its number of rows.
        is_masked: Use zeros for tokens whose rows another rank has, and leave the lookup of rank 0 unchanged.
    """
    module, ranks = find_module(target, "embed_tokens"), target.ranks

    def make(stock: Forward) -> Forward:
        def replaced(ids: torch.Tensor) -> torch.Tensor:
            if is_masked and not ranks.rank:
                found: torch.Tensor = stock(ids)
                return found
            weight = module._parameters["weight"]
            begin, rows = ceil_chunks(weight.shape[0], ranks.size)[ranks.rank]
            found = functions.embedding(row_of(ids, begin, rows), to_local_shard(weight))
            is_of_other_rank = (ids < begin) | (ids >= begin + rows)
            return sum_over_ranks(found.masked_fill(is_of_other_rank[..., None], 0) if is_masked else found, ranks)

        return replaced

    wrap_forward(module, make)


def repeat_expert_gradient_all_reduce(target: InjectionTarget) -> None:
    """All-reduce the input gradient of the experts twice."""
    for module in find_modules(target, "mlp.experts"):
        change_input(module, lambda x: copy_to_ranks(x, target.ranks))
