"""Measure the runtime on one GPU, with generated random weights.

    python benchmarks/gpu.py [--tiny] [--device cuda|cpu] [--parts verify,activation_checkpointing,tensor_parallel]

verify: a Llama of 1.03 B parameters, converted to DCP, loaded and run on the GPU, against the stock model.
activation_checkpointing: memory and time of a training step in each mode, Llama 3.1 8B and a dense Gemma 4.
tensor_parallel: memory and time of rank 0 of 4 with Llama 3.1 8B, with logits gathered and sharded over the vocabulary.
Torch's fake process group stands for the other ranks: shapes and memory are real, values are not, and communication
takes no time.

Each measurement is a separate case, and gpu.json and gpu.md are written after each, so that no result is lost. The
script reports each case that fails or finds an error, and exits with 1. It marks cases for which no time remains as not
run.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from cases import Benchmark, Case, Columns, Part, Row, describe_machine, end_after
from checkpoints import llama
from measure import HERE
from torch.distributed.device_mesh import init_device_mesh
from training_step import Shape, build_model, fit_layers, gemma4_31b, llama_8b, llama_from, measure_step

import ckptx
from ckptx.errors import CkptxError
from ckptx.options.verify import RunOptions
from ckptx.report.report import Log
from ckptx.runtime.forecasting.fake_process_group import fake_process_group
from ckptx.runtime.model.layers import layer_groups
from ckptx.runtime.parallel.activation_checkpointing.wrap import MODES, checkpoint_activations
from ckptx.runtime.parallel.distributed import select_device
from ckptx.runtime.parallel.tensor_parallel.apply import apply_tensor_parallel
from ckptx.runtime.parallel.tensor_parallel.plans import find_plan
from ckptx.runtime.parity.forward import verify_run

_TP = 4
_REPEATS = 5
_LIMIT = 400  # seconds after which no case starts
GRACE = 70.0  # seconds after the limit at which the process is ended
_FREE_BYTES = 8 << 30  # free bytes of /dev/shm that the checkpoints require
# Peak memory in GB with gathered and with sharded logits, as the authors of NeMo Automodel published it.
_PUBLISHED_PEAKS = (51.93, 35.66)
_DEFAULT, _OPTIMIZED = "default plan", "optimized plan"  # cases with gathered logits, and with sharded logits


class Settings(NamedTuple):
    """Settings of all measurements.

    Attributes:
        device: Device of the models.
        is_tiny: Use small shapes and one repeat.
        work: Directory for checkpoints.
    """

    device: torch.device
    is_tiny: bool
    work: Path

    @property
    def repeats(self) -> int:
        """Return the number of timed training steps."""
        return 1 if self.is_tiny else _REPEATS


# ----------------------------------------------------------------------------------------------------------- the parts


def verify_part(settings: Settings) -> Part:
    """Return the part that runs `verify --run` on a DCP and the checkpoint that it was converted from."""
    shape = llama_from(llama().config, is_tiny=settings.is_tiny)

    def measure() -> Row:
        source, dcp = settings.work / "source", settings.work / "dcp"
        model = build_model(shape, settings.device)
        parameters = sum(each.numel() for each in model.parameters())
        model.save_pretrained(source, max_shard_size="1GB")
        del model
        ckptx.convert("hf2dcp", source, dcp)
        report = verify_run(source, dcp, RunOptions(device=settings.device.type), Log())
        document = report.to_dict()
        keys = ("exit", "seconds", "max_abs", "kl", "cosine", "loss", "loss_reference", "gradients", "grad_max_abs")
        row = {"parameters": parameters, **{name: document[name] for name in keys}}
        return row | {"differing": len(document["differing"]), "first_differing": document["differing"][:3]}

    columns: Columns = {
        "parameters": lambda row: f"{row['parameters']:,}",
        "exit": lambda row: str(row["exit"]),
        "logits max abs": lambda row: f"{row['max_abs']:.3g}",
        "KL": lambda row: f"{row['kl']:.3g}",
        "cosine": lambda row: f"{row['cosine']:.6f}",
        "loss": lambda row: f"{row['loss']:.6f}",
        "reference loss": lambda row: f"{row['loss_reference']:.6f}",
        "gradients": lambda row: str(row["gradients"]),
        "gradients max abs": lambda row: f"{row['grad_max_abs']:.3g}",
        "seconds": lambda row: f"{row['seconds']:.1f}",
    }
    title = "`verify --run`: a DCP on one rank and its source HF checkpoint, bf16"
    return Part(title, [Case(shape.name, measure)], columns, wrong_outcomes)


def wrong_outcomes(rows: list[Row]) -> list[str]:
    """List the rows in which `verify` did not exit with 0."""
    return [f"{row['case']}: verify exited with {row['exit']}, expected 0" for row in rows if row["exit"]]


def checkpointing_part(settings: Settings) -> Part:
    """Return the part that measures a training step in each activation checkpointing mode."""

    def case(full_shape: Shape, mode: str) -> Case:
        def measure() -> Row:
            shape = fit_layers(full_shape, settings.device)
            model = build_model(shape, settings.device)
            num_wrapped = checkpoint_activations(model, mode)
            layers = sum(len(group) for group in layer_groups(model).values())
            row = measure_step(model, shape, settings.device, settings.repeats)
            return row | {"model": shape.name, "mode": mode, "wrapped": num_wrapped, "layers": layers}

        return Case(f"{full_shape.name}, {mode}", measure)

    columns: Columns = {
        **_MODEL_COLUMNS,
        "checkpointed": lambda row: str(row["wrapped"]),
        **_STEP_COLUMNS,
        "loss": lambda row: f"{row['loss']:.6f}",
        "gradient norm": lambda row: f"{row['gradient_norm']:.6g}",
    }
    shapes = (llama_8b(1, is_tiny=settings.is_tiny), gemma4_31b(is_tiny=settings.is_tiny))
    cases = [case(shape, mode) for shape in shapes for mode in MODES]
    return Part("Activation checkpointing, forward and backward, bf16", cases, columns, wrong_checkpointing)


def wrong_checkpointing(rows: list[Row]) -> list[str]:
    """List rows with layers that are not checkpointed, or with a loss that depends on the mode."""
    lines = []
    for row in rows:
        expected = 0 if row["mode"] == "none" else row["layers"]
        if row["wrapped"] != expected:
            lines.append(f"{row['case']}: {row['wrapped']} layers are checkpointed, expected {expected}")
        first = next(each for each in rows if each["model"] == row["model"])
        if row["loss"] != first["loss"] or not math.isfinite(row["loss"]):
            lines.append(f"{row['case']}: loss {row['loss']!r}, expected {first['loss']!r} as in {first['case']}")
        if not row["gradient_norm"] > 0:
            lines.append(f"{row['case']}: gradient norm {row['gradient_norm']!r}, expected more than 0")
    return lines


def tensor_parallel_part(settings: Settings) -> Part:
    """Return the part that measures one of four TP ranks, with gathered logits (stock plan) and with sharded logits."""
    shape = llama_8b(4, is_tiny=settings.is_tiny)

    def case(name: str, expected_logits: str, *, sequence_parallel: bool = False) -> Case:
        def measure() -> Row:
            with fake_process_group(0, _TP, settings.device):
                mesh = init_device_mesh(settings.device.type, (_TP,), mesh_dim_names=("tp",))
                model = build_model(shape, settings.device)
                config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
                plan = find_plan(model, config, sequence_parallel=sequence_parallel)
                if expected_logits == "whole":
                    plan = dataclasses.replace(plan, sharded_head="")
                apply_tensor_parallel(model, mesh, plan)
                checkpoint_activations(model, "full")  # otherwise a smaller GPU runs out of memory
                row = measure_step(model, shape, settings.device, settings.repeats)
            del row["loss"], row["gradient_norm"]  # meaningless, because the fake group sends no data
            return row | {"model": shape.name, "tp": _TP, "expected_logits": expected_logits}

        return Case(name, measure)

    columns: Columns = {**_MODEL_COLUMNS, "logits": lambda row: row["logits"], **_STEP_COLUMNS}
    cases = [
        case(_DEFAULT, "whole"),
        case(_OPTIMIZED, "sharded"),
        case(f"{_OPTIMIZED}, sequence parallel", "sharded", sequence_parallel=True),
    ]
    title = f"{shape.name}, rank 0 of TP={_TP} (fake group), forward and backward, full activation checkpointing, bf16"
    return Part(title, cases, columns, wrong_logits, _compare_published)


def wrong_logits(rows: list[Row]) -> list[str]:
    """List rows in which the plan did not give the expected placement of the logits."""
    return [
        f"{row['case']}: the logits are {row['logits']}, expected {row['expected_logits']}"
        for row in rows
        if row["logits"] != row["expected_logits"]
    ]


def _compare_published(rows: list[Row]) -> str:
    """Return a note with the published peaks next to those of this run."""
    published_gathered, published_sharded = _PUBLISHED_PEAKS
    text = (
        f"Published for Llama 3.1 8B, FSDP2 and TP=4 on eight GPUs: {published_gathered} -> "
        f"{published_sharded} GB, {published_sharded - published_gathered:+.2f}."
    )
    peaks = {row["case"]: row["peak_gib"] for row in rows}
    if _DEFAULT in peaks and _OPTIMIZED in peaks:
        gathered, sharded = peaks[_DEFAULT], peaks[_OPTIMIZED]
        text += (
            f" Here, {rows[0]['model']} without FSDP2 and optimizer: {gathered:.4g} -> {sharded:.4g} GiB, "
            f"{sharded - gathered:+.4g}."
        )
    return text


_MODEL_COLUMNS: Columns = {
    "layers": lambda row: str(row["layers"]),
    "batch": lambda row: f"{row['batch_size']} x {row['sequence_length']}",
}
_STEP_COLUMNS: Columns = {
    "weights GiB": lambda row: f"{row['weights_gib']:.4g}",
    "peak GiB": lambda row: f"{row['peak_gib']:.4g}",
    "above weights": lambda row: f"{row['step_gib']:.4g}",
    "ms per step": lambda row: f"{row['seconds'] * 1e3:.0f}",
}
PARTS: dict[str, Callable[[Settings], Part]] = {
    "verify": verify_part,
    "activation_checkpointing": checkpointing_part,
    "tensor_parallel": tensor_parallel_part,
}


def checkpoint_parent() -> str | None:
    """Return the parent directory of checkpoints: a RAM disk with enough space, or None for the default."""
    ram = Path("/dev/shm")
    return str(ram) if ram.is_dir() and shutil.disk_usage(ram).free > _FREE_BYTES else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the selected parts; return 1 if a case fails or a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="use small shapes, to try the script on a CPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--limit", type=float, default=_LIMIT, help="seconds after which no case starts")
    options = parser.parse_args(arguments)
    names = options.parts.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))}: unknown; choose from {', '.join(PARTS)}")
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu: full shapes require a GPU; add --tiny")
    try:
        device = select_device(options.device)
    except CkptxError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    transformers.utils.logging.disable_progress_bar()
    if device.type == "cpu":
        torch.set_num_threads(1)  # shapes too small for more
    with tempfile.TemporaryDirectory(dir=checkpoint_parent(), prefix="ckptx-bench-") as directory:
        settings = Settings(device, options.tiny, Path(directory))
        parts = {name: make(settings) for name, make in PARTS.items() if name in names}
        benchmark = Benchmark("gpu", parts, describe_machine(device, is_tiny=options.tiny), options.results)
        with end_after(benchmark, settings.work, options.limit + GRACE):
            benchmark.run(options.limit)
    print(benchmark.markdown())
    return 1 if benchmark.findings() else 0


if __name__ == "__main__":
    raise SystemExit(main())
