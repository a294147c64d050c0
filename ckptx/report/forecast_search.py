"""What `forecast --search` says to a person: a table of what fits, and why the rest does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ckptx.report.documents.forecast import SearchReport
from ckptx.report.forecast_words import mesh_text, step_text
from ckptx.report.report import counted, human_bytes

_HEADS = ("layout", "checkpointing", "microbatches", "peak", "to spare", "recomputed", "idle", "sent by a rank", "")


def search_text(report: SearchReport, red: Callable[[str], str] = str) -> str:
    """What `forecast --search` says.

    Args:
        report: What was found.
        red: Makes a text red, where the terminal can.
    """
    step = report.settings
    images = f" and {counted(step['images'], 'image')}" if step["images"] else ""
    lines = [
        f"{report.architecture}, {report.parameters:,} parameters, on {_gpus(report)}",
        f"a step over all GPUs: {counted(step['rows'], 'row')} of {step['seq']:,} tokens{images}",
        step_text(step),
    ]
    if report.found:
        lines += _table([_HEADS, *(_row(report, each) for each in report.found)])
    if report.too_large:
        lines.append("do not fit in any mode, at the least:")
        lines += [f"  {_mesh(each['layout'])}: {human_bytes(each['peak'])}" for each in report.too_large]
    if report.refused:
        lines.append("cannot be:")
        lines += [f"  {_mesh(each['layout'])}: {each['reason']}" for each in report.refused]
    lines.append("assumed:")
    lines += [f"  {each}" for each in report.assumptions]
    said = search_verdict(report)
    lines.append(said if report.found else red(said))
    lines.append(f"searched in {report.seconds:.0f} s, {counted(report.tried, 'step')}")
    return "\n".join(lines)


def search_verdict(report: SearchReport) -> str:
    """`BEST: ...`, or that nothing fits."""
    if not report.found:
        least = min((each["peak"] for each in report.too_large), default=None)
        close = f"; the least takes {human_bytes(least)} of tensors" if least is not None else ""
        return f"NOTHING FITS {_gpus(report)}{close}"
    return f"BEST: {options_of(report.found[0])}"


def options_of(found: Mapping[str, Any]) -> str:
    """The options of `forecast` that say a layout that was found."""
    sizes = {"--tp": "tp", "--pp": "pp", "--dp-shard": "dp_shard", "--dp-replicate": "dp_replicate"}
    said = [f"{option} {found['layout'][axis]}" for option, axis in sizes.items() if found["layout"][axis] > 1]
    said.append(f"--batch {found['microbatches'] * found['rows']} --microbatches {found['microbatches']}")
    if found["activation_checkpointing"] != "none":
        said.append(f"--activation-checkpointing {found['activation_checkpointing']}")
    return " ".join(said)


def _gpus(report: SearchReport) -> str:
    return f"{counted(report.gpus, 'GPU')} of {human_bytes(report.gpu_memory)}"


def _row(report: SearchReport, found: Mapping[str, Any]) -> tuple[str, ...]:
    rows = counted(found["rows"], "row")
    return (
        _mesh(found["layout"]),
        found["activation_checkpointing"],
        f"{found['microbatches']} of {rows}",
        human_bytes(found["peak"]),
        human_bytes(report.gpu_memory - found["peak"] - found["reserved"]),
        f"{found['recomputed'] / found['flops']:.1%}" if found["recomputed"] else "none",
        f"{found['idle']:.0%}" if found["idle"] else "none",
        human_bytes(sum(found["sent"].values())),
        "checked" if found["is_whole"] else "",
    )


def _mesh(layout: Mapping[str, int]) -> str:
    return mesh_text(layout) or "one GPU"


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
