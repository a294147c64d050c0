"""`ckptx forecast`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ckptx.cli.command import CommandCall, define_command
from ckptx.cli.output import Output
from ckptx.errors import UsageError
from ckptx.report.documents.forecast import ForecastReport, SearchReport
from ckptx.report.report import Log, Report


@define_command(
    "forecast",
    examples=[
        "ckptx forecast MODEL --tp 2 --dp-shard 4 --seq 4096",
        "ckptx forecast MODEL --pp 2 --activation-checkpointing selective --gpu-memory 80GB --html forecast.html",
        "ckptx forecast --recipe llama_tiny --set layout.tp=2",
        "ckptx forecast MODEL --search --gpus 8 --gpu-memory 80GB",
    ],
)
def command(call: CommandCall) -> int:
    """Forecast the memory of a training step on each rank, from config.json only: no weights, no GPU.

    Exit 1 if the step does not fit in --gpu-memory, or with --search if no layout fits. The peak must leave a reserve
    of 1.5 GiB and 5% of the peak for the CUDA context, NCCL and fragmentation.
    """
    from ckptx.report.forecast import forecast_text, forecast_verdict
    from ckptx.report.forecast_search import search_text, search_verdict

    html = call.output.html

    def make_report(log: Log) -> ForecastReport | SearchReport:
        from ckptx.api.forecast import forecast

        if html is not None and call.values.get("search"):
            raise UsageError(
                "--html cannot be combined with --search; the page shows one layout; leave out one of them"
            )
        report: ForecastReport | SearchReport = forecast(**call.values, log=log)
        return report

    output = Output(call.output, _pages(str(call.values.get("model") or call.values.get("recipe") or ""), html))

    def format_report(report: ForecastReport | SearchReport) -> str:
        if isinstance(report, SearchReport):
            return search_text(report, output.red)
        return forecast_text(report, output.red)

    def format_verdict(report: ForecastReport | SearchReport) -> str:
        return search_verdict(report) if isinstance(report, SearchReport) else forecast_verdict(report)

    return output.run(call.name, make_report, format_report, format_verdict)


def _pages(model: str, html: str | Path | None) -> dict[str, Callable[[Report], str]]:
    """Return the files to write with the report: path -> function that makes the content."""

    def make_page(report: Report) -> str:
        from ckptx.report.forecast_html import forecast_page

        return forecast_page(report, model)

    return {} if html is None else {str(html): make_page}
