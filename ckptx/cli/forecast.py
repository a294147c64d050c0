"""`ckptx forecast`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ckptx.cli.options import (
    GLOBAL,
    HUB,
    SETTINGS,
    Section,
    SectionedCommand,
    hub_options,
    output_options,
    with_global_options,
)  # fmt: skip
from ckptx.cli.output import Output
from ckptx.cli.run_options import mesh_options, settings_option, step_options
from ckptx.errors import missing_package
from ckptx.report.documents.forecast import ForecastReport, SearchReport
from ckptx.report.report import Log, Report

_BESIDE_A_RECIPE = {"gpu_memory", "search", "gpus"}  # what a recipe does not say


@click.command(
    "forecast",
    cls=SectionedCommand,
    context_settings=SETTINGS,
    sections=[
        Section("Layout", ["tp", "pp", "dp_shard", "dp_replicate", "pp_split", "schedule", "microbatches"]),
        Section(
            "Step",
            [
                "batch", "seq", "images", "activation_checkpointing", "ac_scope", "dtype", "param_dtype",
                "reduce_dtype", "optimizer", "no_loss", "loss_fp32", "trust_remote_code",
            ],
        ),
        Section("Recipe, in place of these", ["recipe", "settings"]),
        Section("Judgement", ["gpu_memory"]),
        Section("Search, in place of a layout", ["search", "gpus"]),
        HUB,
        Section("Output", ["html", "as_json", "report_file"]),
        GLOBAL,
    ],
    examples=[
        "ckptx forecast MODEL --tp 2 --dp-shard 4 --seq 4096",
        "ckptx forecast MODEL --pp 2 --activation-checkpointing selective --gpu-memory 80GB --html forecast.html",
        "ckptx forecast --recipe llama_tiny --set layout.tp=2",
        "ckptx forecast MODEL --search --gpus 8 --gpu-memory 80GB",
    ],
)  # fmt: skip
@click.argument("model", metavar="[MODEL]", required=False, type=click.Path())
@mesh_options
@step_options
@click.option(
    "--microbatches",
    type=int,
    metavar="N",
    show_default="one for each stage",
    help="Portions of a step, on each data rank; without a pipeline 1, and gradients are accumulated over more.",
)
@click.option(
    "--batch",
    type=int,
    metavar="N",
    show_default="one for each microbatch",
    help="Rows of each data rank in a step; with --search, for each GPU.",
)
@click.option("--seq", type=int, metavar="N", show_default="4096", help="Tokens of a row.")
@click.option("--images", type=int, metavar="N", show_default="0", help="In each row, for a model that sees.")
@click.option(
    "--dtype",
    metavar="auto|bf16|fp16|fp32",
    show_default="auto",
    help="What parameters are stored in; auto is as the config says.",
)
@click.option(
    "--param-dtype",
    metavar="bf16|fp16|fp32",
    show_default="as stored",
    help="What FSDP2 gathers them in, and computes in.",
)
@click.option(
    "--reduce-dtype",
    metavar="bf16|fp16|fp32",
    show_default="that of --param-dtype",
    help="What FSDP2 sums gradients in.",
)
@click.option("--optimizer", metavar="adamw|adam|sgd|none", show_default="adamw", help="sgd is without momentum.")
@click.option("--no-loss", is_flag=True, help="Sum the logits up in place of a loss.")
@click.option("--loss-fp32", is_flag=True, help="The loss of transformers, on whole logits in float32.")
@click.option("--trust-remote-code", is_flag=True, default=None, help="Run code from MODEL for an unknown class.")
@click.option(
    "--recipe",
    metavar="RECIPE",
    type=click.Path(),
    show_default="none",
    help="Forecast what a recipe trains: its name, or a file.",
)
@settings_option
@click.option(
    "--gpu-memory", metavar="SIZE", show_default="not judged", help="Of each GPU; exit 1 where the step does not fit."
)
@click.option(
    "--search",
    is_flag=True,
    help="Find the layouts of --gpus that fit --gpu-memory, with the checkpointing and microbatches each needs.",
)
@click.option("--gpus", type=int, metavar="N", show_default="none", help="How many GPUs are searched for.")
@click.option(
    "--html",
    metavar="FILE",
    type=click.Path(),
    show_default="no page",
    help="Draw the memory of a step over its course: one page, readable offline.",
)
@hub_options
@output_options
@with_global_options
def command(
    model: str | None,
    no_loss: bool,
    loss_fp32: bool,
    recipe: str | None,
    settings: Sequence[str],
    html: str | None,
    search: bool,
    as_json: bool,
    report_file: str | None,
    **options: Any,
) -> int:
    """Count the memory of a training step on each rank, from config.json alone; no weights, no GPU, no other rank."""
    from ckptx.report.forecast import forecast_text, forecast_verdict
    from ckptx.report.forecast_search import search_text, search_verdict

    given = {name: value for name, value in options.items() if value is not None}
    if search:
        given["search"] = True
    _refuse(model, recipe, settings, given, no_loss, loss_fp32)
    if no_loss or loss_fp32:
        given["loss"] = "none" if no_loss else "whole"
    if html is not None and report_file is not None and Path(html) == Path(report_file):
        raise click.UsageError(f"{html}: is named for both --report and --html", click.get_current_context())

    if search and html is not None:
        raise click.UsageError("--html: draws one step, and a search has many", click.get_current_context())

    def work(log: Log) -> ForecastReport | SearchReport:
        try:
            from ckptx.api.forecast import forecast
        except ImportError as error:  # it imports torch
            raise missing_package("forecast", error) from error
        made: ForecastReport | SearchReport = forecast(model, recipe=recipe, settings=settings, log=log, **given)
        return made

    gc.enable()  # models, unlike catalogs, are full of cycles
    output = Output(as_json=as_json, report_file=report_file, pages=_pages(model or recipe or "", html))

    def text(report: ForecastReport | SearchReport) -> str:
        if isinstance(report, SearchReport):
            return search_text(report, output.red)
        return forecast_text(report, output.red)

    def verdict(report: ForecastReport | SearchReport) -> str:
        return search_verdict(report) if isinstance(report, SearchReport) else forecast_verdict(report)

    return output.run("forecast", work, text, verdict)


def _refuse(
    model: str | None,
    recipe: str | None,
    settings: Sequence[str],
    given: Mapping[str, Any],
    no_loss: bool,
    loss_fp32: bool,
) -> None:
    """Raises a UsageError where options contradict each other."""
    context = click.get_current_context()
    flags = {param.name: param.opts[0] for param in context.command.params}
    said = ""
    if recipe is None:
        if model is None:
            said = "Missing argument 'MODEL'; a config.json, a directory with one, or a Hub id, or give --recipe"
        elif settings:
            said = "--set: changes a recipe, needed --recipe with it"
    else:
        beside = [flags[name] for name in given if name not in _BESIDE_A_RECIPE]
        beside += [flag for flag, is_given in (("--no-loss", no_loss), ("--loss-fp32", loss_fp32)) if is_given]
        if model is not None:
            said = f"{model}: is a second model beside --recipe {recipe}, needed one of them"
        elif beside:
            said = f"{beside[0]}: the recipe says what is trained; change it by --set KEY=VALUE, or leave out --recipe"
    if no_loss and loss_fp32:
        said = "--no-loss, --loss-fp32: name two losses, needed one of them"
    if said:
        raise click.UsageError(said, context)


def _pages(subject: str, html: str | None) -> dict[str, Callable[[Report], str]]:
    """What is written beside the report, and what makes it when it is."""

    def page(report: Report) -> str:
        from ckptx.report.forecast_html import forecast_page

        return forecast_page(report, subject)

    return {} if html is None else {html: page}
