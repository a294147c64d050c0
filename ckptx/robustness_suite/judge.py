"""Judges a phase: its findings become rows of the report, the same for our trainer and for one that is a command.

Findings                  the verdicts of the oracles, and notes
phase_row                 the row of the phase
rows_of_differences       a row for each item that differs
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ckptx.errors import InputError
from ckptx.robustness_suite.oracles import Difference, Verdict, phase_ok


@dataclass(slots=True)
class Findings:
    """Everything that a phase found.

    Attributes:
        verdicts: The verdicts of its oracles.
        notes: What the user should know.
        skipped: The reason why it did not run; None for a phase that ran.
        has_failed: True if a run of the phase failed, whatever the oracles say.
    """

    verdicts: list[Verdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    skipped: str | None = None
    has_failed: bool = False

    @property
    def ok(self) -> bool | None:
        """True where nothing failed; None for a phase that did not run or compared nothing."""
        if self.skipped is not None:
            return None
        return False if self.has_failed else phase_ok(self.verdicts)

    @contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Turn the error of a checkpoint that cannot be read, within the block, into a finding about `what`."""
        try:
            yield
        except InputError as error:
            self.verdicts.append(Verdict("readable", 1, [Difference("readable", what, None, "loads", str(error))]))
        else:
            self.verdicts.append(Verdict("readable", 1))


def phase_row(
    name: str,
    title: str,
    found: Findings,
    seconds: float,
    *,
    number: int | None = None,
    memory: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Return the row of a phase.

    Args:
        name: Its name.
        title: What it proves.
        found: What it found.
        seconds: Wall-clock time that it took.
        number: Its number, as `--phases` chooses it; None for a phase without one.
        memory: Bytes, parameters and threads that it left in the ranks, and those of the baseline; None if nobody
            measured.
    """
    return {
        "name": name,
        **({} if number is None else {"number": number}),
        "title": title,
        "ok": found.ok,
        "seconds": seconds,
        "oracles": [each.row() for each in found.verdicts],
        "notes": [*found.notes, *([found.skipped] if found.skipped else [])],
        "memory": memory,
    }


def rows_of_differences(phase: int | str, verdicts: Iterable[Verdict], *, are_by_rank: bool) -> list[dict[str, Any]]:
    """Return a row for each item that differs.

    Args:
        phase: Number of the phase, or its name where it has no number.
        verdicts: The verdicts of its oracles.
        are_by_rank: True names the rank of each item; the items of a command are those of all ranks.
    """
    rows = [{"phase": phase, **each._asdict()} for verdict in verdicts for each in verdict.differences]
    return rows if are_by_rank else [{key: value for key, value in row.items() if key != "rank"} for row in rows]
