"""Time conversions at growing numbers of workers, against `cp -r`, on a RAM disk.

    python benchmarks/workers.py [--rounds 5] [--parts llama,experts,fp8] [--ram /dev/shm]

llama: HF -> DCP, DCP -> HF, HF -> DCP tp4 x pp2, and `verify`. experts: the same with 18,723 small tensors. fp8:
`convert to-hf --dequantize` of layers of Qwen3-30B-A3B. The numbers of workers are the powers of two up to the number
of cores, and at most 16. `cp -r`, once in each round, copies with one thread. The RAM disk needs three times the size
of a checkpoint. Commands are short, so that getting memory back from the host does not matter (see `measure.py`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from checkpoints import Model, experts, llama, qwen3_moe, write_checkpoint
from dequantize import FP8_CONFIG, fp8_tensors, write_quantized
from measure import CKPTX, Step, Timing, directory_size, parse_arguments, publish, table, time_command, time_rounds

_MOST_WORKERS = 16
_VERIFY = "verify HF DCP"


class Source(NamedTuple):
    """A checkpoint to convert.

    Attributes:
        title: Title of its table.
        layers: Number of hidden layers.
    """

    title: str
    layers: int


_SOURCES = {
    "llama": Source("Llama, 192 tensors", 21),
    "experts": Source("Small experts, 18,723 tensors", 48),
    "fp8": Source("fp8 to bf16, layers of Qwen3-30B-A3B", 3),
}


def worker_counts() -> list[int]:
    """Return the powers of two up to the number of cores that this process may use, and at most 16."""
    most = min(_MOST_WORKERS, len(os.sched_getaffinity(0)))
    return [2**exponent for exponent in range(most.bit_length())]


def convert_steps(work: Path, source: Path, counts: Sequence[int]) -> Iterator[Step]:
    """Yield the commands for an unquantized checkpoint; the DCP that they read is written here."""
    dcp, out = work / "dcp", work / "out"
    time_command([*CKPTX, "convert", "hf2dcp", str(source), str(dcp)])
    compare_source = [*CKPTX, "verify", str(source), str(out)]
    commands = {
        "HF -> DCP": [*CKPTX, "convert", "hf2dcp", str(source), str(out)],
        "DCP -> HF": [*CKPTX, "convert", "dcp2hf", str(dcp), str(out)],
        "HF -> DCP tp4 x pp2": [*CKPTX, "reshard", str(source), str(out), "--to", "dcp", "--tp", "4", "--pp", "2"],
    }
    for name, command in commands.items():
        for count in counts:
            yield Step(f"{name}, {count}", [*command, "--workers", str(count)], out, checks=[compare_source])
    for count in counts:
        command = [*CKPTX, "verify", str(source), str(dcp), "--workers", str(count)]
        yield Step(f"{_VERIFY}, {count}", ["sh", "-c", f"mkdir {out} && {' '.join(command)}"], out)


def dequantize_steps(work: Path, source: Path, counts: Sequence[int]) -> Iterator[Step]:
    """Yield the commands for a quantized checkpoint."""
    out = work / "out"
    compare_source = [*CKPTX, "verify", str(source), str(out), "--dequantize"]
    command = [*CKPTX, "convert", "to-hf", str(source), str(out), "--dequantize"]
    for count in counts:
        yield Step(f"convert to-hf, {count}", [*command, "--workers", str(count)], out, checks=[compare_source])


def time_part(work: Path, part: str, rounds: int) -> tuple[list[Timing], int]:
    """Time the commands of one part.

    Args:
        work: Directory for the checkpoints, on a RAM disk.
        part: Key of `_SOURCES`.
        rounds: Number of timed rounds.

    Returns:
        Timings of the commands, and the size of the output in bytes.
    """
    source, layers = work / part, _SOURCES[part].layers
    copied = source
    if part == "fp8":
        model = qwen3_moe(layers)
        quantized = Model(model.shapes, {**model.config, "quantization_config": FP8_CONFIG})
        write_quantized(source, quantized, fp8_tensors)
        copied = work / "reference"
        time_command([*CKPTX, "convert", "to-hf", str(source), str(copied), "--dequantize"])
        steps = dequantize_steps(work, source, worker_counts())
    else:
        write_checkpoint(source, llama(layers) if part == "llama" else experts(layers))
        steps = convert_steps(work, source, worker_counts())
    copy = work / "cp"
    nbytes = directory_size(copied)
    return time_rounds([Step("cp -r", ["cp", "-r", str(copied), str(copy)], copy), *steps], rounds, 0), nbytes


def workers_table(title: str, timings: Sequence[Timing]) -> str:
    """Return a table with a row for each command, and columns for the numbers of workers.

    A cell has the median seconds, and in parentheses the median of the ratios to the `cp -r` of the same round.
    """
    copy, *others = timings
    counts = worker_counts()
    rows: dict[str, list[Timing]] = {}
    for timing in others:
        rows.setdefault(timing.name.rpartition(",")[0], []).append(timing)
    cells = []
    for name, timings_of_row in rows.items():
        medians = [each.to_dict() for each in timings_of_row]
        peak = max(float(str(each["peak_rss_mib"])) for each in medians)
        times = [f"{each['seconds']:.2f} s ({each['ratio_to_cp']:.2f})" for each in medians]
        cells.append((name, *times, f"{peak:.0f} MiB"))
    cells.append(("cp -r", f"{copy.to_dict()['seconds']:.2f} s", *[""] * (len(counts) - 1), ""))
    heads = [f"{count} worker{'s' * (count > 1)}" for count in counts]
    return table(title, ("command", *heads, "largest peak RSS"), cells)


def main() -> None:
    """Measure the selected parts, and write workers.json and workers.md."""
    arguments = parse_arguments(__doc__, tuple(_SOURCES))
    results: dict[str, Any] = {}
    tables = []
    for part in arguments.parts:
        with tempfile.TemporaryDirectory(dir=arguments.ram, prefix="ckptx-bench-") as directory:
            timings, nbytes = time_part(Path(directory), part, arguments.rounds)
        gib = nbytes / 2**30
        results[part] = {"gib": round(gib, 2), "rows": [each.to_dict() for each in timings]}
        tables.append(workers_table(f"{_SOURCES[part].title}, {gib:.1f} GiB of output, RAM disk", timings))
        publish(arguments.results, "workers", results, tables)


if __name__ == "__main__":
    main()
