"""Inject defects into small models, run `verify --run` on them, and list the levels at which it finds each.

    python benchmarks/defects.py [--results DIR] [--dtypes float32,bfloat16] [PART OF A ROW ...]

Defects of a checkpoint are written to disk; defects of the runtime are injected into its parallel model. Every run has
two gloo ranks, tp 2, and computes in float32 for every stored dtype. Bytes are not compared: other tests show that a
changed byte is found. A defect counts as found if the config, the forward pass or the gradients differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402 (benchmarks run from a checkout)
import torch.distributed as dist  # noqa: E402 (benchmarks run from a checkout)

from benchmarks.injected import models  # noqa: E402 (benchmarks run from a checkout)
from benchmarks.injected.defect import Defect  # noqa: E402 (benchmarks run from a checkout)
from benchmarks.injected.inject import inject_defect  # noqa: E402 (benchmarks run from a checkout)
from benchmarks.injected.more_defects import RARE_DEFECTS  # noqa: E402 (benchmarks run from a checkout)
from benchmarks.injected.reference_defects import COMMON_DEFECTS  # noqa: E402 (benchmarks run from a checkout)
from ckptx.errors import CkptxError  # noqa: E402 (benchmarks run from a checkout)
from ckptx.options.verify import RunOptions  # noqa: E402 (benchmarks run from a checkout)
from ckptx.report.report import Log  # noqa: E402 (benchmarks run from a checkout)
from ckptx.runtime.parity.forward import verify_run  # noqa: E402 (benchmarks run from a checkout)

# Unchanged models; a reported difference is a false alarm.
NO_DEFECT = "nothing"
CLEAN = [
    Defect(name, "clean", NO_DEFECT) for name in dict.fromkeys(each.model for each in (*COMMON_DEFECTS, *RARE_DEFECTS))
]
TABLES = {"common": COMMON_DEFECTS, "rare": RARE_DEFECTS, "clean": CLEAN}
_TITLES = {
    "common": "common faults",
    "rare": "rare faults",
    "clean": "none",
}
LEVELS = ("config", "forward", "gradients")
DTYPES = ("float32", "bfloat16")
Row = dict[str, Any]


class Pair(NamedTuple):
    """A defect in one stored dtype, and the two checkpoints to compare.

    Attributes:
        defect: The defect.
        dtype: Name of the dtype of the stored weights.
        reference: Checkpoint without the defect.
        checkpoint: Checkpoint with the defect; for a defect of the runtime, the same as `reference`.
    """

    defect: Defect
    dtype: str
    reference: Path
    checkpoint: Path


def pairs_of(work: Path, defects: Iterable[Defect], dtypes: Sequence[str]) -> list[Pair]:
    """Return the paths of the reference and the checkpoint of each defect in each dtype."""
    pairs = []
    for number, defect in enumerate(defects):
        for dtype in dtypes:
            clean = work / f"{defect.model} {dtype}"
            pairs.append(
                Pair(defect, dtype, clean, work / f"{number} {dtype}" if defect.checkpoint_injection else clean)
            )
    return pairs


def write(pairs: Iterable[Pair]) -> None:
    """Write each model, and each checkpoint with its defect."""
    for defect, dtype, clean, defective in pairs:
        torch_dtype: torch.dtype = getattr(torch, dtype)
        if not clean.exists():
            models.write(defect.model, torch_dtype, clean)
        if defect.checkpoint_injection is not None:
            tensors, config = models.read(clean)
            defect.checkpoint_injection(tensors, config)
            models.save(tensors, config, torch_dtype, defective)


def verify_pair(pair: Pair) -> Row:
    """Verify one pair, and return its row; every rank calls this."""
    defect = pair.defect
    identical = defect.checkpoint_injection is not None and models.are_equal(pair.reference, pair.checkpoint)
    row = {"model": defect.model, "defect": defect.title, "dtype": pair.dtype, "identical": identical}
    options = RunOptions(**{"tp": 2, **defect.options})
    try:
        with inject_defect(defect):
            report = verify_run(pair.reference, pair.checkpoint, options, Log()).to_dict()
    except CkptxError as error:
        message = str(error).replace(f"{pair.checkpoint.parent}/", "")
        return {**row, "exit": error.exit_code, "levels": [], "error": message, "logits": None, "gradient": None}
    levels = {each["level"] for each in report["differing"]}
    return {
        **row,
        "exit": report["exit"],
        "levels": [level for level in LEVELS if level in levels],
        "error": None,
        "logits": _multiple(report["max_abs"], report["max_abs_tolerance"]),
        "gradient": report["grad_closest_to_tolerance"][1],
    }


def _multiple(difference: Any, tolerance: Any) -> float | str:
    """Return a difference as a multiple of its tolerance; a string if it is not finite.

    Without a tolerance, 0 stands for equal and 1 for different.
    """
    if isinstance(difference, str):
        return difference
    return difference / tolerance if tolerance else float(difference > 0)


def verify_on_rank(work: Path, pairs: Sequence[Pair]) -> None:
    """Verify every pair on this rank; rank 0 writes the rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = []
    for pair in pairs:
        start = time.perf_counter()
        rows.append(verify_pair(pair))
        if not dist.get_rank():
            seconds = time.perf_counter() - start
            print(f"  {pair.defect.key}, {pair.dtype}: {format_cell(rows[-1])}, {seconds:.1f} s", file=sys.stderr)
    if not dist.get_rank():
        (work / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def select_defects(names: Sequence[str]) -> list[Defect]:
    """Return the defects whose key contains one of the names, or all if there are no names."""
    all_defects = [defect for defects in TABLES.values() for defect in defects]
    return [each for each in all_defects if not names or any(name in each.key for name in names)]


# ---------------------------------------------------------------------------------------------------------- the tables


def is_found(row: Row) -> bool:
    """Return True if the config, the forward pass or the gradients differ."""
    return row["exit"] == 1 and bool(row["levels"])


def is_equal(row: Row) -> bool:
    """Return True if both checkpoints are identical and there is no defect of the runtime."""
    return bool(row["identical"]) or row["defect"] == NO_DEFECT


def format_cell(row: Row) -> str:
    """Format the outcome of one run: differences as multiples of their tolerances, and the levels that differ."""
    if row["error"] is not None:
        return f"exit {row['exit']}"
    multiples = f"{_format_multiple(row['logits'])} / {_format_multiple(row['gradient'])}"
    if is_found(row):
        return f"{multiples} {', '.join(row['levels'])}"
    return f"{multiples} {'equal' if is_equal(row) else '**missed**'}"


def _format_multiple(multiple: float | str) -> str:
    return multiple if isinstance(multiple, str) else f"{multiple:.2g}"


def find_reason(defect: Defect, rows: Iterable[Row]) -> str:
    """Return the reason that a defect is missed in a dtype, or "" if it is found in all."""
    rows = list(rows)
    message = next((row["error"] for row in rows if row["error"] is not None), "")
    if message:
        return message
    missed = [row for row in rows if not is_found(row) and not is_equal(row)]
    return defect.missed_reason or "not known" if missed else ""


def tables_of(results: Mapping[str, Sequence[Row]], dtypes: Sequence[str]) -> list[str]:
    """Return the table of counts, then one table per kind of defect.

    Args:
        results: Rows of all runs, by the name of their table.
        dtypes: Stored dtypes, in the order of the columns.
    """
    from measure import table

    totals, tables = [], []
    for name, rows in results.items():
        if not rows:
            continue
        for dtype in dtypes:
            totals.append((_TITLES[name], dtype, *count_outcomes([row for row in rows if row["dtype"] == dtype])))
        row_of = {(row["model"], row["defect"], row["dtype"]): row for row in rows}
        lines = []
        for defect in TABLES[name]:
            rows_of_defect = [row_of[key] for dtype in dtypes if (key := (defect.model, defect.title, dtype)) in row_of]
            if rows_of_defect:
                cells = map(format_cell, rows_of_defect)
                lines.append((defect.model, defect.title, *cells, find_reason(defect, rows_of_defect)))
        columns = ("model", "defect", *(f"stored {dtype}" for dtype in dtypes), "reason if missed")
        tables.append(table(f"`verify --run --tp 2`: {_TITLES[name]}", columns, lines))
    columns = ("injected faults", "stored dtype", "cases", "found", "byte-identical", "missed", "rejected")
    return [table("Defects that `verify --run --tp 2` finds", columns, totals), *tables]


def count_outcomes(rows: Sequence[Row]) -> tuple[int, int, int, int, int]:
    """Return the numbers of runs: all, found, equal, missed, and rejected with an error."""
    found, rejected = sum(map(is_found, rows)), sum(row["error"] is not None for row in rows)
    equal = sum(is_equal(row) and not is_found(row) and row["error"] is None for row in rows)
    return len(rows), found, equal, len(rows) - found - equal - rejected, rejected


def main() -> None:
    """Write and verify the models, and write defects.json and defects.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="PART OF A ROW")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    dtypes = arguments.dtypes.split(",")
    if arguments.work is not None:
        verify_on_rank(arguments.work, pairs_of(arguments.work, select_defects(arguments.names), dtypes))
        return
    from measure import publish

    with tempfile.TemporaryDirectory(prefix="ckptx-defects-") as directory:
        work = Path(directory)
        write(pairs_of(work, select_defects(arguments.names), dtypes))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*torchrun, __file__, "--work", directory, "--dtypes", arguments.dtypes, *arguments.names]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        rows = json.loads((work / "rows.json").read_text())
    table_of = {(each.model, each.title): name for name, defects in TABLES.items() for each in defects}
    results: dict[str, list[Row]] = {name: [] for name in TABLES}
    for row in rows:
        results[table_of[row["model"], row["defect"]]].append(row)
    publish(arguments.results, "defects", results, tables_of(results, dtypes))


if __name__ == "__main__":
    main()
