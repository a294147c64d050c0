"""Compare the present contents of a source with what was copied from it.

A mode, an owner or a hard link changes the change time of a file, and so does whoever rewrites it in place and sets its
modification time back (`rsync --inplace --times`, `touch -r`). Only its contents tell the two apart, so these are read
once more, of the files that were touched alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import ArchivedChunks, TensorEntry
from ckptx.errors import CkptxError
from ckptx.formats.hf.hf_metadata import source_of_config
from ckptx.formats.hf.reader import json_in
from ckptx.formats.registry import open_checkpoint
from ckptx.publishing.source_state import FileIdentities, header_texts
from ckptx.storage.files import changed
from ckptx.storage.interface import SourceFiles, StoredFile, name_below
from ckptx.transfer.digest_sink import digest_of
from ckptx.transfer.plan import CopyPlan
from ckptx.transfer.stream import TensorReader

_logger = logging.getLogger(__name__)


def require_unchanged(
    seen: FileIdentities,
    plan: CopyPlan,
    digests: Mapping[str, str],
    files: SourceFiles,
    opened: Catalog,
    is_decision_unchanged: Callable[[], bool],
    max_memory: int,
) -> None:
    """Check that the source still is what was copied.

    Args:
        seen: Its files, as they were when it was opened.
        plan: The copy.
        digests: Digest of each copied tensor, by target name.
        files: Files of the source.
        opened: The source, as it was when it was opened.
        is_decision_unchanged: Repeats the decisions that contents decided before the copy; True if none changed.
        max_memory: Bytes of buffers.

    Raises:
        InputError: A file is gone, was replaced, or has other contents.
    """
    touched = seen.touched()
    if not touched:
        return
    _logger.info("read again, as their change time is another: %s", ", ".join(map(str, touched)))
    first = next(iter(touched))
    names = {name for path in touched if (name := name_below(opened.root, path)) is not None}
    carried = {catalog.root / sidecar.name for catalog in seen.catalogs for sidecar in catalog.sidecars}
    for path in touched:
        is_known = name_below(opened.root, path) is not None or path in carried
        if not is_known or (path.name == "config.json" and not _is_config_as_read(seen.files[path], seen.catalogs)):
            raise changed(path)
    if names and not (_has_same_catalog(opened) and is_decision_unchanged()):
        raise changed(first)
    reader = TensorReader(files, max_memory)
    for step in plan.steps():
        recorded = digests.get(step.target.name)
        if recorded is None or names.isdisjoint(_files_of(step.source)):
            continue
        if digest_of(reader, step.source, step.target.dtype).digest().hex() != recorded:
            raise changed(opened.root / next(name for name in _files_of(step.source) if name in names))
    if seen.touched() != touched:
        raise changed(first)
    seen.accept(touched)


def _is_config_as_read(config: StoredFile, catalogs: tuple[Catalog, ...]) -> bool:
    """True when every checkpoint that took its config from this file would read the same today."""
    directory = config.location.parent
    owners = [each for each in catalogs if each.config is not None and source_of_config(each).location == directory]
    return all(json_in(*config) == each.config for each in owners)


def _has_same_catalog(opened: Catalog) -> bool:
    """True when a checkpoint that is opened once more has the same headers."""
    try:
        again = open_checkpoint(opened.source.at(opened.opened_from or opened.root).fresh())
    except CkptxError:
        return False
    return list(header_texts(again)) == list(header_texts(opened))


def _files_of(entry: TensorEntry) -> Iterator[str]:
    chunks = entry.chunks
    return (chunk.file for chunk in (chunks.archives if isinstance(chunks, ArchivedChunks) else chunks))
