"""Find a larger mesh for a step that does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from msgspec import structs

from ckptx.errors import CkptxError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.runtime.forecasting.ranks import KnownBoundaries, ranks_of
from ckptx.runtime.forecasting.search import NODE, with_layout
from ckptx.runtime.forecasting.task import Task
from ckptx.runtime.memory.reserve import reserve_bytes

_MOST = 64  # largest factor of the number of ranks


def mesh_that_fits(task: Task, memory: int) -> tuple[ParallelDims, int] | None:
    """Return the smallest mesh with more TP or FSDP2 ranks on which a step fits, and its peak; None if there is none.

    The batch per data-parallel rank stays the same. As in a search, few layers and few pipeline ranks run.

    Args:
        task: Step that does not fit.
        memory: Memory per GPU, in bytes.
    """
    if reserve_bytes(0) >= memory:
        return None
    known_boundaries: KnownBoundaries = {}
    for dims in _larger(task.dims):
        rows = task.recipe.training.global_batch // task.dims.dp * dims.dp
        training = structs.replace(task.recipe.training, global_batch=rows)
        same = replace(task, recipe=structs.replace(task.recipe, training=training))
        mode = task.recipe.layout.activation_checkpointing
        try:
            candidate = with_layout(same, dims, mode, task.microbatches)
            peak = max(
                each.peak
                for each in ranks_of(
                    candidate, validate_extrapolation=False, few_ranks=True, known_boundaries=known_boundaries
                )
            )
        except CkptxError:
            continue  # the model cannot be sharded like this
        if peak + reserve_bytes(peak) <= memory:
            return dims, peak
    return None


def _larger(dims: ParallelDims) -> Iterator[ParallelDims]:
    factor = 2
    while factor <= _MOST:
        if dims.tp * factor <= NODE:
            yield replace(dims, tp=dims.tp * factor)
        yield replace(dims, dp_shard=dims.dp_shard * factor)
        factor *= 2
