"""`ckptx diff`."""

from __future__ import annotations

from ckptx.cli.command import CommandCall, define_command
from ckptx.cli.output import Output


@define_command("diff", examples=["ckptx diff MODEL MODEL-dcp"])
def command(call: CommandCall) -> int:
    """Compare names, shapes, dtypes and tied weights of two checkpoints of any format.

    Reads headers and, to compare tied weights, samples of 64 KiB.
    """
    from ckptx.comparison.headers import diff
    from ckptx.report.text import diff_text

    return Output(call.output).run(call.name, lambda log: diff(**call.values, log=log), diff_text)
