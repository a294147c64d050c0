"""`ckptx inspect`."""

from __future__ import annotations

import click

from ckptx.cli.conversion_options import prefix_of_source
from ckptx.cli.options import (
    GLOBAL,
    HUB,
    SETTINGS,
    Section,
    SectionedCommand,
    hub_options,
    with_global_options,
)  # fmt: skip
from ckptx.cli.output import Output


@click.command(
    "inspect",
    cls=SectionedCommand,
    context_settings=SETTINGS,
    sections=[
        Section("Content", ["prefix"]),
        Section("Output", ["tensors", "ranks", "match", "html", "as_json"]),
        HUB,
        GLOBAL,
    ],
    examples=[
        "ckptx inspect MODEL",
        "ckptx inspect step-1000 --match '*embed*'",
        "ckptx inspect MODEL-tp4-pp2 --ranks --html layout.html",
    ],
)
@click.argument("path", metavar="PATH", type=click.Path())
@click.option("--tensors", is_flag=True, help="List every tensor.")
@click.option("--ranks", is_flag=True, help="Say what each rank holds, and how even that is.")
@click.option(
    "--match",
    metavar="GLOB",
    show_default="all",
    help="List tensors whose name matches; --ranks and --html keep to these.",
)
@click.option(
    "--html",
    metavar="FILE",
    type=click.Path(),
    show_default="no page",
    help="Draw the layout, which rank holds what, into FILE: one page, readable offline.",
)
@prefix_of_source
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@hub_options
@with_global_options
def command(
    path: str,
    tensors: bool,
    ranks: bool,
    match: str | None,
    html: str | None,
    prefix: str | None,
    as_json: bool,
    revision: str | None,
    token: str | None,
    cache_dir: str | None,
) -> int:
    """Say what a checkpoint holds. Reads headers, no tensor data."""
    from ckptx.api.inspect import inspect
    from ckptx.report.text import inspect_text

    return Output(as_json=as_json).run(
        "inspect",
        lambda log: inspect(
            path,
            tensors=tensors,
            match=match,
            ranks=ranks,
            html=html,
            prefix=prefix,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
        ),
        inspect_text,
    )
