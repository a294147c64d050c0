"""Memory of one step of a recipe: forecast before it runs, and compare with the measurement."""

from __future__ import annotations

from pathlib import Path

from ckptx.errors import CkptxError, SpaceError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.report.report import human_bytes
from ckptx.robustness_suite.session import Session
from ckptx.runtime.training.recipe import Recipe

StepMemory = dict[str, int]  # "forecast_peak", "measured_between_steps", ... -> bytes


def forecast_memory(session: Session, gpu_memory: int | None) -> StepMemory:
    """Return the forecast memory of a step, computed in a new process; empty, with a note, if it cannot be forecast.

    Args:
        session: Session with a prepared source.
        gpu_memory: Memory of a GPU in bytes; None for no limit, except the free memory on a CPU.

    Raises:
        SpaceError: The step does not fit in GPU memory or, on a CPU, in the memory that all ranks share.
        CkptxError: `gpu_memory` is set and the memory cannot be forecast.
    """
    try:
        is_memory_shared = session.devices is None and not session.ranks.is_launched
        forecast = session.ranks.run_in_subprocess(
            _forecast_step, session.recipe, session.source, gpu_memory, is_memory_shared
        )
    except SpaceError:
        raise
    except CkptxError as error:
        if gpu_memory is not None:
            raise
        session.log.note(f"memory is not forecast: {error}")
        return {}
    return {"forecast_peak": forecast[0], "forecast_between_steps": forecast[1]}


def _forecast_step(recipe: Recipe, source: Path, gpu_memory: int | None, is_memory_shared: bool) -> tuple[int, int]:
    """Return the bytes of tensors at the peak of a step and between steps, maximum over ranks.

    Args:
        recipe: Recipe of the step.
        source: Path of the checkpoint.
        gpu_memory: Memory of a GPU in bytes; None for no limit.
        is_memory_shared: True if all ranks share the memory of this machine.

    Raises:
        SpaceError: The step does not fit.
    """
    import torch

    from ckptx.runtime.forecasting.larger_mesh import find_larger_mesh
    from ckptx.runtime.forecasting.ranks import forecast_ranks
    from ckptx.runtime.forecasting.task import task_from_recipe
    from ckptx.runtime.memory.reserve import reserve_bytes
    from ckptx.runtime.parity.memory import read_free_bytes

    task = task_from_recipe(recipe, source)
    ranks = forecast_ranks(task)  # one rank of each pipeline stage
    peak = max(each.peak for each in ranks)
    if gpu_memory is not None and peak + reserve_bytes(peak) > gpu_memory:
        raise SpaceError(
            f"--gpu-memory: {recipe.name} takes {human_bytes(peak)} of tensors at the peak of a step and "
            f"{human_bytes(reserve_bytes(peak))} of reserve, more than {human_bytes(gpu_memory)}; "
            f"{_advice(task.dims, find_larger_mesh(task, gpu_memory))}"
        )
    free = read_free_bytes(torch.device("cpu")) if is_memory_shared else None
    needed = sum(each.peak for each in ranks) * recipe.layout.dims.ranks_per_stage
    if free is not None and needed > free:
        raise SpaceError(
            f"{recipe.name}: its ranks take {human_bytes(needed)} of tensors at the peak of a step, but only "
            f"{human_bytes(free)} are free on this machine; reduce data.sequence_length, or use a smaller model"
        )
    return peak, max(sum(each.timeline.between_steps_by_kind) for each in ranks)


def _advice(dims: ParallelDims, larger_mesh: tuple[ParallelDims, int] | None) -> str:
    """Return how to make a step fit.

    Args:
        dims: Mesh of the step that does not fit.
        larger_mesh: Mesh on which it fits, and the bytes of tensors at its peak there; None if no mesh was found.
    """
    if larger_mesh is None:
        return (
            "no mesh of up to 64 times as many ranks for tp or dp_shard makes it fit; use activation checkpointing "
            "(--set layout.activation_checkpointing=full), or larger GPUs"
        )
    larger, peak = larger_mesh
    key, size = ("tp", larger.tp) if larger.tp > dims.tp else ("dp_shard", larger.dp_shard)
    return f"use --set layout.{key}={size}, with which it takes {human_bytes(peak)}"


def add_measurement(memory: StepMemory, measured: tuple[int, int] | None) -> StepMemory:
    """Return a forecast with measured bytes added.

    Args:
        memory: Forecast of a step.
        measured: Bytes of tensors at the peak of a step and between steps; None if they were not measured.
    """
    if measured is None:
        return memory
    return {**memory, "measured_peak": measured[0], "measured_between_steps": measured[1]}
