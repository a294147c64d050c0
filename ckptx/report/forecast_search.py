"""Text of `forecast --search`: a table of the layouts that fit, then those that are too large or not supported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ckptx.report.documents.forecast import SearchReport
from ckptx.report.forecast_phrases import dims_text, other_precision_text, precision_text, step_text
from ckptx.report.report import counted, human_bytes

# Explanations of the order and the columns of the table, printed below it.
_RULES = (
    "order: least time lost (recomputed, idle), then least sent per rank, then lowest peak; free: after the reserve",
    "AC mode: the first of none, selective, submodule and full that fits",
    "microbatches: one sequence each; with dp_shard, larger ones if they rank first (they send less, at a higher peak)",
)
# The last column says that a layout is fully evaluated.
_COLUMN_TITLES = ("layout", "AC mode", "microbatches", "peak", "free", "recomputed", "idle", "sent per rank", "")


def search_text(report: SearchReport, red: Callable[[str], str] = str) -> str:
    """Return the summary that `forecast --search` prints.

    Args:
        report: Report of the search.
        red: Colors a string red if the terminal supports it.
    """
    step = report.settings
    images = f" with {counted(step['images'], 'image')} each" if step["images"] else ""
    lines = [
        f"{report.architecture}, {report.parameters:,} parameters, on {_gpus_text(report)}",
        f"per step, over all GPUs: batch {step['sequences_per_step']:,} x {step['seq']:,} tokens{images}",
        step_text(step, _common_tp(report)),
    ]
    if report.layouts:
        lines += _table([_COLUMN_TITLES, *(_cells(report, each) for each in report.layouts)])
        lines += [f"  {each}" for each in _RULES]
    if report.layouts_too_large:
        lines.append("too large with every mode of activation checkpointing (smallest peak, without the reserve):")
        lines += [f"  {_layout_text(each['layout'])}: {human_bytes(each['peak'])}" for each in report.layouts_too_large]
    if report.unsupported_layouts:
        lines.append("not supported:")
        lines += [f"  {_layout_text(each['layout'])}: {each['reason']}" for each in report.unsupported_layouts]
    lines.append("assumptions:")
    lines += [f"  {each}" for each in report.assumptions]
    verdict_line = search_verdict(report)
    lines.append(verdict_line if report.layouts else red(verdict_line))
    if other := other_precision_text(report):
        lines.append(f"other precision: {other}")
    lines.append(f"done in {report.seconds:.0f} s, {counted(report.evaluated_steps, 'step')} evaluated")
    return "\n".join(lines)


def search_verdict(report: SearchReport) -> str:
    """Return the verdict: `BEST: ` and the options of the best layout, or `NOTHING FITS ...`; then the precision."""
    precision = precision_text(report.settings)
    if report.layouts:
        return f"BEST: {layout_options(report.layouts[0])}; {precision}"
    peak_text = ""
    if report.layouts_too_large:
        smallest = min(report.layouts_too_large, key=lambda each: int(each["peak"]))
        peak_text = f"; the smallest peak is {human_bytes(smallest['peak'])} ({_layout_text(smallest['layout'])})"
    return f"NOTHING FITS on {_gpus_text(report)}{peak_text}; {precision}"


def layout_options(row: Mapping[str, Any]) -> str:
    """Return the options of `forecast` for a layout of the search.

    `--schedule` is not among them: the search runs 1F1B, the default of `forecast`, or the schedule of a recipe.
    """
    sizes = {"--tp": "tp", "--pp": "pp", "--dp-shard": "dp_shard", "--dp-replicate": "dp_replicate"}
    options = [f"{option} {row['layout'][axis]}" for option, axis in sizes.items() if row["layout"][axis] > 1]
    options.append(
        f"--batch {row['microbatches'] * row['sequences_per_microbatch']} --microbatches {row['microbatches']}"
    )
    if row["activation_checkpointing"] != "none":
        options.append(f"--activation-checkpointing {row['activation_checkpointing']}")
    return " ".join(options)


def _common_tp(report: SearchReport) -> int | None:
    """Return the number of TP ranks of all layouts; None if layouts differ in it."""
    sizes = {each["layout"]["tp"] for each in (*report.layouts, *report.layouts_too_large)}
    return sizes.pop() if len(sizes) == 1 else None


def _gpus_text(report: SearchReport) -> str:
    return f"{counted(report.gpus, 'GPU')} of {human_bytes(report.gpu_memory)}"


def _cells(report: SearchReport, row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        _layout_text(row["layout"]),
        row["activation_checkpointing"],
        f"{row['microbatches']} x {counted(row['sequences_per_microbatch'], 'sequence')}",
        human_bytes(row["peak"]),
        human_bytes(report.gpu_memory - row["peak"] - row["reserved"]),
        f"{row['recomputed_flops'] / row['flops']:.1%}" if row["recomputed_flops"] else "none",
        f"{row['bubble_fraction']:.0%}" if row["bubble_fraction"] else "none",
        human_bytes(sum(row["sent_bytes"].values())),
        "fully evaluated" if row["is_fully_evaluated"] else "",
    )


def _layout_text(layout: Mapping[str, int]) -> str:
    return dims_text(layout) or "one GPU"


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
