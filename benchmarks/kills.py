"""Kill saves at twenty file operations, sync and async, on one rank and on all, and check the remaining files.

    python benchmarks/kills.py [--ram /dev/shm] [--results DIR]

Two ranks save a small model and its AdamW state. Steps 3 and 6 are complete, and step 9 is killed: sixteen operations
are on rank 0, which publishes, four on rank 1. A cell has the step from which a run resumes. The bytes of each step are
compared with the saved state, no other directory may load or be where loaders look, and step 9 is then saved again.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from measure import HERE, publish, table

sys.path.insert(0, str(HERE.parent))

from ckptx.robustness_suite.kills import operation_kind, select_kill_points
from ckptx.robustness_suite.surviving_steps import check_steps
from tests.support import killed_ranks
from tests.support.killed_ranks import SAVES, Kill

_NUM_KILL_POINTS = (16, 4)  # by rank
# Save mode, and True if all ranks are killed.
_VARIANTS = [(mode, all_ranks) for mode in SAVES for all_ranks in (False, True)]


def main() -> None:
    """Kill saves, and write kills.json and kills.md; exit with 1 if a wrong file remains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ram", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(dir=arguments.ram, prefix="ckptx-bench-") as directory:
        rows = kill_at_all_points(Path(directory))
    lines = [(row["kind"], row["operation"], row["rank"], *(_cell(each) for each in row["outcomes"])) for row in rows]
    columns = (
        "kind of file",
        "killed at",
        "rank",
        *(f"{mode}, {'all ranks' if is_all else 'one rank'}" for mode, is_all in _VARIANTS),
    )
    faults = [fault for row in rows for each in row["outcomes"] for fault in each["faults"]]
    num_runs = len(rows) * len(_VARIANTS)
    summary = f"{num_runs} saves killed; {len(faults)} damaged the last complete step or prevented the next save.\n"
    title = "Saves of step 9 that are killed, with complete steps 3 and 6"
    publish(arguments.results, "kills", {"rows": rows, "faults": faults}, [table(title, columns, lines), summary])
    raise SystemExit(bool(faults))


def kill_at_all_points(work: Path) -> list[dict[str, Any]]:
    """Kill a save at each operation, and return a row for each."""
    start = work / "start"
    killed_ranks.save_first_steps(start)
    digests, names = dict(check_steps(start, good_step=6).digests), {}
    for mode, function in SAVES.items():
        names[mode], surviving = killed_ranks.run_without_kill(start, work / mode, function)
        digests |= surviving.digests
    assert names["sync"] == names["async"]
    rows = []
    for rank, count in enumerate(_NUM_KILL_POINTS):
        for point in select_kill_points(names["sync"][rank], count):
            row: dict[str, Any] = {"kind": operation_kind(point), "operation": point, "rank": rank, "outcomes": []}
            for mode, all_ranks in _VARIANTS:
                root = work / f"{len(rows)}-{mode}-{all_ranks}"
                exit_codes, remaining = killed_ranks.run_killed_save(
                    start, root, SAVES[mode], Kill(rank, point, all_ranks), digests
                )
                assert exit_codes[rank] == -signal.SIGKILL, exit_codes
                row["outcomes"].append({
                    "mode": mode, "all_ranks": all_ranks, "exits": exit_codes, "published": remaining.published,
                    "latest": remaining.latest, "note": remaining.note, "hidden": remaining.hidden,
                    "faults": remaining.violations,
                })  # fmt: skip
            print(f"  rank {rank}: {point}: {', '.join(map(_cell, row['outcomes']))}", file=sys.stderr)
            rows.append(row)
    return rows


def _cell(outcome: dict[str, Any]) -> str:
    return "; ".join(outcome["faults"]) or f"step-{outcome['latest']}"


if __name__ == "__main__":
    main()
