"""`ckptx robustness`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import click

from ckptx.cli.command import CommandCall, define_command
from ckptx.cli.output import Output
from ckptx.report.documents.robustness import FaultsReport, RobustnessReport
from ckptx.report.report import Report


@define_command(
    "robustness",
    examples=[
        "ckptx robustness llama_tiny",
        "ckptx robustness llama_tiny --set layout.tp=2 --html robustness.html --junit robustness.xml",
        "ckptx robustness --inject list",
    ],
)
def command(call: CommandCall) -> int:
    """Run the training of RECIPE several times, and test that its checkpoints can be reloaded, exported,
    resharded and resumed exactly.

    A recipe is a YAML file with model, data, batch sizes, mesh and optimizer of a short training run, or with the
    command of your own trainer: https://ckptx.github.io/ckptx/recipes/

    Exit 1 if a check fails. RECIPE is required, except with --inject list.
    """
    from ckptx.report.robustness import faults_text, progress_text, robustness_text, robustness_verdict
    from ckptx.robustness_suite import known_faults, robustness

    if call.values.get("inject") == "list":
        return Output(call.output).run(
            call.name,
            lambda log: FaultsReport(command="robustness", faults=known_faults()),
            faults_text,
            faults_text,
        )
    if "recipe" not in call.values:
        raise click.UsageError("Missing argument 'RECIPE'", click.get_current_context())
    gc.enable()  # models, unlike catalogs, are full of reference cycles
    output = Output(call.output, _pages(call.values["recipe"], call.output))
    num_printed: int | None = None  # number of phases that are printed; None if nothing is printed yet

    def print_phase(report: RobustnessReport) -> None:
        nonlocal num_printed
        if output.print_partial(report, lambda partial: progress_text(partial, output.red, num_printed)):
            num_printed = len(report.phases)

    return output.run(
        call.name,
        lambda log: robustness(**call.values, log=log, on_phase=print_phase),
        lambda report: robustness_text(report, output.red, num_printed),
        robustness_verdict,
    )


def _pages(recipe: str, output: Any) -> dict[str, Callable[[Report], str]]:
    """Return the files to write with the report: path -> function that makes the content."""

    def make_page(report: Report) -> str:
        from ckptx.report.robustness_html import robustness_page

        return robustness_page(report, recipe)

    def make_junit(report: Report) -> str:
        from ckptx.report.junit import junit_xml

        return junit_xml(report, recipe)

    files = {output.html: make_page, output.junit: make_junit}
    return {str(path): make_content for path, make_content in files.items() if path is not None}
