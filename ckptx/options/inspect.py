"""Options of `inspect`."""

# No `from __future__ import annotations`: `settings_of` reads the annotations of fields as objects.

from dataclasses import KW_ONLY
from pathlib import Path
from typing import Annotated, ClassVar

from ckptx.options.option import REPORT, Argument, Option
from ckptx.options.source import HubOptions, LogOptions, SourcePrefixOptions


class InspectOptions(LogOptions, HubOptions, SourcePrefixOptions, kw_only=False):
    """Options of `inspect`."""

    command: ClassVar[str] = "inspect"

    path: Annotated[str | Path, Argument("Checkpoint: a directory, file, index or Hub id.", "PATH")]
    _: KW_ONLY
    tensors: Annotated[bool, Option("List every tensor.", REPORT)] = False
    ranks: Annotated[bool, Option("Show what each rank holds and how balanced the shards are.", REPORT)] = False
    match: Annotated[
        str | None,
        Option(
            "List the tensors whose names match; with --ranks or --html, show only these.",
            REPORT,
            metavar="GLOB",
            default="not set",
        ),
    ] = None
    html: Annotated[
        str | Path | None,
        Option(
            "Write a self-contained HTML page that shows which rank holds which shard.",
            REPORT,
            metavar="FILE",
            default="not set",
        ),
    ] = None
