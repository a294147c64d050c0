"""Valid arguments of each command, from their names, so that tests also cover new commands."""

from __future__ import annotations

from pathlib import Path

from ckptx.options.commands import COMMANDS
from ckptx.options.option import Argument, settings_of


def arguments_of(words: str, checkpoint: str | Path, out: str | Path, adapter: str | Path | None = None) -> list[str]:
    """Return the positional arguments of a command.

    Args:
        words: The command, as in `COMMANDS`.
        checkpoint: Checkpoint to pass for every argument that is not named below.
        out: Directory to pass for `dst`.
        adapter: Adapter to pass for `adapter`; None for `checkpoint`.
    """
    places = {"dst": out, "recipe": "llama_tiny", "adapter": adapter or checkpoint}
    settings = settings_of(COMMANDS[words].option_tables[0])
    names = [name for name, each in settings.items() if isinstance(each.annotation, Argument) and each.is_path]
    return [str(places.get(name, checkpoint)) for name in names]
