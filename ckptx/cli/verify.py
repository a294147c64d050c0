"""`ckptx verify`."""

from __future__ import annotations

import gc
from typing import Any

import click

from ckptx.cli.conversion_options import layout_options, prefix_of_source
from ckptx.cli.options import (
    GLOBAL,
    HUB,
    OUTPUT,
    SETTINGS,
    Section,
    SectionedCommand,
    hub_options,
    output_options,
    with_global_options,
)  # fmt: skip
from ckptx.cli.output import Output
from ckptx.cli.run_options import step_options

_RUN = [
    "run", "tp", "pp", "pp_split", "dp_shard", "dp_replicate", "tp_plan", "schedule", "microbatches",
    "reference_memory", "gpu_memory", "device", "backend", "compute_dtype", "activation_checkpointing", "ac_scope",
    "compile", "backward", "trust_remote_code", "strict",
]  # fmt: skip


@click.command(
    "verify",
    cls=SectionedCommand,
    context_settings=SETTINGS,
    sections=[Section("Comparison", ["dtype", "prefix"]), Section("Run the models", _RUN), HUB, OUTPUT, GLOBAL],
    examples=[
        "ckptx verify MODEL MODEL-dcp",
        "ckptx verify MODEL MODEL-bf16 --dtype bf16",
        "ckptx verify MODEL MODEL-tp2 --run --tp 2 --dp-shard 2",
    ],
)
@click.argument("reference", metavar="REFERENCE", type=click.Path())
@click.argument("checkpoint", metavar="CHECKPOINT", type=click.Path())
@click.option(
    "--dtype",
    metavar="auto|bf16|fp16|fp32",
    show_default="auto",
    help="Cast the reference first, as convert --dtype casts; auto compares as stored.",
)
@prefix_of_source
@click.option("--run", is_flag=True, help="Load both into transformers models and compare what they compute.")
@layout_options
@step_options
@click.option(
    "--microbatches",
    type=int,
    metavar="N",
    show_default="one for each stage",
    help="Of a step of the pipeline, on each data rank.",
)
@click.option(
    "--reference-memory",
    metavar="SIZE",
    show_default="what is free",
    help="The reference may take; in pieces, if need be. On one rank: both sides.",
)
@click.option(
    "--gpu-memory",
    metavar="SIZE",
    show_default="not asked",
    help="Of each GPU: what cannot fit is refused before it runs, and measured.",
)
@click.option("--device", metavar="auto|cpu|cuda", show_default="auto", help="What to compute on.")
@click.option("--backend", metavar="auto|gloo|nccl", show_default="auto", help="What ranks talk through.")
@click.option(
    "--compute-dtype",
    metavar="auto|bf16|fp16|fp32",
    show_default="fp32",
    help="Of the parameters, whatever is stored; auto is as stored.",
)
@click.option("--compile", is_flag=True, default=None, help="Compile each layer.")
@click.option(
    "--backward/--no-backward", default=None, show_default="--backward", help="Compare gradients of one step, too."
)
@click.option("--trust-remote-code", is_flag=True, default=None, help="Run code from them for an unknown class.")
@click.option("--strict", is_flag=True, default=None, help="Exit 1, too, where nothing could be decided.")
@hub_options
@output_options
@with_global_options
def command(reference: str, checkpoint: str, run: bool, as_json: bool, report_file: str | None, **options: Any) -> int:
    """Compare the contents of two checkpoints bit for bit, across formats; with --run, what they compute."""
    from ckptx.api.verify import verify

    output = Output(as_json=as_json, report_file=report_file)
    if run:
        gc.enable()  # models, unlike catalogs, are full of cycles
        from ckptx.report.running import run_text, run_verdict

        return output.run(
            "verify", lambda log: verify(reference, checkpoint, run=True, log=log, **options), run_text, run_verdict
        )
    from ckptx.report.text import verify_text, verify_verdict

    options["on_progress"] = output.progress
    return output.run(
        "verify", lambda log: verify(reference, checkpoint, log=log, **options), verify_text, verify_verdict
    )
