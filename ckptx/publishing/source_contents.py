"""Compare the current contents of a source with the contents that were copied.

The change time (ctime) of a file changes with its mode, owner or hard links, and also if the file is rewritten in place
and its modification time set back (`rsync --inplace --times`, `touch -r`). Only the contents distinguish the two cases.
So files of which only the change time differs (touched files) are compared as follows:

    files of the source   the source is opened again, and positions and headers are compared; then the tensors in
                          touched files are digested again, and compared with the digests of the copy
    config.json           compared with the config that was used
    DECISION_FILES        compared with the digest from before the copy
    other sidecars        not read here; see below
    any other file        counts as changed, such as a tensor file of the base

A decision is what the conversion derived from the contents of the source: names and dtypes of the output, which tensors
are tied, and how the training state is mapped. `DECISION_FILES` are small files on which decisions depend; a decision
that depends on tensors is made again, and compared.

Other sidecars are read only once, and their identity is checked then: when they are copied, which is after this
comparison, or when they are compared with those of an output that is already complete, which is before it.

Files with another size, modification time or inode count as changed, and are not read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import LazyChunks, TensorEntry
from ckptx.errors import CkptxError, StorageFailure
from ckptx.formats.hf.hf_metadata import config_source
from ckptx.formats.hf.reader import read_json_object
from ckptx.formats.registry import open_checkpoint
from ckptx.publishing.source_state import DECISION_FILES, FileIdentities, digest_small_file, header_strings
from ckptx.storage.files import changed_error
from ckptx.storage.interface import FileIdentity, Location, SourceFiles, StoredFile, relative_name
from ckptx.transfer.digest_sink import digest_tensor
from ckptx.transfer.plan import CopyPlan
from ckptx.transfer.stream import TensorReader

_logger = logging.getLogger(__name__)


def require_unchanged(
    identities: FileIdentities,
    plan: CopyPlan,
    digests: Mapping[str, str],
    files: SourceFiles,
    opened_catalog: Catalog,
    are_source_decisions_unchanged: Callable[[], bool],
    max_memory: int,
) -> None:
    """Check that the source is unchanged since it was copied; the module docstring lists what is compared.

    Args:
        identities: Identities of the files of the source and of other checkpoints when they were opened. Those of
            touched files whose contents turn out to be unchanged are updated.
        plan: Plan of the copy.
        digests: Digest of each copied tensor in hex, by target name; tensors without one, which another process copied,
            are not compared.
        files: Files of the source.
        opened_catalog: Catalog of the source as it was when it was opened.
        are_source_decisions_unchanged: Reads the tied tensors and the training state of the source again, and returns
            True if the conversion would make the same decisions about them.
        max_memory: Memory limit for buffers, in bytes.

    Raises:
        InputError: A file was removed or replaced, or has other contents.
    """
    touched = identities.find_touched()
    if not touched:
        return
    _logger.info("reading files again because their change time differs: %s", ", ".join(map(str, touched)))
    first = next(iter(touched))
    names = {name for path in touched if (name := relative_name(opened_catalog.root, path)) is not None}
    sidecar_locations = {catalog.root / sidecar.name for catalog in identities.catalogs for sidecar in catalog.sidecars}
    for path, identity in touched.items():
        is_comparable = relative_name(opened_catalog.root, path) is not None or path in sidecar_locations
        if not is_comparable or not _is_metadata_unchanged(identities, path, identity):
            raise changed_error(path)
    if names and not (_has_same_catalog(opened_catalog) and are_source_decisions_unchanged()):
        raise changed_error(first)
    reader = TensorReader(files, max_memory)
    for step in plan.steps():  # a step copies one tensor or one pickled object
        expected = digests.get(step.target.name)
        read_files = {stored for file in _iterate_chunk_files(step.source) for stored in files.stored_names(file)}
        if expected is None or names.isdisjoint(read_files):
            continue
        if digest_tensor(reader, step.source, step.target.dtype).digest().hex() != expected:
            raise changed_error(opened_catalog.root / min(names & read_files))
    if identities.find_touched() != touched:
        raise changed_error(first)
    identities.accept(touched)


def _is_metadata_unchanged(identities: FileIdentities, path: Location, identity: FileIdentity) -> bool:
    """Return False if a touched config.json or one of `DECISION_FILES` has other contents; True for other files.

    Args:
        identities: Identities of the files.
        path: Location of the touched file.
        identity: Its current identity.
    """
    file = identities.files[path]
    if path.name == "config.json":
        return _is_config_unchanged(file, identities.catalogs)
    if path.name in DECISION_FILES:
        digest = identities.decision_digests.get(path)
        return digest is not None and digest_small_file(file, identity) == digest
    return True


def _is_config_unchanged(config: StoredFile, catalogs: tuple[Catalog, ...]) -> bool:
    """Return True if the config file still has the contents of `config` of every catalog that was opened with it."""
    directory = config.location.parent
    config_users = [each for each in catalogs if each.config is not None and config_source(each).location == directory]
    return all(read_json_object(*config) == each.config for each in config_users)


def _has_same_catalog(opened: Catalog) -> bool:
    """Return True if opening the checkpoint again gives the same tensors, positions, objects, config and headers."""
    try:
        reopened = open_checkpoint(opened.source.with_location(opened.opened_from or opened.root).without_cache())
    except StorageFailure:
        raise
    except CkptxError:
        return False
    return list(header_strings(reopened)) == list(header_strings(opened))


def _iterate_chunk_files(entry: TensorEntry) -> Iterator[str]:
    chunks = entry.chunks
    return (chunk.file for chunk in (chunks.archives if isinstance(chunks, LazyChunks) else chunks))
