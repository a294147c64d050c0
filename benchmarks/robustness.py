"""Run `ckptx robustness` over layouts and recipes on CPU ranks: phases that pass, time, memory, and noise.

    python benchmarks/robustness.py [--ram /dev/shm] [--results DIR] [NAME ...]

Each row is one command; a resumed run has new processes for its ranks. Memory is the peak RSS of the largest process.
Recipes of large models run with few and narrow layers, as the comments in their files explain, and save earlier.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import CKPTX, HERE, publish, table

_PHASES_OF_LAYOUTS = "1,2,6"
_UNSHARDED = "checks.sharded=false"
_IMAGES = ("model.shrunk=true", "data.dataset=synthetic_images", "data.sequence_length=64")
_TEXT = ("model.shrunk=true", "data.dataset=synthetic_text", "data.sequence_length=64")
_SHORT = ("training.steps=4", "training.save_at=[2]")
# Name -> recipe, phases (None is all), settings.
CASES: dict[str, tuple[str, str | None, Sequence[str]]] = {
    "dp2": ("llama_tiny", _PHASES_OF_LAYOUTS, ()),
    "tp2": ("llama_tiny", _PHASES_OF_LAYOUTS, ("layout.tp=2", "layout.dp_shard=1")),
    "tp2-dp2": ("llama_tiny", _PHASES_OF_LAYOUTS, ("layout.tp=2",)),
    "pp2-dp2": ("llama_tiny", _PHASES_OF_LAYOUTS, ("layout.pp=2",)),
    "tp2-pp2": ("llama_tiny", _PHASES_OF_LAYOUTS, ("layout.tp=2", "layout.pp=2", "layout.dp_shard=1")),
    "replicas": ("llama_tiny", _PHASES_OF_LAYOUTS, ("layout.dp_replicate=2", "layout.dp_shard=1", _UNSHARDED)),
    "hsdp": ("llama_tiny", _PHASES_OF_LAYOUTS, ("layout.dp_replicate=2",)),
    "ac-full": ("llama_tiny", _PHASES_OF_LAYOUTS, ("layout.activation_checkpointing=full",)),
    "ac-selective": ("llama_tiny", _PHASES_OF_LAYOUTS, ("layout.activation_checkpointing=selective",)),
    "asynchronous": ("llama_tiny", _PHASES_OF_LAYOUTS, ("checkpoint.asynchronous=true",)),
    "llama_tiny": ("llama_tiny", None, ()),
    "gemma3_tiny": ("gemma3_tiny", None, ()),
    "qwen3_moe_tiny": ("qwen3_moe_tiny", None, ()),
    "gemma4_vlm_tiny": ("gemma4_vlm_tiny", None, ()),
    "gemma4_vlm_tiny-tp2-pp2": ("gemma4_vlm_tiny", None, ("layout.tp=2", "layout.pp=2")),
    "gemma4_31b": ("gemma4_31b", None, (*_IMAGES, *_SHORT)),
    "gemma4_31b_tp4_pp2": ("gemma4_31b_tp4_pp2", None, (*_IMAGES, *_SHORT, "layout.tp=1")),
    "gemma4_31b_tp4_pp4": ("gemma4_31b_tp4_pp4", None, (*_IMAGES, *_SHORT, "layout.tp=1", "checks.layouts=[{pp: 2}]")),
    "phi_4_squad": ("phi_4_squad", None, (*_TEXT, "training.steps=6", "training.save_at=[3]")),
}

Row = dict[str, Any]


def main() -> None:
    """Run the cases, and write robustness.json and robustness.md; exit with 1 if a phase fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"cases to run: {', '.join(CASES)} [default: all]")
    parser.add_argument("--ram", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(CASES)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: unknown; choose from {', '.join(CASES)}")
    rows = []
    for name in arguments.names or CASES:
        with tempfile.TemporaryDirectory(dir=arguments.ram, prefix="ckptx-bench-") as directory:
            rows.append(run_case(name, Path(directory)))
        print(f"  {name}: {_cells(rows[-1])}", file=sys.stderr, flush=True)
    columns = (
        "recipe", "mesh", "ranks", "settings", "phases passed", "failed", "seconds", "peak RSS", "loss noise",
        "logits noise",
    )  # fmt: skip
    title = "Train, save, load, export, reshard, resume and kill"
    publish(arguments.results, "robustness", {"rows": rows}, [table(title, columns, list(map(_cells, rows)))])
    raise SystemExit(any(row["failed"] for row in rows))


def run_case(name: str, work: Path) -> Row:
    """Run `ckptx robustness` for one case, and return the figures of its report."""
    recipe, phases, settings = CASES[name]
    command = [*CKPTX, "robustness", recipe, "--out", str(work / "out"), "--device", "cpu", "--json"]
    command += ["--phases", phases] if phases is not None else []
    command += [part for each in settings for part in ("--set", each)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(command)}: exit {process.returncode}\n{process.stderr}")
    report = json.loads(process.stdout)
    noise = report["noise"] or {}
    return {
        "name": name, "recipe": recipe, "settings": list(settings), "layout": report["layout"],
        "ranks": report["world_size"],
        "passed": [phase["number"] for phase in report["phases"] if phase["ok"]],
        "failed": [phase["number"] for phase in report["phases"] if phase["ok"] is False],
        "not_run": [phase["number"] for phase in report["phases"] if phase["ok"] is None],
        "compared": sum(check["compared"] for phase in report["phases"] for check in phase["checks"]),
        "differing": report["differing"], "seconds": round(report["seconds"], 1),
        "peak_rss": _peak_rss(report, work / "out"),
        "noise": {kind: max(values.values()) for kind, values in noise.items()},
    }  # fmt: skip


def _peak_rss(report: Row, out: Path) -> int:
    """Return the peak RSS of the largest process in bytes: the main process or a rank (from its log)."""
    lines = [json.loads(line) for each in out.glob("*.jsonl") for line in each.read_text().splitlines()]
    return max(int(report["peak_rss"]), *(int(line["mem"] * 2**30) for line in lines))


def _cells(row: Row) -> Sequence[str]:
    mesh = " x ".join(f"{axis} {size}" for axis, size in row["layout"].items() if size > 1) or "one rank"
    other_settings = [each for each in row["settings"] if not each.startswith(("layout.tp", "layout.pp", "layout.dp"))]
    failed = ", ".join(f"{each['phase']}: {each['item']}" for each in row["differing"][:3])
    return (
        row["recipe"], mesh, str(row["ranks"]), " ".join(f"`{each}`" for each in other_settings), _join(row["passed"]),
        failed or _join(row["failed"]), f"{row['seconds']:.0f}", f"{row['peak_rss'] / 2**20:.0f} MiB",
        f"{row['noise'].get('loss', 0):.1e}", f"{row['noise'].get('logits', 0):.1e}",
    )  # fmt: skip


def _join(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


if __name__ == "__main__":
    main()
