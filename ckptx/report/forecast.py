"""What `forecast` says to a person: a block for each stage, then the verdict and what it rests on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ckptx.report.documents.forecast import ForecastReport
from ckptx.report.forecast_words import (
    called,
    flops_text,
    mesh,
    moment_text,
    place_text,
    rows_text,
    sent_text,
    settings_text,
    tensor_text,
    verdict,
)
from ckptx.report.report import counted, human_bytes


def forecast_text(report: ForecastReport, red: Callable[[str], str] = str) -> str:
    """What `forecast` says.

    Args:
        report: What was counted.
        red: Makes a text red, where the terminal can.
    """
    lines = [
        f"{report.architecture}, {report.parameters:,} parameters, on {mesh(report)}",
        f"a step on each data rank: {rows_text(report)}",
        settings_text(report),
    ]
    for row in report.by_stage:
        lines += _stage(report, row, red)
    lines.append(f"all ranks: {flops_text(report)}")
    lines.append("assumed:")
    lines += [f"  {each}" for each in report.assumptions]
    said = verdict(report)
    lines.append(said if report.fits is not False else red(said))
    lines.append(f"counted in {report.seconds:.2f} s")
    return "\n".join(lines)


def forecast_verdict(report: ForecastReport) -> str:
    """What `forecast -q` says, in one line."""
    return verdict(report)


def _stage(report: ForecastReport, row: Mapping[str, Any], red: Callable[[str], str]) -> Iterator[str]:
    peak = f"peak {human_bytes(row['peak'])}"
    layers = f", {counted(row['wrapped_layers'], 'layer')} checkpointed" if row["wrapped_layers"] else ""
    yield (
        f"{called(report, row)}: {red(peak) if row['fits'] is False else peak}, "
        f"{human_bytes(row['between_steps'])} between steps{layers}"
    )
    at = row["at"]
    if at is not None:
        yield f"  at  {moment_text(report, at)}, when {at['op']} makes {tensor_text(at)}"
    yield f"  {'':<12} {'at the peak':>12} {'between':>12}"
    for kind in report.kinds:
        numbers = row["by_kind"][kind], row["between_by_kind"][kind]
        if any(numbers):
            yield f"  {kind:<12} {human_bytes(numbers[0]):>12} {human_bytes(numbers[1]):>12}"
    yield "  largest at the peak"
    for each in row["largest"]:
        yield (
            f"    {human_bytes(each['nbytes']):>11}  {each['kind']:<12} {tensor_text(each)} by {each['op']} "
            f"{place_text(each['module'])}"
        )
    yield f"  {flops_text(row)}{f'; {sent_text(row)}' if row['sent'] else ''}"
