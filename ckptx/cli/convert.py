"""`ckptx convert hf2dcp` and `ckptx convert dcp2hf`."""

from __future__ import annotations

from typing import Any

import click

from ckptx.cli.options import (
    GLOBAL,
    HUB,
    OUTPUT,
    SETTINGS,
    F,
    Section,
    SectionedCommand,
    SectionedGroup,
    global_options,
    hub_options,
    output_options,
    with_global_options,
)
from ckptx.cli.output import Output

_CONTENT = Section(
    "Content", ["dtype", "prefix", "tied", "tie_missing", "base", "max_shard_size", "files", "trust_remote_code"]
)
_RUN = Section("Run", ["workers", "max_memory", "dry_run", "overwrite", "resume"])


def _common(function: F) -> F:
    """The options of both directions."""
    for option in reversed(
        [
            click.option(
                "--dtype",
                metavar="auto|bf16|fp16|fp32",
                help="Cast floats; auto keeps each tensor's own. Integers, scales, and fp32 the model needs stay.",
            ),
            click.option(
                "--prefix", metavar="auto|TEXT", help="hf2dcp: added to names. dcp2hf: removed; auto finds it."
            ),
            click.option(
                "--tied",
                metavar="auto|alias|copy|drop",
                help="Tied names: as files and config say; one copy that names share; copies; left out.",
            ),
            click.option(
                "--tie-missing", is_flag=True, default=None, help="Tie a head that is missing though not declared tied."
            ),
            click.option(
                "--trust-remote-code", is_flag=True, default=None, help="Run code from SRC for an unknown class."
            ),
            click.option("--workers", type=int, metavar="N", help="Threads; the output does not depend on it."),
            click.option("--max-memory", metavar="SIZE", help="Buffers in flight (256MB)."),
            click.option("--dry-run", is_flag=True, default=None, help="Say what would be written; write nothing."),
            click.option("--overwrite", is_flag=True, default=None, help="Replace DST atomically."),
            click.option("--resume", is_flag=True, default=None, help="Continue an interrupted run."),
        ]
    ):
        function = option(function)
    return with_global_options(output_options(hub_options(function)))


@click.group(
    cls=SectionedGroup,
    context_settings=SETTINGS,
    params=global_options(),
    sections=[GLOBAL],
    examples=["ckptx convert hf2dcp MODEL MODEL-dcp", "ckptx convert dcp2hf MODEL-dcp MODEL-back"],
)
def command(**_: object) -> None:
    """HF safetensors to a torch DCP and back, at the speed of a file copy."""


@command.command(
    "hf2dcp",
    cls=SectionedCommand,
    context_settings=SETTINGS,
    sections=[_CONTENT, _RUN, HUB, OUTPUT, GLOBAL],
    examples=[
        "ckptx convert hf2dcp MODEL MODEL-dcp",
        "ckptx convert hf2dcp MODEL MODEL-dcp --dry-run",
        "ckptx convert hf2dcp org/name NAME-dcp --revision main --dtype bf16",
    ],
)
@click.argument("src", metavar="SRC")
@click.argument("dst", metavar="DST", type=click.Path())
@click.option("--files", type=int, metavar="N", help="Number of .distcp files; the size decides.")
@_common
def hf2dcp(src: str, dst: str, as_json: bool, report_file: str | None, **options: Any) -> int:
    """Convert an HF checkpoint (safetensors or pytorch_model*.bin) into a torch DCP."""
    return _run("hf2dcp", src, dst, as_json, report_file, options)


@command.command(
    "dcp2hf",
    cls=SectionedCommand,
    context_settings=SETTINGS,
    sections=[_CONTENT, _RUN, HUB, OUTPUT, GLOBAL],
    examples=[
        "ckptx convert dcp2hf MODEL-dcp MODEL-back",
        "ckptx convert dcp2hf step-1000 MODEL-1000 --base MODEL --max-shard-size 5GB",
        "ckptx convert dcp2hf step-1000 tensors --base none",
    ],
)
@click.argument("src", metavar="SRC")
@click.argument("dst", metavar="DST", type=click.Path())
@click.option("--base", metavar="HF|none", help="Checkpoint that gives config, tokenizer and other files.")
@click.option("--max-shard-size", metavar="SIZE", help="Tensors in one safetensors file (5GB).")
@_common
def dcp2hf(src: str, dst: str, as_json: bool, report_file: str | None, **options: Any) -> int:
    """Convert a torch DCP, as any trainer writes it, into an HF directory."""
    return _run("dcp2hf", src, dst, as_json, report_file, options)


def _run(direction: str, src: str, dst: str, as_json: bool, report_file: str | None, options: dict[str, Any]) -> int:
    from ckptx.conversion.convert import convert
    from ckptx.report.text import conversion_text

    output = Output(as_json=as_json, report_file=report_file)
    return output.run(
        f"convert {direction}",
        lambda report: convert(direction, src, dst, on_progress=output.progress, report=report, **options),
        conversion_text,
    )
