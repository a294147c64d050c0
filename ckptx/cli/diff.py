"""`ckptx diff`."""

from __future__ import annotations

import click

from ckptx.cli.conversion_options import prefix_of_source
from ckptx.cli.options import GLOBAL, HUB, SETTINGS, Section, SectionedCommand, hub_options, with_global_options
from ckptx.cli.output import Output


@click.command(
    "diff",
    cls=SectionedCommand,
    context_settings=SETTINGS,
    sections=[Section("Comparison", ["prefix"]), Section("Output", ["as_json"]), HUB, GLOBAL],
    examples=["ckptx diff MODEL MODEL-dcp"],
)
@click.argument("a", metavar="A", type=click.Path())
@click.argument("b", metavar="B", type=click.Path())
@prefix_of_source
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@hub_options
@with_global_options
def command(a: str, b: str, prefix: str | None, as_json: bool, **hub: str | None) -> int:
    """Compare names, shapes, dtypes and ties of two checkpoints of any format. Reads headers, no tensor data."""
    from ckptx.comparison.headers import diff
    from ckptx.report.text import diff_text

    return Output(as_json=as_json).run("diff", lambda log: diff(a, b, prefix=prefix, **hub), diff_text)
