"""Measure what one EP rank of a MoE reads: from HF shards with and without `--group-experts`, and from a DCP.

    python benchmarks/expert_parallel.py [--rounds 3] [--ram /dev/shm] [--results DIR]

Of HF shards, the rank reads every dense tensor and its own experts, like an engine that skips the experts of other
ranks, in two ways: single tensors from mapped files (`safe_open`), and full files, of which it needs at least one
tensor. Of a DCP, it loads its own experts with stock `dcp.load` into DTensors over an EP mesh of a fake process group.
The bytes of mapped files are those of the tensors. Before each measurement, the rank loads a tiny model, so that
imports do not count.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checkpoints import qwen3_moe, write_checkpoint
from measure import CKPTX, HERE, parse_arguments, publish, table, time_command

EP = 4
_RANK = 1  # rank whose reads are measured
_SHARD_SIZE = "500MB"


def read_in_process(method: str, path: Path) -> dict[str, Any]:
    """Run expert_rank.py in a separate process, and return its row."""
    command = [sys.executable, str(HERE / "expert_rank.py"), method, str(path), str(EP), str(_RANK)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def main() -> None:
    """Write the checkpoints to the RAM disk, measure each, and publish the tables."""
    arguments = parse_arguments(__doc__, ("all",))
    work = Path(tempfile.mkdtemp(dir=arguments.ram))
    try:
        write_checkpoint(work / "hf", qwen3_moe())
        plain, grouped = str(work / "plain"), str(work / "grouped")
        to_hf = [*CKPTX, "convert", "to-hf", str(work / "hf")]
        time_command([*to_hf, plain, "--max-shard-size", _SHARD_SIZE])
        time_command([*to_hf, grouped, "--max-shard-size", _SHARD_SIZE, "--group-experts", str(EP)])
        reshard = [*CKPTX, "reshard", str(work / "hf")]
        options = ["--to", "dcp", "--names", "model", "--tp", str(EP)]
        time_command([*reshard, str(work / "dcp-tp"), *options])
        time_command([*reshard, str(work / "dcp-ep"), *options, "--ep", str(EP)])
        shutil.rmtree(work / "hf")
        cases = [
            ("HF shards, single tensors", "mapped", plain),
            ("HF shards with `--group-experts 4`, single tensors", "mapped", grouped),
            ("HF shards, full files", "files", plain),
            ("HF shards with `--group-experts 4`, full files", "files", grouped),
            ("DCP with `--tp 4`, stock `dcp.load` of the experts", "dcp", str(work / "dcp-tp")),
            ("DCP with `--tp 4 --ep 4`, stock `dcp.load` of the experts", "dcp", str(work / "dcp-ep")),
        ]
        runs = {
            name: [read_in_process(method, Path(path)) for _ in range(arguments.rounds)] for name, method, path in cases
        }
    finally:
        shutil.rmtree(work)
    digests = {row["digest"] for name, rows in runs.items() for row in rows if name.startswith("HF")}
    assert len(digests) == 1, "the tensors that the rank read differ"
    assert len({row["digest"] for name, rows in runs.items() for row in rows if name.startswith("DCP")}) == 1
    results = {
        name: {**rows[0], "seconds": statistics.median(row["seconds"] for row in rows)} for name, rows in runs.items()
    }
    cells = [
        (
            name,
            f"{row['opened']} of {row['files']}",
            f"{row['needed'] / 2**30:.2f}",
            f"{row['read'] / 2**30:.2f}",
            f"{row['seconds']:.2f}",
        )
        for name, row in results.items()
    ]
    columns = ("source", "weight files read", "GiB needed", "GiB read", "seconds (median)")
    title = f"EP rank {_RANK} of {EP}: Qwen3-30B-A3B with 3 layers, 128 experts each, RAM disk"
    publish(arguments.results, "expert_parallel", {"cases": results}, [table(title, columns, cells)])


if __name__ == "__main__":
    main()
