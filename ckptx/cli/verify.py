"""`ckptx verify`."""

from __future__ import annotations

import gc

from ckptx.cli.command import CommandCall, define_command
from ckptx.cli.output import Output


@define_command(
    "verify",
    examples=[
        "ckptx verify MODEL MODEL-dcp",
        "ckptx verify MODEL MODEL-bf16 --dtype bf16",
        "ckptx verify MODEL MODEL-tp2 --run --tp 2 --dp-shard 2",
    ],
)
def command(call: CommandCall) -> int:
    """Compare two checkpoints bit for bit, across formats and layouts.

    With --run, load both models instead, and compare the tensors that they load (without optimizer state), and logits,
    loss and gradients on two sequences of random tokens (per data-parallel rank and microbatch). Exit 1 if they differ.

    On one rank, and with --pp but neither TP nor FSDP, results must be bit-identical, unless the device is not
    deterministic or --compile is set. Otherwise, differences within a tolerance are allowed: 8 times the rounding noise
    that is measured on the reference. If the tolerance is too large to detect errors, the result is inconclusive: exit
    0, or 1 with --strict.
    """
    from ckptx.api.verify import verify

    output = Output(call.output)
    if call.values.get("run"):
        gc.enable()  # models, unlike catalogs, are full of reference cycles
        from ckptx.report.verify_run import run_text, run_verdict

        return output.run(call.name, lambda log: verify(**call.values, log=log), run_text, run_verdict)
    from ckptx.report.text import verify_text, verify_verdict

    call.values["on_progress"] = output.progress
    return output.run(call.name, lambda log: verify(**call.values, log=log), verify_text, verify_verdict)
