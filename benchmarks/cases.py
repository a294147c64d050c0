"""Run the cases of a benchmark in order within a time limit, and write the results so far after each."""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from measure import table

import ckptx

Row = dict[str, Any]
Columns = dict[str, Callable[[Row], str]]


class Case(NamedTuple):
    """One measurement; it gives figures by name."""

    name: str
    measure: Callable[[], Row]


class Part(NamedTuple):
    """What belongs into one table.

    Attributes:
        title: Of the table.
        cases: In their order.
        columns: Title -> text of a row that is done.
        findings: What is wrong with the rows that are done, a line each.
        note: Below the table.
    """

    title: str
    cases: list[Case]
    columns: Columns
    findings: Callable[[list[Row]], list[str]]
    note: Callable[[list[Row]], str] = lambda rows: ""


class Benchmark:
    """The cases of all parts with what became of them.

    Args:
        name: Of the files, NAME.json and NAME.md.
        parts: By name.
        machine: What the figures are taken on.
        directory: Of the files.
    """

    def __init__(self, name: str, parts: dict[str, Part], machine: Row, directory: Path) -> None:
        self.name, self.parts, self.machine, self.directory = name, parts, machine, directory
        self.rows = {
            name: [{"case": case.name, "status": "not run", "reason": "not reached"} for case in part.cases]
            for name, part in parts.items()
        }

    def run(self, limit: float) -> None:
        """Runs every case that can begin within `limit` seconds."""
        start = time.monotonic()
        for name, part in self.parts.items():
            for case, row in zip(part.cases, self.rows[name], strict=True):
                passed = time.monotonic() - start
                if passed >= limit:
                    row["reason"] = f"{passed:.0f} s have passed, cases begin within {limit:.0f} s"
                    continue
                row.update(status="failed", reason="was still running when the time was over")
                print(f"{name}: {case.name}", file=sys.stderr)
                row.update(_outcome(case))
                _free()
                self.write()
        self.write()

    def findings(self) -> list[str]:
        """What is wrong with the figures, and what failed."""
        failed = [
            f"{name}: {row['case']}: {row['reason']}"
            for name, rows in self.rows.items()
            for row in rows
            if row["status"] == "failed"
        ]
        wrong = [
            f"{name}: {finding}" for name, part in self.parts.items() for finding in part.findings(self._done(name))
        ]
        return failed + wrong

    def write(self) -> None:
        """Writes NAME.json and NAME.md."""
        self.directory.mkdir(parents=True, exist_ok=True)
        results = {"machine": self.machine, "findings": self.findings(), "parts": self.rows}
        text = json.dumps(_finite(results), indent=2, allow_nan=False) + "\n"
        (self.directory / f"{self.name}.json").write_text(text)
        (self.directory / f"{self.name}.md").write_text(self.markdown())

    def markdown(self) -> str:
        """The tables."""
        described = ", ".join(f"{key} {value}" for key, value in self.machine.items())
        tables = []
        for name, part in self.parts.items():
            rows = [self._cells(part, row) for row in self.rows[name]]
            note = part.note(self._done(name))
            tables += [table(part.title, ("case", *part.columns, "result"), rows), *([note, ""] if note else [])]
        return "\n".join([described, "", *tables, *(f"* {finding}" for finding in self.findings())])

    def _done(self, name: str) -> list[Row]:
        return [row for row in self.rows[name] if row["status"] == "done"]

    @staticmethod
    def _cells(part: Part, row: Row) -> list[str]:
        if row["status"] != "done":
            return [row["case"], *([""] * len(part.columns)), f"{row['status']}: {row['reason']}"]
        return [row["case"], *(show(row) for show in part.columns.values()), "done"]


def machine_of(device: torch.device, *, is_tiny: bool) -> Row:
    """What figures were taken on; nothing that names a host."""
    found: Row = {"card": "none"}
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        found = {"card": card.name, "card_gib": round(card.total_memory / 2**30, 1), "cuda": torch.version.cuda}
    return found | {
        "shapes": "tiny" if is_tiny else "full",
        "memory": "max_memory_allocated" if device.type == "cuda" else "allocations that torch saw",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "ckptx": ckptx.__version__,
    }


def _outcome(case: Case) -> Row:
    """The figures of a case, or why there are none."""
    try:
        return {"status": "done", "reason": None, **case.measure()}
    except Exception as error:  # whatever it is, the other cases still have something to show
        said = " ".join(str(error).split())
        return {"status": "failed", "reason": f"{type(error).__name__}: {said:.300}"}


def _free() -> None:
    """Gives back the memory of a case; outside of it, where no traceback holds its model any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _finite(value: Any) -> Any:
    """JSON has no word for nan and infinity: they become text."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def ended(benchmark: Benchmark, work: Path, seconds: float) -> Iterator[None]:
    """Ends the process after so many seconds, whatever it waits for, with what there is written and `work` removed."""

    def end() -> None:
        try:
            benchmark.write()
            shutil.rmtree(work, ignore_errors=True)
            print(f"ended after {seconds:.0f} s", file=sys.stderr, flush=True)
        finally:
            os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
