"""Time the merge of LoRA adapters against `cp -r` and PEFT, and measure how exact it is.

    python benchmarks/merge.py [--rounds 3] [--parts accuracy,time,large] [--ram DIRECTORY]

accuracy: elements that differ from the correctly rounded sum (float64). time: a Llama of 1.9 GiB in bf16 on a RAM disk,
with adapters of rank 16 on the attention and on every linear layer, and PEFT's merge_and_unload. large: a dry run for
DeepSeek-V3 (671 B parameters, in files with holes) with an adapter of rank 16 on its attention, which measures seconds
and memory of everything but the copy.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import Model, deepseek, llama, write_checkpoint
from measure import (
    CKPTX,
    HERE,
    Step,
    directory_size,
    parse_arguments,
    publish,
    table,
    time_command,
    time_rounds,
    timing_table,
)
from threadpoolctl import threadpool_limits

import ckptx
from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.formats.hf.safetensors import format_header_text, frame_header, pad_header
from ckptx.quantization.decode import bf16_values
from ckptx.transfer.cast import round_to_bf16

_RANK, _ALPHA = 16, 32
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")


def write_adapter(path: Path, model: Model, modules: tuple[str, ...], scale: float = 0.02) -> int:
    """Write an adapter with random values for the linear layers of a model.

    Args:
        path: Directory to write.
        model: Model; layers with other names than `modules` get none.
        modules: Last components of the names of the layers; empty for all linear layers of the transformer layers.
        scale: Standard deviation of A and B.

    Returns:
        The number of layers.
    """
    path.mkdir()
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for name, shape in model.shapes:
        module = name.removesuffix(".weight")
        is_layer = name.startswith("model.layers.") and len(shape) == 2 and ".experts." not in name
        if is_layer and name.endswith(".weight") and (module.rpartition(".")[2] in modules or not modules):
            for kind, size in (("A", (_RANK, shape[1])), ("B", (shape[0], _RANK))):
                values = (rng.standard_normal(size) * scale).astype(np.float32)
                arrays[f"base_model.model.{module}.lora_{kind}.weight"] = values
    header, offset = [], 0
    for name, values in arrays.items():
        header.append((name, DTYPES_BY_NAME["F32"], values.shape, offset, offset + values.nbytes))
        offset += values.nbytes
    with (path / "adapter_model.safetensors").open("wb") as file:
        file.write(frame_header(pad_header(format_header_text(header, {"format": "pt"}))))
        for values in arrays.values():
            file.write(values.tobytes())
    targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in arrays})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": _RANK,
        "lora_alpha": _ALPHA,
        "target_modules": targets,
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    return len(arrays) // 2


def measure_accuracy(work: Path) -> list[tuple[str, str, str]]:
    """Return rows with the elements of merged bf16 weights that differ from the correctly rounded ones.

    Args:
        work: Directory for the checkpoints.
    """
    write_checkpoint(work / "model", llama(2), normal=True)
    rows = []
    for scale, description in ((0.01, "small against the weights"), (0.1, "as large as the weights")):
        adapter = work / f"adapter {scale}"
        write_adapter(adapter, llama(2), (), scale)
        ckptx.merge(work / "model", adapter, work / f"out {scale}")
        opened = [ckptx.open_checkpoint(each) for each in (work / "model", work / f"out {scale}", adapter)]
        differing = total = largest = 0
        for name, entry in opened[0].tensors.items():
            module = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{module}.lora_A.weight" not in opened[2].tensors:
                continue
            weight, found = (_read(each, name, np.uint16).reshape(entry.shape) for each in opened[:2])
            a, b = (_read(opened[2], f"{module}.lora_{kind}.weight", np.float32) for kind in "AB")
            a, b = a.reshape(_RANK, -1).astype(np.float64), b.reshape(-1, _RANK).astype(np.float64)
            exact = bf16_values(weight).astype(np.float64) + _ALPHA / _RANK * (b @ a)
            expected = round_to_bf16(exact.astype(np.float32))
            distance = np.abs(_ordered(found) - _ordered(expected))
            differing += int(np.count_nonzero(distance))
            largest, total = max(largest, int(distance.max())), total + distance.size
        rows.append((description, f"{differing:,} of {total:,}", str(largest)))
    return rows


def _read(catalog: Any, name: str, dtype: Any) -> Any:
    """Return the elements of a tensor that is stored in one piece."""
    (chunk,) = catalog.tensors[name].chunks
    with catalog.source.open() as files:
        return np.frombuffer(files.read(chunk.file, chunk.offset, chunk.nbytes), dtype)


def _ordered(bits: Any) -> Any:
    """Return bf16 bits as integers in the order of their values, which units in the last place count."""
    magnitude = (bits & 0x7FFF).astype(np.int32)
    return np.where(bits >> 15, -magnitude, magnitude)


def time_merges(work: Path, rounds: int) -> tuple[list[Any], int]:
    """Time merges and PEFT on a RAM disk; return the timings and the size of the model in bytes."""
    source = work / "model"
    write_checkpoint(source, llama(), normal=True)
    nbytes = directory_size(source)
    copy = work / "copy"
    steps = [Step("cp -r of the model", ["cp", "-r", str(source), str(copy)], copy)]
    adapters = {"attention": _ATTENTION, "every linear layer": ()}
    for name, modules in adapters.items():
        write_adapter(work / name, llama(), modules)
        out = work / "out"
        command = [*CKPTX, "merge", str(source), str(work / name), str(out)]
        steps.append(Step(f"ckptx merge, {name}", command, out))
        sharded = work / "sharded"
        steps.append(
            Step(f"ckptx merge --tp 4 --pp 2, {name}", [*command[:-1], str(sharded), "--tp", "4", "--pp", "2"], sharded)
        )
    stock = work / "stock"
    command = [sys.executable, str(HERE / "stock_merge.py"), str(source), str(work / "every linear layer"), str(stock)]
    steps.append(Step("PEFT merge_and_unload, every linear layer", command, stock))
    return time_rounds(steps, rounds, nbytes), nbytes


def time_large(work: Path) -> tuple[float, int, int]:
    """Return seconds, peak RSS and layers of a dry run for DeepSeek-V3 with an adapter on its attention."""
    write_checkpoint(work / "model", deepseek(), shards=163, sparse=True)
    layers = write_adapter(work / "adapter", deepseek(), _ATTENTION)
    command = [*CKPTX, "merge", str(work / "model"), str(work / "adapter"), str(work / "out"), "--dry-run", "--resume"]
    seconds, peak = time_command(command)
    return seconds, peak, layers


def main() -> None:
    """Measure the selected parts and publish the tables."""
    arguments = parse_arguments(__doc__, ("accuracy", "time", "large"))
    results: dict[str, Any] = {}
    tables = []
    for part in arguments.parts:
        with tempfile.TemporaryDirectory(dir=arguments.ram) as work, threadpool_limits(1, user_api="blas"):
            if part == "accuracy":
                rows = measure_accuracy(Path(work))
                results["accuracy"] = [list(row) for row in rows]
                columns = (
                    "change by the adapter",
                    "elements that differ",
                    "largest difference (units in the last place)",
                )
                tables.append(table("Merged bf16 weights against the correctly rounded sum", columns, rows))
            elif part == "time":
                timings, nbytes = time_merges(Path(work), arguments.rounds)
                results["time"] = {"model_gib": round(nbytes / 2**30, 2), "rows": [each.to_dict() for each in timings]}
                tables.append(timing_table(f"Merge into a model of {nbytes / 2**30:.1f} GiB, on a RAM disk", timings))
            else:
                seconds, peak, layers = time_large(Path(work))
                results["large"] = {"seconds": round(seconds, 2), "peak_rss_mib": round(peak / 2**20), "layers": layers}
                tables.append(
                    f"Dry run for DeepSeek-V3 (671 B parameters) with an adapter on {layers} layers: {seconds:.1f} s, "
                    f"{peak / 2**20:.0f} MiB.\n"
                )
    publish(arguments.results, "merge", results, tables)


if __name__ == "__main__":
    main()
