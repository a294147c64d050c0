"""Run `verify --run` on models that are equal to their reference: every reported difference is a false alarm.

    python benchmarks/clean_runs.py [--results DIR] [MODEL ...]

Every tiny model of the tests is written with random weights, converted to a DCP, and run with tensor parallelism on two
ranks: with 5 seeds, 3 scales of the weights, float32 and bfloat16, and dp_shard 1 and 2. In 16 runs per model, every
pair of these values occurs at least once. The table has, for each model, the largest difference relative to its
tolerance.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from measure import publish, table  # noqa: E402 (benchmarks run from a checkout)

SEEDS = range(5)
SCALES = (0.02, 0.08, 0.3)  # standard deviations of weights
DTYPES = ("float32", "bfloat16")
DP_SHARD_SIZES = (1, 2)


class Run(NamedTuple):
    """One run of `verify --run`.

    Attributes:
        seed: Seed of the weights.
        scale: Standard deviation of the weights.
        dtype: Dtype of the weights: "float32" or "bfloat16".
        dp_shard: Number of data-parallel ranks.
    """

    seed: int
    scale: float
    dtype: str
    dp_shard: int


def runs() -> list[Run]:
    """Return 16 runs in which every pair of values occurs at least once."""
    found = [
        Run(seed, scale, DTYPES[(seed + index // 2) % 2], DP_SHARD_SIZES[(seed // 2 + index) % 2])
        for index, scale in enumerate(SCALES)
        for seed in SEEDS
    ]
    return [*found, Run(0, SCALES[0], DTYPES[1], DP_SHARD_SIZES[1])]


def write(name: str, run: Run, path: Path) -> None:
    """Write a model with random weights as an HF checkpoint; matrices have the standard deviation `run.scale`."""
    import torch
    import transformers

    from tests.support.models import EVERY, randomize

    torch.manual_seed(0)
    model = EVERY[name].model()
    model = model.bfloat16() if run.dtype == "bfloat16" else model.float()
    randomize(model, run.seed)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point() and tensor.dim() > 1:
            tensor.mul_(run.scale / 0.3)
    transformers.utils.logging.disable_progress_bar()
    model.eval().save_pretrained(path)


def verify_on_rank(work: Path, names: Sequence[str], dp_shard: int) -> None:
    """Verify every model on this rank; rank 0 writes the rows."""
    import shutil

    import torch
    import torch.distributed as dist

    import ckptx
    from ckptx.errors import CkptxError
    from ckptx.options.verify import RunOptions
    from ckptx.report.report import Log
    from ckptx.runtime.parity.forward import verify_run

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    options = RunOptions(tp=2, dp_shard=dp_shard, device="cpu")
    rows: list[dict[str, Any]] = []
    for name in names:
        for run in (each for each in runs() if each.dp_shard == dp_shard):
            if dist.get_rank() == 0:
                shutil.rmtree(work / "hf", ignore_errors=True)
                shutil.rmtree(work / "dcp", ignore_errors=True)
                write(name, run, work / "hf")
            dist.barrier()
            ckptx.convert("hf2dcp", work / "hf", work / "dcp")
            dist.barrier()
            row: dict[str, Any] = {"model": name, **run._asdict()}
            try:
                report = verify_run(work / "hf", work / "dcp", options, Log()).to_dict()
                row |= {key: report[key] for key in _REPORT_KEYS}
                row["inconclusive"] = len(report["inconclusive"])
            except CkptxError as error:
                row |= {"exit": error.exit_code, "error": str(error).replace(f"{work}/", "")}
            rows.append(row)
            dist.barrier()
    if dist.get_rank() == 0:
        (work / f"rows-{dp_shard}.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


_REPORT_KEYS = ("exit", "error", "max_abs", "max_abs_tolerance", "grad_closest_to_tolerance", "differing")
_COLUMNS = (
    "model",
    "runs",
    "equal",
    "rejected",
    "inconclusive",
    "logits: largest part of tolerance",
    "gradients: largest part of tolerance",
)


def table_row(name: str, rows: Sequence[dict[str, Any]]) -> tuple[object, ...]:
    """Return the table row of a model: a summary of all its runs."""
    finished = [row for row in rows if row["error"] is None]
    logits_ratios = [row["max_abs"] / row["max_abs_tolerance"] for row in finished if row["max_abs_tolerance"]]
    gradient_ratios = [row["grad_closest_to_tolerance"][1] for row in finished]
    return (
        name,
        len(rows),
        sum(row["exit"] == 0 for row in finished),
        len(rows) - len(finished),
        sum(bool(row["inconclusive"]) for row in finished),
        f"{max(logits_ratios, default=0):.0%}",
        f"{max(gradient_ratios, default=0):.0%}",
    )


def main() -> None:
    """Run all models, and write clean_runs.json and clean_runs.md; exit with 1 if a run reports a difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--dp-shard", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work is not None:
        verify_on_rank(arguments.work, arguments.models, arguments.dp_shard)
        return
    from tests.support.models import EVERY

    names, rows = arguments.models or list(EVERY), []
    with tempfile.TemporaryDirectory(prefix="ckptx-clean-") as directory:
        work = Path(directory)
        for dp_shard in DP_SHARD_SIZES:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            ranks = ["--nproc-per-node", str(2 * dp_shard), __file__, "--work", str(work)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run([*torchrun, *ranks, "--dp-shard", str(dp_shard), *names], check=True, env=environment)
            rows += json.loads((work / f"rows-{dp_shard}.json").read_text())
    lines = [table_row(name, [row for row in rows if row["model"] == name]) for name in names]
    false_alarms = [row for row in rows if row["error"] is None and row["exit"] != 0]
    counts = Counter("rejected" if row["error"] else "equal" if row["exit"] == 0 else "DIFFERENT" for row in rows)
    outcomes = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(counts.items()))
    title = f"Clean runs: {len(rows):,} of {len(names)} models, {outcomes}"
    others = [row for row in rows if row["exit"] != 0]
    results = {"counts": counts, "models": [dict(zip(_COLUMNS, line, strict=True)) for line in lines], "others": others}
    publish(arguments.results, "clean_runs", results, [table(title, _COLUMNS, lines)])
    for row in false_alarms:
        print("false alarm:", row["model"], *(row[key] for key in Run._fields), row["differing"][:3])
    sys.exit(bool(false_alarms))


if __name__ == "__main__":
    main()
