"""`ckptx reshard`."""

from __future__ import annotations

from ckptx.cli.command import CommandCall, define_command
from ckptx.cli.output import Output


@define_command(
    "reshard",
    examples=[
        "ckptx reshard MODEL MODEL-tp4-pp2 --tp 4 --pp 2",
        "ckptx reshard step-1000 step-1000-tp2 --tp 2 --base MODEL",
        "ckptx reshard MODEL MODEL-tp8 --tp 8 --to dcp --dry-run",
        "torchrun --nproc-per-node 4 -m ckptx reshard MODEL MODEL-tp4-pp2 --tp 4 --pp 2",
    ],
)
def command(call: CommandCall) -> int:
    """Reshard a checkpoint for a TP x PP x FSDP mesh, so that each rank reads its own files.

    The loaders of torch and transformers can read the result on any other mesh.
    """
    from ckptx.api.reshard import reshard
    from ckptx.report.text import conversion_text

    output = Output(call.output)
    return output.run(
        call.name,
        lambda log: reshard(**call.values, log=log, on_progress=output.progress, report_file=output.report_file),
        conversion_text,
    )
