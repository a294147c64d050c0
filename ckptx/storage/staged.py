"""Where an output lies while it is being made: a hidden directory beside its place."""

from __future__ import annotations

import os
from pathlib import Path


def is_being_written(path: Path) -> bool:
    """True for a staging directory, or anything inside one."""
    return any(part.startswith(".") and part.endswith(".ckptx-partial") for part in path.resolve().parts)


def staged(target: Path) -> tuple[Path, Path]:
    """Tree and journal of the run that is making `target`."""
    resolved = Path(os.path.realpath(target))
    root = resolved.parent / f".{resolved.name}.ckptx-partial"
    return root / "tree", root / "journal"
