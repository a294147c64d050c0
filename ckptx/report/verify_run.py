"""Text of `verify --run`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptx.report.documents.verify_run import RunReport
from ckptx.report.number_formats import bytes_read_text
from ckptx.report.report import counted, human_bytes
from ckptx.report.text import cost_text

# Levels of the comparison; a difference at one level causes differences at later ones.
_LEVELS = ("config", "bytes", "forward", "gradients")
_LEVEL_TEXTS = {"bytes": "tensor bytes", "forward": "logits/loss"}  # other levels are printed as they are
_MAX_LINES_PER_LEVEL = 8
_SHOWN_AXES = ("tp", "dp_shard")  # dims of the mesh that are shown even if they are 1


def run_text(report: RunReport) -> str:
    """Return the summary: differences, each tensor once, then measurements and the verdict."""
    lines = _difference_lines(report.differing)
    first = report.first_divergence
    if first is not None:
        lines.append(
            f"first module with a different output: {first['module']}, max abs difference "
            f"{_number_text(first['max_abs'])}"
        )
    layout = report.layout
    dims = [f"{name} {size}" for name, size in layout.items() if name in _SHOWN_AXES or size > 1]
    mesh = f"{' x '.join(dims)} ({counted(report.world_size, 'rank')})"
    kinds, tensors = " and ".join(report.inputs), counted(report.tensors, "tensor")
    per_rank = " per rank" if report.stages == 1 else ""
    read = f"{bytes_read_text(report)} from the checkpoint by all ranks together"
    lines.append(f"ran on random {kinds} inputs in {report.compute_dtype}, {mesh}; {tensors}{per_rank}, {read}")
    if report.stages > 1:
        lines.append(
            f"pipeline   {report.stages} stages, {counted(report.microbatches, 'microbatch')} per step, "
            f"bubble about {report.bubble_fraction:.0%}"
        )
    if report.forecast_peak is not None:
        measured = "" if report.measured_peak is None else f", measured {human_bytes(report.measured_peak)}"
        lines.append(
            f"memory     peak of tensors (max over ranks): forecast {human_bytes(report.forecast_peak)}{measured}"
        )
    if report.reference_parts > 1:
        lines.append(f"reference  run in {report.reference_parts} parts, one after another")
    for key, (configured, used) in report.attention_windows.items():
        lines.append(
            f"{key} {configured:,} reduced to {used:,} for the checkpoint and the reference, so that the sequence "
            "exceeds it"
        )
    if report.checkpointed_layers:
        lines.append(f"activation checkpointing of {counted(report.checkpointed_layers, 'layer')}")
    lines += _gathered_lines(report)
    lines.append(
        f"logits     max abs difference {_number_text(report.max_abs)} "
        f"(tolerance {_number_text(report.max_abs_tolerance)}), "
        f"KL {_number_text(report.kl)}, cosine {float(report.cosine):.9g}"
    )
    loss, reference = float(report.loss), float(report.loss_reference)
    lines.append(
        f"loss       {loss:.7g}, difference {abs(loss - reference):.3g} "
        f"(tolerance {_number_text(report.loss_tolerance)})"
    )
    if report.grad_closest_to_tolerance is not None and report.grad_max_abs is not None:
        name, share = report.grad_closest_to_tolerance
        is_shown = name and not report.differing
        nearest = f"; closest to its tolerance: {name} ({float(share):.0%})" if is_shown else ""
        lines.append(
            f"gradients  {report.gradients} compared, max abs difference {_number_text(report.grad_max_abs)}{nearest}"
        )
    lines += _inconclusive_lines(report)
    lines.append(_verdict_text(report))
    lines.append(cost_text(report))
    return "\n".join(lines)


def _gathered_lines(report: RunReport) -> list[str]:
    """Return warnings about modules whose shards were gathered instead of used as stored."""
    lines = []
    for gathered, rows in (
        ("parameters", [row for row in report.gathered_modules if row["what"] == "parameters"]),
        ("outputs", [row for row in report.gathered_modules if row["what"] == "output" and not row["aligned"]]),
    ):
        if not rows:
            continue
        names = ", ".join(f"{row['pattern']} ({row['modules']:,})" for row in rows[:_MAX_LINES_PER_LEVEL])
        num_unlisted = len(rows) - _MAX_LINES_PER_LEVEL
        more = f", and {counted(num_unlisted, 'other pattern')}" if num_unlisted > 0 else ""
        count = counted(sum(row["modules"] for row in rows), "module")
        lines.append(
            f"warning: {count} ran with gathered {gathered}; this run does not show that TP layers can compute "
            f"on their shards: {names}{more}"
        )
    return lines


def run_verdict(report: RunReport) -> str:
    """Return the one line that `verify --run -q` prints: the verdict, with the first difference."""
    lines = run_text(report).splitlines()
    verdict, first = lines[-2], lines[0]  # the last line is the cost
    return f"{verdict}; {first}" if report.differing else verdict


def _verdict_text(report: RunReport) -> str:
    """Return the verdict: the levels that differ, or those that are equal or within tolerance; then inconclusive ones.

    Example:
        EQUAL: config, tensor bytes; within tolerance: logits/loss, gradients
    """
    levels = _LEVELS if report.gradients is not None else _LEVELS[:-1]
    different = {row["level"] for row in report.differing}
    inconclusive = {row["level"] for row in report.inconclusive} - different
    if different:
        groups = {"DIFFERENT": different}
    else:
        with_tolerance = _levels_with_tolerance(report)
        groups = {"EQUAL": {*levels} - with_tolerance - inconclusive, "within tolerance": with_tolerance - inconclusive}
    groups["INCONCLUSIVE"] = inconclusive
    texts = (
        (title, [_level_text(level) for level in levels if level in selected]) for title, selected in groups.items()
    )
    return "; ".join(f"{title}: {', '.join(names)}" for title, names in texts if names)


def _levels_with_tolerance(report: RunReport) -> set[str]:
    """Return the levels that are compared with a tolerance; on one rank all results have to be bit-identical."""
    tolerances = {
        "forward": [report.max_abs_tolerance, report.loss_tolerance],
        "gradients": [row["tolerance"] for row in report.gradient_differences],
    }
    return {level for level, values in tolerances.items() if any(map(float, values))}


def _level_text(level: str) -> str:
    """Return the printed name of a level of the report."""
    return _LEVEL_TEXTS.get(level, level)


def _inconclusive_lines(report: RunReport) -> list[str]:
    """Return a line for each level with inconclusive results, whose tolerance exceeds the values that are compared."""
    lines = []
    forward, gradients = ([row for row in report.inconclusive if row["level"] == level] for level in _LEVELS[2:])
    if forward:
        lines.append(
            f"logits     inconclusive: tolerance {_number_text(report.max_abs_tolerance)} for rounding in "
            f"{report.compute_dtype}, standard deviation of the logits {_number_text(report.logits_std)}"
        )
    if gradients:
        first = gradients[0]
        lines.append(
            f"gradients  {len(gradients)} of {report.gradients} inconclusive, first {first['name']}: tolerance "
            f"{_number_text(first['tolerance'])} for rounding, largest value {_number_text(first['magnitude'])}"
        )
    if lines and report.compute_dtype != "float32":
        lines.append("           use --compute-dtype fp32 for a smaller tolerance")
    return lines


def _difference_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for level in _LEVELS:
        by_name: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            if row["level"] == level:
                by_name.setdefault(row["name"], []).append(row)
        for name, tensor_rows in list(by_name.items())[:_MAX_LINES_PER_LEVEL]:
            model_name = f" ({tensor_rows[0]['model_name']} in the model)" if "model_name" in tensor_rows[0] else ""
            ranks_text = "" if level == "config" else f" ({_ranks_text(tensor_rows)})"
            label = "" if level == "forward" else f"{_level_text(level)}: "  # the names are logits and loss
            lines.append(f"{label}{name}{model_name}: {_difference_text(level, tensor_rows)}{ranks_text}")
        if len(by_name) > _MAX_LINES_PER_LEVEL:
            more = counted(len(by_name) - _MAX_LINES_PER_LEVEL, "more key" if level == "config" else "more tensor")
            lines.append(f"{_level_text(level)}: {more}; --json lists all")
    return lines


def _difference_text(level: str, rows: list[dict[str, Any]]) -> str:
    if level == "config":
        return f"{rows[0]['reference']} in the reference, {rows[0]['checkpoint']} in the checkpoint"
    if level == "bytes":
        return str(rows[0].get("what", "differs from the reference"))
    worst = max(rows, key=lambda row: float(row["max_abs"]))
    return (
        worst.get("what")
        or f"max abs difference {_number_text(worst['max_abs'])}, tolerance {_number_text(worst['tolerance'])}"
    )


def _ranks_text(rows: list[dict[str, Any]]) -> str:
    ranks = sorted({row["rank"] for row in rows})
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _number_text(value: float | str) -> str:
    """Return a measured number as text; NaN and infinity are strings in the report, as JSON cannot represent them."""
    return f"{float(value):.3g}"
