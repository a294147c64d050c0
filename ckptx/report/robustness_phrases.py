"""Phrases of robustness reports, shared by their text, page and JUnit XML."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from ckptx.errors import UsageError
from ckptx.report.documents.robustness import RobustnessReport
from ckptx.report.report import counted, human_bytes

# Meaning and possible causes of a failing check. docs/ci.md explains each.
CAUSES: Mapping[str, str] = {
    "reference files": "a run changed files of the reference run; use a separate output folder for each run",
    "resume": "the trainer did not resume but started from scratch, or overwrites the weights that it loads",
    "readable": "a finished checkpoint cannot be read: damaged, truncated, or moved into place before it was complete",
    "sharded": "parameters are not sharded as the recipe expects; the trainer may have run unsharded without an error",
    "finite": "the state or a loss contains NaN or infinity; saved checkpoints may already contain it",
    "names": "tensors are missing, unexpected, or named after a wrapper; or a head is tied in only one of the two",
    "model": "parameters or buffers differ; possible causes: weights of another step, swapped rows or shards, a cast",
    "second model": "a second copy of the model, such as an EMA, differs; possible cause: it was not restored",
    "moments": "optimizer state differs; possible causes: not restored, loaded for other parameters, or cast",
    "master weights": "optimizer master weights differ; possible causes: not restored, or recreated from the model",
    "adam step": "step counts of the optimizer, which set its bias correction, differ; possible cause: not restored",
    "param groups": "settings of the optimizer's param groups differ; possible cause: they were not restored",
    "scheduler": "scheduler state differs; possible causes: it was not restored, or was made for another step count",
    "step": "the step counter differs; possible cause: it was not restored",
    "epoch": "the epoch differs; possible cause: it was not restored",
    "samples": "the count of samples differs; possible cause: it was not restored, so that data is repeated or skipped",
    "rng": "RNG state differs; possible causes: state of another rank, stale state, or a draw after restoring it",
    "replicas": "replicas of a tensor differ between ranks; only one of them was saved",
    "batch": "the next samples differ; possible causes: data position not restored, or that of another rank",
    "learning rate": "the learning rate differs; possible causes: the scheduler or optimizer state was not restored",
    "memory": "the model is still referenced after its phase, or a process group (6 threads) was not destroyed",
    "other": "state that ckptx does not recognize differs; the items name it",
    "loss": "difference exceeds noise; if no exact check fails, check non-state causes: dropout, kernels, reductions",
    "logits": "difference exceeds noise; the model computes other outputs with the same weights",
}

# What each check compares, for the page; docs/ci.md has the same table.
CHECK_MEANINGS: Mapping[str, str] = {
    "reference files": "files of the uninterrupted run, before and after every other run",
    "resume": "steps of which a resumed run logs losses, and altered weights that it must have loaded",
    "readable": "the checkpoint opens and is complete",
    "sharded": "whether parameters are sharded, as the recipe requires",
    "finite": "no NaN or infinity in parameters, optimizer state and losses",
    "names": "tensor names and tied weights",
    "model": "bytes of parameters and buffers",
    "second model": "a second copy of the model in the checkpoint, such as an EMA",
    "moments": "optimizer state of each parameter, such as Adam's moments",
    "master weights": "float32 copies of the parameters that an optimizer keeps",
    "adam step": "Adam's step count of each parameter",
    "param groups": "betas, eps and weight decay of each param group of the optimizer",
    "scheduler": "scheduler state",
    "step": "step of the run",
    "epoch": "epoch of the run",
    "samples": "number of samples seen",
    "rng": "state of the random number generators of Python, numpy, torch and the device, on each rank",
    "replicas": "state that TP ranks, or replicas (HSDP), hold in full",
    "batch": "the samples of the next step on each rank",
    "learning rate": "learning rate of the next step",
    "other": "state that ckptx does not recognize, under its own name",
    "memory": "live tensors and threads after the phase, compared with those after two warmup steps",
    "loss": "largest difference of the losses, compared with measured noise",
    "logits": "largest difference of the logits, compared with measured noise",
}

_UNCHECKED_REASONS: Mapping[str, str] = {
    "replicas": "no replicated state",
    "loss": "no loss",
    "logits": "no logits",
    "finite": "no floating-point state",
    "memory": "not measured on any rank",
}
# Name of an exact check -> what it counts, and its result if it passed; other checks find identical items.
_PASSED_TEXTS = {
    "reference files": ("reference file", "unchanged"),
    "readable": ("checkpoint", "readable"),
    "finite": ("item", "finite"),
    "memory": ("measurement", "not above the level after warmup"),
}
_SETTING_NAMES = {"lr": "learning rate", "initial_lr": "initial learning rate", "weight_decay": "weight decay"}

MAX_ITEMS = 4  # items of a check that are listed in a summary


def number_text(value: float | str | None) -> str:
    """Return a measured number as text; NaN and infinity are strings in the report, as JSON cannot represent them."""
    return "none" if value is None else f"{parse_number(value):.3g}"


def parse_number(value: float | str | None) -> float:
    """Return a number of the report as a float; NaN for None and for other strings."""
    try:
        return float("nan") if value is None else float(value)
    except ValueError:
        return float("nan")


def mesh_text(report: RobustnessReport) -> str:
    """Return the mesh and its number of ranks: `tp 2 x dp_shard 2, 4 ranks`; empty if the number is unknown."""
    if report.world_size is None:
        return ""
    dims = [f"{name} {size}" for name, size in report.layout.items() if size > 1]
    return f"{' x '.join(dims)}{', ' if dims else ''}{counted(report.world_size, 'rank')}"


def phase_notes(phase: Mapping[str, Any]) -> list[str]:
    """Return the notes of a phase."""
    notes = phase.get("notes") or ()
    return [notes] if isinstance(notes, str) else [str(note) for note in notes]


def failing_checks(phase: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the entries of `checks` that failed."""
    return [row for row in phase.get("checks") or () if row["ok"] is False]


def checks_without_result(phase: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the entries of `checks` that had nothing to compare."""
    return [row for row in phase.get("checks") or () if row["ok"] is None]


def unchecked_text(row: Mapping[str, Any]) -> str:
    """Return the reason why a check had no result: `skipped: no loss`."""
    return f"skipped: {_UNCHECKED_REASONS.get(str(row['name']), 'nothing to compare')}"


def skipped_checks_text(phase: Mapping[str, Any]) -> str:
    """Return the checks that a completed phase skipped: `1 check skipped: replicas`; empty for none."""
    skipped = [str(row["name"]) for row in checks_without_result(phase)] if phase["ok"] is not None else []
    return f"{counted(len(skipped), 'check')} skipped: {', '.join(skipped)}" if skipped else ""


def widened_checks(report: RobustnessReport) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name of the phase and the entry of each check whose tolerance the recipe widened."""
    for phase in report.phases:
        for row in phase.get("checks") or ():
            if row.get("is_widened"):
                yield str(phase["name"]), row


def widened_text(phase: str, row: Mapping[str, Any]) -> str:
    """Return a widened tolerance: `resume: loss tolerance 3.82e-06 (8 x noise)`."""
    return f"{phase}: {row['name']} tolerance {number_text(row['tolerance'])} ({row['noise_factor']:g} x noise)"


def passed_text(row: Mapping[str, Any]) -> str:
    """Return the result of an exact check that passed: `312 items identical`, `1,956 items finite`."""
    if row["name"] == "sharded":
        return "as the recipe requires"
    noun, result = _PASSED_TEXTS.get(str(row["name"]), ("item", "identical"))
    return f"{counted(row['compared'], noun)} {result}"


def check_text(row: Mapping[str, Any]) -> str:
    """Return the result of a check, without its items: `2 of 185 items differ`, or the difference and its tolerance.

    Example:
        difference 0.0003, tolerance 3.82e-06 (8 x noise 4.77e-07)
        difference 0.0003, tolerance 0 (bit-identity required)
    """
    parts = []
    if row.get("differing_count"):
        differ = "differs" if row["differing_count"] == 1 else "differ"
        parts.append(f"{row['differing_count']:,} of {counted(row['compared'], 'item')} {differ}")
    elif row.get("value") is None:
        parts.append(passed_text(row) if row["ok"] else f"{counted(row['compared'], 'item')} compared")
    if row.get("value") is not None:
        noise_factor = row.get("noise_factor")
        rule = f"{noise_factor:g} x noise{_noise_text(row)}" if noise_factor is not None else "bit-identity required"
        parts.append(f"difference {number_text(row['value'])}, tolerance {number_text(row['tolerance'])} ({rule})")
    return "; ".join(parts)


def _noise_text(row: Mapping[str, Any]) -> str:
    """Return the noise of which the tolerance of a check is a multiple, as ` 4.77e-07`; empty for a report without it.

    For logits, the text says that the noise is that of these logits, because each comparison measures its own.
    """
    if row.get("noise") is None:
        return ""
    return f"{' of these logits' if row['name'] == 'logits' else ''} {number_text(row['noise'])}"


def differing_items(report: RobustnessReport, phase: Mapping[str, Any], check: str) -> list[str]:
    """Return items of a check that differ, with ranks and values: `a on rank 1: expected x, got y`.

    If `differing` of the report has none of them, return their names alone, which the entry of the check lists.
    """
    rows_by_item: dict[tuple[str, object], list[Mapping[str, Any]]] = {}
    for row in report.differing:
        if is_in_phase(row, phase) and row.get("check") == check:
            # Ranks of one item are listed together. Entries without a rank are listed each with its own value.
            value = row.get("actual") if row.get("rank") is None else None
            rows_by_item.setdefault((str(row["item"]), value), []).append(row)
    if not rows_by_item:
        (names,) = (row.get("differing") or () for row in phase["checks"] if row["name"] == check)
        return [str(name) for name in names]
    return [f"{item}{_ranks_text(rows)}{_values_text(rows[0])}" for (item, _), rows in rows_by_item.items()]


def check_cause(report: RobustnessReport, phase: Mapping[str, Any], check: str) -> str | None:
    """Return the meaning and possible causes of a failing check; None if they are unknown.

    For the check of param groups, the text names the settings that differ.
    """
    if check != "param groups":
        return CAUSES.get(check)
    items = [str(row["item"]) for row in report.differing if is_in_phase(row, phase) and row.get("check") == check]
    keys = list(dict.fromkeys(item.rpartition(".")[2] for item in items))
    if not keys:
        return CAUSES[check]
    names = ", ".join(first_items([_SETTING_NAMES.get(key, key) for key in keys]))
    return f"{names} in the optimizer's param groups: different; possible cause: not restored"


def is_in_phase(row: Mapping[str, Any], phase: Mapping[str, Any]) -> bool:
    """Return True if an entry of `differing`, whose `phase` is a number or a name, belongs to a phase."""
    return row.get("phase") in (phase["name"], phase.get("number", phase["name"]))


def phase_name(phase: Mapping[str, Any]) -> str:
    """Return the number and the name of a phase: `6 resume`."""
    number = phase.get("number")
    return str(phase["name"]) if number is None else f"{number} {phase['name']}"


def _ranks_text(rows: Sequence[Mapping[str, Any]]) -> str:
    ranks = sorted({row["rank"] for row in rows if row.get("rank") is not None})
    if not ranks:
        return ""
    return f" on {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks[:8]))}{', ...' * (len(ranks) > 8)}"


def _values_text(row: Mapping[str, Any]) -> str:
    reference, actual = row.get("reference"), row.get("actual")
    if reference is None and actual is None:
        return ""
    if actual is None:
        return ": missing"
    return f": {actual}, not in the reference" if reference is None else f": expected {reference}, got {actual}"


def first_items(items: Sequence[str], limit: int = MAX_ITEMS) -> list[str]:
    """Return the first `limit` items, and the number of further items as a last line."""
    more = [f"and {len(items) - limit:,} more"] if len(items) > limit else []
    return [*items[:limit], *more]


def step_memory_text(report: RobustnessReport) -> str | None:
    """Return forecast and measured memory of a step; None if it was not measured."""
    memory = report.step_memory
    parts = []
    for name, label in (("peak", "peak"), ("between_steps", "between steps")):
        forecast, measured = memory.get(f"forecast_{name}"), memory.get(f"measured_{name}")
        if measured is not None:
            expected = f" (forecast {human_bytes(forecast)}, ratio {measured / forecast:.3f})" if forecast else ""
            parts.append(f"{label} {human_bytes(measured)}{expected}")
    return "; ".join(parts) or None


def noise_text(report: RobustnessReport, quantity: str) -> str | None:
    """Return the noise of `loss` or `logits` and its two measurements; None if it was not measured."""
    row = report.noise.get(quantity)
    if not row:
        return None
    parts = [("identical rerun", row.get("repeated")), ("embedding perturbed by 1 ULP", row.get("perturbed"))]
    text = "; ".join(f"{label}: {number_text(value)}" for label, value in parts if value is not None)
    return f"{number_text(measured_noise(report, quantity))} ({text})" if text else None


def measured_noise(report: RobustnessReport, quantity: str) -> float | None:
    """Return the larger of both measurements of noise, NaN if one is not finite; None if it was not measured."""
    row = report.noise.get(quantity) or {}
    values = [parse_number(row[key]) for key in ("repeated", "perturbed") if row.get(key) is not None]
    if not values:
        return None
    return max(values) if all(map(isfinite, values)) else float("nan")


def memory_failures(phase: Mapping[str, Any]) -> list[str]:
    """Return a phrase each for memory and threads above the baseline after a failed phase.

    Empty if there are none, or if the check `memory` reports them.
    """
    memory = phase.get("memory")
    has_memory_check = any(row["name"] == "memory" for row in phase.get("checks") or ())
    if phase["ok"] is not False or not memory or has_memory_check:
        return []
    failures = []
    if memory["tensor_bytes"] > memory["baseline_tensor_bytes"]:
        baseline = human_bytes(memory["baseline_tensor_bytes"])
        failures.append(
            f"{human_bytes(memory['tensor_bytes'])} of tensors retained after the phase, baseline {baseline}"
        )
    if memory["threads"] > memory["baseline_threads"]:
        threads = counted(memory["threads"], "thread")
        failures.append(f"{threads} after the phase, baseline {memory['baseline_threads']} (a process group has 6)")
    return failures


def kills_text(kills: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of kills, and after how many of them the last complete step could be loaded."""
    num_valid = sum(1 for row in kills if row["ok"])
    cases = "each time" if num_valid == len(kills) else f"after {num_valid:,} of them"
    return f"{counted(len(kills), 'time')}; the last complete step could be loaded {cases}"


def kill_text(row: Mapping[str, Any]) -> str:
    """Return ranks, operation and kind of save of a kill, and the latest step that could be loaded after it."""
    step = row.get("latest_step")
    latest = "no step can be loaded" if step is None else f"step {step} is the latest that can be loaded"
    expected = ", as expected" if row.get("ok") else ""
    return f"{kill_place_text(row)}: {latest}{expected}"


def kill_place_text(row: Mapping[str, Any]) -> str:
    """Return ranks, operation and kind of save of a kill: `rank 0 killed at fsync 2 (synchronous save)`."""
    save_kind = "asynchronous" if row.get("is_async") else "synchronous"
    operation = _operation_text(str(row.get("operation")))
    return f"{_killed_ranks(row.get('ranks'))} killed at {operation} ({save_kind} save)"


def _operation_text(operation: str) -> str:
    """Return a file operation in words: `write 250 of __0_0.distcp` for "write __0_0.distcp #250"."""
    match = re.fullmatch(r"(\S+) (.+) #(\d+)", operation)
    return operation if match is None else f"{match[1]} {match[3]} of {match[2]}"


def _killed_ranks(ranks: Any) -> str:
    if isinstance(ranks, list | tuple):
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}" if ranks else "no rank"
    return str(ranks) if isinstance(ranks, str) else f"rank {ranks}"


def verdict(report: RobustnessReport) -> str:
    """Return the verdict: `PASSED: ...`, or `FAILED: ...` with the phases and checks that failed.

    It is `NOT DETECTED: ...` if a fault was injected and no check failed.
    """
    failed = [phase for phase in report.phases if phase["ok"] is False]
    completed = [phase for phase in report.phases if phase["ok"] is not None]
    fault = f"; injected fault: {report.injected_fault}" if report.injected_fault else ""
    is_undetected = bool(report.injected_fault) and report.exit == UsageError.exit_code
    if not failed and (report.ok or is_undetected):
        skipped = len(report.phases) - len(completed)
        skipped_text = f", {skipped} not run" if skipped else ""
        word = "NOT DETECTED" if is_undetected else "PASSED"
        return f"{word}: {report.recipe}, {counted(len(completed), 'phase')}{skipped_text}{fault}"
    names = [f"{phase['name']}{_checks_text(phase)}" for phase in failed]
    return f"FAILED: {report.recipe}: {'; '.join(names) or 'see the notes'}{fault}"


def _checks_text(phase: Mapping[str, Any]) -> str:
    names = [str(row["name"]) for row in failing_checks(phase)]
    names += ["memory"] if memory_failures(phase) else []
    return f" ({', '.join(names)})" if names else ""


def find_first_failure(report: RobustnessReport) -> dict[str, Any] | None:
    """Return the first failure of a run: `phase`, `check` (None if the phase has none) and `cause` in words.

    Later failures are usually consequences of the first one, as training steps spread it. None if no phase failed.
    """
    for phase in report.phases:
        if phase["ok"] is False:
            failed = [str(row["name"]) for row in failing_checks(phase)]
            failed += ["memory"] if memory_failures(phase) else []
            check = failed[0] if failed else None
            cause = (
                phase.get("cause")
                or (check_cause(report, phase, check) if check else None)
                or next(iter(phase_notes(phase)), "")
                or "unknown"
            )
            return {"phase": str(phase["name"]), "check": check, "cause": str(cause)}
    return None


def cause_text(report: RobustnessReport) -> str | None:
    """Return the first failure in one line: `cause: resume, check rng: ...`; None if no phase failed."""
    cause = find_first_failure(report)
    if cause is None:
        return None
    check = f", check {cause['check']}" if cause["check"] else ""
    return f"cause: {cause['phase']}{check}: {cause['cause']}"
