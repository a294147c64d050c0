"""Reports as a command would make them, for tests of what is made of reports."""

from __future__ import annotations

from typing import Any

from ckptx.report.documents.conversion import ConversionReport
from ckptx.report.documents.inspection import InspectionReport


def inspected(**fields: Any) -> InspectionReport:
    """A report of `inspect` with these fields, and otherwise of next to nothing."""
    made: dict[str, Any] = {
        "command": "inspect", "path": "made", "format": "dcp", "bytes": 1, "parameters": 1, "architecture": None,
        "prefix": "", "files": {}, "sidecars": [], "chunks": 9, "shared": [], "tied": [],
        "optimizer": {"tensors": 0, "bytes": 0}, "other": [], "objects": 0, "unknown": [], "fit": None,
        "groups": [{"pattern": "w", "tensors": 9, "bytes": 1}],
    }  # fmt: skip
    return InspectionReport(**{**made, **fields})


def converted(**fields: Any) -> ConversionReport:
    """A report of `convert` with these fields: one tensor was written."""
    target = {"tensors": 1, "stored": 1, "copies": 0, "aliases": 0}
    made: dict[str, Any] = {
        "command": "convert hf2dcp", "tensors": 1, "bytes_written": 2 << 20, "parameters": 1, "architecture": None,
        "dtypes": {"before": {"F32": 1}, "after": {"BF16": 1}},
        "ledger": {"source": 1, "written": 1, "aliases": 0, "dropped": 0, "target": target},
    }  # fmt: skip
    return ConversionReport(**{**made, **fields})
