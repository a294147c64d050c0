"""Run `ckptx robustness` on one GPU: layers with real shapes, as many as time and memory allow.

    python benchmarks/robustness_gpu.py [--tiny] [--device cuda|cpu] [--work DIR] [--results DIR] [NAME ...]

The script uses the recipes of phi-4 and Gemma 4 31B with their real layers, but fewer of them, random weights and
generated data, because the machine has no network. It runs phases 0 to 4 and 6: equality of the runtime and
transformers, the noise between two runs, saved state, export, and resume. It exits with 1 if a phase fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cases import describe_machine
from measure import HERE, publish, table

from ckptx.runtime.training.recipe_file import read_recipe

_GIB = 2**30
_PHASES = "0-4,6"
Row = dict[str, Any]


class Case(NamedTuple):
    """A recipe with fewer layers.

    Attributes:
        recipe: Name of the recipe.
        layers: Number of layers of the language model.
        settings: Overrides of recipe keys, "key=value".
    """

    recipe: str
    layers: int
    settings: Sequence[str]


_SHORT_RUN = ("training.steps=3", "training.save_at=[2]", "training.global_batch=4", "layout.dp_shard=1")
_TEXT = ("data.dataset=synthetic_text", "data.samples=12", *_SHORT_RUN)
_IMAGES = ("data.dataset=synthetic_images", "data.samples=12", *_SHORT_RUN)
CASES = {
    "phi-4, full": Case("phi_4_squad", 2, _TEXT),
    "phi-4, none": Case("phi_4_squad", 2, (*_TEXT, "layout.activation_checkpointing=none")),
    "Gemma 4 31B, full": Case("gemma4_31b", 2, _IMAGES),
}
_TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_global_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32,
}  # fmt: skip


def config_of(case: Case, is_tiny: bool) -> dict[str, Any]:
    """Return the model's config with fewer layers; the last layer of a Gemma keeps full attention."""
    config: dict[str, Any] = json.loads(json.dumps(read_recipe(case.recipe).model.shrunk_from))
    text = config.get("text_config", config)
    text["num_hidden_layers"] = case.layers
    if "text_config" in config:
        text["layer_types"] = ["sliding_attention"] * (case.layers - 1) + ["full_attention"]
    if is_tiny:
        text.update({key: value for key, value in _TINY.items() if key in text})
        if "vision_config" in config:
            config["vision_config"]["num_hidden_layers"] = 1
    return config


def run_case(name: str, case: Case, work: Path, device: str, is_tiny: bool) -> Row:
    """Run `ckptx robustness` for one case, and return the figures of its report."""
    settings = ["model.pretrained=null", f"model.config={json.dumps(config_of(case, is_tiny))}", *case.settings]
    settings += ["data.sequence_length=64"] if is_tiny else []
    report = work / "report.json"
    command = [sys.executable, "-m", "ckptx", "robustness", case.recipe, "--device", device, "--phases", _PHASES]
    command += ["--out", str(work / "out"), "--report", str(report)]
    command += [part for each in settings for part in ("--set", each)]
    start = time.monotonic()
    print(f"{name}:", file=sys.stderr, flush=True)
    process = subprocess.run(command, check=False, stdout=sys.stderr, env={**os.environ, "TMPDIR": str(work)})
    seconds = time.monotonic() - start
    document: Mapping[str, Any] = json.loads(report.read_text())
    phases = [each for each in document.get("phases", ()) if each["ok"] is not None]
    noise = document.get("noise") or {}
    return {
        "name": name, "recipe": case.recipe, "layers": case.layers, "settings": list(case.settings),
        "exit": process.returncode, "error": document["error"], "seconds": seconds, "peak_rss": document["peak_rss"],
        "phases": {f"{each['number']} {each['name']}": [each["ok"], each["seconds"]] for each in phases},
        "failed": {
            each["name"]: [check["name"] for check in each["checks"] if not check["ok"]]
            for each in phases if not each["ok"]
        },
        "noise": noise, "losses": document.get("losses"), "memory": document.get("step_memory") or {},
    }  # fmt: skip


def _cells(row: Row) -> Sequence[str]:
    memory, noise = row["memory"], row["noise"]

    def gib(name: str) -> str:
        return f"{memory[name] / _GIB:.2f}" if name in memory else ""

    passed = [name.split()[0] for name, (ok, _) in row["phases"].items() if ok]
    failed = "; ".join(f"{name}: {', '.join(checks)}" for name, checks in row["failed"].items())
    return (
        row["name"], str(row["layers"]), ", ".join(passed), row["error"] or failed or "none", f"{row['seconds']:.0f}",
        *(" / ".join(f"{each:.3g}" for each in noise.get(kind, {}).values()) for kind in ("loss", "logits")),
        gib("forecast_peak"), gib("measured_peak"), f"{row['peak_rss'] / _GIB:.1f} GiB" if row["peak_rss"] else "",
    )  # fmt: skip


def main() -> None:
    """Run the cases, and write robustness_gpu.json and robustness_gpu.md; exit with 1 if a phase fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"cases to run: {', '.join(CASES)} [default: all]")
    parser.add_argument("--tiny", action="store_true", help="use small shapes, to try the script on a CPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--work", type=Path, default=None, help="directory for temporary checkpoints [default: system]")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(CASES):
        parser.error(f"{', '.join(sorted(unknown))}: unknown; choose from {', '.join(CASES)}")
    machine = describe_machine(torch.device(arguments.device), is_tiny=arguments.tiny)
    columns = (
        "recipe", "layers", "phases passed", "failed", "seconds", "loss noise: rerun / perturbed", "logits noise",
        "forecast peak, GiB", "measured peak, GiB", "peak RSS",
    )  # fmt: skip
    rows = []
    for name in arguments.names or CASES:
        work = Path(tempfile.mkdtemp(dir=arguments.work, prefix="ckptx-bench-"))
        try:
            rows.append(run_case(name, CASES[name], work, arguments.device, arguments.tiny))
        finally:
            shutil.rmtree(work)
        machine_text = ", ".join(f"{key} {value}" for key, value in machine.items())
        markdown = table("`ckptx robustness` on one GPU", columns, [_cells(row) for row in rows])
        publish(
            arguments.results, "robustness_gpu", {"machine": machine, "rows": rows}, [f"{machine_text}\n", markdown]
        )
    raise SystemExit(any(row["exit"] for row in rows))


if __name__ == "__main__":
    main()
