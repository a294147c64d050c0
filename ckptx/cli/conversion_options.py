"""The options that `convert` and `reshard` share."""

from __future__ import annotations

from collections.abc import Callable

import click

from ckptx.cli.options import F, Section, hub_options, output_options, with_global_options, with_options
from ckptx.cli.run_options import mesh_options

CONTENT = Section(
    "Content",
    [
        "to", "dtype", "names", "prefix", "tied", "tie_missing", "allow_misfit", "allow_overflow", "optimizer", "base",
        "max_shard_size", "index", "files", "trust_remote_code",
    ],
)  # fmt: skip
LAYOUT = Section("Layout", ["tp", "pp", "dp_shard", "pp_split", "tp_plan"])
RUN = Section("Run", ["workers", "max_memory", "dry_run", "overwrite", "resume"])


_conversion_options = with_options(
    click.option(
        "--dtype",
        metavar="auto|base|bf16|fp16|fp32",
        show_default="auto",
        help="Cast floats; auto keeps each tensor's own, base is as the base has it. Integers, scales, and "
        "fp32 the model needs stay.",
    ),
    click.option(
        "--tied",
        metavar="auto|alias|copy|drop",
        show_default="auto",
        help="Tied names: as files and config say; one copy that names share; copies; left out.",
    ),
    click.option(
        "--tie-missing", is_flag=True, default=None, help="Tie a head that is missing though not declared tied."
    ),
    click.option(
        "--allow-misfit",
        is_flag=True,
        default=None,
        help="Take tensors whose names or shapes are not those of the config: a part of a model, padded rows.",
    ),
    click.option(
        "--allow-overflow",
        is_flag=True,
        default=None,
        help="Write numbers that are too large for --dtype as infinity. [default: exit 3]",
    ),
    click.option("--trust-remote-code", is_flag=True, default=None, help="Run code from SRC for an unknown class."),
    click.option(
        "--workers",
        type=int,
        metavar="N",
        show_default="one for each core, at most 16",
        help="Threads; the output does not depend on it.",
    ),
    click.option("--max-memory", metavar="SIZE", show_default="256MB", help="Buffers in flight."),
    click.option("--dry-run", is_flag=True, default=None, help="Say what would be written; write nothing."),
    click.option("--overwrite", is_flag=True, default=None, help="Replace DST atomically."),
    click.option("--resume", is_flag=True, default=None, help="Continue an interrupted run."),
)
_plan_option = click.option(
    "--tp-plan",
    metavar="FILE",
    type=click.Path(),
    show_default="that of the model",
    help='JSON {"pattern": "style"} in model names; goes before the plan of the model.',
)


def common_options(function: F) -> F:
    """What every conversion takes."""
    return with_global_options(output_options(hub_options(_conversion_options(function))))


def layout_options(function: F) -> F:
    """The mesh to cut for, and how."""
    return mesh_options(_plan_option(function))


def names_option(default: str) -> Callable[[F], F]:
    """`--names`; what it is by default depends on the output."""
    return click.option(
        "--names",
        metavar="disk|model|torchtitan",
        show_default=default,
        help="Names to write: as published, as in the model of transformers, or torchtitan's.",
    )


def optimizer_option(default: str) -> Callable[[F], F]:
    """`--optimizer`, of commands that read a DCP."""
    return click.option(
        "--optimizer", metavar="keep|drop", show_default=default, help="Optimizer state of a DCP; a DCP can keep it."
    )


def prefix_option(metavar: str, default: str, said: str) -> Callable[[F], F]:
    """`--prefix`, which is removed from the names of one format and added to those of the other."""
    return click.option("--prefix", metavar=metavar, show_default=default, help=said)


prefix_of_source = click.option(
    "--prefix",
    metavar="TEXT",
    show_default="detected",
    help='Prefix of the model\'s names in a DCP that holds several models; "" selects the names without a prefix.',
)
files_option = click.option(
    "--files",
    type=int,
    metavar="N",
    show_default="as the size asks for",
    help="Number of .distcp files, of each rank when cut.",
)
base_option = click.option(
    "--base",
    metavar="HF|none",
    show_default="SRC itself",
    help="For a DCP: checkpoint that gives config, tokenizer and other files.",
)
