"""`ckptx inspect`."""

from __future__ import annotations

import click

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
    sections=[Section("Output", ["tensors", "match", "as_json"]), HUB, GLOBAL],
    examples=["ckptx inspect MODEL", "ckptx inspect step-1000 --match '*embed*'"],
)
@click.argument("path", metavar="PATH")
@click.option("--tensors", is_flag=True, help="List every tensor.")
@click.option("--match", metavar="GLOB", help="List tensors whose name matches.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@hub_options
@with_global_options
def command(
    path: str,
    tensors: bool,
    match: str | None,
    as_json: bool,
    revision: str | None,
    token: str | None,
    cache_dir: str | None,
) -> int:
    """Say what a checkpoint holds. Reads headers, no tensor data."""
    from ckptx.formats.hub import resolve
    from ckptx.inspection import inspect
    from ckptx.report.text import inspect_text

    return Output(as_json=as_json).run(
        "inspect",
        lambda report: inspect(
            resolve(path, revision=revision, token=token, cache_dir=cache_dir), tensors=tensors, match=match
        ),
        inspect_text,
    )
