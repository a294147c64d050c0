"""`ckptx robustness`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from ckptx.cli.options import (
    GLOBAL,
    SETTINGS,
    Section,
    SectionedCommand,
    output_options,
    with_global_options,
)  # fmt: skip
from ckptx.cli.output import Output
from ckptx.cli.run_options import settings_option
from ckptx.report.documents.robustness import FaultsReport, RobustnessReport
from ckptx.report.report import Report


@click.command(
    "robustness",
    cls=SectionedCommand,
    context_settings=SETTINGS,
    sections=[
        Section("Run", ["settings", "phases", "inject", "out", "device", "backend", "gpu_memory"]),
        Section("Output", ["html", "junit", "as_json", "report_file"]),
        GLOBAL,
    ],
    examples=[
        "ckptx robustness llama_tiny",
        "ckptx robustness llama_tiny --set layout.tp=2 --html robustness.html --junit robustness.xml",
        "ckptx robustness --inject list",
    ],
)
@click.argument("recipe", metavar="RECIPE", required=False, type=click.Path())
@settings_option
@click.option("--phases", metavar="LIST", show_default="all", help="Run these phases alone, by their numbers: 0-3,6.")
@click.option(
    "--inject",
    metavar="FAULT|list",
    show_default="none",
    help="Plant a fault, which has to be found; list says which there are.",
)
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(),
    show_default="a temporary one, kept on failure",
    help="Directory for everything that is written.",
)
@click.option("--device", metavar="auto|cpu|cuda", show_default="auto", help="What to compute on.")
@click.option("--backend", metavar="auto|gloo|nccl", show_default="auto", help="What ranks talk through.")
@click.option("--gpu-memory", metavar="SIZE", show_default="what it has", help="Of each GPU; the run has to fit.")
@click.option(
    "--html",
    metavar="FILE",
    type=click.Path(),
    show_default="no page",
    help="Write one page with phases, losses, memory and differences, readable offline.",
)
@click.option(
    "--junit",
    metavar="FILE",
    type=click.Path(),
    show_default="no file",
    help="Write JUnit XML, which CI reads: a test case for each phase and each oracle.",
)
@output_options
@with_global_options
def command(
    recipe: str | None,
    settings: Sequence[str],
    phases: str | None,
    inject: str | None,
    out: str | None,
    device: str,
    backend: str,
    gpu_memory: str | None,
    html: str | None,
    junit: str | None,
    as_json: bool,
    report_file: str | None,
) -> int:
    """Prove that what a training run saves can be read back, exported, re-laid and resumed; name what differs."""
    from ckptx.report.robustness import faults_text, progress_text, robustness_text, robustness_verdict
    from ckptx.robustness_suite import known_faults, robustness

    if inject == "list":
        return Output(as_json=as_json, report_file=report_file).run(
            "robustness",
            lambda log: FaultsReport(command="robustness", faults=known_faults()),
            faults_text,
            faults_text,
        )
    _refuse(recipe, [report_file, html, junit])
    assert recipe is not None
    gc.enable()  # models, unlike catalogs, are full of cycles
    output = Output(as_json=as_json, report_file=report_file, pages=_pages(recipe, html, junit))
    told: int | None = None

    def tell(report: RobustnessReport) -> None:
        nonlocal told
        if output.tell(report, lambda shown: progress_text(shown, output.red, told)):
            told = len(report.phases)

    return output.run(
        "robustness",
        lambda log: robustness(
            recipe,
            settings=settings,
            phases=phases,
            inject=inject,
            out=out,
            device=device or "auto",
            backend=backend or "auto",
            gpu_memory=gpu_memory,
            log=log,
            on_phase=tell,
        ),
        lambda report: robustness_text(report, output.red, told),
        robustness_verdict,
    )


def _refuse(recipe: str | None, files: Sequence[str | None]) -> None:
    """Raises a UsageError where no recipe is named, or where one file would get two documents."""
    if recipe is None:
        raise click.UsageError("Missing argument 'RECIPE'", click.get_current_context())
    named = [Path(each) for each in files if each is not None]
    twice = next((path for at, path in enumerate(named) if path in named[:at]), None)
    if twice is not None:
        raise click.UsageError(
            f"{twice}: is named for two of --report, --html and --junit", click.get_current_context()
        )


def _pages(recipe: str, html: str | None, junit: str | None) -> dict[str, Callable[[Report], str]]:
    """What is written beside the report, and what makes it when it is."""

    def page(report: Report) -> str:
        from ckptx.report.robustness_html import robustness_page

        return robustness_page(report, recipe)

    def cases(report: Report) -> str:
        from ckptx.report.junit import junit_xml

        return junit_xml(report, recipe)

    made = {html: page, junit: cases}
    return {path: make for path, make in made.items() if path is not None}
