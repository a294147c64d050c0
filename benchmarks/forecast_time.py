"""Measure the time of `ckptx forecast` and of its layout search, and the memory of the largest process.

    python benchmarks/forecast_time.py [--results DIR] [--old CHECKOUT] [NAME ...]

With another checkout of ckptx, each case runs with both, one right after the other, with the same packages.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forecast_documents import DEEPSEEK, LLAMA
from measure import HERE, publish, table, time_command

from ckptx.runtime.training.recipe_file import read_recipe

_MIB = 2**20
QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "max_position_embeddings": 40960, "rope_theta": 1000000.0, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
_DEEPSEEK_OPTIONS = ("--tp", "8", "--dp-shard", "128", "--activation-checkpointing", "full")
# Name -> model, options of `ckptx forecast`, target in seconds.
CASES: Mapping[str, tuple[str, Sequence[str], float]] = {
    "Llama 3.1 8B, dp_shard 8": ("llama", ("--dp-shard", "8"), 15),
    "Gemma 4 31B, dp_shard 8": ("gemma", ("--dp-shard", "8", "--seq", "2048"), 15),
    "Gemma 4 31B, dp_shard 8, checkpointing full": (
        "gemma", ("--dp-shard", "8", "--seq", "2048", "--activation-checkpointing", "full"), 15,
    ),
    "Gemma 4 31B, tp 4 x pp 2": ("gemma", ("--tp", "4", "--pp", "2", "--seq", "2048"), 30),
    "DeepSeek-V3 671B, tp 8 x dp_shard 128, 1,024 ranks, checkpointing full": ("deepseek", _DEEPSEEK_OPTIONS, 30),
    "Qwen3 30B-A3B, tp 4 x pp 2, both precisions": ("qwen", ("--tp", "4", "--pp", "2"), 15),
    "search: Qwen3 30B-A3B, 8 GPUs": ("qwen", ("--search", "--gpus", "8", "--gpu-memory", "80GiB"), 300),
    "search: Llama 3.1 8B, 8 GPUs": ("llama", ("--search", "--gpus", "8", "--gpu-memory", "80GB"), 60),
    "search: Gemma 4 31B, 8 GPUs": ("gemma", ("--search", "--gpus", "8", "--gpu-memory", "80GB", "--seq", "2048"), 60),
    "search: Llama 3.1 8B, 64 GPUs": ("llama", ("--search", "--gpus", "64", "--gpu-memory", "80GB"), 300),
}  # fmt: skip


@contextmanager
def use_checkout(path: Path) -> Iterator[None]:
    """Let `python -m ckptx` run the code of a checkout, which is then the working directory."""
    previous = Path.cwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(previous)


def run_case(name: str, directory: Path, old: Path | None) -> dict[str, Any]:
    """Run one case, with an old checkout right before if there is one, and return its figures."""
    model, options, target = CASES[name]
    dtype = () if model == "qwen" else ("--dtype", "bf16")
    command = [sys.executable, "-m", "ckptx", "forecast", str(directory / model), *dtype, *options]
    report = directory / "report.json"
    old_seconds = None
    if old is not None:
        with use_checkout(old):
            old_seconds, _ = time_command([*command, "--report", str(directory / "old.json")])
    seconds, peak_rss = time_command([*command, "--report", str(report)])
    document = json.loads(report.read_text())
    rows = (
        document.get("by_pipeline_rank") or document["layouts"]
    )  # stages of a forecast, or layouts that a search found
    return {
        "case": name,
        "seconds": seconds,
        "old_seconds": old_seconds,
        "target_seconds": target,
        "peak_rss": peak_rss,
        "results": len(rows),
        "candidates": document.get("evaluated_steps", len(rows)),
        "peak": rows[0]["peak"],
    }


def main() -> None:
    """Run the cases, and write forecast_time.json and forecast_time.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="run only cases whose name contains this string")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--old", type=Path, metavar="CHECKOUT", help="checkout of ckptx to compare with")
    options = parser.parse_args()
    models = {
        "llama": LLAMA, "qwen": QWEN, "deepseek": DEEPSEEK, "gemma": dict(read_recipe("gemma4_31b").model.shrunk_from),
    }  # fmt: skip
    rows = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for model, config in models.items():
            (directory / model).mkdir()
            (directory / model / "config.json").write_text(json.dumps(config))
        # Compile bytecode first, so that the first case does not.
        subprocess.run([sys.executable, "-m", "ckptx", "env"], check=True, capture_output=True)
        for case in CASES:
            if not options.names or any(each in case for each in options.names):
                rows.append(run_case(case, directory, options.old))
                print(rows[-1], flush=True)
    cells = [
        {
            "forecast": row["case"],
            "seconds": f"{row['seconds']:.1f}",
            **({} if row["old_seconds"] is None else {"seconds of the old checkout": f"{row['old_seconds']:.1f}"}),
            "target, s": f"{row['target_seconds']:.0f}",
            "peak RSS of a process, MiB": f"{row['peak_rss'] / _MIB:.0f}",
            "stages or layouts": row["candidates"],
        }
        for row in rows
    ]
    columns = list(cells[0])
    text = table("Time and memory of a forecast", columns, [list(each.values()) for each in cells])
    publish(options.results, "forecast_time", {"rows": rows}, [text])


if __name__ == "__main__":
    main()
