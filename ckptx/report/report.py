"""Report of a run: one object for the summary, `--json`, `--report` and the Python API."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from ckptx.processes.peak_memory import peak_memory, peak_memory_of_children
from ckptx.wording import counted as counted
from ckptx.wording import human_bytes as human_bytes

if TYPE_CHECKING:  # help pages import this module and must not import the catalog
    from ckptx.catalog.entry import TensorEntry

SCHEMA_VERSION = 3
THIS_PROCESS, LARGEST_RANK, LARGEST_PROCESS = "this process", "largest rank", "largest process"


class HasNotes(Protocol):
    """Result of a step of a command, with notes for the user."""

    @property
    def notes(self) -> tuple[str, ...]: ...


V = TypeVar("V", bound=HasNotes)
R = TypeVar("R", bound="Report")


class Log:
    """Notes of a run, in the order of its steps. They are kept even if the run fails and makes no report.

    Attributes:
        notes: Notes for the user.
    """

    def __init__(self, on_step: Callable[[str], None] | None = None) -> None:
        """Start without notes.

        Args:
            on_step: Called with the text of each step before it runs, to show progress; None shows none.
        """
        self.notes: list[str] = []
        self._on_step = on_step

    def step(self, text: str) -> None:
        """Show what runs now, such as "importing torch"; calls with the same text update the elapsed time."""
        if self._on_step is not None:
            self._on_step(text)

    def __call__(self, value: V) -> V:
        """Record the notes of a value, and return the value."""
        self.note(*value.notes)
        return value

    def note(self, *notes: str) -> None:
        """Record notes without a value; a note of several steps is kept once."""
        self.notes.extend(note for note in dict.fromkeys(notes) if note not in self.notes)


# Metadata of a field that is omitted from the document if it is None. A field with metadata `digits` is rounded in the
# document to this number of decimal places.
OPTIONAL = {"optional": True}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report:
    """Fields that every report has. docs/report.md defines each of them.

    Attributes:
        commands: Names of the commands that print this report, aliases included; empty for reports of failures.
        command: Name of the command: "convert hf2dcp", "verify", ...
        exit: Exit code; `ok` is true if it is 0.
        error: Error message on one line; null if there is none.
        tensors: Number of tensor names in the checkpoint that was written or read; for a comparison, in the reference.
        bytes_read: Bytes of tensor data read; for a dry run, those to be read (with `--quantize`, a lower bound).
        bytes_written: Bytes of all files written: weights, index, config and other files, manifest; for a dry run,
            those to be written.
        aliases: Names in the checkpoint that share the bytes of another name -> that other name.
        ties: Decisions of a conversion on tied weights: `name`, `tied_to`, `stored`, `action`, `declared`, `evidence`,
            `output_names`.
        dropped: Tensors that were dropped: `name`, `reason`.
        config_edits: Changes to config.json: `key`, `before`, `after` (null: the key is removed).
        dtypes: Number of tensor names by dtype. For a conversion, those of the output: "after" by the dtype in the
            output, "before" by the dtype in the source. For a comparison, "before" counts the first checkpoint and
            "after" the second. `inspect` has only "before".
        ranks: One entry per rank; empty for commands without ranks.
        notes: Notes for the user; they do not change the exit code.
        seconds: Wall-clock time in seconds.
        written_gb_per_s: Gigabytes (1e9 bytes) written per second; 0 for a dry run.
        peak_rss: Peak resident set size in bytes, of the process named by `peak_rss_of`.
        peak_rss_of: Process of `peak_rss`: "this process", or "largest rank" or "largest process" of several.
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
    config_edits: Sequence[dict[str, Any]] = field(default_factory=list)
    dtypes: Mapping[str, dict[str, int]] = field(default_factory=dict)
    ranks: Sequence[dict[str, Any]] = field(default_factory=list)
    notes: Sequence[str] = field(default_factory=list)
    seconds: float = field(default=0.0, metadata={"digits": 6})
    written_gb_per_s: float = field(default=0.0, metadata={"digits": 6})
    peak_rss: int = 0
    peak_rss_of: str = THIS_PROCESS

    @property
    def ok(self) -> bool:
        """Return True if the command succeeded and found no difference."""
        return self.exit == 0

    def __repr__(self) -> str:
        """Return one short line: `<ConversionReport of convert to-hf: exit 0, 90 tensors>`."""
        problem = "" if self.error is None else f", {self.error}"
        return (
            f"<{type(self).__name__} of {self.command}: exit {self.exit}, {counted(self.tensors, 'tensor')}{problem}>"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the document that `--json` prints."""
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
        """Return the document as JSON."""
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
        """Write the document to a file."""
        from ckptx.publishing.report_file import write_text  # most reports are only printed

        write_text(path, self.to_json())


class Stopwatch:
    """Measure the time since its creation, and the peak memory of child processes that end in this time."""

    def __init__(self) -> None:
        self._started, self._peak_of_earlier_children = time.perf_counter(), peak_memory_of_children()

    def stop(self, report: R) -> R:
        """Return the report with the elapsed time and the peak memory of the largest process of the run."""
        seconds = time.perf_counter() - self._started
        speed = written_gb_per_s(report, seconds)
        peak_here, peak_of_child, peak_process = peak_memory(), peak_memory_of_children(), report.peak_rss_of
        peak = report.peak_rss if peak_process == LARGEST_RANK and report.peak_rss else max(peak_here, report.peak_rss)
        # The peak of a child begins at that of this process, so only a larger one is known to be memory of the child.
        if peak_of_child > max(peak, peak_here, self._peak_of_earlier_children):
            peak, peak_process = peak_of_child, LARGEST_PROCESS if peak_process == THIS_PROCESS else peak_process
        return replace(report, seconds=seconds, written_gb_per_s=speed, peak_rss=peak, peak_rss_of=peak_process)


def written_gb_per_s(report: Report, seconds: float) -> float:
    """Return the write throughput in 1e9 bytes per second; 0 for a dry run, which writes nothing.

    Args:
        report: Report with `bytes_written`.
        seconds: Wall-clock time of the run, in seconds.
    """
    is_dry = bool(getattr(report, "dry_run", False))
    return 0.0 if is_dry or not seconds else report.bytes_written / seconds / 1e9


def count_dtypes(tensors: Iterable[TensorEntry]) -> dict[str, int]:
    """Return the number of tensors by name of their dtype, sorted by name."""
    counts = Counter(entry.dtype for entry in tensors)
    return dict(sorted((dtype.name, count) for dtype, count in counts.items()))
