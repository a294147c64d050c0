"""Compare the forecast of a training step with the allocations on one GPU in the same step.

    python benchmarks/forecast_gpu.py [--tiny] [--device cuda|cpu] [--only PART,...] [--results DIR]

Layers have their real shapes, and there are as many of them as fit on a GPU of 80 GB. For each case, `ckptx forecast`
runs in a separate process; then the same step runs on the GPU, with random weights. Torch's fake process group stands
for the other ranks: shapes and memory are real, values are not, and communication takes no time. NCCL is not used,
except in the first row, which shows the memory of a group of one rank.

The script writes forecast_gpu.json and forecast_gpu.md after each case. It exits with 1 if a case fails, or if a ratio
is wrong by more than 5 %.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from cases import Benchmark, Columns, Part, Row, describe_machine, end_after
from cases import Case as Measurement
from forecast_documents import LLAMA
from measure import HERE
from training_step import local_of

from ckptx.layout.parallel_dims import ParallelDims
from ckptx.options.forecast import ForecastOptions
from ckptx.runtime.forecasting.fake_process_group import fake_process_group
from ckptx.runtime.forecasting.step import StepSpec, make_step_inputs, make_step_optimizer
from ckptx.runtime.forecasting.task import ForecastTask, task_from_options
from ckptx.runtime.memory.measured_memory import measure_step
from ckptx.runtime.memory.reserve import reserve_bytes
from ckptx.runtime.memory.storage_ledger import StorageLedger
from ckptx.runtime.model.build import materialize
from ckptx.runtime.parallel.distributed import mesh_of, select_device
from ckptx.runtime.torch_private import free_cublas_workspaces
from ckptx.runtime.training.rank_model import RankModel, build_rank_model_on_meta
from ckptx.runtime.training.recipe_file import read_recipe

_GIB = 2**30
_LIMIT = 480  # seconds after which no case starts
_GRACE = 60.0  # seconds after the limit at which the process is ended
_WORKERS = 6  # forecasts that run at the same time, each on one core
_TOLERANCE = 0.05  # allowed relative difference of forecast and measurement
_STD = 0.02  # standard deviation of random weights
_QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "max_position_embeddings": 40960, "tie_word_embeddings": False, "rope_theta": 1e6,
}  # fmt: skip
_TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 1024, "head_dim": 8, "global_head_dim": 16, "pad_token_id": 0,
    "num_global_key_value_heads": 4, "sliding_window": 16, "num_experts": 8, "moe_intermediate_size": 32,
}  # fmt: skip


class Case(NamedTuple):
    """A training step to forecast and measure.

    Attributes:
        model: Config of the model, with its number of layers.
        options: Options of `ckptx forecast`, by their names in Python.
    """

    model: Mapping[str, Any]
    options: Mapping[str, Any]


def _llama(layers: int) -> dict[str, Any]:
    return {**LLAMA, "num_hidden_layers": layers}


def _phi(layers: int) -> dict[str, Any]:
    return {**read_recipe("phi_4_squad").model.shrunk_from, "num_hidden_layers": layers}


def _gemma(layers: int) -> dict[str, Any]:
    """Return the config of the text model; every sixth layer has full attention."""
    config: Mapping[str, Any] = read_recipe("gemma4_31b").model.shrunk_from
    text = dict(config["text_config"])
    kinds = ["full_attention" if each % 6 == 5 else "sliding_attention" for each in range(layers)]
    return {
        **text, "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "num_hidden_layers": layers,
        "layer_types": kinds, "tie_word_embeddings": True,
    }  # fmt: skip


def cases() -> dict[str, Case]:
    """Return all cases by name."""
    modes = ("none", "full", "submodule", "selective")
    options = {"dtype": "bf16", "seq": 4096}
    full_checkpointing = {**options, "activation_checkpointing": "full"}
    named_cases = {
        f"Llama 3.1 8B, 16 layers, {mode}": Case(_llama(16), {**options, "activation_checkpointing": mode})
        for mode in modes
    }
    named_cases |= {
        "Llama 3.1 8B, 32 layers, full": Case(_llama(32), full_checkpointing),
        "Llama 3.1 8B, 16 layers, full logits in fp32": Case(
            _llama(16), {**full_checkpointing, "loss": "full", "batch": 2}
        ),
        "Llama 3.1 8B, tp4, 4 rows": Case(_llama(32), {**full_checkpointing, "tp": 4, "batch": 4}),
        "Llama 3.1 8B, FSDP2 x 8, fp32, gathered in bf16": Case(
            _llama(32), {**full_checkpointing, "dtype": "fp32", "param_dtype": "bf16", "dp_shard": 8, "batch": 2}
        ),
        "Llama 3.1 8B, tp2 x FSDP2 x 4, selective": Case(
            _llama(32),
            {**options, "tp": 2, "dp_shard": 4, "activation_checkpointing": "selective", "batch": 2},
        ),
        "phi-4, 8 layers, none": Case(_phi(8), {**options, "seq": 2048, "batch": 2}),
        "phi-4, FSDP2 x 8, full, 4 rows in 2 microbatches": Case(
            _phi(40), {**full_checkpointing, "seq": 2048, "dp_shard": 8, "batch": 4, "microbatches": 2}
        ),
        "Gemma 4 31B, 6 layers, none": Case(_gemma(6), {**options, "optimizer": "sgd"}),
        "Gemma 4 31B, 6 layers, full": Case(_gemma(6), full_checkpointing),
        "Gemma 4 31B, tp4, 24 layers, full": Case(_gemma(24), {**full_checkpointing, "tp": 4}),
        "Qwen3 30B-A3B, 6 layers, none": Case(_QWEN3_MOE, options),
        "Qwen3 30B-A3B, 6 layers, full": Case(_QWEN3_MOE, full_checkpointing),
    }
    return named_cases


def shrink_case(case: Case) -> Case:
    """Return the case with small shapes, to try the script on a CPU."""
    kinds = case.model.get("layer_types")
    small_values = {key: value for key, value in _TINY.items() if key in case.model or key == "pad_token_id"}
    if kinds:
        small_values["layer_types"] = ["sliding_attention", "full_attention"]
    if "global_head_dim" not in case.model:
        small_values.pop("head_dim", None)
    return Case({**case.model, **small_values}, {**case.options, "seq": 64})


# ---------------------------------------------------------------------------------------------------------- the figures


def run_forecast(source: Path, options: Mapping[str, Any]) -> Row:
    """Run `ckptx forecast`, and return the forecast peak and the bytes between steps."""
    arguments = []
    for name, value in options.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    command = [sys.executable, "-m", "ckptx", "forecast", str(source), *arguments, "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command[2:])}: exit {process.returncode}: {process.stderr[-300:]}")
    document = json.loads(process.stdout)
    (stage,) = document["by_pipeline_rank"]
    return {
        "forecast": stage["peak"],
        "forecast_between_steps": stage["between_steps"],
        "forecast_seconds": document["seconds"],
    }


def task_of(source: Path, options: Mapping[str, Any]) -> ForecastTask:
    """Return the task that the command forecasts."""
    return task_from_options(source, ForecastOptions(source, **options), 1)


def measure_on_gpu(task: ForecastTask, device: torch.device) -> Row:
    """Run a step twice on the GPU, and measure the second, because the first creates the optimizer state."""
    with fake_process_group(0, task.dims.world_size, device) as context:
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        assembled = build_rank_model_on_meta(task.recipe, task.source, context)
        row = {"bytes_before": before, **_measure_step(_build_random_step(assembled, task, device), device)}
        assembled.release()
    gc.collect()
    if device.type == "cuda":
        free_cublas_workspaces()
    return row


def _measure_step(step: StepSpec, device: torch.device) -> Row:
    """Run a step twice, and return the bytes and seconds of the second."""

    def run() -> None:
        step.run(StorageLedger())
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    run()
    start = time.perf_counter()
    measured = measure_step(run, step.rank_model.models, device)
    row = {
        "measured": measured.peak + measured.workspaces,
        "measured_between_steps": measured.between_steps + measured.workspaces,
        "workspaces": measured.workspaces,
        "seconds": time.perf_counter() - start,
    }
    if device.type == "cuda":
        row["reserved"] = torch.cuda.max_memory_reserved(device)
        row["outside_allocator"] = _used_gpu_bytes(device) - torch.cuda.memory_reserved(device)
    return row


def _build_random_step(assembled: RankModel, task: ForecastTask, device: torch.device) -> StepSpec:
    """Fill a model with random weights, and return its step with inputs on the device."""
    torch.manual_seed(0)
    model = assembled.models[0]
    materialize(model, device)
    parameters = [each for _, each in assembled.parameters()]
    with torch.no_grad():
        for each in parameters:
            local_of(each).normal_(0, _STD)
    config = {**model.config.to_dict(), "architectures": model.config.architectures}
    inputs = make_step_inputs(task, config)
    inputs = inputs._replace(
        batch={name: each.to(device) for name, each in inputs.batch.items()}, labels=inputs.labels.to(device)
    )
    return StepSpec(assembled, task, inputs, make_step_optimizer(task, parameters))


def _used_gpu_bytes(device: torch.device) -> int:
    """Return the bytes in use on a GPU that no other process uses."""
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def measure_nccl(device: torch.device, mesh: ParallelDims) -> Row:
    """Measure the memory outside the allocator after an all-reduce with NCCL."""
    if device.type != "cuda":
        return {"outside_allocator": 0}
    with tempfile.TemporaryDirectory() as directory:
        store = dist.FileStore(str(Path(directory, "store")), 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
        mesh_of(mesh, device.type)
        for dtype in (torch.bfloat16, torch.float32):
            dist.all_reduce(torch.ones(2**24, dtype=dtype, device=device))
        torch.cuda.synchronize(device)
        found = _used_gpu_bytes(device) - torch.cuda.memory_reserved(device)
        dist.destroy_process_group()
    return {"outside_allocator": found}


# ----------------------------------------------------------------------------------------------------------- the tables


def comparison_part(
    cases_by_name: Mapping[str, Case], work: Path, device: torch.device, pool: ThreadPoolExecutor
) -> Part:
    """Return the part that compares the forecast and the measurement of each case."""
    forecasts: dict[str, Future[Row]] = {}
    measurements = []
    for number, (name, case) in enumerate(cases_by_name.items()):
        source = work / str(number)
        source.mkdir()
        (source / "config.json").write_text(json.dumps(case.model))
        forecasts[name] = pool.submit(run_forecast, source, case.options)
        task = task_of(source, case.options)

        def measure(name: str = name, task: ForecastTask = task) -> Row:
            row = measure_on_gpu(task, device)
            row |= forecasts[name].result()
            return row | {
                "ratio": row["forecast"] / row["measured"],
                "between_steps_ratio": row["forecast_between_steps"] / row["measured_between_steps"],
            }

        measurements.append(Measurement(name, measure))

    def gib(name: str) -> Any:
        return lambda row: f"{row[name] / _GIB:.3f}" if name in row else ""

    columns: Columns = {
        "forecast GiB": gib("forecast"),
        "measured GiB": gib("measured"),
        "ratio": lambda row: f"{row['ratio']:.4f}",
        "forecast between steps": gib("forecast_between_steps"),
        "measured between steps": gib("measured_between_steps"),
        "ratio between steps": lambda row: f"{row['between_steps_ratio']:.4f}",
        "reserved": gib("reserved"),
        "outside allocator": gib("outside_allocator"),
        "s per step": lambda row: f"{row['seconds']:.2f}",
        "s to forecast": lambda row: f"{row['forecast_seconds']:.1f}",
    }
    return Part("Forecast and `max_memory_allocated` of one step, GiB", measurements, columns, wrong_ratios, _summary)


def wrong_ratios(rows: list[Row]) -> list[str]:
    """List the wrong forecasts, and the cases that started with memory of an earlier case."""
    leaks = [
        f"{row['case']}: {row['bytes_before']:,} bytes were in use before the step, expected 0"
        for row in rows
        if row["bytes_before"] > 2**20
    ]
    return leaks + [
        f"{row['case']}: forecast / measured is {row['ratio']:.4f}, expected {1 - _TOLERANCE} to {1 + _TOLERANCE}"
        for row in rows
        if not abs(row["ratio"] - 1) <= _TOLERANCE
    ]


def _summary(rows: list[Row]) -> str:
    if not rows:
        return ""
    ratios = [row["ratio"] for row in rows]
    text = f"{len(rows)} cases: forecast / measured {min(ratios):.4f} to {max(ratios):.4f}."
    gpu_rows = [row for row in rows if "reserved" in row]
    if gpu_rows:
        needed = [row["measured"] + row["outside_allocator"] for row in gpu_rows]
        excess = max(each - row["forecast"] for each, row in zip(needed, gpu_rows, strict=True))
        short = [
            row["case"]
            for each, row in zip(needed, gpu_rows, strict=True)
            if each > row["forecast"] + reserve_bytes(row["forecast"])
        ]
        text += (
            f" Tensors and memory outside the allocator exceed the forecast by at most {excess / _GIB:.2f} GiB; they "
            f"exceed forecast and reserve in these cases: {', '.join(short) or 'none'}. The allocator reserved up to "
            f"{max(row['reserved'] / row['measured'] for row in gpu_rows):.3f} times the peak. Nothing limited it, and "
            "a smaller GPU was not tried."
        )
    return text


def nccl_part(device: torch.device) -> Part:
    """Return the part that measures the memory of an NCCL group."""
    measurements = [Measurement("NCCL group of one rank", lambda: measure_nccl(device, ParallelDims()))]
    columns: Columns = {"outside the allocator, GiB": lambda row: f"{row['outside_allocator'] / _GIB:.3f}"}
    return Part("Context and NCCL", measurements, columns, lambda rows: [])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases; return 1 if one fails or its forecast is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="use small shapes, to try the script on a CPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--only", default="", metavar="PART,...", help="run only cases whose name contains one of these strings"
    )
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--limit", type=float, default=_LIMIT, help="seconds after which no case starts")
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu: full shapes require a GPU; add --tiny")
    device = select_device(options.device)
    substrings = [each for each in options.only.split(",") if each]
    selected_cases = {
        name: case for name, case in cases().items() if not substrings or any(each in name for each in substrings)
    }
    if options.tiny:
        selected_cases = {name: shrink_case(case) for name, case in selected_cases.items()}
        torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory(prefix="ckptx-bench-") as directory,
        ThreadPoolExecutor(min(_WORKERS, max(1, (os.cpu_count() or 2) // 2))) as pool,
    ):
        tables = {
            "libraries": nccl_part(device),
            "steps": comparison_part(selected_cases, Path(directory), device, pool),
        }
        benchmark = Benchmark("forecast_gpu", tables, describe_machine(device, is_tiny=options.tiny), options.results)
        with end_after(benchmark, Path(directory), options.limit + _GRACE):
            benchmark.run(options.limit)
    print(benchmark.markdown())
    return 1 if benchmark.findings() else 0


if __name__ == "__main__":
    raise SystemExit(main())
