"""Time this checkout against another one in one run: conversions of checkpoints with many experts.

    python benchmarks/compare.py OTHER [--rounds 5] [--models experts,qwen3-moe] [--ram /dev/shm] [--results DIR]

OTHER is the directory of another checkout, for example from `git worktree add`. Both run in this environment. Each
command is compared with a `cp -r` of its input, which runs immediately before it.
"""

from __future__ import annotations

import argparse
import compileall
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpoints import experts, qwen3_moe, write_checkpoint
from measure import HERE, Step, Timing, directory_size, publish, time_rounds, timing_table

_RUN = "import sys; sys.path.insert(0, {root!r})\nfrom ckptx.cli.main import run\nrun()"
_MESH = ["--tp", "4", "--pp", "2"]
MODELS = {
    "experts": ("Small experts, 18,723 tensors, 2.95 GiB, RAM disk", experts),
    "qwen3-moe": ("Layers of Qwen3-30B-A3B, 1,182 tensors, 3.73 GiB, RAM disk", qwen3_moe),
}


def command(root: Path, *arguments: str) -> list[str]:
    """Return the command that runs the ckptx of a checkout."""
    return [sys.executable, "-c", _RUN.format(root=str(root)), *arguments]


def time_cases(
    work: Path, source: Path, cases: Sequence[tuple[str, list[str]]], other: Path, rounds: int
) -> list[Timing]:
    """Time each case with both checkouts.

    Args:
        work: Directory for outputs.
        source: Checkpoint to convert.
        cases: Name of each case; its command ("reshard", "convert hf2dcp") and options.
        other: The other checkout.
        rounds: Number of timed rounds.
    """
    copy, out = work / "cp", work / "out"
    steps = [Step(f"cp -r {source.name}", ["cp", "-r", str(source), str(copy)], copy)]
    for name, (verb, *rest) in cases:
        words = [*verb.split(), str(source), str(out), *rest]
        steps += [Step(f"{name}{suffix}", command(root, *words), out) for suffix, root in _checkouts(other)]
    return time_rounds(steps, rounds, directory_size(source))


def _checkouts(other: Path) -> list[tuple[str, Path]]:
    """Return (suffix of the names in the table, directory) of both checkouts."""
    return [(", before", other), ("", HERE.parent)]


def time_conversions(work: Path, other: Path, rounds: int) -> list[Timing]:
    """Time all conversions of the checkpoint `work / "HF"`: from HF, from a DCP, and from a sharded DCP."""
    dcp, sharded = work / "DCP", work / "DCP tp4 x pp2"
    rows = time_cases(
        work,
        work / "HF",
        [
            ("convert to-dcp", ["convert to-dcp"]),
            ("HF -> DCP tp4 x pp2", ["reshard", "--to", "dcp", *_MESH]),
            ("HF -> sharded safetensors tp4 x pp2", ["reshard", "--to", "safetensors", *_MESH]),
        ],
        other,
        rounds,
    )
    _run_ckptx(["convert", "to-dcp"], work / "HF", dcp)
    rows += time_cases(work, dcp, [("convert to-hf", ["convert to-hf"])], other, rounds)
    subprocess.run(["rm", "-r", str(dcp)], check=True)
    _run_ckptx(["reshard", "--to", "dcp", *_MESH], work / "HF", sharded)
    return rows + time_cases(
        work,
        sharded,
        [("DCP tp4 x pp2 -> DCP tp2", ["reshard", "--tp", "2"]), ("DCP tp4 x pp2 -> HF", ["convert to-hf"])],
        other,
        rounds,
    )


def _run_ckptx(arguments: list[str], source: Path, out: Path) -> None:
    subprocess.run(command(HERE.parent, *arguments, str(source), str(out)), check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Compare with the selected models, and write compare.json and compare.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ram", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    other = arguments.other.resolve(strict=True)
    for _, root in _checkouts(other):
        compileall.compile_dir(root / "ckptx", quiet=1)
    results: dict[str, Any] = {}
    tables = []
    for name in arguments.models.split(","):
        title, make_model = MODELS[name]
        with tempfile.TemporaryDirectory(dir=arguments.ram, prefix="ckptx-bench-") as directory:
            write_checkpoint(Path(directory) / "HF", make_model())
            rows = time_conversions(Path(directory), other, arguments.rounds)
        results[name] = [row.to_dict() for row in rows]
        tables.append(timing_table(title, rows))
    publish(arguments.results, "compare", results, tables)


if __name__ == "__main__":
    main()
