"""The report of a run: one object for the summary, `--json`, `--report` and the Python API."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from ckptx.processes.peak_memory import peak_memory, peak_of_children
from ckptx.wording import counted as counted

if TYPE_CHECKING:  # help pages import this module, and need no catalog
    from ckptx.catalog.entry import TensorEntry

SCHEMA_VERSION = 2
THIS_PROCESS, LARGEST_RANK, LARGEST_PROCESS = "this process", "largest rank", "largest process"


class HasNotes(Protocol):
    """What a step of a command found: a value that says what the user should know of it."""

    @property
    def notes(self) -> tuple[str, ...]: ...


V = TypeVar("V", bound=HasNotes)
R = TypeVar("R", bound="Report")


class Log:
    """The notes of a run, in the order of its steps. It is there for a run that fails, too, which gives no report."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def __call__(self, value: V) -> V:
        """The value; its notes are taken down."""
        self.note(*value.notes)
        return value

    def note(self, *notes: str) -> None:
        """Add notes before there is a value; a note that two steps have is kept once."""
        self.notes.extend(note for note in dict.fromkeys(notes) if note not in self.notes)


# Metadata of a field that is left out of the document while it is None.
OPTIONAL = {"optional": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Top level of `--json`. docs/report.md defines every word of it.

    Attributes:
        commands: Words of the commands that print it, other names included; empty for reports of failures alone.
        command: "convert hf2dcp", "verify", ...
        exit: The exit code; `ok` is true when it is 0.
        error: The one line of an error, or None.
        tensors: Names of tensors in the checkpoint that was written, or looked at; of a comparison, the reference.
        bytes_read: Bytes of tensor data read.
        bytes_written: Bytes of every file written: weights, sidecars, index, manifest.
        aliases: Name in that checkpoint -> name it shares bytes with.
        ties: Decisions on tied names: target, source, case, action, evidence.
        dropped: Tensors left out: name, reason.
        edits: Changes to config.json: key, before, after.
        dtypes: Counts by dtype, {"before": {...}, "after": {...}}.
        ranks: A row for each rank.
        warnings: What the user should know.
        seconds: Wall-clock time.
        gb_per_s: Gigabytes (1e9 bytes) written per second; 0 for a dry run.
        peak_rss: Peak resident set size of the process that `peak_rss_of` names, in bytes.
        peak_rss_of: "this process"; "largest rank" or "largest process" of a run of several, this one included.
    """

    commands: ClassVar[Sequence[str]] = ()

    command: str
    exit: int = 0
    error: str | None = None
    tensors: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    aliases: Mapping[str, str] = field(default_factory=dict)
    ties: Sequence[dict[str, Any]] = field(default_factory=list)
    dropped: Sequence[dict[str, str]] = field(default_factory=list)
    edits: Sequence[dict[str, Any]] = field(default_factory=list)
    dtypes: Mapping[str, dict[str, int]] = field(default_factory=dict)
    ranks: Sequence[dict[str, Any]] = field(default_factory=list)
    warnings: Sequence[str] = field(default_factory=list)
    seconds: float = field(default=0.0, metadata={"digits": 6})
    gb_per_s: float = field(default=0.0, metadata={"digits": 6})
    peak_rss: int = 0
    peak_rss_of: str = THIS_PROCESS

    @property
    def ok(self) -> bool:
        """True when the command did what was asked and found nothing wrong."""
        return self.exit == 0

    def to_dict(self) -> dict[str, Any]:
        """The document that `--json` prints."""
        document: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None or not each.metadata.get("optional"):
                digits = each.metadata.get("digits")
                document[each.name] = value if digits is None else round(value, digits)
            if each.name == "exit":
                document["ok"] = self.ok
        return document

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def summary(self) -> str:
        """Return the lines that the command prints for this report, without color."""
        from ckptx.report.summary import summary_text  # a report for --json alone needs no text

        return summary_text(self)

    def _repr_html_(self) -> str:
        """Return the summary as HTML; notebooks call this to show a report."""
        from ckptx.report.summary import summary_html

        return summary_html(self)

    def write(self, path: str | Path) -> None:
        """Writes the document to a file."""
        from ckptx.publishing.report_file import write_text  # most reports are printed alone

        write_text(path, self.to_json())


class Stopwatch:
    """Takes the time from when it is made, and the memory of the processes that end meanwhile."""

    def __init__(self) -> None:
        self._started, self._children = time.perf_counter(), peak_of_children()

    def stop(self, report: R) -> R:
        """Return the report with the time that passed, and with the peak memory of the largest process of the run."""
        seconds = time.perf_counter() - self._started
        speed = written_gb_per_s(report, seconds)
        own, children, owner = peak_memory(), peak_of_children(), report.peak_rss_of
        peak = report.peak_rss if owner == LARGEST_RANK and report.peak_rss else max(own, report.peak_rss)
        if children > max(peak, own, self._children):  # a child inherits the peak of this process until it takes more
            peak, owner = children, LARGEST_PROCESS if owner == THIS_PROCESS else owner
        return replace(report, seconds=seconds, gb_per_s=speed, peak_rss=peak, peak_rss_of=owner)


def written_gb_per_s(report: Report, seconds: float) -> float:
    """Compute the speed of writing, in 1e9 bytes per second; 0 for a dry run, which writes nothing.

    Args:
        report: What was written, or would be.
        seconds: Wall-clock time of the run.
    """
    is_dry = bool(getattr(report, "dry_run", False))
    return 0.0 if is_dry or not seconds else report.bytes_written / seconds / 1e9


def count_dtypes(tensors: Iterable[TensorEntry]) -> dict[str, int]:
    """Number of tensors by dtype, by name of the dtype."""
    counts = Counter(entry.dtype for entry in tensors)
    return dict(sorted((dtype.name, count) for dtype, count in counts.items()))


def human_bytes(nbytes: float) -> str:
    """`nbytes` in binary units: 1.92 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"
