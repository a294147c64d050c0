"""Run every tiny model of the tests under TP x FSDP2 on four gloo ranks, and list the differences from one rank.

    python benchmarks/models.py [--tp 2] [--dp-shard 2] [--dtypes fp32,bf16] [--results DIR] [MODEL ...]

The script measures differences, not time: each is listed next to its tolerance, which is the model's own rounding in
the same run. A model that cannot be run is listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from measure import publish, table  # noqa: E402 (benchmarks run from a checkout)


def prepare(work: Path, names: list[str]) -> None:
    """Write each model as an HF checkpoint, and convert it to a DCP."""
    import torch

    import ckptx
    from tests.support.models import EVERY, write

    for name in names:
        write(replace(EVERY[name], dtype=torch.float32), work / name)
        ckptx.convert("hf2dcp", work / name, work / f"{name}-dcp")


def verify_on_rank(work: Path, names: list[str], tp: int, dp_shard: int, dtype: str) -> None:
    """Verify every model on this rank; rank 0 writes the rows."""
    import torch
    import torch.distributed as dist

    from ckptx.errors import CkptxError
    from ckptx.options.verify import RunOptions
    from ckptx.report.report import Log
    from ckptx.runtime.parity.forward import verify_run

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    options = RunOptions(tp=tp, dp_shard=dp_shard, compute_dtype=dtype)
    rows: list[dict[str, Any]] = []
    for name in names:
        try:
            report = verify_run(work / name, work / f"{name}-dcp", options, Log()).to_dict()
            rows.append({"model": name, **{key: report[key] for key in _REPORT_KEYS}})
        except CkptxError as error:
            rows.append({"model": name, "exit": error.exit_code, "error": str(error).replace(f"{work}/", "")})
    if dist.get_rank() == 0:
        (work / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


_REPORT_KEYS = (
    "exit", "error", "max_abs", "max_abs_tolerance", "kl", "cosine", "loss", "loss_reference", "loss_tolerance",
    "gradients", "grad_max_abs", "grad_closest_to_tolerance",
)  # fmt: skip


_COLUMNS = (
    "model", "outcome", "logits: max abs of tolerance", "KL", "loss: difference of tolerance", "gradients: max abs",
)  # fmt: skip


def table_row(row: dict[str, Any]) -> tuple[object, ...]:
    """Return the table row of a model."""
    if row["error"] is not None:
        return row["model"], f"exit {row['exit']}: {row['error']}", "", "", "", ""
    difference = abs(row["loss"] - row["loss_reference"])
    return (
        row["model"],
        "equal" if row["exit"] == 0 else "DIFFERENT",
        f"{row['max_abs']:.1e} of {row['max_abs_tolerance']:.1e}",
        f"{row['kl']:.0e}",
        f"{difference:.1e} of {row['loss_tolerance']:.1e}",
        f"{row['grad_max_abs']:.1e}, {row['grad_closest_to_tolerance'][1]:.0%} of tolerance",
    )


def main() -> None:
    """Run all models, and write models.json and models.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--dp-shard", type=int, default=2)
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work is not None:
        verify_on_rank(arguments.work, arguments.models, arguments.tp, arguments.dp_shard, arguments.dtypes)
        return
    from tests.support.models import EVERY

    names = arguments.models or list(EVERY)
    results: dict[str, Any] = {}
    tables = []
    with tempfile.TemporaryDirectory(prefix="ckptx-models-") as directory:
        work = Path(directory)
        prepare(work, names)
        for dtype in arguments.dtypes.split(","):
            torchrun = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(arguments.tp * arguments.dp_shard),
            ]
            mesh = ["--tp", str(arguments.tp), "--dp-shard", str(arguments.dp_shard), "--dtypes", dtype]
            command = [*torchrun, __file__, *mesh, "--work", directory, *names]
            subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
            results[dtype] = rows = json.loads((work / "rows.json").read_text())
            title = f"`verify --run --tp {arguments.tp} --dp-shard {arguments.dp_shard}` of tiny random models, {dtype}"
            tables.append(table(title, _COLUMNS, [table_row(row) for row in rows]))
    publish(arguments.results, "models", results, tables)


if __name__ == "__main__":
    main()
