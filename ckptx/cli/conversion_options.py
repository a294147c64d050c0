"""The options that `convert` and `reshard` share."""

from __future__ import annotations

import click

from ckptx.cli.options import F, Section, hub_options, output_options, with_global_options

CONTENT = Section(
    "Content",
    [
        "to", "dtype", "names", "prefix", "tied", "tie_missing", "optimizer", "base", "max_shard_size", "files",
        "trust_remote_code",
    ],
)  # fmt: skip
LAYOUT = Section("Layout", ["tp", "pp", "dp_shard", "pp_split", "tp_plan"])
RUN = Section("Run", ["workers", "max_memory", "dry_run", "overwrite", "resume"])


def common_options(function: F) -> F:
    """What every conversion takes."""
    for option in reversed(
        [
            click.option(
                "--dtype",
                metavar="auto|bf16|fp16|fp32",
                help="Cast floats; auto keeps each tensor's own. Integers, scales, and fp32 the model needs stay.",
            ),
            click.option(
                "--names",
                metavar="disk|model|torchtitan",
                help="Names to write: as published, as in the model of transformers, or torchtitan's.",
            ),
            click.option(
                "--prefix", metavar="auto|TEXT", help="hf2dcp: added to names. From a DCP: removed; auto finds it."
            ),
            click.option(
                "--tied",
                metavar="auto|alias|copy|drop",
                help="Tied names: as files and config say; one copy that names share; copies; left out.",
            ),
            click.option(
                "--tie-missing", is_flag=True, default=None, help="Tie a head that is missing though not declared tied."
            ),
            click.option("--optimizer", metavar="keep|drop", help="Optimizer state of a DCP; a DCP can keep it."),
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


def layout_options(function: F) -> F:
    """The mesh to cut for."""
    for option in reversed(
        [
            click.option(
                "--tp", "--tensor-parallel-size", "tp", type=int, metavar="N", help="Ranks that share each tensor (1)."
            ),
            click.option("--pp", "--pipeline-parallel-size", "pp", type=int, metavar="N", help="Pipeline stages (1)."),
            click.option("--dp-shard", type=int, metavar="N", help="FSDP ranks inside each TP rank (1)."),
            click.option(
                "--pp-split",
                metavar="even|vllm|titan|hf|a,b,c",
                help="Layers per stage: by whose rule, or the counts themselves (even).",
            ),
            click.option(
                "--tp-plan",
                metavar="FILE",
                type=click.Path(),
                help='JSON {"pattern": "style"} in model names; goes before the plan of the model.',
            ),
        ]
    ):
        function = option(function)
    return function


files_option = click.option("--files", type=int, metavar="N", help="Number of .distcp files, of each rank when cut.")
base_option = click.option(
    "--base", metavar="HF|none", help="For a DCP: checkpoint that gives config, tokenizer and other files."
)
