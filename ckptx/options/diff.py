"""Options of `diff`."""

# No `from __future__ import annotations`: `settings_of` reads the annotations of fields as objects.

from pathlib import Path
from typing import Annotated, ClassVar

from ckptx.options.option import Argument
from ckptx.options.source import LogOptions, TwoCheckpointOptions


class DiffOptions(LogOptions, TwoCheckpointOptions, kw_only=False):
    """Options of `diff`."""

    command: ClassVar[str] = "diff"

    a: Annotated[str | Path, Argument("First checkpoint: a directory, file, index or Hub id.", "A")]
    b: Annotated[str | Path, Argument("Second checkpoint.", "B")]
