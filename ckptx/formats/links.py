"""Links in a checkpoint that lead out of it.

They are followed, as every loader does: link farms keep their weights elsewhere, and so does the Hub's cache. But a
link in a directory from a stranger can name a text of the user's own, and what is carried into an output may be handed
on. So what came through one is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptx.storage.interface import Location, Source


def leading_out(source: Source, names: Iterable[str]) -> list[tuple[str, Location]]:
    """The files of a checkpoint that lie outside of it, each with where it lies.

    Args:
        source: Directory of the checkpoint.
        names: Of files in it; a directory on the way may be the link.

    Returns:
        In the order of `names`. The `blobs` of the Hub cache that a snapshot belongs to are no other place.
    """
    home = source.spellings()[-1]
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else None
    found = []
    for name in names:
        real = source.spellings(name)[-1]
        above = tuple(_above(real))
        if home not in above and (blobs is None or blobs not in above):
            found.append((name, real))
    return found


def _above(location: Location) -> Iterator[Location]:
    """Return the directories that a location lies in."""
    while location.parent != location:
        location = location.parent
        yield location
