"""`ckptx verify`."""

from __future__ import annotations

import click

from ckptx.cli.options import (
    GLOBAL,
    OUTPUT,
    SETTINGS,
    Section,
    SectionedCommand,
    output_options,
    with_global_options,
)  # fmt: skip
from ckptx.cli.output import Output


@click.command(
    "verify",
    cls=SectionedCommand,
    context_settings=SETTINGS,
    sections=[Section("Comparison", ["dtype"]), OUTPUT, GLOBAL],
    examples=["ckptx verify MODEL MODEL-dcp", "ckptx verify MODEL MODEL-bf16 --dtype bf16"],
)
@click.argument("reference", metavar="REFERENCE")
@click.argument("checkpoint", metavar="CHECKPOINT")
@click.option(
    "--dtype",
    metavar="auto|bf16|fp16|fp32",
    default="auto",
    help="Cast the reference first, as convert --dtype casts.",
)
@output_options
@with_global_options
def command(reference: str, checkpoint: str, dtype: str, as_json: bool, report_file: str | None) -> int:
    """Compare the contents of two checkpoints bit for bit, across formats."""
    from ckptx.formats.hub import resolve
    from ckptx.report.text import verify_text
    from ckptx.verification.bits import verify

    output = Output(as_json=as_json, report_file=report_file)
    return output.run(
        "verify",
        lambda report: verify(
            resolve(reference), resolve(checkpoint), dtype=dtype, on_progress=output.progress, report=report
        ),
        verify_text,
    )
