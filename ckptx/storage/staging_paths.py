"""Paths of the staging directory of an output: a hidden directory next to the target."""

from __future__ import annotations

import os
from pathlib import Path

from ckptx.storage.interface import Location


def is_in_staging_directory(path: Location) -> bool:
    """Return True for a staging directory, or anything inside one, by the names in the path; links are resolved."""
    location: Location = path.resolve() if isinstance(path, Path) else path
    while location.parent != location:
        if location.name.startswith(".") and location.name.endswith(".ckptx-partial"):
            return True
        location = location.parent
    return False


def staging_paths(target: Path) -> tuple[Path, Path]:
    """Return the paths of the tree and the journal of a run that writes `target`, see `ckptx.publishing.staging`."""
    resolved = Path(os.path.realpath(target))
    root = resolved.parent / f".{resolved.name}.ckptx-partial"
    return root / "tree", root / "journal"
