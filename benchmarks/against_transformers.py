"""Compare every tiny model of the tests with transformers in processes without ckptx, and write a table.

    python benchmarks/against_transformers.py [--results DIR] [MODEL ...]

ckptx and transformers both load and run each model; transformers does so in processes that never import ckptx. The
unsharded models must be equal bit for bit. With tensor parallelism on two ranks, where transformers uses its own plan,
each difference is listed next to its tolerance for rounding. Models that transformers rejects are listed with its
error.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
os.environ["OMP_NUM_THREADS"] = "1"

from measure import publish, table  # noqa: E402 (benchmarks run from a checkout)


def compare_model(work: Path, name: str, pool: Any) -> dict[str, Any]:
    """Run one model with ckptx and compare it with the saved outputs of transformers."""
    from tests.support import against_transformers
    from tests.support.against_transformers import compare_results, load_results

    unsharded, sharded = load_results(work, "stock", name), load_results(work, "stock-tp", name)
    unsharded_ckptx = against_transformers.compute_results(
        work, name, against_transformers.load_unsharded_model(work, name)
    )
    pool.run(against_transformers.save_sharded_results, against_transformers.TP, work, name)
    sharded_ckptx, tolerances = (
        load_results(work, "ckptx-tp", name),
        against_transformers.measure_tolerances(work, name, unsharded),
    )
    pairs = {"ckptx_tp_vs_unsharded": (sharded_ckptx, unsharded)}
    if "outputs" in sharded:
        pairs |= {
            "ckptx_tp_vs_transformers_tp": (sharded_ckptx, sharded),
            "transformers_tp_vs_unsharded": (sharded, unsharded),
        }
    return {
        "model": name,
        "tensors": len(unsharded["tensors"]),
        "unequal": against_transformers.list_differences(unsharded_ckptx, unsharded),
        "error": sharded.get("error"),
        **{key: _figures(compare_results(*pair, tolerances)) for key, pair in pairs.items()},
    }


def _figures(comparison: Any) -> dict[str, Any]:
    """Return the figures of a comparison for the JSON file: differences, each with its tolerance, and counts."""
    name, difference, tolerance = comparison.worst_gradient
    return {
        "outputs": comparison.outputs,
        "loss": comparison.loss,
        "gradients": len(comparison.gradients),
        "worst_gradient": [name, difference, tolerance],
        "faults": len(comparison.faults),
    }


_COLUMNS = (
    "model", "as `from_pretrained`", "tp 2, difference from unsharded transformers: outputs, worst gradient",
    "tp 2, difference from transformers' own tp 2: outputs, worst gradient",
)  # fmt: skip


def table_row(row: dict[str, Any]) -> tuple[object, ...]:
    """Return the table row of a model."""
    equal = f"equal, {row['tensors']} tensors" if not row["unequal"] else f"{len(row['unequal'])} DIFFERENCES"
    sharded = [_format_difference(row["ckptx_tp_vs_transformers_tp"])] if "ckptx_tp_vs_transformers_tp" in row else []
    self_difference = row.get("transformers_tp_vs_unsharded")
    if self_difference is not None and self_difference["faults"]:
        sharded = [f"transformers differs from its unsharded run: {_format_difference(self_difference)}"]
    if row["error"] is not None:
        sharded.append(f"transformers fails: {re.split('[.!] ', row['error'])[0]}")
    return row["model"], equal, _format_difference(row["ckptx_tp_vs_unsharded"]), "; ".join(sharded)


def _format_difference(figures: dict[str, Any]) -> str:
    outputs = f"{figures['outputs'][0]:.1e} of {figures['outputs'][1]:.1e}"
    _, difference, tolerance = figures["worst_gradient"]
    gradient = f", {difference:.1e} of {tolerance:.1e}" if figures["gradients"] else ""
    return f"{outputs}{gradient}{' DIFFERENT' if figures['faults'] else ''}"


def count_outcomes(rows: list[dict[str, Any]]) -> list[tuple[str, int, str]]:
    """Count the outcomes of transformers' own tensor parallelism, with the models of each."""
    models_by_outcome: dict[str, list[str]] = {}
    for row in rows:
        models_by_outcome.setdefault(_outcome(row), []).append(row["model"])
    most_frequent = max(models_by_outcome, key=lambda outcome: len(models_by_outcome[outcome]))
    return [
        (outcome, len(names), "" if outcome == most_frequent else ", ".join(names))
        for outcome, names in models_by_outcome.items()
    ]


def _outcome(row: dict[str, Any]) -> str:
    """Return the outcome of transformers' own tensor parallelism for one model."""
    error, self_difference = row["error"], row.get("transformers_tp_vs_unsharded")
    parts = []
    if self_difference is not None and self_difference["faults"]:
        kind = "outputs" if self_difference["outputs"][0] > self_difference["outputs"][1] else "gradients"
        parts.append(f"{kind} differ from unsharded")
    elif self_difference is not None:
        parts.append("same as ckptx" if not row["ckptx_tp_vs_transformers_tp"]["faults"] else "DIFFERENT FROM CKPTX")
    if error is not None:
        parts.append("no plan" if "has no `tp_plan`" in error else f"error: {error.partition(':')[0]}")
    return ", ".join(parts)


def main() -> None:
    """Run all models, and write against_transformers.json and .md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    import torch
    import transformers

    from tests.support import against_transformers
    from tests.support.models import EVERY
    from tests.support.pool import GlooPool

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    names = arguments.models or list(EVERY)
    pool = GlooPool()
    try:
        with tempfile.TemporaryDirectory(prefix="ckptx-bench-") as directory:
            work = Path(directory)
            against_transformers.prepare(work, names)
            against_transformers.run_transformers(work, names, tp=against_transformers.TP)
            rows = [compare_model(work, name, pool) for name in names]
    finally:
        pool.close()
    title = "The runtime, and transformers in a separate process; tiny random models, float32"
    tables = [
        table(
            "Results of transformers' own tensor parallelism",
            ("transformers at tp 2", "models", "names"),
            count_outcomes(rows),
        ),
        table(title, _COLUMNS, [table_row(row) for row in rows]),
    ]
    publish(arguments.results, "against_transformers", {"models": rows}, tables)


if __name__ == "__main__":
    main()
