"""Find a larger mesh for a step that does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from msgspec import structs

from ckptx.errors import CkptxError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.runtime.forecasting.ranks import BoundariesBySplit, forecast_ranks
from ckptx.runtime.forecasting.search import GPUS_PER_NODE, with_layout
from ckptx.runtime.forecasting.task import ForecastTask
from ckptx.runtime.memory.reserve import reserve_bytes

_MAX_FACTOR = 64  # largest factor of the number of ranks


def find_larger_mesh(task: ForecastTask, memory: int) -> tuple[ParallelDims, int] | None:
    """Return the smallest mesh with more TP or FSDP2 ranks on which a step fits, and its peak in bytes.

    The batch per data-parallel rank stays the same. As in a search, few layers and few pipeline ranks run.

    Returns:
        None if there is none with at most 64 times as many ranks.

    Args:
        task: Step that does not fit.
        memory: Memory per GPU, in bytes.
    """
    if reserve_bytes(0) >= memory:
        return None
    known_boundaries: BoundariesBySplit = {}
    for dims in _larger_meshes(task.dims):
        global_batch = task.recipe.training.global_batch // task.dims.dp * dims.dp
        training = structs.replace(task.recipe.training, global_batch=global_batch)
        base_task = replace(task, recipe=structs.replace(task.recipe, training=training))
        mode = task.recipe.layout.activation_checkpointing
        try:
            candidate = with_layout(base_task, dims, mode, task.microbatches)
            peak = max(
                each.peak
                for each in forecast_ranks(
                    candidate, validate_extrapolation=False, peak_ranks_only=True, known_boundaries=known_boundaries
                )
            )
        except CkptxError:
            continue  # the model cannot be sharded like this
        if peak + reserve_bytes(peak) <= memory:
            return dims, peak
    return None


def _larger_meshes(dims: ParallelDims) -> Iterator[ParallelDims]:
    """Yield the meshes to try, in ascending order of their ranks; with equal numbers, the one with more TP is first."""
    factor = 2
    while factor <= _MAX_FACTOR:
        if dims.tp * factor <= GPUS_PER_NODE:
            yield replace(dims, tp=dims.tp * factor)
        yield replace(dims, dp_shard=dims.dp_shard * factor)
        factor *= 2
