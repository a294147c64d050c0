"""The options of a mesh, and of what runs on one, that several commands share."""

from __future__ import annotations

import click

from ckptx.cli.options import with_options

mesh_options = with_options(
    click.option(
        "--tp",
        "--tensor-parallel-size",
        "tp",
        type=int,
        metavar="N",
        show_default="1",
        help="Ranks that share each tensor.",
    ),
    click.option(
        "--pp", "--pipeline-parallel-size", "pp", type=int, metavar="N", show_default="1", help="Pipeline stages."
    ),
    click.option("--dp-shard", type=int, metavar="N", show_default="1", help="FSDP ranks inside each TP rank."),
    click.option(
        "--pp-split",
        metavar="even|vllm|titan|hf|a,b,c",
        show_default="even",
        help="Layers per stage: by whose rule, or the counts themselves.",
    ),
)

# Of whatever runs a model.
step_options = with_options(
    click.option("--dp-replicate", type=int, metavar="N", show_default="1", help="Replicas of all of them (HSDP)."),
    click.option(
        "--schedule",
        metavar="gpipe|1f1b|interleaved1f1b|...",
        show_default="1f1b",
        help="Of the pipeline; also interleavedzerobubble, zbvzerobubble, dualpipev.",
    ),
    click.option(
        "--activation-checkpointing",
        metavar="none|full|submodule|selective",
        show_default="none",
        help="What layers recompute.",
    ),
    click.option(
        "--ac-scope", metavar="all|language|vision|audio", show_default="all", help="Which layers recompute, if any."
    ),
)

settings_option = click.option(
    "--set",
    "settings",
    metavar="KEY=VALUE",
    multiple=True,
    show_default="as the recipe says",
    help="Another value for a key of the recipe, as layout.tp=2; may be given several times.",
)
