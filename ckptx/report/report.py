"""The report of a run: one object for the summary, `--json`, `--report` and the Python API."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptx.catalog.entry import TensorEntry
from ckptx.publishing.report_file import write_text
from ckptx.wording import counted as counted

SCHEMA_VERSION = 2


@dataclass(slots=True)
class Report:
    """Top level of `--json`. docs/report.md defines every word of it.

    Attributes:
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
        warnings: What the user should know.
        seconds: Wall-clock time.
        gb_per_s: Gigabytes (1e9) written per second.
        peak_rss: Peak resident set size of this process, in bytes.
        details: Fields of one command alone.
        file: Where it will be written, if anywhere: looked at before the work.
        is_echo: True when the error is that of another rank, which has said it.
    """

    command: str
    exit: int = 0
    error: str | None = None
    tensors: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    aliases: dict[str, str] = field(default_factory=dict)
    ties: list[dict[str, Any]] = field(default_factory=list)
    dropped: list[dict[str, str]] = field(default_factory=list)
    edits: list[dict[str, Any]] = field(default_factory=list)
    dtypes: dict[str, dict[str, int]] = field(default_factory=dict)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0
    gb_per_s: float = 0.0
    peak_rss: int = 0
    details: dict[str, Any] = field(default_factory=dict)
    is_echo: bool = False
    file: Path | None = None
    _started: float = field(default_factory=time.perf_counter, repr=False)

    @property
    def ok(self) -> bool:
        """True when the command did what was asked and found nothing wrong."""
        return self.exit == 0

    def finish(self) -> Report:
        """Takes the time and the memory of the process."""
        self.seconds = time.perf_counter() - self._started
        self.gb_per_s = self.bytes_written / self.seconds / 1e9 if self.seconds else 0.0
        self.peak_rss = peak_memory()
        return self

    def to_dict(self) -> dict[str, Any]:
        """The document that `--json` prints."""
        return {
            "schema_version": SCHEMA_VERSION,
            "command": self.command,
            "exit": self.exit,
            "ok": self.ok,
            "error": self.error,
            "tensors": self.tensors,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "aliases": self.aliases,
            "ties": self.ties,
            "dropped": self.dropped,
            "edits": self.edits,
            "dtypes": self.dtypes,
            "ranks": self.ranks,
            "warnings": self.warnings,
            "seconds": round(self.seconds, 6),
            "gb_per_s": round(self.gb_per_s, 6),
            "peak_rss": self.peak_rss,
            **self.details,
        }

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def write(self, path: Path) -> None:
        """Writes the document to a file."""
        write_text(path, self.to_json())


def peak_memory() -> int:
    """Peak resident set size of this program, in bytes.

    The kernel's VmHWM begins anew when a process becomes another program; `ru_maxrss` keeps what the one before took,
    so it is asked only where there is no /proc.
    """
    try:
        for line in Path("/proc/self/status").read_bytes().splitlines():
            if line.startswith(b"VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def count_dtypes(tensors: Iterable[TensorEntry]) -> dict[str, int]:
    """Number of tensors by dtype, by name of the dtype."""
    counts: dict[str, int] = {}
    for entry in tensors:
        counts[entry.dtype.name] = counts.get(entry.dtype.name, 0) + 1
    return dict(sorted(counts.items()))


def human_bytes(nbytes: float) -> str:
    """`nbytes` in binary units: 1.92 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"
