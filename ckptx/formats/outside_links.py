"""Find symbolic links in a checkpoint that point outside it.

Links are followed, as by every loader: the Hub cache, for example, keeps its weights in another directory. But a link
in an untrusted directory can point to a private file of the user, and files copied to an output may be published. So
the files behind such links are reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptx.storage.interface import Location, Source


def find_outside_links(source: Source, names: Iterable[str]) -> list[tuple[str, Location]]:
    """Return the files of a checkpoint that resolve to a location outside it, each with that location.

    Args:
        source: Directory of the checkpoint.
        names: Names of files in it; a parent directory may be the link.

    Returns:
        (name, resolved location), in the order of `names`. The `blobs` of a snapshot in the Hub cache count as inside.
    """
    root = source.absolute_locations()[-1]
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else None
    found = []
    for name in names:
        resolved = source.absolute_locations(name)[-1]
        parents = tuple(_parents(resolved))
        if root not in parents and (blobs is None or blobs not in parents):
            found.append((name, resolved))
    return found


def _parents(location: Location) -> Iterator[Location]:
    """Iterate over the parent directories of a location."""
    while location.parent != location:
        location = location.parent
        yield location
