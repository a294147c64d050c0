"""Memory check before `verify --run`: forecast its step in a child process, and compare it with the GPU memory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from ckptx.errors import SpaceError
from ckptx.formats.hf.hf_metadata import local_config_directory
from ckptx.formats.registry import open_checkpoint
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.options.forecast import ForecastOptions
from ckptx.options.verify import RunOptions
from ckptx.processes.fork import run_in_child
from ckptx.report.report import human_bytes
from ckptx.runtime.memory.reserve import reserve_bytes
from ckptx.storage.files import is_regular_file

_SEQUENCE_LENGTH = 32  # tokens per sequence in the batches that `verify --run` uses


def check_memory_fit(reference: Path, checkpoint: Path, options: RunOptions, gpu_memory: int) -> int:
    """Check that a run fits into the memory of a GPU, and return its peak tensor memory in bytes.

    The peak is the maximum over ranks. A run fits if its peak and a reserve, for the CUDA context, NCCL and
    fragmentation, fit.

    Args:
        reference: Checkpoint whose config is used if `checkpoint` has none.
        checkpoint: Checkpoint that runs on the mesh.
        options: Options of the run.
        gpu_memory: Memory per GPU in bytes.

    Raises:
        SpaceError: The run does not fit.
        CkptxError: The run cannot be forecast.
    """
    sources = [local_config_directory(open_checkpoint(path)) for path in (checkpoint, reference)]
    source = next((each for each in sources if is_regular_file(each / "config.json")), sources[-1])
    step = ForecastOptions(
        source,
        **options.values_shared_with(ForecastOptions),
        dtype=options.compute_dtype,
        seq=_SEQUENCE_LENGTH,
        optimizer="none",
    )
    peak, larger_mesh = run_in_child(_forecast_peak, source, step, gpu_memory)
    if peak + reserve_bytes(peak) > gpu_memory:
        raise SpaceError(
            f"--gpu-memory: a run of {checkpoint} requires {human_bytes(peak)} of tensors and "
            f"{human_bytes(reserve_bytes(peak))} of reserve per GPU, and a GPU has {human_bytes(gpu_memory)}; "
            f"{_advice(options.dims, larger_mesh)}"
        )
    return int(peak)


def _advice(dims: ParallelDims, larger_mesh: tuple[ParallelDims, int] | None) -> str:
    """Return the next step, given a larger mesh that fits with its peak in bytes; None if no mesh fits."""
    if larger_mesh is None:
        return "multiplying --tp or --dp-shard by up to 64 does not make it fit; use larger GPUs"
    larger_dims, peak = larger_mesh
    option = f"--tp {larger_dims.tp}" if larger_dims.tp > dims.tp else f"--dp-shard {larger_dims.dp_shard}"
    return f"use {option}, which lowers this to {human_bytes(peak)} of tensors"


def _forecast_peak(source: Path, options: ForecastOptions, gpu_memory: int) -> tuple[int, Any]:
    """Return the peak in bytes, and a larger mesh that fits with its peak in bytes.

    The larger mesh is None if the step fits, or if no larger mesh makes it fit.
    """
    from ckptx.runtime.forecasting.larger_mesh import find_larger_mesh
    from ckptx.runtime.forecasting.model_config import without_quantization_config
    from ckptx.runtime.forecasting.ranks import forecast_ranks
    from ckptx.runtime.forecasting.task import task_from_options
    from ckptx.runtime.parallel.pipeline.schedules import count_stages

    with tempfile.TemporaryDirectory(prefix="ckptx-forecast-") as directory:
        source, _ = without_quantization_config(source, Path(directory))  # --dequantize runs the dequantized model
        task = task_from_options(source, options, count_stages(options.dims.pp, options.schedule))
        peak = max(each.peak for each in forecast_ranks(task))
        return peak, None if peak + reserve_bytes(peak) <= gpu_memory else find_larger_mesh(task, gpu_memory)
