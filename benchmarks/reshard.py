"""Time resharding for a mesh and merging, and measure the benefit of sharded tensors.

    python benchmarks/reshard.py [--rounds 5] [--parts llama,experts,qwen3-moe,flat,loading,planning] [--ram /dev/shm]

llama, experts, qwen3-moe: whole processes against `cp -r`. flat: peak RSS against size. loading: bytes that stock
`dcp.load` reads on one rank, from a DCP with full tensors and from one with sharded tensors. planning: `--dry-run` for
1,024 ranks.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checkpoints import deepseek, experts, llama, qwen3_moe, write_checkpoint
from measure import (
    CKPTX,
    HERE,
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

_RESHARD = [*CKPTX, "reshard"]
_MERGE = [*CKPTX, "convert", "dcp2hf"]
_TP4_PP2 = ["--tp", "4", "--pp", "2"]
_TP8_PP16_DP8 = ["--tp", "8", "--pp", "16", "--dp-shard", "8"]


def time_resharding(work: Path, source: Path, rounds: int, *, stock: bool) -> list[Timing]:
    """Time `cp -r` and ckptx with one checkpoint: HF -> tp4 x pp2, from there to another mesh, and back to HF.

    Args:
        work: Directory for outputs.
        source: The HF checkpoint.
        rounds: Number of timed rounds.
        stock: Also time the merge with stock torch.
    """
    copy, sharded, resharded, merged, shards, stock_back = (
        work / name for name in ("cp", "tp4-pp2", "tp2", "back", "shards", "stock-back")
    )
    to_sharded = [*_RESHARD, str(source), str(sharded), "--to", "dcp", *_TP4_PP2]
    to_resharded = [*_RESHARD, str(sharded), str(resharded), "--to", "dcp", "--tp", "2"]
    to_shards = [*_RESHARD, str(source), str(shards), "--to", "safetensors", *_TP4_PP2]
    verify = [*CKPTX, "verify", str(source)]
    # The shards have transformers names and fused experts, so they are verified after conversion back to HF.
    shard_checks = [[*_MERGE, str(shards), str(merged)], [*verify, str(merged)], ["rm", "-r", str(merged)]]
    steps = [
        Step("cp -r", ["cp", "-r", str(source), str(copy)], copy),
        Step("HF -> DCP tp4 x pp2", to_sharded, sharded, keep=True, checks=[[*verify, str(sharded)]]),
        Step("DCP tp4 x pp2 -> DCP tp2", to_resharded, resharded, checks=[[*verify, str(resharded)]]),
        Step("DCP tp4 x pp2 -> HF", [*_MERGE, str(sharded), str(merged)], merged, checks=[[*verify, str(merged)]]),
        Step("HF -> sharded safetensors tp4 x pp2", to_shards, shards, checks=shard_checks),
    ]
    if stock:
        steps.append(
            Step("stock torch DCP tp4 x pp2 -> HF", [*STOCK, "dcp2hf", str(sharded), str(stock_back)], stock_back)
        )
    return time_rounds(steps, rounds, directory_size(source))


def measure_peaks(work: Path, sizes: tuple[tuple[int, int], ...]) -> list[dict[str, float]]:
    """Measure the peak RSS of resharding and merging for checkpoints of 1 to 8 GiB; it must not grow with the model."""
    rows = []
    for gib, source in growing_checkpoints(work, sizes):
        sharded, merged = work / "flat-sharded", work / "flat-back"
        _, reshard_peak = time_command([*_RESHARD, str(source), str(sharded), "--to", "dcp", *_TP4_PP2])
        shutil.rmtree(source)
        _, merge_peak = time_command([*_MERGE, str(sharded), str(merged)])
        for path in (sharded, merged):
            shutil.rmtree(path)
        rows.append(
            {"gib": gib, "reshard_mib": round(reshard_peak / 2**20, 1), "merge_mib": round(merge_peak / 2**20, 1)}
        )
        print(f"  {rows[-1]}", file=sys.stderr)
    return rows


def measure_loading(work: Path, source: Path) -> list[dict[str, Any]]:
    """Measure the bytes that rank 3 of TP 8 reads to load its shards of `source` with stock `dcp.load`.

    Raises:
        SystemExit: If the shards from the two DCPs differ.
    """
    unsharded, sharded = work / "unsharded", work / "tp8"
    time_command([*CKPTX, "convert", "hf2dcp", str(source), str(unsharded)])
    time_command([*_RESHARD, str(source), str(sharded), "--to", "dcp", "--tp", "8"])
    rows: list[dict[str, Any]] = []
    for title, path in {"full tensors": unsharded, "sharded for tp8": sharded}.items():
        command = [sys.executable, str(HERE / "stock_load.py"), str(path), "8", "3"]
        loaded = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        rows.append({"dcp": title, **json.loads(loaded.stdout)})
        print(f"  {rows[-1]}", file=sys.stderr)
        shutil.rmtree(path)
    if len({row["digest"] for row in rows}) != 1:
        raise SystemExit("rank 3: stock dcp.load returned different bytes from the sharded and the unsharded DCP")
    return rows


def time_planning(work: Path, rounds: int) -> list[dict[str, Any]]:
    """Time `--dry-run` of DeepSeek-V3 for 1,024 ranks, and of its first quarter and half.

    Each includes the multi-token prediction layer. The quarter has 16 layers, one per pipeline stage.
    """
    rows = []
    for layers in (16, 31, 61):
        source, report = work / "deepseek", work / "report.json"
        nbytes = write_checkpoint(source, deepseek(layers), shards=163 * layers // 61, sparse=True)
        command = [*_RESHARD, str(source), str(work / "none"), "--to", "dcp", *_TP8_PP16_DP8, "--dry-run"]
        row = Timing("")
        for round_number in range(rounds + 1):
            seconds, peak = time_command([*command, "--report", str(report)])
            if round_number:
                row.seconds.append(seconds)
                row.peak_rss = max(row.peak_rss, peak)
        document, times = json.loads(report.read_text()), row.to_dict()
        assert len(document["ranks"]) == 1024
        rows.append(
            {
                "layers": layers,
                "tib": round(nbytes / 2**40, 2),
                "tensors": document["tensors"],
                "chunks": document["chunks"],
                **{key: times[key] for key in ("seconds", "min", "max", "peak_rss_mib", "rounds")},
            }
        )
        print(f"  {rows[-1]}", file=sys.stderr)
        shutil.rmtree(source)
    return rows


def loading_table(rows: list[dict[str, Any]]) -> str:
    """Return the table of bytes that a rank needs and reads."""
    cells = [
        (
            row["dcp"],
            f"{row['needed'] / 2**20:.1f} MiB",
            f"{row['read'] / 2**20:.1f} MiB",
            f"{row['read'] / row['needed']:.2f}",
            f"{row['seconds']:.2f}",
        )
        for row in rows
    ]
    columns = ("DCP", "rank needs", "rank reads", "read / needed", "seconds")
    return table("Stock `dcp.load` on one rank at TP 8, Llama, 1.92 GiB, RAM disk", columns, cells)


def planning_table(rows: list[dict[str, Any]]) -> str:
    """Return the table of seconds and memory of dry runs."""
    cells = [
        (
            row["layers"],
            f"{row['tib']} TiB",
            f"{row['tensors']:,}",
            f"{row['chunks']:,}",
            f"{row['seconds']:.1f}",
            f"{1e6 * row['seconds'] / row['chunks']:.1f}",
            f"{row['peak_rss_mib']:.0f} MiB",
        )
        for row in rows
    ]
    columns = ("layers", "size", "tensors", "chunks", "seconds (median)", "us per chunk", "peak RSS")
    return table("`ckptx reshard --dry-run` of DeepSeek-V3, tp8 x pp16 x dp8 = 1,024 ranks", columns, cells)


def main() -> None:
    """Run the selected parts, and write reshard.json and reshard.md."""
    arguments = parse_arguments(__doc__, ("llama", "experts", "qwen3-moe", "flat", "loading", "planning"))
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
        for part, (title, model) in models.items():
            if part in parts:
                source = work / part
                write_checkpoint(source, model)
                rows = time_resharding(work, source, rounds, stock=part == "llama")
                results[part] = [row.to_dict() for row in rows]
                tables.append(timing_table(title, rows))
                shutil.rmtree(source)
        if "flat" in parts:
            results["flat"] = sizes = measure_peaks(work, ((1, 9), (2, 21), (4, 44), (8, 91)))
            cells = [(f"{row['gib']} GiB", f"{row['reshard_mib']} MiB", f"{row['merge_mib']} MiB") for row in sizes]
            columns = ("checkpoint", "HF -> DCP tp4 x pp2", "DCP tp4 x pp2 -> HF")
            tables.append(table("Peak RSS against size", columns, cells))
        if "loading" in parts:
            source = work / "llama"
            write_checkpoint(source, llama())
            results["loading"] = loads = measure_loading(work, source)
            tables.append(loading_table(loads))
            shutil.rmtree(source)
        if "planning" in parts:
            results["planning"] = plans = time_planning(work, min(rounds, 3))
            tables.append(planning_table(plans))
    publish(arguments.results, "reshard", results, tables)


if __name__ == "__main__":
    main()
