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

Row = dict[str, Any]  # "case", "status" ("done", "failed" or "not run"), "reason" (None if done), and the figures
Columns = dict[str, Callable[[Row], str]]  # title -> function that formats a cell


class Case(NamedTuple):
    """One measurement.

    Attributes:
        name: Name in the first column of the table.
        measure: Function that runs it and returns its figures by name.
    """

    name: str
    measure: Callable[[], Row]


class Part(NamedTuple):
    """The cases of one table.

    Attributes:
        title: Title of the table.
        cases: Cases in the order of the rows.
        columns: Columns between the case and its status; the functions get only rows with status "done".
        findings: Function that returns one line for each wrong result in the rows with status "done".
        note: Function that returns the text below the table, or "".
    """

    title: str
    cases: list[Case]
    columns: Columns
    findings: Callable[[list[Row]], list[str]]
    note: Callable[[list[Row]], str] = lambda rows: ""


class Benchmark:
    """The cases of all parts and their results.

    Args:
        name: Name of the result files, NAME.json and NAME.md.
        parts: Parts by name.
        machine: Hardware and versions, from `describe_machine`.
        directory: Directory of the result files.
    """

    def __init__(self, name: str, parts: dict[str, Part], machine: Row, directory: Path) -> None:
        self.name, self.parts, self.machine, self.directory = name, parts, machine, directory
        self.rows = {
            name: [{"case": case.name, "status": "not run", "reason": "not reached"} for case in part.cases]
            for name, part in parts.items()
        }

    def run(self, limit: float) -> None:
        """Run every case that can start within `limit` seconds."""
        start = time.monotonic()
        for name, part in self.parts.items():
            for case, row in zip(part.cases, self.rows[name], strict=True):
                elapsed = time.monotonic() - start
                if elapsed >= limit:
                    row["reason"] = f"{elapsed:.0f} s have passed, cases start only within {limit:.0f} s"
                    continue
                row.update(status="failed", reason="was still running when the time limit ended")
                print(f"{name}: {case.name}", file=sys.stderr)
                row.update(_run_case(case))
                _free_memory()
                self.write()
        self.write()

    def findings(self) -> list[str]:
        """Return a line for each case that failed, and for each wrong result."""
        failed = [
            f"{name}: {row['case']}: {row['reason']}"
            for name, rows in self.rows.items()
            for row in rows
            if row["status"] == "failed"
        ]
        wrong = [
            f"{name}: {finding}"
            for name, part in self.parts.items()
            for finding in part.findings(self._finished_rows(name))
        ]
        return failed + wrong

    def write(self) -> None:
        """Write NAME.json and NAME.md."""
        self.directory.mkdir(parents=True, exist_ok=True)
        results = {"machine": self.machine, "findings": self.findings(), "parts": self.rows}
        text = json.dumps(_replace_non_finite(results), indent=2, allow_nan=False) + "\n"
        (self.directory / f"{self.name}.json").write_text(text)
        (self.directory / f"{self.name}.md").write_text(self.markdown())

    def markdown(self) -> str:
        """Return all tables as Markdown."""
        machine_text = ", ".join(f"{key} {value}" for key, value in self.machine.items())
        tables = []
        for name, part in self.parts.items():
            rows = [self._cells(part, row) for row in self.rows[name]]
            note = part.note(self._finished_rows(name))
            tables += [table(part.title, ("case", *part.columns, "result"), rows), *([note, ""] if note else [])]
        return "\n".join([machine_text, "", *tables, *(f"* {finding}" for finding in self.findings())])

    def _finished_rows(self, name: str) -> list[Row]:
        return [row for row in self.rows[name] if row["status"] == "done"]

    @staticmethod
    def _cells(part: Part, row: Row) -> list[str]:
        if row["status"] != "done":
            return [row["case"], *([""] * len(part.columns)), f"{row['status']}: {row['reason']}"]
        return [row["case"], *(show(row) for show in part.columns.values()), "done"]


def describe_machine(device: torch.device, *, is_tiny: bool) -> Row:
    """Describe the GPU and the versions, without the host name.

    Args:
        device: Device of the measurements.
        is_tiny: True if the benchmark uses small shapes.
    """
    hardware: Row = {"card": "none"}
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        hardware = {"card": card.name, "card_gib": round(card.total_memory / 2**30, 1), "cuda": torch.version.cuda}
    return hardware | {
        "shapes": "tiny" if is_tiny else "full",
        "memory": "max_memory_allocated" if device.type == "cuda" else "allocations recorded by torch",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "ckptx": ckptx.__version__,
    }


def _run_case(case: Case) -> Row:
    """Run a case, and return its status, with its figures or the reason why it failed."""
    try:
        return {"status": "done", "reason": None, **case.measure()}
    except Exception as error:  # an error of any kind must not stop the other cases
        message = " ".join(str(error).split())
        return {"status": "failed", "reason": f"{type(error).__name__}: {message:.300}"}


def _free_memory() -> None:
    """Free the memory of a case; call it when no traceback refers to its model."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _replace_non_finite(value: Any) -> Any:
    """Replace nan and infinity by strings, because JSON does not have them."""
    if isinstance(value, dict):
        return {key: _replace_non_finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_non_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def end_after(benchmark: Benchmark, work: Path, seconds: float) -> Iterator[None]:
    """Exit with code 1 if the block still runs after `seconds`; first write the results and remove `work`."""

    def exit_process() -> None:
        try:
            benchmark.write()
            shutil.rmtree(work, ignore_errors=True)
            print(f"ended after {seconds:.0f} s", file=sys.stderr, flush=True)
        finally:
            os._exit(1)

    timer = threading.Timer(seconds, exit_process)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
