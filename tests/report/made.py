"""Reports as a command would make them, for tests of what is made of reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptx.report.documents.conversion import ConversionReport
from ckptx.report.documents.inspection import InspectionReport
from ckptx.report.documents.robustness import RobustnessReport


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


def oracle(name: str, differing: Sequence[str] = (), *, compared: int = 185, **more: Any) -> dict[str, Any]:
    """A row of an oracle, as `Verdict.row` makes it."""
    made = {
        "name": name, "ok": not differing, "compared": compared, "count": len(differing), "differing": list(differing),
        "value": None, "limit": None, "times_noise": None, "widened": False,
    }  # fmt: skip
    return {**made, **more}


def phase(name: str, ok: bool | None = True, *oracles: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A row of a phase."""
    memory = {"tensor_bytes": 0, "threads": 8, "baseline_tensor_bytes": 0, "baseline_threads": 8}
    made = {
        "name": name, "title": f"what {name} proves", "ok": ok, "seconds": 1.25, "oracles": list(oracles), "notes": [],
        "memory": None if ok is None else memory,
    }  # fmt: skip
    return {**made, **more}


def robust(**fields: Any) -> RobustnessReport:
    """A report of `robustness` with these fields: two phases passed."""
    made: dict[str, Any] = {
        "command": "robustness", "recipe": "small", "recipe_file": "/recipes/small.yaml", "out": "/runs/out",
        "world_size": 2, "layout": {"tp": 1, "pp": 1, "dp_shard": 2, "dp_replicate": 1}, "trainer": "ckptx",
        "phases": [phase("straight", True, oracle("model")), phase("resume", True, oracle("model"), oracle("rng"))],
        "noise": {"loss": {"repeated": 0.0, "moved": 4.8e-7}, "logits": None},
        "losses": [
            {"run": "straight", "steps": [1, 2, 3, 4], "losses": [6.25, 6.125, 6.0, 5.875]},
            {"run": "resumed", "steps": [3, 4], "losses": [6.0, 5.875]},
        ],
        "environment": {"torch": "2.13.0"},
    }  # fmt: skip
    return RobustnessReport(**{**made, **fields})


def broken(**fields: Any) -> RobustnessReport:
    """A report of `robustness` that found something of every kind."""
    wide = oracle("loss", compared=3, ok=False, value=3e-3, limit=4.8e-5, times_noise=100.0, widened=True)
    leaked = {"tensor_bytes": 4096, "threads": 14, "baseline_tensor_bytes": 0, "baseline_threads": 8}
    made: dict[str, Any] = {
        "exit": 1,
        "phases": [
            phase("straight", True, oracle("finite"), oracle("model")),
            phase("replicas", False, oracle("replicas"), memory=leaked),
            phase("layouts", None, notes=["--phases left it out"]),
            phase("resume", False, oracle("model"), oracle("rng", ["torch", "python"]), wide, notes=["a note"]),
        ],
        "losses": [
            {"run": "straight", "steps": [1, 2, 3, 4], "losses": [6.25, 6.125, 6.0, 5.875]},
            {"run": "resumed", "steps": [3, 4], "losses": [6.003, "nan"]},
        ],
        "differing": [
            {"phase": "resume", "oracle": "rng", "item": "torch", "rank": rank, "reference": "9c3d", "found": "1f2a"}
            for rank in (0, 1)
        ] + [{"phase": "resume", "oracle": "rng", "item": "python", "rank": 1, "reference": "77", "found": None}],
        "kills": [
            {"at": "rename 1", "ranks": [0, 1], "asynchronous": False, "latest": 3, "ok": True},
            {"at": "fsync 2", "ranks": [1], "asynchronous": True, "latest": None, "ok": False},
        ],
        "settings": {"checks.loss_times_noise": "100"},
        "injected": "stale_rng",
    }  # fmt: skip
    return robust(**{**made, **fields})
