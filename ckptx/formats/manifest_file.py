"""Read the manifest of a checkpoint, or report in one line why it is ignored.

The manifest is `ckptx.json`, which records the files that ckptx wrote, with digests, and how to restore the original
ones. No loader needs it, so a damaged one does not prevent reading complete tensor files; and it is never ignored
silently, because it would have allowed restoring the original files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptx.errors import CkptxError, InputError, ReadError, UnsupportedError
from ckptx.formats.sidecars import MANIFEST
from ckptx.storage.interface import Source
from ckptx.untrusted.limits import MAX_MANIFEST_BYTES

if TYPE_CHECKING:
    from ckptx.catalog.manifest import Manifest


def read_manifest(source: Source, notes: list[str]) -> Manifest | None:
    """Read the manifest in a directory.

    Args:
        source: The directory.
        notes: Receives one line if the manifest cannot be read or is invalid.

    Returns:
        None if there is no manifest, or if it is ignored.

    Raises:
        ReadError: The storage failed. The manifest may be valid, and checks that compare it must not be skipped.
    """
    if not source.listing().has(MANIFEST):
        return None
    from ckptx.catalog.manifest_parser import parse_manifest  # takes as long to import as most headers take to read

    try:
        return parse_manifest(source.read_small(MANIFEST, MAX_MANIFEST_BYTES), str(source.location / MANIFEST))
    except ReadError:
        raise
    except (InputError, UnsupportedError) as error:
        notes.append(_ignored_note(error))
        return None


def note_unreadable_manifest(source: Source, notes: list[str]) -> None:
    """Add the note of `read_manifest` for a manifest that is too large or not a regular file, without reading it.

    Raises:
        ReadError: The storage failed.
    """
    if not source.listing().has(MANIFEST):
        return
    try:
        source.refuse_large(MANIFEST, MAX_MANIFEST_BYTES)
    except ReadError:
        raise
    except InputError as error:
        notes.append(_ignored_note(error))


def _ignored_note(error: CkptxError) -> str:
    return f"{error}; manifest ignored"
