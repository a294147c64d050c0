"""Read the manifest beside a checkpoint, or say in one line why it is ignored.

No loader needs a manifest, so a damaged one never stands in the way of complete tensor files; and it is never passed
over silently, because it would have given the original files back.
"""

from __future__ import annotations

import os
from pathlib import Path

from ckptx.catalog.manifest import Manifest
from ckptx.errors import CkptxError, InputError, UnsupportedError
from ckptx.formats.sidecars import MANIFEST
from ckptx.storage.files import refuse_large
from ckptx.untrusted.limits import MANIFEST_BYTES


def manifest_in(root: Path, notes: list[str]) -> Manifest | None:
    """Read the manifest in a directory.

    Args:
        root: The directory.
        notes: Receives one line if there is a manifest that cannot be read, or that is none.

    Returns:
        None if there is none, or if it is ignored.
    """
    path = root / MANIFEST
    if not os.path.lexists(path):
        return None
    from ckptx.catalog.manifest_parser import read_manifest  # takes as long to import as most headers take to read

    try:
        return read_manifest(path)
    except (InputError, UnsupportedError) as error:
        notes.append(_note(error))
        return None


def note_no_file(root: Path, notes: list[str]) -> None:
    """Add the note of `manifest_in` for a manifest that is no regular file of a plausible size, without reading it."""
    path = root / MANIFEST
    if not os.path.lexists(path):
        return
    try:
        refuse_large(path, MANIFEST_BYTES)
    except InputError as error:
        notes.append(_note(error))


def _note(error: CkptxError) -> str:
    return f"{error}; ignored, the tensor files are read without it"
