"""`ckptx verify`."""

from __future__ import annotations

from typing import Any

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
from ckptx.errors import UsageError

_RUN = [
    "run", "tp", "dp_shard", "tp_plan", "device", "backend", "compute_dtype", "activation_checkpointing", "ac_scope",
    "compile", "backward", "trust_remote_code",
]  # fmt: skip


@click.command(
    "verify",
    cls=SectionedCommand,
    context_settings=SETTINGS,
    sections=[Section("Comparison", ["dtype"]), Section("Run the models", _RUN), OUTPUT, GLOBAL],
    examples=[
        "ckptx verify MODEL MODEL-dcp",
        "ckptx verify MODEL MODEL-bf16 --dtype bf16",
        "ckptx verify MODEL MODEL-tp2 --run --tp 2 --dp-shard 2",
    ],
)
@click.argument("reference", metavar="REFERENCE")
@click.argument("checkpoint", metavar="CHECKPOINT")
@click.option("--dtype", metavar="auto|bf16|fp16|fp32", help="Cast the reference first, as convert --dtype casts.")
@click.option("--run", is_flag=True, help="Load both into transformers models and compare what they compute.")
@click.option("--tp", "--tensor-parallel-size", "tp", type=int, metavar="N", help="Ranks that share each tensor (1).")
@click.option("--dp-shard", type=int, metavar="N", help="FSDP ranks inside each TP rank (1).")
@click.option("--tp-plan", metavar="FILE", type=click.Path(), help='JSON {"pattern": "style"} in model names.')
@click.option("--device", metavar="auto|cpu|cuda", help="What to compute on.")
@click.option("--backend", metavar="auto|gloo|nccl", help="What ranks talk through.")
@click.option("--compute-dtype", metavar="auto|bf16|fp16|fp32", help="Of the parameters; auto is that of the config.")
@click.option("--activation-checkpointing", metavar="none|full|submodule|selective", help="What layers recompute.")
@click.option("--ac-scope", metavar="all|language|vision|audio", help="Which layers that is about.")
@click.option("--compile", is_flag=True, default=None, help="Compile each layer.")
@click.option("--backward/--no-backward", default=None, help="Compare gradients of one step, too (yes).")
@click.option("--trust-remote-code", is_flag=True, default=None, help="Run code from them for an unknown class.")
@output_options
@with_global_options
def command(
    reference: str, checkpoint: str, dtype: str | None, run: bool, as_json: bool, report_file: str | None, **given: Any
) -> int:
    """Compare the contents of two checkpoints bit for bit, across formats; with --run, what they compute."""
    from ckptx.formats.hub import resolve
    from ckptx.report.report import Report
    from ckptx.report.text import verify_text

    text = verify_text
    if run:
        from ckptx.report.running import run_text as text
    output = Output(as_json=as_json, report_file=report_file)
    options = {name: value for name, value in given.items() if value is not None}

    def compare(report: Report) -> Report:
        if not run:
            from ckptx.verification.bits import verify

            for name in options:
                raise UsageError(f"--{name.replace('_', '-')}: is about running the models, needed --run with it")
            return verify(
                resolve(reference),
                resolve(checkpoint),
                dtype=dtype or "auto",
                on_progress=output.progress,
                report=report,
            )
        from ckptx.verification.running import verify_running

        if dtype is not None:
            raise UsageError("--dtype: is about comparing bytes; with --run, --compute-dtype says what to compute in")
        return verify_running(resolve(reference), resolve(checkpoint), report=report, **options)

    return output.run("verify", compare, text)
