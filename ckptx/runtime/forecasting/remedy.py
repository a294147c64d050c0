"""A mesh on which a step fits that does not fit as it was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from msgspec import structs

from ckptx.errors import CkptxError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.runtime.forecasting.ranks import Carries, ranks_of
from ckptx.runtime.forecasting.search import NODE, with_layout
from ckptx.runtime.forecasting.task import Task
from ckptx.runtime.memory.reserve import reserved

_MOST = 64  # times as many ranks


def mesh_that_fits(task: Task, memory: int) -> tuple[ParallelDims, int] | None:
    """The smallest mesh with more ranks for TP or FSDP2 on which a step fits, and its peak; None where none does.

    Each data rank has as many rows as before. Few layers and few ranks of a pipeline run, as in a search.

    Args:
        task: What does not fit.
        memory: Of each GPU, in bytes.
    """
    if reserved(0) >= memory:
        return None
    carries: Carries = {}
    for dims in _larger(task.dims):
        rows = task.recipe.training.global_batch // task.dims.dp * dims.dp
        training = structs.replace(task.recipe.training, global_batch=rows)
        same = replace(task, recipe=structs.replace(task.recipe, training=training))
        mode = task.recipe.layout.activation_checkpointing
        try:
            asked = with_layout(same, dims, mode, task.microbatches)
            peak = max(each.peak for each in ranks_of(asked, is_tried=False, few_ranks=True, carries=carries))
        except CkptxError:
            continue  # the model cannot be cut so
        if peak + reserved(peak) <= memory:
            return dims, peak
    return None


def _larger(dims: ParallelDims) -> Iterator[ParallelDims]:
    factor = 2
    while factor <= _MOST:
        if dims.tp * factor <= NODE:
            yield replace(dims, tp=dims.tp * factor)
        yield replace(dims, dp_shard=dims.dp_shard * factor)
        factor *= 2
