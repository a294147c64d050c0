"""Text of `forecast`: a block of lines for each pipeline rank, then the assumptions and the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ckptx.report.documents.forecast import ForecastReport
from ckptx.report.forecast_phrases import (
    batch_text,
    communication_text,
    flops_text,
    kind_text,
    mesh_text,
    origin_text,
    other_precision_text,
    peak_time_text,
    present_kinds,
    settings_text,
    stages_text,
    tensor_text,
    verdict,
)
from ckptx.report.report import counted, human_bytes


def forecast_text(report: ForecastReport, red: Callable[[str], str] = str) -> str:
    """Return the summary that `forecast` prints.

    Args:
        report: Report of `forecast`.
        red: Colors a string red if the terminal supports it.
    """
    lines = [
        f"{report.architecture}, {report.parameters:,} parameters, on {mesh_text(report)}",
        f"per data-parallel rank: {batch_text(report)}",
        settings_text(report),
    ]
    for row in report.by_pipeline_rank:
        lines += _stage_lines(report, row, red)
    lines.append(f"all ranks: {flops_text(report)}")
    lines.append("assumptions:")
    lines += [f"  {each}" for each in report.assumptions]
    verdict_line = verdict(report)
    lines.append(verdict_line if report.fits is not False else red(verdict_line))
    if other := other_precision_text(report):
        lines.append(f"other precision: {other}")
    lines.append(f"done in {report.seconds:.1f} s")
    return "\n".join(lines)


def forecast_verdict(report: ForecastReport) -> str:
    """Return the one line that `forecast -q` prints."""
    return verdict(report)


def _stage_lines(report: ForecastReport, row: Mapping[str, Any], red: Callable[[str], str]) -> Iterator[str]:
    peak = f"peak {human_bytes(row['peak'])}"
    layers = f", {counted(row['checkpointed_layers'], 'layer')} checkpointed" if row["checkpointed_layers"] else ""
    yield (
        f"{stages_text(report, row)}: {red(peak) if row['fits'] is False else peak}, "
        f"{human_bytes(row['between_steps'])} between steps{layers}"
    )
    peak_tensor = row["peak_tensor"]
    if peak_tensor is not None:
        allocation = f"{peak_tensor['op']} allocates {tensor_text(peak_tensor)}"
        yield f"  peak during {peak_time_text(report, peak_tensor)}: {allocation}"
    yield f"  {'':<12} {'at the peak':>13}  {'between steps':>13}"
    present = present_kinds(report, row)
    for kind in report.memory_kinds:
        sizes = row["by_kind"][kind], row["between_steps_by_kind"][kind]
        if any(sizes) or kind in present:
            yield f"  {kind_text(kind):<12} {human_bytes(sizes[0]):>13}  {human_bytes(sizes[1]):>13}"
    yield "  largest tensors at the peak"
    counts = Counter(
        f"    {human_bytes(each['bytes']):>11}  {kind_text(each['kind']):<12} {tensor_text(each)} {origin_text(each)}"
        for each in row["largest_tensors"]
    )
    yield from (line if count == 1 else f"{line} ({count} of this size)" for line, count in counts.items())
    yield f"  per rank: {flops_text(row)}{f'; {communication_text(row)}' if row['sent_bytes'] else ''}"
