"""Times HF <-> DCP conversions as whole processes, against `cp -r` and the stock torch way.

Every round runs every command once, in turn, so a drift of the machine meets all of them; the first does not count.
Before each run a file as large as its output is written and removed: on virtual machines freed memory goes back to the
host, and whoever writes first pays for getting it again; so each command gets pages in the same state.

    python benchmarks/convert.py [--rounds 5] [--parts llama,experts,flat,disk,inspect] [--ram /dev/shm] [--disk DIR]
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from checkpoints import experts_shapes, llama_shapes, write_checkpoint

import ckptx

_HERE = Path(__file__).resolve().parent
_CKPTX = [str(Path(sys.executable).with_name("ckptx"))]
# The kernel counts the memory of whoever forked into the peak of the child, so a small process does the forking.
_LAUNCH = [sys.executable, "-I", "-S", str(_HERE / "launch.py")]
_STOCK = [sys.executable, str(_HERE / "stock.py")]


@dataclass
class Row:
    """One command over all rounds: seconds, ratios to `cp -r` of the same round, and peak RSS in bytes."""

    name: str
    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    peak: int = 0

    def to_dict(self) -> dict[str, object]:
        """Medians, for the JSON file."""
        return {
            "name": self.name,
            "seconds": round(statistics.median(self.seconds), 3),
            "min": round(min(self.seconds), 3),
            "max": round(max(self.seconds), 3),
            "ratio_to_cp": round(statistics.median(self.ratios), 3) if self.ratios else None,
            "peak_rss_mib": round(self.peak / 2**20, 1),
            "rounds": len(self.seconds),
        }


def timed(command: Sequence[str], warm: Path | None = None, nbytes: int = 0) -> tuple[float, int]:
    """Seconds from fork to exit, and peak RSS in bytes, of one process."""
    if warm is not None:
        ballast(warm, nbytes)
    launched = subprocess.run([*_LAUNCH, *command], capture_output=True, text=True, check=False)
    if launched.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {launched.returncode}\n{launched.stderr}")
    seconds, peak = launched.stdout.split()
    return float(seconds), int(peak)


def ballast(directory: Path, nbytes: int) -> None:
    """Takes and gives back as much memory (or disk) as the next run will write."""
    path = directory / "ballast"
    block = bytes(8 << 20)
    with path.open("wb") as file:
        for _ in range(0, nbytes, len(block)):
            file.write(block)
    path.unlink()


def race(work: Path, source: Path, rounds: int, *, stock: bool) -> list[Row]:
    """Rounds of cp, ckptx and (when asked) stock torch, over one checkpoint."""
    nbytes = sum(file.stat().st_size for file in source.iterdir())
    copy, dcp, back, stock_dcp, stock_back = (work / name for name in ("cp", "dcp", "back", "stock-dcp", "stock-back"))
    commands = {
        "cp -r": (["cp", "-r", str(source), str(copy)], copy),
        "ckptx convert hf2dcp": ([*_CKPTX, "convert", "hf2dcp", str(source), str(dcp)], None),
        "ckptx convert dcp2hf": ([*_CKPTX, "convert", "dcp2hf", str(dcp), str(back)], back),
    }
    if stock:
        commands |= {
            "stock torch HF -> DCP": ([*_STOCK, "hf2dcp", str(source), str(stock_dcp)], stock_dcp),
            "stock torch DCP -> HF": ([*_STOCK, "dcp2hf", str(dcp), str(stock_back)], stock_back),
        }
    rows = {name: Row(name) for name in commands}
    for turn in range(rounds + 1):
        copied = 0.0
        for name, (command, output) in commands.items():
            seconds, peak = timed(command, work, nbytes)
            if output is not None:
                shutil.rmtree(output)
            copied = copied or seconds
            if turn:  # the first round warms pages and caches
                rows[name].seconds.append(seconds)
                rows[name].ratios.append(seconds / copied)
                rows[name].peak = max(rows[name].peak, peak)
            print(f"  round {turn}: {name}: {seconds:.2f} s, {peak / 2**20:.0f} MiB", file=sys.stderr)
        shutil.rmtree(dcp)
    return list(rows.values())


def flat(work: Path) -> list[dict[str, object]]:
    """Peak RSS for checkpoints of 1 to 8 GiB: it must not grow with the model."""
    rows = []
    for gib, layers in ((1, 9), (2, 21), (4, 44), (8, 91)):
        source, dcp, back = work / "flat", work / "flat-dcp", work / "flat-back"
        write_checkpoint(source, llama_shapes(layers), "LlamaForCausalLM", "llama", shards=max(1, gib // 2))
        nbytes = sum(file.stat().st_size for file in source.iterdir())
        _, there = timed([*_CKPTX, "convert", "hf2dcp", str(source), str(dcp)])
        shutil.rmtree(source)
        _, home = timed([*_CKPTX, "convert", "dcp2hf", str(dcp), str(back)])
        for path in (dcp, back):
            shutil.rmtree(path)
        rows.append(
            {
                "gib": round(nbytes / 2**30, 2),
                "hf2dcp_mib": round(there / 2**20, 1),
                "dcp2hf_mib": round(home / 2**20, 1),
            }
        )
        print(f"  {rows[-1]}", file=sys.stderr)
    return rows


def on_disk(work: Path, rounds: int) -> list[Row]:
    """One checkpoint on a real disk; ckptx fsyncs, so `cp` is followed by `sync` of what it wrote."""
    source = work / "llama"
    write_checkpoint(source, llama_shapes(), "LlamaForCausalLM", "llama")
    copy, dcp, back = work / "cp", work / "dcp", work / "back"
    durable = f"cp -r {source} {copy} && sync -f {copy}"
    commands = {
        "cp -r, then sync -f": ["sh", "-c", durable],
        "ckptx convert hf2dcp (fsync included)": [*_CKPTX, "convert", "hf2dcp", str(source), str(dcp)],
        "ckptx convert dcp2hf (fsync included)": [*_CKPTX, "convert", "dcp2hf", str(dcp), str(back)],
    }
    rows = {name: Row(name) for name in commands}
    for turn in range(rounds + 1):
        copied = 0.0
        for name, command in commands.items():
            seconds, peak = timed(command)
            copied = copied or seconds
            if turn:
                rows[name].seconds.append(seconds)
                rows[name].ratios.append(seconds / copied)
                rows[name].peak = max(rows[name].peak, peak)
            print(f"  round {turn}: {name}: {seconds:.2f} s", file=sys.stderr)
        for path in (copy, dcp, back):
            shutil.rmtree(path)
        os.sync()
    return list(rows.values())


def inspecting(checkpoints: dict[str, Path], rounds: int) -> list[Row]:
    """`ckptx inspect` of each checkpoint."""
    rows = []
    for name, path in checkpoints.items():
        row = Row(f"ckptx inspect, {name}")
        for _ in range(rounds + 1):
            seconds, peak = timed([*_CKPTX, "inspect", str(path)])
            row.seconds.append(seconds)
            row.peak = max(row.peak, peak)
        row.seconds.pop(0)
        rows.append(row)
    return rows


def table(title: str, rows: list[Row]) -> str:
    """One Markdown table."""
    lines = [f"### {title}", "", "| command | seconds (median) | x `cp -r` | peak RSS |", "|---|---|---|---|"]
    for row in rows:
        shown = row.to_dict()
        ratio = "" if shown["ratio_to_cp"] is None else f"{shown['ratio_to_cp']:.2f}"
        lines.append(f"| {row.name} | {shown['seconds']:.2f} | {ratio} | {shown['peak_rss_mib']:.0f} MiB |")
    return "\n".join([*lines, ""])


def machine() -> dict[str, object]:
    """What the figures were taken on: cores, memory and versions, nothing that names a host."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    packages = ("torch", "transformers", "safetensors", "xxhash", "isal")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }


def main() -> None:
    """Runs the parts asked for and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", default="llama,experts,inspect,flat,disk")
    parser.add_argument("--ram", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--disk", type=Path, default=_HERE)
    parser.add_argument("--results", type=Path, default=_HERE / "results")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    # What pip does when it installs; an editable install in an environment that writes no bytecode compiles every time.
    compileall.compile_dir(Path(ckptx.__file__).parent, quiet=1)
    results: dict[str, object] = {"machine": machine()}
    tables = []
    with tempfile.TemporaryDirectory(dir=arguments.ram, prefix="ckptx-bench-") as directory:
        work = Path(directory)
        shapes = {
            "llama": ("Llama, 183 tensors, 1.92 GiB, RAM disk", llama_shapes(), "LlamaForCausalLM", "llama"),
            "experts": (
                "Experts, 18,723 tensors, 2.9 GiB, RAM disk",
                experts_shapes(),
                "Qwen3MoeForCausalLM",
                "qwen3_moe",
            ),
        }
        inspected: list[Row] = []
        for part, (title, made, architecture, model_type) in shapes.items():
            if part not in parts and "inspect" not in parts:
                continue
            source = work / part
            write_checkpoint(source, made, architecture, model_type)
            if part in parts:
                rows = race(work, source, arguments.rounds, stock=True)
                results[part] = [row.to_dict() for row in rows]
                tables.append(table(title, rows))
            if "inspect" in parts:
                dcp = work / f"{part}-dcp"
                timed([*_CKPTX, "convert", "hf2dcp", str(source), str(dcp)])
                inspected += inspecting({f"{part} HF": source, f"{part} DCP": dcp}, arguments.rounds)
                shutil.rmtree(dcp)
            shutil.rmtree(source)
        if inspected:
            results["inspect"] = [row.to_dict() for row in inspected]
            tables.append(table("Inspect", inspected))
        if "flat" in parts:
            results["flat"] = rows_flat = flat(work)
            lines = ["### Peak RSS against size", "", "| checkpoint | hf2dcp | dcp2hf |", "|---|---|---|"]
            lines += [f"| {r['gib']} GiB | {r['hf2dcp_mib']} MiB | {r['dcp2hf_mib']} MiB |" for r in rows_flat]
            tables.append("\n".join([*lines, ""]))
    if "disk" in parts:
        with tempfile.TemporaryDirectory(dir=arguments.disk, prefix="ckptx-bench-") as directory:
            rows = on_disk(Path(directory), arguments.rounds)
            results["disk"] = [row.to_dict() for row in rows]
            tables.append(table("Llama, 1.92 GiB, ext4 disk", rows))
    arguments.results.mkdir(exist_ok=True)
    (arguments.results / "convert.json").write_text(json.dumps(results, indent=2) + "\n")
    described = ", ".join(f"{key} {value}" for key, value in machine().items())
    (arguments.results / "convert.md").write_text(f"{described}\n\n" + "\n".join(tables))
    print("\n".join(tables))


if __name__ == "__main__":
    main()
