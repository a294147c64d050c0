"""What `verify --run` says to a person."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptx.report.documents.running import RunReport
from ckptx.report.numbers import bytes_read_text
from ckptx.report.report import counted, human_bytes
from ckptx.report.text import cost

_LEVELS = ("config", "bytes", "forward", "gradients")  # what comes first causes what comes after
_MOST_OF_A_LEVEL = 8
_ALWAYS = ("tp", "dp_shard")  # dims of the mesh that are said when they are 1, too


def run_text(report: RunReport) -> str:
    """The differences, each tensor once, then what was measured."""
    lines = _differences(report.differing)
    first = report.first_divergence
    if first is not None:
        lines.append(f"first module that differs: {first['module']}, by {_number(first['max_abs'])}")
    layout = report.layout
    dims = [f"{name} {size}" for name, size in layout.items() if name in _ALWAYS or size > 1]
    mesh = f"{' x '.join(dims)}, {counted(report.world_size, 'rank')}"
    kinds, tensors = " and ".join(report.inputs), counted(report.tensors, "tensor")
    each = " on each" if report.stages == 1 else ""
    lines.append(f"ran {kinds} in {report.compute_dtype} on {mesh}; {tensors}{each}, {bytes_read_text(report)}")
    if report.stages > 1:
        lines.append(
            f"pipeline   {report.stages} stages, {counted(report.microbatches, 'microbatch')} a step; a "
            f"rank waits {report.bubble_fraction:.0%} of it at best"
        )
    if report.forecast_peak is not None:
        found = "" if report.measured_peak is None else f", measured {human_bytes(report.measured_peak)}"
        lines.append(
            f"tensors    {human_bytes(report.forecast_peak)} forecast at the peak{found}, on the rank with the most"
        )
    if report.reference_pieces > 1:
        lines.append(f"reference  in {report.reference_pieces} pieces, one after another")
    for key, (said, run) in report.windows.items():
        lines.append(f"{key} {said:,} run as {run:,} on both sides, so that the text crosses it")
    if report.wrapped_layers:
        lines.append(f"activations of {counted(report.wrapped_layers, 'layer')} checkpointed")
    lines += _gathered(report)
    lines.append(
        f"logits     max abs {_number(report.max_abs)} (allowed {_number(report.max_abs_limit)}), "
        f"KL {_number(report.kl)}, cosine {float(report.cosine):.9g}"
    )
    loss, reference = float(report.loss), float(report.loss_reference)
    lines.append(f"loss       {loss:.7g}, {abs(loss - reference):.3g} away (allowed {_number(report.loss_limit)})")
    if report.grad_of_limit is not None and report.grad_max_abs is not None:
        name, share = report.grad_of_limit
        nearest = f", {name} at {float(share):.0%} of what it may" if name and not report.differing else ""
        lines.append(f"gradients  {report.gradients} compared, max abs {_number(report.grad_max_abs)}{nearest}")
    lines += _undecided(report)
    lines.append(_verdict(report))
    lines.append(cost(report))
    return "\n".join(lines)


def _gathered(report: RunReport) -> list[str]:
    """Return warnings about the modules whose shards were not used as they are stored."""
    lines = []
    for what, kept in (
        ("parameters", [row for row in report.gathered if row["what"] == "parameters"]),
        ("outputs", [row for row in report.gathered if row["what"] == "output" and not row["aligned"]]),
    ):
        if not kept:
            continue
        names = ", ".join(f"{row['pattern']} ({row['modules']:,})" for row in kept[:_MOST_OF_A_LEVEL])
        others = len(kept) - _MOST_OF_A_LEVEL
        more = f", and {counted(others, 'other pattern')}" if others > 0 else ""
        count = counted(sum(row["modules"] for row in kept), "module")
        lines.append(
            f"warning: {count} ran with gathered {what}; this run does not show that TP kernels can use their shards: "
            f"{names}{more}"
        )
    return lines


def run_verdict(report: RunReport) -> str:
    """What `verify --run -q` says: equal or not, with the first difference, in one line."""
    lines = run_text(report).splitlines()
    verdict, first = lines[-2], lines[0]
    return f"{verdict}; {first}" if report.differing else verdict


def _verdict(report: RunReport) -> str:
    """Which levels are equal; and where there is no telling."""
    levels = _LEVELS if report.gradients is not None else _LEVELS[:-1]
    different = {row["level"] for row in report.differing}
    undecided = {row["level"] for row in report.undecided} - different
    if different:
        words = [f"DIFFERENT: {', '.join(level for level in levels if level in different)}"]
    else:
        words = [f"equal: {', '.join(level for level in levels if level not in undecided)}"]
    if undecided:
        words.append(f"NOT DECIDED: {', '.join(level for level in levels if level in undecided)}")
    return "; ".join(words)


def _undecided(report: RunReport) -> list[str]:
    """One line for each level with results that no limit could have refused."""
    lines = []
    forward, gradients = ([row for row in report.undecided if row["level"] == level] for level in _LEVELS[2:])
    if forward:
        lines.append(
            f"logits     not decided: rounding in {report.compute_dtype} allows {_number(report.max_abs_limit)}, "
            f"and they deviate by {_number(report.logits_deviation)}"
        )
    if gradients:
        first = gradients[0]
        lines.append(
            f"gradients  {len(gradients)} of {report.gradients} not decided, the first {first['name']}: rounding "
            f"allows {_number(first['limit'])}, and it is no larger than {_number(first['size'])}"
        )
    if lines and report.compute_dtype != "float32":
        lines.append("           --compute-dtype fp32 decides more")
    return lines


def _differences(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for level in _LEVELS:
        by_name: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            if row["level"] == level:
                by_name.setdefault(row["name"], []).append(row)
        for name, found in list(by_name.items())[:_MOST_OF_A_LEVEL]:
            called = f" ({found[0]['model_name']} in the model)" if "model_name" in found[0] else ""
            where = "" if level == "config" else f" ({_ranks(found)})"
            lines.append(f"{level}: {name}{called}: {_what(level, found)}{where}")
        if len(by_name) > _MOST_OF_A_LEVEL:
            more = counted(len(by_name) - _MOST_OF_A_LEVEL, "key" if level == "config" else "tensor")
            lines.append(f"{level}: and {more} more, --json lists all")
    return lines


def _what(level: str, found: list[dict[str, Any]]) -> str:
    if level == "config":
        return f"{found[0]['reference']} in the reference, {found[0]['checkpoint']} in the checkpoint"
    if level == "bytes":
        return str(found[0].get("what", "is not what the reference has"))
    worst = max(found, key=lambda row: float(row["max_abs"]))
    return worst.get("what") or f"max abs {_number(worst['max_abs'])}, allowed {_number(worst['limit'])}"


def _ranks(found: list[dict[str, Any]]) -> str:
    ranks = sorted({row["rank"] for row in found})
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _number(value: float | str) -> str:
    """A measured number; one that is not finite is a text in the report, as JSON has no name for it."""
    return f"{float(value):.3g}"
