"""Whether a run fits the GPUs, asked before it begins: in a process of its own, by the forecast of its step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckptx.errors import SpaceError
from ckptx.formats.hf.hf_metadata import directory_of_config
from ckptx.formats.registry import open_checkpoint
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.options.forecast import ForecastOptions
from ckptx.options.verify import RunOptions
from ckptx.processes.fork import in_child
from ckptx.report.report import human_bytes
from ckptx.runtime.memory.reserve import reserved

_LENGTH, _ROWS = 32, 2  # of what models are compared on


def peak_that_fits(reference: Path, checkpoint: Path, options: RunOptions, gpu_memory: int) -> int:
    """Bytes of tensors at the peak of a run, on the rank with the most.

    Args:
        reference: Whose config is taken where the checkpoint has none.
        checkpoint: What is run.
        options: How it is run.
        gpu_memory: Of each GPU, in bytes.

    Raises:
        SpaceError: It does not fit.
        CkptxError: It cannot be forecast.
    """
    sources = [directory_of_config(open_checkpoint(path)) for path in (checkpoint, reference)]
    source = next((each for each in sources if (each / "config.json").is_file()), sources[-1])
    step = ForecastOptions(
        source, **options.shared_with(ForecastOptions), dtype=options.compute_dtype, seq=_LENGTH, optimizer="none"
    )
    peak, fitting = in_child(_peak, source, step, gpu_memory)
    if peak + reserved(peak) > gpu_memory:
        raise SpaceError(
            f"--gpu-memory: a run of {checkpoint} takes {human_bytes(peak)} of tensors and "
            f"{human_bytes(reserved(peak))} beside them on each GPU, found {human_bytes(gpu_memory)}; "
            f"{_advice(options.dims, fitting)}"
        )
    return int(peak)


def _advice(dims: ParallelDims, fitting: tuple[ParallelDims, int] | None) -> str:
    if fitting is None:
        return "no mesh of up to 64 times as many ranks for --tp or --dp-shard makes it fit; use larger GPUs"
    larger, peak = fitting
    option = f"--tp {larger.tp}" if larger.tp > dims.tp else f"--dp-shard {larger.dp_shard}"
    return f"use {option}, with which it takes {human_bytes(peak)}"


def _peak(source: Path, options: ForecastOptions, gpu_memory: int) -> tuple[int, Any]:
    from ckptx.runtime.forecasting.ranks import ranks_of, stages_of
    from ckptx.runtime.forecasting.remedy import mesh_that_fits
    from ckptx.runtime.forecasting.task import task_of_options

    task = task_of_options(source, options, stages_of(options.dims.pp, options.schedule))
    peak = max(each.peak for each in ranks_of(task))
    return peak, None if peak + reserved(peak) <= gpu_memory else mesh_that_fits(task, gpu_memory)
