"""Time HF <-> DCP conversions as whole processes, against `cp -r` and conversions with stock torch.

python benchmarks/convert.py [--rounds 5] [--parts llama,experts,qwen3-moe,inspect,flat,disk]
                             [--ram /dev/shm] [--disk DIR]
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from checkpoints import experts, llama, qwen3_moe, write_checkpoint
from measure import (
    CKPTX,
    STOCK,
    Step,
    Timing,
    directory_size,
    growing_checkpoints,
    parse_arguments,
    publish,
    table,
    time_command,
    time_rounds,
    timing_table,
)


def time_in_ram(work: Path, source: Path, rounds: int, *, stock: bool) -> list[Timing]:
    """Time the conversions of one checkpoint to a DCP and back.

    Args:
        work: Directory for outputs, on a RAM disk.
        source: The HF checkpoint.
        rounds: Number of timed rounds.
        stock: Also time stock torch, which keeps the whole model in memory.
    """
    copy, dcp, back, stock_dcp, stock_back = (work / name for name in ("cp", "dcp", "back", "stock-dcp", "stock-back"))
    to_dcp, to_hf, verify = (
        [*CKPTX, "convert", "hf2dcp"],
        [*CKPTX, "convert", "dcp2hf"],
        [*CKPTX, "verify", str(source)],
    )
    steps = [
        Step("cp -r", ["cp", "-r", str(source), str(copy)], copy),
        Step("ckptx convert to-dcp", [*to_dcp, str(source), str(dcp)], dcp, keep=True, checks=[[*verify, str(dcp)]]),
        Step("ckptx convert to-hf", [*to_hf, str(dcp), str(back)], back, checks=[[*verify, str(back)]]),
    ]
    if stock:
        steps += [
            Step("stock torch HF -> DCP", [*STOCK, "hf2dcp", str(source), str(stock_dcp)], stock_dcp),
            Step("stock torch DCP -> HF", [*STOCK, "dcp2hf", str(dcp), str(stock_back)], stock_back),
        ]
    return time_rounds(steps, rounds, directory_size(source))


def measure_peaks(work: Path) -> list[dict[str, float]]:
    """Measure the peak RSS for checkpoints of 1 to 8 GiB; it must not grow with the model."""
    rows = []
    for gib, source in growing_checkpoints(work, ((1, 9), (2, 21), (4, 44), (8, 91))):
        dcp, back = work / "flat-dcp", work / "flat-back"
        _, to_dcp = time_command([*CKPTX, "convert", "hf2dcp", str(source), str(dcp)])
        shutil.rmtree(source)
        _, to_hf = time_command([*CKPTX, "convert", "dcp2hf", str(dcp), str(back)])
        for path in (dcp, back):
            shutil.rmtree(path)
        rows.append({"gib": gib, "hf2dcp_mib": round(to_dcp / 2**20, 1), "dcp2hf_mib": round(to_hf / 2**20, 1)})
        print(f"  {rows[-1]}", file=sys.stderr)
    return rows


def time_on_disk(work: Path, rounds: int) -> list[Timing]:
    """Time one checkpoint on a disk; ckptx calls fsync, so `cp` is followed by `sync -f`."""
    source, copy, dcp, back = (work / name for name in ("llama", "cp", "dcp", "back"))
    write_checkpoint(source, llama())
    copy_and_sync = ["sh", "-c", f"cp -r {source} {copy} && sync -f {copy}"]
    to_dcp = [*CKPTX, "convert", "hf2dcp", str(source), str(dcp)]
    to_hf = [*CKPTX, "convert", "dcp2hf", str(dcp), str(back)]
    steps = (
        Step("cp -r, then sync -f", copy_and_sync, copy, keep=True),
        Step("ckptx convert to-dcp (fsync included)", to_dcp, dcp, keep=True),
        Step("ckptx convert to-hf (fsync included)", to_hf, back, keep=True),
    )
    return time_rounds(steps, rounds)


def time_inspect(checkpoints: dict[str, Path], rounds: int) -> list[Timing]:
    """Time `ckptx inspect` of each checkpoint, without the first of `rounds + 1` runs."""
    rows = []
    for name, path in checkpoints.items():
        row = Timing(f"ckptx inspect, {name}")
        for _ in range(rounds + 1):
            seconds, peak = time_command([*CKPTX, "inspect", str(path)])
            row.seconds.append(seconds)
            row.peak_rss = max(row.peak_rss, peak)
        row.seconds.pop(0)  # the warm-up round
        rows.append(row)
    return rows


def main() -> None:
    """Run the selected parts, and write convert.json and convert.md."""
    arguments = parse_arguments(__doc__, ("llama", "experts", "qwen3-moe", "inspect", "flat", "disk"))
    parts, rounds = arguments.parts, arguments.rounds
    results: dict[str, Any] = {}
    tables = []
    with tempfile.TemporaryDirectory(dir=arguments.ram, prefix="ckptx-bench-") as directory:
        work = Path(directory)
        models = {
            "llama": ("Llama, 183 tensors, 1.92 GiB, RAM disk", llama()),
            "experts": ("Small experts, 18,723 tensors, 2.95 GiB, RAM disk", experts()),
            "qwen3-moe": ("Layers of Qwen3-30B-A3B, 1,182 tensors, 3.73 GiB, RAM disk", qwen3_moe()),
        }
        inspect_rows: list[Timing] = []
        for part, (title, model) in models.items():
            if part not in parts and "inspect" not in parts:
                continue
            source = work / part
            write_checkpoint(source, model)
            if part in parts:
                rows = time_in_ram(work, source, rounds, stock=part != "qwen3-moe")
                results[part] = [row.to_dict() for row in rows]
                tables.append(timing_table(title, rows))
            if "inspect" in parts:
                dcp = work / f"{part}-dcp"
                time_command([*CKPTX, "convert", "hf2dcp", str(source), str(dcp)])
                inspect_rows += time_inspect({f"{part} HF": source, f"{part} DCP": dcp}, rounds)
                shutil.rmtree(dcp)
            shutil.rmtree(source)
        if inspect_rows:
            results["inspect"] = [row.to_dict() for row in inspect_rows]
            tables.append(timing_table("Inspect", inspect_rows))
        if "flat" in parts:
            results["flat"] = sizes = measure_peaks(work)
            cells = [(f"{row['gib']} GiB", f"{row['hf2dcp_mib']} MiB", f"{row['dcp2hf_mib']} MiB") for row in sizes]
            tables.append(table("Peak RSS against size", ("checkpoint", "to-dcp", "to-hf"), cells))
    if "disk" in parts:
        with tempfile.TemporaryDirectory(dir=arguments.disk, prefix="ckptx-bench-") as directory:
            rows = time_on_disk(Path(directory), rounds)
            results["disk"] = [row.to_dict() for row in rows]
            tables.append(timing_table("Llama, 1.92 GiB, ext4 disk", rows))
    publish(arguments.results, "convert", results, tables)


if __name__ == "__main__":
    main()
