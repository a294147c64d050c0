"""Run every fault of `ckptx robustness --inject`: the checks that fail, and the change of the loss.

    python benchmarks/faults.py [--ram /dev/shm] [--results DIR] [NAME ...]

`llama_tiny` runs on two data-parallel ranks, or with tp 2 if a fault needs it; each fault is injected in the phase that
must identify it. For comparison, the table has the differences that a comparison of losses would see: the difference of
the loss in the first step after the fault, and the largest in later steps. Faults of a resumed run share the
uninterrupted run before it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from ckptx.report.report import Log
from ckptx.robustness_suite.faults import FAULTS
from ckptx.robustness_suite.oracles import abs_difference, largest_value
from ckptx.robustness_suite.phases import PHASES
from ckptx.robustness_suite.ranks import Ranks, RetainedMemory
from ckptx.robustness_suite.report_builder import ReportBuilder
from ckptx.robustness_suite.run import measure_baseline, run_phase
from ckptx.robustness_suite.session import InjectedFault, Session
from ckptx.runtime.training.recipe_file import read_recipe

RECIPE = "llama_tiny"
_SETTING_OF_AXIS = {"tp": "layout.tp=2"}  # mesh axis -> override that gives it the required size
_RESUME_PHASE = 6

Row = dict[str, Any]


class SharedRanksSession(Session):
    """A session that reuses its ranks, because the effects of these faults do not depend on new interpreters."""

    def fresh_ranks(self) -> AbstractContextManager[Ranks]:
        """Return the ranks of the session instead of new ones."""
        return nullcontext(self.ranks)


@contextmanager
def open_session(
    folder: Path, min_mesh: Mapping[str, int], ranks: Ranks | None = None, settings: Sequence[str] = ()
) -> Iterator[tuple[Session, RetainedMemory]]:
    """Open a session on a mesh that a fault requires; yield it with the baseline memory of its ranks.

    Args:
        folder: Directory of the session; it must not exist.
        min_mesh: Mesh axes that the fault requires, with their minimum sizes.
        ranks: Ranks to use; None starts new ones.
        settings: Overrides of recipe keys, "key=value".
    """
    recipe = read_recipe(
        RECIPE, [*settings, *(_SETTING_OF_AXIS[axis] for axis in min_mesh if axis in _SETTING_OF_AXIS)]
    )
    with Ranks(device="cpu") if ranks is None else nullcontext(ranks) as session_ranks:
        folder.mkdir()
        session = SharedRanksSession(
            recipe=recipe, source=folder / "source", out=folder, ranks=session_ranks, is_exact=True, log=Log(),
        )  # fmt: skip
        session.source = session.run_task("prepare", recipe, session.source, "cpu").source
        yield session, measure_baseline(session)


def run_with_fault(session: Session, baseline: RetainedMemory, name: str | None, number: int) -> Row:
    """Run a phase with a fault, and return a row with the checks that fail.

    Args:
        session: Session to run in.
        baseline: Memory of the ranks before the phases.
        name: Name of the fault; None runs without one.
        number: Number of the phase.
    """
    fault = FAULTS[name] if name is not None else None
    session.injection = fault.injection if fault is not None else InjectedFault()
    builder = ReportBuilder(lambda _: None)
    row = run_phase(builder, session, PHASES[number], baseline)
    failed = [each["name"] for each in row["checks"] if each["ok"] is False]  # None: not checked
    run = fault.run if fault is not None else "resumed"
    losses = session.runs[run].losses if number == _RESUME_PHASE and run in session.runs else {}
    differences = [
        abs_difference(session.uninterrupted_result.losses[step], loss)
        for step, loss in losses.items()
        if step in session.uninterrupted_result.losses
    ]
    return {
        "fault": name or "none", "description": fault.description if fault is not None else "", "phase": number,
        "expected_check": fault.oracle if fault is not None else "", "failed": failed,
        "differing": builder.differing[:8],
        "first_difference": differences[0] if differences else None,
        "largest_difference": largest_value(differences) if differences else None,
    }  # fmt: skip


def run_all(work: Path, names: list[str]) -> Iterator[Row]:
    """Yield a row for each of phases 1, 2, 3 and 6 without a fault, and for each fault."""
    with open_session(work / "resumed", {}) as (session, baseline):
        for number in (1, 2, 3, _RESUME_PHASE):
            yield run_with_fault(session, baseline, None, number)
        for name in names:
            if FAULTS[name].phase == _RESUME_PHASE:
                yield run_with_fault(session, baseline, name, _RESUME_PHASE)
    for name in names:
        if FAULTS[name].phase != _RESUME_PHASE:
            with open_session(work / name, FAULTS[name].min_mesh) as (session, baseline):
                yield run_with_fault(session, baseline, name, FAULTS[name].phase)


def main() -> None:
    """Inject the faults, and write faults.json and faults.md; exit with 1 if a check misses its fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ram", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--results", type=Path, default=Path(__file__).resolve().parent / "results")
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=arguments.ram, prefix="ckptx-bench-") as directory:
        start = time.perf_counter()
        for row in run_all(Path(directory), arguments.names or list(FAULTS)):
            rows.append(row)
            print(
                f"  {time.perf_counter() - start:6.1f} s  {row['fault']}: {', '.join(row['failed'])}", file=sys.stderr
            )
    lines = [
        (
            row["fault"],
            row["description"],
            row["phase"],
            row["expected_check"],
            ", ".join(row["failed"]),
            *map(_cell, (row["first_difference"], row["largest_difference"])),
        )
        for row in rows
    ]
    columns = (
        "fault",
        "what it does",
        "phase",
        "check",
        "checks that fail",
        "loss difference, first step",
        "largest",
    )
    injected = [row for row in rows if row["expected_check"]]
    missed = [row["fault"] for row in injected if row["expected_check"] not in row["failed"]]
    false_alarms = [row["phase"] for row in rows if not row["expected_check"] and row["failed"]]
    summary = f"{len(injected) - len(missed)} of {len(injected)} faults are detected by their check in their phase.\n"
    from measure import publish, table  # next to this file; the tests import this module from another directory

    publish(arguments.results, "faults", {"rows": rows}, [table("Injected faults", columns, lines), summary])
    raise SystemExit(bool(missed or false_alarms))


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}" if value else "0"


if __name__ == "__main__":
    main()
