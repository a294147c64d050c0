"""Reports as a command would make them, for tests of what is made of reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptx.report.documents.conversion import ConversionReport
from ckptx.report.documents.forecast import ForecastReport, SearchReport
from ckptx.report.documents.inspection import InspectionReport
from ckptx.report.documents.robustness import RobustnessReport


def inspected(**fields: Any) -> InspectionReport:
    """A report of `inspect` with these fields, and otherwise of next to nothing."""
    made: dict[str, Any] = {
        "command": "inspect", "path": "made", "format": "dcp", "bytes": 1, "parameters": 1, "architecture": None,
        "prefix": "", "files": {}, "other_files": [], "chunks": 9, "alias_groups": [],
        "tied_groups": [], "optimizer": {"tensors": 0, "bytes": 0}, "other_tensors": [], "objects": 0,
        "unknown_tensors": [], "config_check": None,
        "groups": [{"pattern": "w", "tensors": 9, "bytes": 1}], "dtypes": {"before": {"F32": 9}, "after": {"F32": 9}},
    }  # fmt: skip
    return InspectionReport(**{**made, **fields})


def converted(**fields: Any) -> ConversionReport:
    """A report of `convert` with these fields: one tensor was written."""
    target = {"tensors": 1, "stored": 1, "copies": 0, "aliases": 0}
    made: dict[str, Any] = {
        "command": "convert hf2dcp", "tensors": 1, "bytes_written": 2 << 20, "output_bytes": 2 << 20,
        "parameters": 1, "architecture": None,
        "dtypes": {"before": {"F32": 1}, "after": {"BF16": 1}},
        "ledger": {"source": 1, "written": 1, "tied": 0, "decoded": 0, "dropped": 0, "target": target},
    }  # fmt: skip
    return ConversionReport(**{**made, **fields})


def oracle(name: str, differing: Sequence[str] = (), *, compared: int = 185, **more: Any) -> dict[str, Any]:
    """A row of an oracle, as `Verdict.row` makes it."""
    made = {
        "name": name, "ok": not differing, "compared": compared, "differing_count": len(differing),
        "differing": list(differing),
        "value": None, "tolerance": None, "noise_factor": None, "noise": None, "is_widened": False,
    }  # fmt: skip
    return {**made, **more}


def phase(name: str, ok: bool | None = True, *oracles: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A row of a phase."""
    memory = {"tensor_bytes": 0, "threads": 8, "baseline_tensor_bytes": 0, "baseline_threads": 8}
    made = {
        "name": name, "title": f"what {name} proves", "ok": ok, "seconds": 1.25, "checks": list(oracles), "notes": [],
        "memory": None if ok is None else memory,
    }  # fmt: skip
    return {**made, **more}


def robust(**fields: Any) -> RobustnessReport:
    """A report of `robustness` with these fields: two phases passed."""
    made: dict[str, Any] = {
        "command": "robustness", "recipe": "small", "recipe_file": "/recipes/small.yaml", "output_dir": "/runs/out",
        "world_size": 2, "layout": {"tp": 1, "pp": 1, "dp_shard": 2, "dp_replicate": 1}, "trainer": "ckptx",
        "phases": [
            phase("uninterrupted", True, oracle("model")), phase("resume", True, oracle("model"), oracle("rng")),
        ],
        "noise": {"loss": {"repeated": 0.0, "perturbed": 4.8e-7}, "logits": None},
        "losses": [
            {"run": "uninterrupted", "steps": [1, 2, 3, 4], "losses": [6.25, 6.125, 6.0, 5.875]},
            {"run": "resumed", "steps": [3, 4], "losses": [6.0, 5.875]},
        ],
        "environment": {"torch": "2.13.0"},
    }  # fmt: skip
    return RobustnessReport(**{**made, **fields})


def broken(**fields: Any) -> RobustnessReport:
    """A report of `robustness` that found something of every kind."""
    wide = oracle(
        "loss", compared=3, ok=False, value=3e-3, tolerance=4.8e-5, noise_factor=100.0, noise=4.8e-7, is_widened=True
    )
    leaked = {"tensor_bytes": 4096, "threads": 14, "baseline_tensor_bytes": 0, "baseline_threads": 8}
    made: dict[str, Any] = {
        "exit": 1,
        "phases": [
            phase("uninterrupted", True, oracle("finite"), oracle("model")),
            phase("replicas", False, oracle("replicas"), memory=leaked),
            phase("layouts", None, notes=["--phases left it out"]),
            phase("resume", False, oracle("model"), oracle("rng", ["torch", "python"]), wide, notes=["a note"]),
        ],
        "losses": [
            {"run": "uninterrupted", "steps": [1, 2, 3, 4], "losses": [6.25, 6.125, 6.0, 5.875]},
            {"run": "resumed", "steps": [3, 4], "losses": [6.003, "nan"]},
        ],
        "differing": [
            {"phase": "resume", "check": "rng", "item": "torch", "rank": rank, "reference": "9c3d", "actual": "1f2a"}
            for rank in (0, 1)
        ] + [{"phase": "resume", "check": "rng", "item": "python", "rank": 1, "reference": "77", "actual": None}],
        "kills": [
            {"operation": "rename 1", "ranks": [0, 1], "is_async": False, "latest_step": 3, "ok": True},
            {"operation": "fsync 2", "ranks": [1], "is_async": True, "latest_step": None, "ok": False},
        ],
        "overrides": {"checks.loss_noise_factor": "100"},
        "injected_fault": "stale_rng",
    }  # fmt: skip
    return robust(**{**made, **fields})


def largest(nbytes: int, module: str = "", **more: Any) -> dict[str, Any]:
    """A tensor, as `forecast` tells of it."""
    made = {
        "bytes": nbytes, "kind": "temporaries", "op": "aten::exp", "module": module, "parameter": None,
        "phase": "backward", "microbatch": 1, "is_recomputed": False, "shape": [2, 3], "dtype": "float32",
    }  # fmt: skip
    return {**made, **more}


def stage(number: int, course: Sequence[Sequence[Any]], **more: Any) -> dict[str, Any]:
    """A row of `by_pipeline_rank`: the peak is where the course has most, between steps there is what it ends with."""
    worst, last = max(course, key=lambda row: sum(row[3:]))[3:], course[-1][3:]
    made = {
        "stages": [number], "peak": sum(worst), "between_steps": sum(last),
        "by_kind": dict(zip(KINDS, worst, strict=True)), "between_steps_by_kind": dict(zip(KINDS, last, strict=True)),
        "peak_tensor": largest(2 << 20, "lm_head"), "largest_tensors": [largest(2 << 20, "lm_head"), largest(1 << 20)],
        "flops": 4 * 10**12, "recomputed_flops": 10**12, "sent_bytes": {"all-gather": 1 << 20},
        "checkpointed_layers": 2, "fits": True, "timeline": course,
    }  # fmt: skip
    return {**made, **more}


KINDS = ("parameters", "gathered", "gradients", "optimizer", "activations", "pipeline_p2p", "temporaries")
_MIB = 1 << 20
COURSE = [
    ["forward", 0, "", 4 * _MIB, 0, 0, 8 * _MIB, 0, 0, 0],
    ["forward", 0, "layers.0", 4 * _MIB, 0, 0, 8 * _MIB, 2 * _MIB, 0, 0],
    ["backward", 0, "layers.0", 4 * _MIB, 0, 4 * _MIB, 8 * _MIB, 2 * _MIB, 0, 2 * _MIB],
    ["optimizer", 0, "", 4 * _MIB, 0, 0, 8 * _MIB, 0, 0, 0],
]


def forecasted(**fields: Any) -> ForecastReport:
    """A report of `forecast` with these fields: a step on two pipeline stages that fits."""
    rows = [stage(0, COURSE), stage(1, [[*row[:3], *(2 * size for size in row[3:])] for row in COURSE])]
    made: dict[str, Any] = {
        "command": "forecast", "architecture": "SomeForCausalLM", "parameters": 4_000_000,
        "layout": {"tp": 2, "pp": 2, "dp_shard": 1, "dp_replicate": 1},
        "settings": {
            "batch": 2, "seq": 1024, "images": 0, "microbatches": 2, "schedule": "1f1b",
            "activation_checkpointing": "full", "ac_scope": "all", "dtype": "float32", "param_dtype": "bfloat16",
            "reduce_dtype": None, "optimizer": "adamw", "loss": "sharded",
        },
        "by_pipeline_rank": rows, "memory_kinds": KINDS, "gpu_memory": 1 << 30, "reserved": 24 << 20, "fits": True,
        "other_precision": None,
        "flops": 16 * 10**12, "recomputed_flops": 4 * 10**12, "assumptions": ["bytes of tensors", "no fragmentation"],
    }  # fmt: skip
    return ForecastReport(**{**made, **fields})


def too_large(**fields: Any) -> ForecastReport:
    """A report of `forecast` of a step whose second stage does not fit."""
    first, second = forecasted().by_pipeline_rank
    rows = [first, {**second, "fits": False}]
    made: dict[str, Any] = {"exit": 1, "fits": False, "gpu_memory": 50 << 20, "by_pipeline_rank": rows}
    return forecasted(**{**made, **fields})


def searched(**fields: Any) -> SearchReport:
    """A report of `forecast --search`: two layouts fit, one does not, one cannot be."""
    first = {
        "layout": {"tp": 2, "pp": 1, "dp_shard": 4, "dp_replicate": 1}, "activation_checkpointing": "none",
        "microbatches": 2, "sequences_per_microbatch": 1, "peak": 600 << 20, "between_steps": 90 << 20,
        "reserved": 24 << 20,
        "flops": 10**12, "recomputed_flops": 0, "bubble_fraction": 0.0,
        "sent_bytes": {"all-gather": 3 << 20, "all-reduce": 1 << 20},
        "is_fully_evaluated": True,
    }  # fmt: skip
    second = {
        **first, "layout": {"tp": 1, "pp": 2, "dp_shard": 4, "dp_replicate": 1}, "activation_checkpointing": "full",
        "microbatches": 1, "sequences_per_microbatch": 2, "recomputed_flops": 25 * 10**10,
        "bubble_fraction": 0.2, "is_fully_evaluated": False,
    }  # fmt: skip
    made: dict[str, Any] = {
        "command": "forecast", "architecture": "SomeForCausalLM", "parameters": 4_000_000, "gpus": 8,
        "gpu_memory": 1 << 30,
        "settings": {
            "sequences_per_step": 8, "seq": 1024, "images": 0, "dtype": "float32", "param_dtype": "bfloat16",
            "reduce_dtype": None, "optimizer": "adamw", "loss": "sharded",
        },
        "layouts": [first, second],
        "layouts_too_large": [{"layout": {"tp": 1, "pp": 1, "dp_shard": 8, "dp_replicate": 1}, "peak": 2 << 30}],
        "unsupported_layouts": [
            {"layout": {"tp": 8, "pp": 1, "dp_shard": 1, "dp_replicate": 1}, "reason": "tp 8 of 4 heads"},
        ],
        "other_precision": None, "evaluated_steps": 9, "assumptions": ["bytes of tensors"],
    }  # fmt: skip
    return SearchReport(**{**made, **fields})
