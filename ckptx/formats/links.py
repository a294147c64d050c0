"""Links in a checkpoint that lead out of it.

They are followed, as every loader does: link farms keep their weights elsewhere, and so does the Hub's cache. But a
link in a directory from a stranger can name a text of the user's own, and what is carried into an output may be handed
on. So what came through one is named.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def leading_out(root: Path, names: Iterable[str]) -> list[tuple[str, Path]]:
    """The files of a checkpoint that lie outside of it, each with where it lies.

    Args:
        root: Directory of the checkpoint.
        names: Of files in it; a directory on the way may be the link.

    Returns:
        In the order of `names`. The `blobs` of the Hub cache that a snapshot belongs to are no other place.
    """
    home = Path(os.path.realpath(root))
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else None
    found = []
    for name in names:
        real = Path(os.path.realpath(home / name))
        if home not in real.parents and (blobs is None or blobs not in real.parents):
            found.append((name, real))
    return found
