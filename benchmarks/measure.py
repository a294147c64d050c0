"""Time commands as whole processes, in rounds, against `cp -r` of the same round, and write the tables.

Every round runs every command once, so that a slow phase of the machine affects all of them; the first round is a
warm-up and does not count. On a RAM disk each command is compared with a `cp -r` immediately before it, with the same
amount of memory in use, and both get memory that was in use a moment ago (`free_memory.py`): otherwise, on a virtual
machine, every command of more than two seconds would pay for getting memory back from the host.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from checkpoints import llama, write_checkpoint

import ckptx

HERE = Path(__file__).resolve().parent
CKPTX = [str(Path(sys.executable).with_name("ckptx"))]
STOCK = [sys.executable, str(HERE / "stock_torch.py")]
# The kernel counts the memory of the forking process in the peak of the child, so a small process forks.
_LAUNCH = [sys.executable, "-I", "-S", str(HERE / "launch.py")]
_FREE_MEMORY = [sys.executable, "-I", "-S", str(HERE / "free_memory.py")]


class Step(NamedTuple):
    """One command of a round.

    Attributes:
        name: Name in the table.
        command: Command line of the process.
        output: Directory that it writes; removed after the step, or after the round with `keep`.
        keep: Keep the output for a later step.
        checks: Commands that run after the step in the warm-up round; each must succeed.
    """

    name: str
    command: Sequence[str]
    output: Path
    keep: bool = False
    checks: Sequence[Sequence[str]] = ()


@dataclass
class Timing:
    """Measurements of one command over all rounds.

    Attributes:
        name: Name in the table.
        seconds: Wall time of each round.
        ratios: Wall time of each round relative to the `cp -r` before it; empty if nothing was copied.
        peak_rss: Largest peak RSS of all rounds, in bytes.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    peak_rss: int = 0

    def to_dict(self) -> dict[str, object]:
        """Return medians and extremes of the rounds for the JSON file."""
        return {
            "name": self.name,
            "seconds": round(statistics.median(self.seconds), 3),
            "min": round(min(self.seconds), 3),
            "max": round(max(self.seconds), 3),
            "ratio_to_cp": round(statistics.median(self.ratios), 3) if self.ratios else None,
            "peak_rss_mib": round(self.peak_rss / 2**20, 1),
            "rounds": len(self.seconds),
        }


def time_command(command: Sequence[str], nbytes: int = 0) -> tuple[float, int]:
    """Run a command, and return its seconds from fork to exit and its peak RSS in bytes.

    Args:
        command: Command line of the process.
        nbytes: Bytes of memory that `free_memory.py` frees while it runs; 0 for none.
    """
    with free_memory_meanwhile(nbytes):
        process = subprocess.run([*_LAUNCH, *command], capture_output=True, text=True, check=False)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {process.returncode}\n{process.stderr}")
    seconds, peak = process.stdout.split()
    return float(seconds), int(peak)


@contextmanager
def free_memory_meanwhile(nbytes: int) -> Iterator[None]:
    """Let `free_memory.py` free `nbytes` during the block, as other processes allocate memory; 0 frees nothing."""
    if not nbytes:
        yield
        return
    with subprocess.Popen([*_FREE_MEMORY, str(nbytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise SystemExit(f"free_memory.py: could not allocate {nbytes} bytes")
        try:
            yield
        finally:
            process.stdin.close()


def time_rounds(steps: Sequence[Step], rounds: int, nbytes: int = 0) -> list[Timing]:
    """Time all steps in rounds, and return a row for each.

    Args:
        steps: Steps in order. The first is a copy, with which the others are compared; on a RAM disk it runs before
            each of them.
        rounds: Number of timed rounds.
        nbytes: Bytes that a step writes to a RAM disk; 0 if it writes to another disk.
    """
    rows = {step.name: Timing(step.name) for step in steps}
    copy_step = steps[0]
    if nbytes:
        steps = [each for step in steps[1:] for each in (copy_step, step)]
    for round_number in range(rounds + 1):
        copy_seconds = 0.0
        for step in steps:
            row = rows[step.name]
            seconds, peak = time_command(step.command, nbytes)
            for check in step.checks if not round_number else ():
                time_command(check)
            if not step.keep:
                shutil.rmtree(step.output)
            copy_seconds = seconds if step is copy_step else copy_seconds
            if round_number:  # the first round warms up pages and caches
                row.seconds.append(seconds)
                row.ratios.append(seconds / copy_seconds)
                row.peak_rss = max(row.peak_rss, peak)
            print(f"  round {round_number}: {step.name}: {seconds:.2f} s, {peak / 2**20:.0f} MiB", file=sys.stderr)
        for step in steps:
            if step.keep:
                shutil.rmtree(step.output)
        os.sync()
    return list(rows.values())


def growing_checkpoints(work: Path, sizes: Sequence[tuple[int, int]]) -> Iterator[tuple[float, Path]]:
    """Write Llamas of growing size one after the other; the caller removes each.

    Args:
        work: Parent directory of the checkpoints.
        sizes: Nominal size in GiB and number of layers of each checkpoint.

    Yields:
        Size of a checkpoint in GiB, and its directory.
    """
    for gib, layers in sizes:
        source = work / "flat"
        write_checkpoint(source, llama(layers), shards=max(1, gib // 2))
        yield round(directory_size(source) / 2**30, 2), source


def directory_size(directory: Path) -> int:
    """Return the total size of the files in a directory, in bytes."""
    return sum(file.stat().st_size for file in directory.iterdir())


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table with a title."""
    lines = [f"### {title}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join([*lines, ""])


def timing_table(title: str, rows: Sequence[Timing]) -> str:
    """Return the table of timed commands; it has ratios if something was copied."""
    seconds = "seconds (one round)" if all(len(row.seconds) == 1 for row in rows) else "seconds (median)"
    has_ratios = any(row.ratios for row in rows)
    cells = []
    for row in rows:
        medians = row.to_dict()
        ratio = "" if medians["ratio_to_cp"] is None else f"{medians['ratio_to_cp']:.2f}"
        ratios = [ratio] if has_ratios else []
        cells.append((row.name, f"{medians['seconds']:.2f}", *ratios, f"{medians['peak_rss_mib']:.0f} MiB"))
    return table(title, ("command", seconds, *(["x `cp -r`"] if has_ratios else []), "peak RSS"), cells)


def describe_machine() -> dict[str, object]:
    """Describe the machine: cores, memory in GiB and versions, without the host name."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    packages = ("torch", "transformers", "safetensors", "xxhash", "isal")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30),
        "python": platform.python_version(),
        **{package: version(package) for package in packages if find_spec(package) is not None},
    }


def parse_arguments(description: str | None, parts: Sequence[str]) -> argparse.Namespace:
    """Parse the command line of a benchmark.

    Args:
        description: Help text of the command.
        parts: Names of all parts.

    Returns:
        Arguments; `parts` is the list of the selected parts.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", default=",".join(parts))
    parser.add_argument("--ram", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--disk", type=Path, default=HERE)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    arguments.parts = arguments.parts.split(",")
    unknown = set(arguments.parts) - set(parts)
    if unknown:
        parser.error(f"--parts: {', '.join(sorted(unknown))}: unknown; choose from {', '.join(parts)}")
    # pip does this at installation; an editable install without bytecode files would compile in every process.
    compileall.compile_dir(Path(ckptx.__file__).parent, quiet=1)
    return arguments


def publish(directory: Path, name: str, results: dict[str, Any], tables: Sequence[str]) -> None:
    """Write NAME.json and NAME.md, and print the tables."""
    directory.mkdir(exist_ok=True)
    (directory / f"{name}.json").write_text(json.dumps({"machine": describe_machine(), **results}, indent=2) + "\n")
    machine_text = ", ".join(f"{key} {value}" for key, value in describe_machine().items())
    (directory / f"{name}.md").write_text(f"{machine_text}\n\n" + "\n".join(tables))
    print("\n".join(tables))
