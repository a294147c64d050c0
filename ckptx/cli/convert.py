"""`ckptx convert hf2dcp` and `ckptx convert dcp2hf`."""

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
from ckptx.cli.options import (
    GLOBAL,
    HUB,
    OUTPUT,
    SETTINGS,
    SectionedCommand,
    SectionedGroup,
    global_options,
    need_command,
)
from ckptx.cli.output import Output


@click.group(
    cls=SectionedGroup,
    context_settings=SETTINGS,
    params=global_options(),
    sections=[GLOBAL],
    examples=["ckptx convert hf2dcp MODEL MODEL-dcp", "ckptx convert dcp2hf MODEL-dcp MODEL-back"],
)
def command(**_: object) -> None:
    """HF safetensors to a torch DCP and back, at the speed of a file copy."""
    need_command()


@command.command(
    "hf2dcp",
    cls=SectionedCommand,
    context_settings=SETTINGS,
    sections=[CONTENT, LAYOUT, RUN, HUB, OUTPUT, GLOBAL],
    examples=[
        "ckptx convert hf2dcp MODEL MODEL-dcp",
        "ckptx convert hf2dcp MODEL MODEL-dcp --tp 4 --pp 2",
        "ckptx convert hf2dcp org/name NAME-dcp --revision main --dtype bf16",
    ],
)
@click.argument("src", metavar="SRC", type=click.Path())
@click.argument("dst", metavar="DST", type=click.Path())
@names_option("disk")
@prefix_option("TEXT", "none", "Added to every name.")
@files_option
@layout_options
@common_options
def hf2dcp(src: str, dst: str, as_json: bool, report_file: str | None, **options: Any) -> int:
    """Convert an HF checkpoint (safetensors or pytorch_model*.bin) into a torch DCP."""
    return _run("hf2dcp", src, dst, as_json, report_file, options)


@command.command(
    "dcp2hf",
    cls=SectionedCommand,
    context_settings=SETTINGS,
    sections=[CONTENT, RUN, HUB, OUTPUT, GLOBAL],
    examples=[
        "ckptx convert dcp2hf MODEL-dcp MODEL-back",
        "ckptx convert dcp2hf step-1000 MODEL-1000 --base MODEL --max-shard-size 5GB",
        "ckptx convert dcp2hf step-1000 tensors --base none",
    ],
)
@click.argument("src", metavar="SRC", type=click.Path())
@click.argument("dst", metavar="DST", type=click.Path())
@names_option("disk")
@prefix_option("auto|TEXT", "auto", "Removed from names; auto finds the one that leaves names of the model.")
@optimizer_option("drop, as safetensors hold the model alone")
@base_option
@click.option("--max-shard-size", metavar="SIZE", show_default="5GB", help="Tensors in one safetensors file.")
@click.option("--index", metavar="auto|always", show_default="auto", help="An index beside a single file, too.")
@common_options
def dcp2hf(src: str, dst: str, as_json: bool, report_file: str | None, **options: Any) -> int:
    """Convert a torch DCP, or sharded safetensors, in any layout into an HF directory."""
    return _run("dcp2hf", src, dst, as_json, report_file, options)


def _run(direction: str, src: str, dst: str, as_json: bool, report_file: str | None, options: dict[str, Any]) -> int:
    from ckptx.api.convert import convert
    from ckptx.report.text import conversion_text

    output = Output(as_json=as_json, report_file=report_file)
    return output.run(
        f"convert {direction}",
        lambda log: convert(
            direction, src, dst, on_progress=output.progress, log=log, report_file=output.report_file, **options
        ),
        conversion_text,
    )
