"""Run trainers that do not use ckptx: each script unchanged, and with a known mistake in one line.

    python benchmarks/trainers.py [--ram /dev/shm] [--results DIR] [NAME ...]

A row is one command, `ckptx robustness RECIPE`, on a copy of the recipes with that line changed. The scripts do not use
ckptx, and therefore only their checkpoints can show the mistake. They are those of the package, and three others in
`benchmarks/injected/external`. A mistake is identified if the phase that can detect it fails, and if the cause in the
last line is right or reported as unknown.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import CKPTX, HERE, publish, table

sys.path.insert(0, str(HERE.parent))

from benchmarks.injected import external_trainers
from benchmarks.injected.external_trainers import EXTERNAL
from benchmarks.injected.trainers import MISTAKES, SCRIPTS, inject_into
from ckptx.robustness_suite.external_trainer import BUILT_IN_RECIPES

MISTAKES_BY_RECIPE = {**MISTAKES, **external_trainers.MISTAKES}  # recipe -> name -> mistake
Row = dict[str, Any]


def main() -> None:
    """Run the commands, and write trainers.json and trainers.md; exit with 1 if a mistake is not identified."""
    names = [
        f"{recipe}:{mistake_name}"
        for recipe, mistakes in MISTAKES_BY_RECIPE.items()
        for mistake_name in ("none", *mistakes)
    ]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"commands to run: {', '.join(names)} [default: all]")
    parser.add_argument("--ram", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(names)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: unknown; choose from {', '.join(names)}")
    rows = []
    for name in arguments.names or names:
        with tempfile.TemporaryDirectory(dir=arguments.ram, prefix="ckptx-bench-") as directory:
            rows.append(run_trainer(*name.split(":"), Path(directory)))
        print(f"  {name}: {_cells(rows[-1])}", file=sys.stderr, flush=True)
    columns = ("recipe", "mistake", "exit", "expected", "phases and checks that fail", "cause", "seconds")
    title = "Third-party trainers, unchanged and with a mistake"
    publish(arguments.results, "trainers", {"rows": rows}, [table(title, columns, list(map(_cells, rows)))])
    raise SystemExit(not all(row["is_identified"] for row in rows))


def run_trainer(recipe: str, mistake_name: str, work: Path) -> Row:
    """Run `ckptx robustness` on a trainer with a mistake ("none": unchanged), and return the figures of its report."""
    recipes = work / "recipes"
    shutil.copytree(BUILT_IN_RECIPES if recipe in MISTAKES else EXTERNAL, recipes)
    mistake = MISTAKES_BY_RECIPE[recipe].get(mistake_name)
    if mistake is not None:
        inject_into(recipes / (f"scripts/{SCRIPTS[recipe]}" if recipe in MISTAKES else f"{recipe}.py"), mistake)
    command = [*CKPTX, "robustness", str(recipes / f"{recipe}.yaml"), "--out", str(work / "out"), "--json"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if process.returncode not in (0, 1):
        raise SystemExit(f"{recipe}, {mistake_name}: exit {process.returncode}: {process.stderr[-2000:]}")
    report = json.loads(process.stdout)
    failed = {
        phase["name"]: [each["name"] for each in phase["checks"] if each["ok"] is False]
        for phase in report["phases"]
        if phase["ok"] is False
    }
    if mistake is None:
        is_identified = process.returncode == 0 and not failed
    else:
        is_identified = process.returncode == 1 and mistake.oracles <= set(failed.get(mistake.phase, ()))
        is_identified = is_identified and (not mistake.cause or mistake.matches_cause(report["first_failure"]["cause"]))
    return {
        "recipe": recipe, "mistake": mistake_name,
        "description": mistake.description if mistake is not None else "as it is",
        "expected": f"{mistake.phase}: {', '.join(sorted(mistake.oracles))}" if mistake is not None else "",
        "exit": process.returncode, "failed": failed, "cause": (report["first_failure"] or {}).get("cause", ""),
        "is_identified": is_identified, "seconds": report["seconds"],
    }  # fmt: skip


def _cells(row: Row) -> Sequence[str]:
    failed = "; ".join(f"{phase}: {', '.join(checks)}" for phase, checks in row["failed"].items())
    return (
        row["recipe"],
        row["description"],
        str(row["exit"]),
        row["expected"],
        failed,
        row["cause"],
        f"{row['seconds']:.0f}",
    )


if __name__ == "__main__":
    main()
