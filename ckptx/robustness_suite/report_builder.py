"""Convert the findings of phases into rows of the report, for the runtime's trainer and for custom trainers.

Findings          verdicts of the oracles and notes of one phase
phase_row         row of a phase
difference_rows   a row for each item that differs
ReportBuilder     rows of all phases so far, and the report with them

`phases.py` gets findings from its own ranks, `external_trainer.py` from the files of a command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ckptx.errors import InputError
from ckptx.report.documents.robustness import RobustnessReport
from ckptx.report.report import Log
from ckptx.robustness_suite.oracles import Difference, Verdict, json_number, phase_ok

_MAX_DIFFERENCES = 200  # rows of differences in a report


@dataclass(slots=True)
class Findings:
    """Results of the oracles in one phase.

    Attributes:
        verdicts: Verdicts of the oracles.
        notes: Notes for the user.
        skip_reason: Reason why the phase did not run; None if it ran.
        has_failed: True if a run of the phase failed, whatever the oracles say.
        title: Property that the phase tested, if it depends on the recipe; None for the title of the phase.
    """

    verdicts: list[Verdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    skip_reason: str | None = None
    has_failed: bool = False
    title: str | None = None

    @property
    def ok(self) -> bool | None:
        """Return True if nothing failed; None if the phase did not run or compared nothing."""
        if self.skip_reason is not None:
            return None
        return False if self.has_failed else phase_ok(self.verdicts)

    @contextmanager
    def catch_read_errors(self, item: str) -> Iterator[None]:
        """Add the verdict of the oracle `readable` on `item`; it fails if the block raises an `InputError`."""
        try:
            yield
        except InputError as error:
            self.verdicts.append(Verdict("readable", 1, [Difference("readable", item, None, "loads", str(error))]))
        else:
            self.verdicts.append(Verdict("readable", 1))


def phase_row(
    name: str,
    title: str,
    findings: Findings,
    seconds: float,
    *,
    number: int | None = None,
    memory: Mapping[str, int] | None = None,
    cause: str = "",
) -> dict[str, Any]:
    """Return the row of a phase.

    Args:
        name: Name of the phase.
        title: Property that the phase tests, unless `findings` has another.
        findings: Findings of the phase.
        seconds: Wall-clock time in seconds.
        number: Number of the phase, for `--phases`; None for a phase of a custom trainer.
        memory: Bytes, parameters and threads retained after the phase, and those of the baseline; None if they were
            not measured.
        cause: Cause if the phase of a custom trainer failed; ignored for other phases.
    """
    row = {
        "name": name,
        **({} if number is None else {"number": number}),
        "title": findings.title or title,
        "ok": findings.ok,
        "seconds": seconds,
        "checks": [each.row() for each in findings.verdicts],
        "notes": [*findings.notes, *([findings.skip_reason] if findings.skip_reason else [])],
        "memory": memory,
    }
    return row if number is not None else {**row, "cause": cause if findings.ok is False else None}


def difference_rows(phase: int | str, verdicts: Iterable[Verdict]) -> list[dict[str, Any]]:
    """Return a row for each item that differs.

    Args:
        phase: Number of the phase; its name for a custom trainer, whose items have no ranks.
        verdicts: Verdicts of the oracles of the phase.
    """
    rows = [
        {
            "phase": phase,
            "check": each.oracle,
            "item": each.item,
            "rank": each.rank,
            "reference": each.reference,
            "actual": each.actual,
        }
        for verdict in verdicts
        for each in verdict.differences
    ]
    omitted = () if isinstance(phase, int) else ("rank",)
    return [{key: value for key, value in row.items() if key not in omitted} for row in rows]


@dataclass(slots=True)
class ReportBuilder:
    """Results of the phases so far, as rows of the report.

    Attributes:
        on_phase: Function that is called with this object after each phase.
        world_size: Number of ranks; None if it is unknown.
        phases: A row for each phase.
        losses: A row for each run, with its losses by step.
        differing: A row for each item that differs.
        noise: Measured noise of loss and logits, as in the report; empty before the measurement.
    """

    on_phase: Callable[[ReportBuilder], None]
    world_size: int | None = None
    phases: list[dict[str, Any]] = field(default_factory=list)
    losses: list[dict[str, Any]] = field(default_factory=list)
    differing: list[dict[str, Any]] = field(default_factory=list)
    noise: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Return True if no phase failed."""
        return all(row["ok"] is not False for row in self.phases)

    def add_losses(
        self, run: str, losses: Mapping[int, float], compared_with: str | None = None, mesh: str | None = None
    ) -> None:
        """Add the losses of a run.

        Args:
            run: Name of the run.
            losses: Step -> loss.
            compared_with: Name of the run whose losses are the reference; None for none.
            mesh: Mesh as text; None if it is unknown.
        """
        numbers = [*map(json_number, losses.values())]
        self.losses.append(
            {"run": run, "steps": [*losses], "losses": numbers, "compared_with": compared_with, "mesh": mesh}
        )

    def add(self, name: str, title: str, findings: Findings, seconds: float, **phase_fields: Any) -> dict[str, Any]:
        """Add the row of a phase and those of the items that differ; return the row of the phase.

        Args:
            name: Name of the phase.
            title: Property that the phase tests.
            findings: Findings of the phase.
            seconds: Wall-clock time in seconds.
            phase_fields: Further arguments of `phase_row`.
        """
        row = phase_row(name, title, findings, seconds, **phase_fields)
        self.phases.append(row)
        self.differing += difference_rows(row.get("number", name), findings.verdicts)
        self.on_phase(self)
        return row

    def report(self, report: RobustnessReport, log: Log | None = None) -> RobustnessReport:
        """Return `report` with all rows, and `exit` 1 if a phase failed.

        `log` gets a note if there are more differences than the report lists.
        """
        if log is not None and len(self.differing) > _MAX_DIFFERENCES:
            log.note(f"{len(self.differing)} items differ; the report lists the first {_MAX_DIFFERENCES}")
        return replace(
            report, exit=0 if self.ok else 1, phases=self.phases, losses=self.losses, noise=self.noise,
            differing=self.differing[:_MAX_DIFFERENCES], world_size=self.world_size,
        )  # fmt: skip
