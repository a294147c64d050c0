"""Time the decoding of quantized weights: the kernels, and whole conversions against `cp -r` and torch's reader.

    python benchmarks/dequantize.py [--rounds 3] [--parts kernels,fp8,mxfp4,experts,torch] [--disk DIRECTORY]

kernels: elements per CPU-second of one thread, from codes in memory to bf16 in memory. fp8, mxfp4: conversions of a
model of 8 GiB in bf16 to HF files, at one and two workers, against `cp -r` of the output. ckptx waits until its output
is on the disk, so a second copy does, too. The last two commands copy the quantized tensors with their scales, and the
decoded ones. experts: the same for 18,723 small tensors in fp8. torch: the same for fp8 and 2.6 GiB, with torch's
reader, which holds the model in memory more than once. The disk needs 55 GiB.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import Model, experts, qwen3_moe
from measure import CKPTX, HERE, Step, Timing, parse_arguments, publish, table, time_command, time_rounds, timing_table

from ckptx.catalog.dtype import DTYPES_BY_NAME, DType
from ckptx.formats.hf.reader import format_index
from ckptx.formats.hf.safetensors import format_header_text, frame_header, pad_header
from ckptx.quantization import decode

# Layers of Qwen3-30B-A3B: 8.3 GiB in bf16; for torch's reader, which holds the model in memory, 2.6 GiB.
_LAYERS, _LAYERS_FOR_TORCH = 7, 2
_SHARDS = 4
_DEEPSEEK_V3_PARAMETERS = 671e9

Tensor = tuple[str, DType, tuple[int, ...], bytes]  # name, dtype, shape and contents


def time_kernels() -> list[dict[str, Any]]:
    """Return elements per CPU-second of each kernel, the best of several runs."""
    rng = np.random.default_rng(0)
    rows, columns = 73, 7168  # 1 MiB of bf16, as conversions read them
    codes = rng.integers(0, 256, (rows, columns), np.uint8)
    packed = rng.integers(0, 256, (rows, columns // 2), np.uint8)
    exponents = rng.integers(110, 130, (rows, columns // 32), np.uint8)
    e4m3_scales = rng.integers(1, 120, (rows, columns // 16), np.uint8)
    scales, row_scales = rng.random((1, columns // 128), np.float32), rng.random((rows, 1), np.float32)
    group_scales = rng.random((rows, columns // 32), np.float32)
    out = np.empty((rows, columns), np.uint16)
    e8m0, e4m3 = (decode.pair_table(each, is_divisor=False, to_bf16=True) for each in (None, 1.0))
    integers = np.arange(16, dtype=np.float32) - 8
    kernels: dict[str, Callable[[], None]] = {
        "fp8, blocks of 128 x 128": lambda: decode.decode_by_tables(
            codes, scales, decode.e4m3_values(), (128, 128), 0, out
        ),
        "fp8, one scale per row": lambda: decode.decode_by_tables(
            codes, row_scales, decode.e4m3_values(), (1, columns), 0, out
        ),
        "mxfp4": lambda: decode.decode_pairs(packed, exponents, e8m0, 32, out),
        "nvfp4": lambda: decode.decode_pairs(packed, e4m3_scales, e4m3, 16, out),
        "int4, groups of 32": lambda: decode.decode_by_products(
            decode.unpack_nibbles(packed, columns), group_scales, integers, 32, out
        ),
    }
    return [
        {"kernel": name, "millions_per_cpu_second": round(rows * columns / _best_seconds(run) / 1e6)}
        for name, run in kernels.items()
    ]


def _best_seconds(run: Callable[[], None]) -> float:
    """Return the CPU seconds of one call: the mean over 20 calls, in the fastest of 7 repetitions."""
    run()
    best = float("inf")
    for _ in range(7):
        start = time.process_time()
        for _ in range(20):
            run()
        best = min(best, (time.process_time() - start) / 20)
    return best


def write_quantized(root: Path, model: Model, quantize: Callable[[str, tuple[int, ...]], Iterator[Tensor]]) -> None:
    """Write a quantized checkpoint in safetensors files.

    Args:
        root: Directory of the checkpoint; it must not exist.
        model: Tensors and config to write.
        quantize: Yields the stored tensors of a tensor, given its name and shape.
    """
    root.mkdir(parents=True)
    tensors = list(model.shapes)
    weight_map: dict[str, str] = {}
    for index in range(_SHARDS):
        tensors_of_file = tensors[index * len(tensors) // _SHARDS : (index + 1) * len(tensors) // _SHARDS]
        header, payloads, offset = [], [], 0
        for name, shape in tensors_of_file:
            for stored, dtype, stored_shape, data in quantize(name, shape):
                header.append((stored, dtype, stored_shape, offset, offset + len(data)))
                payloads.append(data)
                offset += len(data)
        file = f"model-{index + 1:05d}-of-{_SHARDS:05d}.safetensors"
        with (root / file).open("wb") as out:
            out.write(frame_header(pad_header(format_header_text(header, {"format": "pt"}))))
            out.writelines(payloads)
        weight_map |= {stored: file for stored, *_ in header}
    (root / "config.json").write_text(json.dumps(model.config, indent=2) + "\n")
    (root / "model.safetensors.index.json").write_text(format_index(weight_map, {}))


def _is_quantized(name: str) -> bool:
    return name.endswith("_proj.weight")


_RNG = np.random.default_rng(0)
_CODES = _RNG.integers(0, 126, 64 << 20, np.uint8) | (_RNG.integers(0, 2, 64 << 20, np.uint8) << 7)  # no NaN


def _random_codes(count: int) -> bytes:
    """Return `count` random bytes."""
    start = int(_RNG.integers(0, len(_CODES)))
    return np.resize(np.roll(_CODES[: min(len(_CODES), count)], start % max(1, count)), count).tobytes()


def _random_bf16(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of random numbers in bf16, which is not quantized."""
    values = _RNG.normal(0, 0.02, prod(shape)).astype(np.float32).view(np.uint32) >> 16
    return name, DTYPES_BY_NAME["BF16"], shape, values.astype(np.uint16).tobytes()


def fp8_tensors(name: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Yield a tensor in fp8 and its scales of blocks of 128 x 128; other tensors than projections in bf16."""
    if not _is_quantized(name):
        yield _random_bf16(name, shape)
        return
    yield name, DTYPES_BY_NAME["F8_E4M3"], shape, _random_codes(prod(shape))
    blocks = tuple(-(-size // 128) for size in shape)
    scales = _RNG.uniform(1e-5, 1e-3, blocks).astype(np.float32)
    yield f"{name}_scale_inv", DTYPES_BY_NAME["F32"], blocks, scales.tobytes()


def mxfp4_tensors(name: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Yield a tensor in mxfp4 as compressed-tensors stores it, and its scales; other than projections in bf16."""
    if not _is_quantized(name):
        yield _random_bf16(name, shape)
        return
    stem, (rows, columns) = name.removesuffix(".weight"), shape
    yield f"{stem}.weight_packed", DTYPES_BY_NAME["U8"], (rows, columns // 2), _random_codes(rows * columns // 2)
    scales = _RNG.integers(110, 122, (rows, columns // 32), np.uint8)
    yield f"{stem}.weight_scale", DTYPES_BY_NAME["U8"], scales.shape, scales.tobytes()


FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
_MXFP4_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
_MXFP4_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _MXFP4_WEIGHTS}},
}
_PARTS: dict[str, tuple[dict[str, Any], Callable[[str, tuple[int, ...]], Iterator[Tensor]], Callable[[], Model]]] = {
    "fp8": (FP8_CONFIG, fp8_tensors, lambda: qwen3_moe(_LAYERS)),
    "mxfp4": (_MXFP4_CONFIG, mxfp4_tensors, lambda: qwen3_moe(_LAYERS)),
    "experts": (FP8_CONFIG, fp8_tensors, experts),
    "torch": (FP8_CONFIG, fp8_tensors, lambda: qwen3_moe(_LAYERS_FOR_TORCH)),
}

_SCHEMES = {"fp8": "fp8", "mxfp4": "mxfp4", "experts": "18,723 small tensors, fp8", "torch": "fp8"}


def time_conversions(work: Path, part: str, rounds: int) -> tuple[list[Timing], int]:
    """Time the conversions of one part.

    Args:
        work: Directory for the checkpoints.
        part: Key of `_PARTS`.
        rounds: Number of timed rounds.

    Returns:
        Timings of the commands, and the size of the output in bytes.
    """
    source, reference = work / part, work / "reference"
    config, quantize, build_model = _PARTS[part]
    model = build_model()
    write_quantized(source, Model(model.shapes, {**model.config, "quantization_config": config}), quantize)
    convert = [*CKPTX, "convert", "to-hf", str(source)]
    time_command([*convert, str(reference), "--dequantize"])
    nbytes = sum(file.stat().st_size for file in reference.iterdir())
    copies = {"cp -r of the output": work / "cp", "cp -r of the output, then sync -f": work / "synced"}
    steps = [
        Step(name, ["sh", "-c", f"cp -r {reference} {copy}" + (f" && sync -f {copy}" if "sync" in name else "")], copy)
        for name, copy in copies.items()
    ]
    for workers in (1, 2):
        out = work / f"workers-{workers}"
        command = [*convert, str(out), "--dequantize", "--workers", str(workers)]
        check = [*CKPTX, "verify", str(source), str(out), "--dequantize"]
        steps.append(Step(f"ckptx, {workers} worker{'s' * (workers > 1)}", command, out, checks=[check]))
    if part != "torch":
        copies_by_name = {"the quantized files as they are": source, "from the decoded files": reference}
        for name, copied in copies_by_name.items():
            out = work / "copied"
            command = [*CKPTX, "convert", "to-hf", str(copied), str(out), "--workers", "2"]
            steps.append(Step(f"ckptx, 2 workers, {name}", command, out))
    if part == "torch":
        out = work / "stock"
        command = [sys.executable, str(HERE / "stock_dequantize.py"), str(source), str(out)]
        steps.append(Step("torch's QuantizedHuggingFaceStorageReader", command, out))
    return time_rounds(steps, rounds), nbytes


def main() -> None:
    """Measure the selected parts and publish the tables."""
    arguments = parse_arguments(__doc__, ("kernels", *_PARTS))
    results: dict[str, Any] = {}
    tables = []
    if "kernels" in arguments.parts:
        results["kernels"] = rows = time_kernels()
        cells = [(row["kernel"], row["millions_per_cpu_second"]) for row in rows]
        tables.append(table("Decoding to bf16", ("kernel", "million elements per CPU-second"), cells))
    for part in _PARTS:
        if part not in arguments.parts:
            continue
        with tempfile.TemporaryDirectory(dir=arguments.disk) as work:
            timings, nbytes = time_conversions(Path(work), part, arguments.rounds)
        results[part] = {"output_gib": round(nbytes / 2**30, 2), "rows": [each.to_dict() for each in timings]}
        title = f"{_SCHEMES[part]} to bf16, {nbytes / 2**30:.1f} GiB of output, on disk"
        tables.append(timing_table(title, timings))
        if part not in ("fp8", "mxfp4"):
            continue
        decoding = [each for each in timings if each.name.startswith("ckptx") and "files" not in each.name]
        seconds = float(str(decoding[-1].to_dict()["seconds"]))
        hours = _DEEPSEEK_V3_PARAMETERS * 2 / nbytes * seconds / 3600
        tables.append(f"Extrapolated from 2 workers that decode: {hours:.1f} hours for 671 B parameters.\n")
        os.sync()
    publish(arguments.results, "dequantize", results, tables)


if __name__ == "__main__":
    main()
