"""Measure the time, the bytes read and the memory of one TP rank of four that loads its shards of a Llama.

    python benchmarks/load.py [--rounds 5] [--ram /dev/shm] [--results DIR] [--tiny]

The checkpoint is a DCP from `ckptx reshard --tp 4`. `ckptx.runtime.load` is compared with stock `dcp.load` into the
same DTensors, and with `from_pretrained` of the whole model, from which the rank takes its shards: safetensors maps
files, so that only pages that it touches are read, and count as memory while they are mapped. See load_rank.py.

--tiny: a model of half a megabyte and two ranks, one run without timing; it shows that bytes, files and digests are
right.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checkpoints import Model, llama, write_checkpoint
from measure import CKPTX, HERE, free_memory_meanwhile, parse_arguments, publish, table, time_command

TP = 4
_RANK = 1  # rank whose loads are timed; the norms are in the file of rank 0
_MEMORY_MARGIN = 200 << 20  # bytes of memory that a rank may use in addition to its shards
_READ_MARGIN = 6 << 10  # bytes that it may read in addition to each tensor, for the records of its archive
_METHODS = {
    "ckptx": "`ckptx.runtime.load`",
    "stock": "stock `dcp.load`",
    "transformers": "`from_pretrained` (full model, then sliced)",
}


def tiny_llama() -> Model:
    """Return a Llama with every dimension divided by 32."""
    model = llama(2)
    config = dict(model.config)
    for key in ("head_dim", "hidden_size", "intermediate_size", "vocab_size"):
        config[key] //= 32
    shapes = [(name, tuple(size // 32 for size in shape)) for name, shape in model.shapes]
    return Model(iter(shapes), config)


def write_checkpoints(root: Path, model: Model) -> None:
    """Write the HF checkpoint to root/hf and the sharded DCP to root/dcp."""
    write_checkpoint(root / "hf", model)
    time_command([*CKPTX, "reshard", str(root / "hf"), str(root / "dcp"), "--to", "dcp", "--tp", str(TP)])


def load_in_process(warmup: Path, source: Path, rank: int, *methods: str) -> list[dict[str, Any]]:
    """Run load_rank.py in a separate process, and return its rows, one for each method.

    Args:
        warmup: Directory of the tiny checkpoints that each method loads first.
        source: Directory of the checkpoints to load.
        rank: Rank that loads.
        *methods: Keys of `_METHODS`.
    """
    jobs = [
        each for method in methods for each in (method, str(source / ("hf" if method == "transformers" else "dcp")))
    ]
    command = [sys.executable, str(HERE / "load_rank.py"), str(TP), str(rank), str(warmup), *jobs]
    process = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    rows: list[dict[str, Any]] = json.loads(process.stdout)
    return rows


def check(rows: list[dict[str, Any]], rank: int, metadata_bytes: int) -> None:
    """Check the results that do not depend on the machine.

    Args:
        rows: Rows of one rank from `load_in_process`; one of them is from ckptx.
        rank: Rank that loaded.
        metadata_bytes: Size of `.metadata` and `config.json`.

    Raises:
        SystemExit: If the methods loaded different bytes, or if ckptx opened files of other ranks, read too many bytes
            or used too much memory.
    """
    if len({row["digest"] for row in rows}) != 1:
        raise SystemExit(f"rank {rank} has different bytes from {' and '.join(row['method'] for row in rows)}")
    row = next(row for row in rows if row["method"] == "ckptx")
    unexpected_files = [name for name in row["files"] if not _may_open(name, rank)]
    if unexpected_files or f"__{rank}_0.distcp" not in row["files"]:
        raise SystemExit(
            f"rank {rank} opened {', '.join(row['files'])}; expected only its own files and those of rank 0"
        )
    if row["read"] > row["needed"] + metadata_bytes + _READ_MARGIN * row["tensors"]:
        raise SystemExit(f"rank {rank} read {row['read']} bytes for shards of {row['needed']} bytes")
    if row["memory_growth"] > row["needed"] + _MEMORY_MARGIN:
        raise SystemExit(f"rank {rank} used {row['memory_growth']} bytes of memory for shards of {row['needed']} bytes")


def _may_open(name: str, rank: int) -> bool:
    """Return True for metadata files, the rank's own files, and those of rank 0, which has the replicated tensors.

    `ckptx.json` is opened to check that it is a file, but not read.
    """
    return name in (".metadata", "config.json", "ckptx.json") or name.startswith((f"__{rank}_", "__0_"))


def summarize(method: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the rounds of one method: median seconds, bytes in MiB, and opened files."""
    seconds = [row["seconds"] for row in rows]
    return {
        "method": method,
        "needed_mib": round(rows[0]["needed"] / 2**20, 2),
        "read_mib": round(rows[0]["read"] / 2**20, 2),
        "files": rows[0]["files"],
        "memory_growth_mib": round(max(row["memory_growth"] for row in rows) / 2**20, 1),
        "seconds": round(statistics.median(seconds), 3),
        "min": min(seconds),
        "max": max(seconds),
        "rounds": len(rows),
    }


def method_table(rows: list[dict[str, Any]]) -> str:
    """Return the table of all methods."""
    cells = [
        (
            _METHODS[row["method"]],
            f"{row['seconds']:.2f}",
            f"{row['needed_mib']:.1f} MiB",
            "mapped" if row["method"] == "transformers" else f"{row['read_mib']:.1f} MiB",
            "all" if row["method"] == "transformers" else ", ".join(f"`{name}`" for name in row["files"]),
            f"{row['memory_growth_mib']:.0f} MiB",
        )
        for row in rows
    ]
    columns = ("loader", "seconds (median)", "rank needs", "rank reads", "files opened", "memory added")
    return table(f"Rank {_RANK} at TP {TP} loads a Llama", columns, cells)


def main() -> None:
    """Check every rank once, then time one rank, and write load.json and load.md."""
    is_tiny = "--tiny" in sys.argv
    if is_tiny:
        sys.argv.remove("--tiny")
    arguments = parse_arguments(__doc__, ("load",))
    with tempfile.TemporaryDirectory(dir=arguments.ram, prefix="ckptx-bench-") as directory:
        warmup = source = Path(directory, "tiny")
        write_checkpoints(warmup, tiny_llama())
        if not is_tiny:
            source = Path(directory, "llama")
            write_checkpoints(source, llama(10))
        metadata_bytes = sum((source / "dcp" / name).stat().st_size for name in (".metadata", "config.json"))
        ranks = []
        for rank in range(2 if is_tiny else TP):
            rows = load_in_process(warmup, source, rank, *(_METHODS if is_tiny else ("ckptx",)))
            check(rows, rank, metadata_bytes)
            ranks.append({"rank": rank, **summarize("ckptx", rows[:1])})
        rounds_by_method: dict[str, list[dict[str, Any]]] = {method: [] for method in _METHODS}
        for round_number in range(0 if is_tiny else arguments.rounds + 1):
            rows = []
            for method in _METHODS:
                with free_memory_meanwhile(1 << 30):
                    rows += load_in_process(warmup, source, _RANK, method)
            check(rows, _RANK, metadata_bytes)
            for row in rows if round_number else ():
                rounds_by_method[row["method"]].append(row)
                print(
                    f"  round {round_number}: {row['method']}: {row['seconds']} s, {row['memory_growth'] >> 20} MiB",
                    file=sys.stderr,
                )
        summaries = [summarize(method, rows) for method, rows in rounds_by_method.items() if rows]
        publish(
            arguments.results,
            "load",
            {"load": summaries, "ranks": ranks},
            [method_table(summaries)] if summaries else [],
        )


if __name__ == "__main__":
    main()
