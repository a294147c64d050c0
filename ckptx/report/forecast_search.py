"""Text of `forecast --search`: a table of layouts that fit, and the reasons against the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ckptx.report.documents.forecast import SearchReport
from ckptx.report.forecast_words import mesh_text, step_text
from ckptx.report.report import counted, human_bytes

_HEADS = ("layout", "checkpointing", "microbatches", "peak", "free", "recomputed", "idle", "sent per rank", "")


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
        f"per step, over all GPUs: batch {step['sequences']:,} x {step['seq']:,} tokens{images}",
        step_text(step),
    ]
    if report.layouts:
        lines += _table([_HEADS, *(_cells(report, each) for each in report.layouts)])
    if report.layouts_too_large:
        lines.append("too large in every checkpointing mode (smallest peak):")
        lines += [f"  {_mesh(each['layout'])}: {human_bytes(each['peak'])}" for each in report.layouts_too_large]
    if report.unsupported_layouts:
        lines.append("not supported:")
        lines += [f"  {_mesh(each['layout'])}: {each['reason']}" for each in report.unsupported_layouts]
    lines.append("assumptions:")
    lines += [f"  {each}" for each in report.assumptions]
    last = search_verdict(report)
    lines.append(last if report.layouts else red(last))
    lines.append(f"done in {report.seconds:.0f} s, {counted(report.evaluated_steps, 'step')} evaluated")
    return "\n".join(lines)


def search_verdict(report: SearchReport) -> str:
    """Return the verdict: `BEST: ` and the options of the best layout, or `NOTHING FITS ...`."""
    if not report.layouts:
        least = min((each["peak"] for each in report.layouts_too_large), default=None)
        close = f"; the smallest peak is {human_bytes(least)}" if least is not None else ""
        return f"NOTHING FITS on {_gpus_text(report)}{close}"
    return f"BEST: {options_of(report.layouts[0])}"


def options_of(found: Mapping[str, Any]) -> str:
    """Return the options of `forecast` for a layout of the search."""
    sizes = {"--tp": "tp", "--pp": "pp", "--dp-shard": "dp_shard", "--dp-replicate": "dp_replicate"}
    options = [f"{option} {found['layout'][axis]}" for option, axis in sizes.items() if found["layout"][axis] > 1]
    options.append(f"--batch {found['microbatches'] * found['sequences']} --microbatches {found['microbatches']}")
    if found["activation_checkpointing"] != "none":
        options.append(f"--activation-checkpointing {found['activation_checkpointing']}")
    return " ".join(options)


def _gpus_text(report: SearchReport) -> str:
    return f"{counted(report.gpus, 'GPU')} of {human_bytes(report.gpu_memory)}"


def _cells(report: SearchReport, found: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        _mesh(found["layout"]),
        found["activation_checkpointing"],
        f"{found['microbatches']} x {counted(found['sequences'], 'sequence')}",
        human_bytes(found["peak"]),
        human_bytes(report.gpu_memory - found["peak"] - found["reserved"]),
        f"{found['recomputed_flops'] / found['flops']:.1%}" if found["recomputed_flops"] else "none",
        f"{found['bubble_fraction']:.0%}" if found["bubble_fraction"] else "none",
        human_bytes(sum(found["sent_bytes"].values())),
        "checked" if found["is_checked"] else "",
    )


def _mesh(layout: Mapping[str, int]) -> str:
    return mesh_text(layout) or "one GPU"


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
