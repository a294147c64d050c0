"""Measure how many small changes of a package its tests find: mutation testing with the operators of mutmut.

    python tools/mutants.py layout
    python tools/mutants.py architecture/tied --number 50 --seed 2
    python tools/mutants.py layout --again

PACKAGE is a directory or a module of `ckptx/`. The tests are those in the directory of the same name in `tests/` that
are not marked slow and do not start gloo processes. The script draws a sample of mutants, runs the tests that execute
each changed line, and writes `build/mutants/PACKAGE.json` and `.txt`: which mutants the tests killed, which survived,
and the share of killed mutants with a 95 % interval (Wilson). A mutant whose tests do not end is killed, and a mutant
whose line no test executes has survived. `--again` repeats the last sample, but runs only mutants that were not
killed. `tools/mutant_source.py` lists which code is not mutated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = ("killed", "timeout", "survived", "not covered")
# Modules to mutate in a large package: those that decide whether two values are equal. Other packages: all modules.
COMPARISON_MODULES = {
    "runtime/parity": (
        "comparison", "distances", "divergence", "noise", "run_report", "unreached_parameters",
    ),
    "robustness_suite": (
        "causes", "file_contents", "file_noise", "item_names", "item_oracles", "json_values", "losses", "oracles",
        "pickle_normalizer", "stored_items", "surviving_steps", "tensor_digests", "value_digests",
    ),
}  # fmt: skip


def files_of(package: str, root: Path) -> list[Path]:
    """Return the files of a package or module to mutate; exit if there is no such package or module."""
    if package in COMPARISON_MODULES:
        return [root / package / f"{name}.py" for name in COMPARISON_MODULES[package]]
    module = (root / package).with_suffix(".py")
    files = [module] if module.is_file() else sorted((root / package).rglob("*.py"))
    if not files:
        sys.exit(f"{package}: no such package or module in {root}")
    return files


def tests_of(package: str, root: Path) -> Path:
    """Return the directory of tests of a package, or of the package that contains a module."""
    folder = Path("tests") / package
    return folder if (root / package).is_dir() else folder.parent


def draw_sample(files: Sequence[Path], number: int, seed: int) -> tuple[list[Any], int]:
    """Return a sample of the mutants of files, and the number of all their mutants.

    Args:
        files: Source files.
        number: Size of the sample; it is smaller if fewer mutants change the code.
        seed: Seed of the sample.

    Returns:
        The sample in the order of the files and of their lines, without mutants that compile to the same code; and the
        number of mutants, with these.
    """
    from mutant_source import mutants_of

    mutants = [mutant for file in files for mutant in mutants_of(file)]
    order = random.Random(seed).sample(range(len(mutants)), len(mutants))
    chosen: list[int] = []
    for index in order:
        if len(chosen) == number:
            break
        if mutants[index].changes_code():
            chosen.append(index)
    return [mutants[index] for index in sorted(chosen)], len(mutants)


def wilson_interval(successes: int, number: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share, by Wilson; (0, 1) for no trials."""
    if number == 0:
        return 0.0, 1.0
    z = 1.959964
    share, factor = successes / number, 1 + z * z / number
    center = (share + z * z / (2 * number)) / factor
    half = z / factor * math.sqrt(share * (1 - share) / number + z * z / (4 * number * number))
    return max(0.0, center - half), min(1.0, center + half)


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the number of mutants by result, and the share of killed mutants with its interval."""
    counts = Counter(row["result"] for row in rows)
    killed = counts["killed"] + counts["timeout"]
    low, high = wilson_interval(killed, len(rows))
    return {
        "mutants": len(rows),
        **{name.replace(" ", "_"): counts[name] for name in RESULTS},
        "score": round(killed / len(rows), 4) if rows else None,
        "interval": [round(low, 4), round(high, 4)],
    }


def format_text(document: dict[str, Any]) -> str:
    """Return the results of a package as text: the summary, then every mutant that was not killed."""
    summary = document["summary"]
    low, high = summary["interval"]
    head = f"{document['package']}: {summary['mutants']} of {document['mutants_in_package']} mutants"
    counts = ", ".join(f"{name} {summary[name.replace(' ', '_')]}" for name in RESULTS)
    lines = [
        f"{head}, seed {document['seed']}",
        counts,
        f"score {summary['score']:.1%} (95 % interval {low:.1%} to {high:.1%})",
    ]
    for row in document["rows"]:
        if row["result"] in ("survived", "not covered"):
            lines += [
                "",
                f"{row['result']}: {row['file']}:{row['line']} {row['operator']} ({row['tests']} tests)",
                row["diff"],
            ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the mutants of one package and write its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", help="directory or module, such as layout or architecture/tied")
    parser.add_argument("--number", type=int, default=200, help="number of mutants [default: 200]")
    parser.add_argument("--seed", type=int, default=1, help="seed of the sample [default: 1]")
    parser.add_argument("--again", action="store_true", help="run only the mutants that the last run did not kill")
    parser.add_argument("--root", type=Path, default=Path("ckptx"), help="directory of the package [default: ckptx]")
    options = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # before numpy: threads do not survive a fork
        os.environ[name] = "1"
    from mutant_session import record_tests, run_mutants

    package = options.package.strip("/").removesuffix(".py")
    files = files_of(package, options.root)
    output = Path("build/mutants") / f"{package.replace('/', '.')}.json"
    killed = _last_killed(output) if options.again else {}
    mutants, total = draw_sample(files, options.number, options.seed)
    folders = [str(tests_of(package, options.root))]
    print(f"{package}: {len(mutants)} of {total} mutants, seed {options.seed}; tests of {folders[0]}", flush=True)
    recording = record_tests(folders, files)
    rows = {id(mutant): _row(mutant) for mutant in mutants}

    waiting = []
    for mutant in mutants:
        row = rows[id(mutant)]
        if (earlier := killed.get(_key(row))) is None:
            waiting.append(mutant)
        else:
            row |= earlier
    for mutant, outcome in run_mutants(folders, waiting, recording) if waiting else ():
        rows[id(mutant)] |= {"result": outcome.result, "tests": outcome.tests, "seconds": round(outcome.seconds, 2)}
    document = {
        "package": package,
        "seed": options.seed,
        "mutants_in_package": total,
        "tests": len(recording.seconds),
        "summary": summarize(list(rows.values())),
        "rows": list(rows.values()),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    text = format_text(document)
    output.with_suffix(".txt").write_text(text, encoding="utf-8")
    print("\n" + text, end="")
    return 0


def _row(mutant: Any) -> dict[str, Any]:
    return {"file": str(mutant.path), "line": mutant.line, "operator": mutant.operator, "diff": mutant.diff}


def _last_killed(output: Path) -> dict[tuple[str, int, str], dict[str, Any]]:
    """Return the rows of the mutants that the last run killed, by `_key`."""
    rows = json.loads(output.read_text(encoding="utf-8"))["rows"]
    return {_key(row): row for row in rows if row["result"] in ("killed", "timeout")}


def _key(row: dict[str, Any]) -> tuple[str, int, str]:
    """Return file, line and diff, which identify a mutant in each run."""
    return row["file"], row["line"], row["diff"]


if __name__ == "__main__":
    sys.exit(main())
