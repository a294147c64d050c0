"""Measure peak memory of rank 0 in `verify --run`, and the threads of a process that verifies many times.

    python benchmarks/run_memory.py [--other CHECKOUT] [--runs 50] [--ram /dev/shm] [--results DIR]

The model is a Llama of 317 M parameters, stored in bfloat16, at tp2. Rank 0 has the whole reference: its weights and as
many gradients; the last column is the memory beyond these. CHECKOUT is another checkout of ckptx, which is measured for
comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import HERE, publish, table

_MODEL = """
import sys, torch, transformers
config = transformers.LlamaConfig(
    vocab_size=32000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=16, num_attention_heads=16,
    num_key_value_heads=8,
)
torch.manual_seed(0)
transformers.utils.logging.disable_progress_bar()
transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(sys.argv[1])
"""
_PARAMETERS = 317_228_032
_CASES = {
    "float32": (["--compute-dtype", "fp32"], 8),
    "float32, no backward": (["--compute-dtype", "fp32", "--no-backward"], 4),
    "as stored, bfloat16": (["--compute-dtype", "auto"], 4),
}  # options, and bytes per parameter for weight and gradient
_GIB = 1 << 30
_TINY_MODEL = "llama-tied"


def environment(root: Path) -> dict[str, str]:
    """Return an environment that imports ckptx from a checkout; `-m` also needs it as the working directory."""
    return {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}


def measure_peak(root: Path, model: Path, options: list[str]) -> int:
    """Run `verify --run` at tp 2, and return the peak RSS of rank 0 in bytes."""
    verify = [sys.executable, "-m", "ckptx", "verify", str(model), str(model), "--run", "--tp", "2", "--json"]
    process = subprocess.run([*verify, *options], cwd=root, env=environment(root), stdout=subprocess.PIPE, check=True)
    return int(json.loads(process.stdout)["peak_rss_rank_0"])


def count_threads_on_rank(path: Path, runs: int, out: Path) -> None:
    """Verify a model `runs` times on this rank; rank 0 writes its number of threads after each run."""
    import torch.distributed as dist

    from ckptx.options.verify import RunOptions
    from ckptx.report.report import Log
    from ckptx.runtime.parity.forward import verify_run

    counts = []
    dist.init_process_group("gloo")
    for _ in range(runs):
        assert verify_run(path, path, RunOptions(tp=2, device="cpu"), Log()).exit == 0
        counts.append(len(os.listdir("/proc/self/task")))
    if dist.get_rank() == 0:
        out.write_text(json.dumps(counts))
    dist.destroy_process_group()


def measure_threads(work: Path, runs: int) -> list[int]:
    """Return the number of threads of rank 0 after each run of a tiny model."""
    sys.path.insert(0, str(HERE.parent))
    from tests.support.models import EVERY, write

    write(EVERY[_TINY_MODEL], work / "tiny")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    arguments = ["--runs", str(runs), "--work", str(work)]
    subprocess.run([*torchrun, *arguments], env=environment(HERE.parent), check=True)
    counts: list[int] = json.loads((work / "threads.json").read_text())
    return counts


def main() -> None:
    """Measure memory and threads, and write run_memory.json and run_memory.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--ram", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work is not None:
        count_threads_on_rank(arguments.work / "tiny", arguments.runs, arguments.work / "threads.json")
        return
    roots = {} if arguments.other is None else {", before": arguments.other.resolve(strict=True)}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=arguments.ram, prefix="ckptx-bench-") as directory:
        model = Path(directory) / "HF"
        subprocess.run([sys.executable, "-c", _MODEL, str(model)], check=True)
        for case, (options, bytes_per_parameter) in _CASES.items():
            for suffix, root in {**roots, "": HERE.parent}.items():
                peak, nbytes = measure_peak(root, model, options), _PARAMETERS * bytes_per_parameter
                rows.append(
                    {
                        "case": f"{case}{suffix}",
                        "weights_and_gradients": nbytes,
                        "peak": peak,
                        "overhead": peak - nbytes,
                    }
                )
        counts = measure_threads(Path(directory), arguments.runs)
    lines = [
        (
            row["case"],
            *(f"{row[key] / _GIB:.2f} GiB" for key in ("weights_and_gradients", "peak", "overhead")),
        )
        for row in rows
    ]
    columns = ("computed in", "weights and gradients", "peak of rank 0", "beyond weights and gradients")
    threads = f"Threads of rank 0 after the first of {len(counts)} runs: {counts[0]}; after the last: {counts[-1]}.\n"
    title = "`verify --run --tp 2`, 317 M parameters stored in bfloat16"
    publish(arguments.results, "run_memory", {"rows": rows, "threads": counts}, [table(title, columns, lines), threads])


if __name__ == "__main__":
    main()
