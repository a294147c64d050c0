"""`ckptx inspect`."""

from __future__ import annotations

from ckptx.cli.command import CommandCall, define_command
from ckptx.cli.output import Output


@define_command(
    "inspect",
    examples=[
        "ckptx inspect MODEL",
        "ckptx inspect step-1000 --match '*embed*'",
        "ckptx inspect MODEL-tp4-pp2 --ranks --html layout.html",
    ],
)
def command(call: CommandCall) -> int:
    """Summarize a checkpoint: format, model, tensors, dtypes and layout.

    The command reads headers and, if a tied weight is stored twice, three samples of 64 KiB of each copy.
    """
    from ckptx.api.inspect import inspect
    from ckptx.report.text import inspect_text

    return Output(call.output).run(call.name, lambda log: inspect(**call.values, log=log), inspect_text)
