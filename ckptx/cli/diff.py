"""`ckptx diff`."""

from __future__ import annotations

from ckptx.cli.command import CommandCall, define_command
from ckptx.cli.output import Output


@define_command("diff", examples=["ckptx diff MODEL MODEL-dcp"])
def command(call: CommandCall) -> int:
    """Compare names, shapes, dtypes and tied weights of two checkpoints of any format. Exit 1 if they differ.

    The command reads headers and, if a tied weight is stored twice, three samples of 64 KiB of each copy. It does not
    compare other contents; verify does. A tied weight that one checkpoint stores under one name and the other under two
    is listed, but does not count as a difference.
    """
    from ckptx.comparison.headers import diff
    from ckptx.report.text import diff_text

    return Output(call.output).run(call.name, lambda log: diff(**call.values, log=log), diff_text)
