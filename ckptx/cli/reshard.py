"""`ckptx reshard`."""

from __future__ import annotations

from typing import Any

import click

from ckptx.cli.conversion_options import (
    CONTENT,
    LAYOUT,
    RUN,
    base_option,
    common_options,
    files_option,
    layout_options,
    names_option,
    optimizer_option,
    prefix_option,
)
from ckptx.cli.options import GLOBAL, HUB, OUTPUT, SETTINGS, SectionedCommand
from ckptx.cli.output import Output


@click.command(
    "reshard",
    cls=SectionedCommand,
    context_settings=SETTINGS,
    sections=[LAYOUT, CONTENT, RUN, HUB, OUTPUT, GLOBAL],
    examples=[
        "ckptx reshard MODEL MODEL-tp4-pp2 --tp 4 --pp 2",
        "ckptx reshard step-1000 step-1000-tp2 --tp 2 --base MODEL",
        "ckptx reshard MODEL MODEL-tp8 --tp 8 --to dcp --dry-run",
        "torchrun --nproc-per-node 4 -m ckptx reshard MODEL MODEL-tp4-pp2 --tp 4 --pp 2",
    ],
)
@click.argument("src", metavar="SRC", type=click.Path())
@click.argument("dst", metavar="DST", type=click.Path())
@click.option(
    "--to", metavar="dcp|safetensors", show_default="the family of SRC", help="A DCP, or safetensors by rank."
)
@names_option("disk into a DCP, model into safetensors")
@prefix_option(
    "auto|TEXT", "auto", "Of a DCP: that of the model's names, found or given. Else added to those of a DCP."
)
@optimizer_option("keep into a DCP, drop into safetensors")
@base_option
@files_option
@layout_options
@common_options
def command(src: str, dst: str, as_json: bool, report_file: str | None, **options: Any) -> int:
    """Cut a checkpoint for a mesh of TP x PP x FSDP, so that each rank reads its own files.

    Stock loaders read the result at any other mesh, too.
    """
    from ckptx.api.reshard import reshard
    from ckptx.report.text import conversion_text

    output = Output(as_json=as_json, report_file=report_file)
    return output.run(
        "reshard",
        lambda log: reshard(src, dst, on_progress=output.progress, log=log, report_file=output.report_file, **options),
        conversion_text,
    )
