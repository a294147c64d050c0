"""Record the state of the files of a checkpoint when it is opened, so that no copy mixes two states."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import LazyChunks
from ckptx.errors import CkptxError, ReadError
from ckptx.formats.dcp.megatron import BACKEND_FILE, COMMON_FILE
from ckptx.formats.hf.hf_metadata import DTYPE_MAPPING, FILE_MAPPING
from ckptx.formats.sidecars import MANIFEST, QUANTIZATION_FILES
from ckptx.storage.files import changed_error
from ckptx.storage.interface import FileIdentity, Location, SourceFiles, StoredFile
from ckptx.transfer.digest import bytes_digest_hex, leaf_digest, tree_digest
from ckptx.untrusted.limits import MAX_MANIFEST_BYTES

# Small files whose contents determine names, dtypes, files or values of the output, and are not in `Catalog`.
DECISION_FILES = frozenset(
    {MANIFEST, FILE_MAPPING, DTYPE_MAPPING, COMMON_FILE, BACKEND_FILE, "modules.json"} | QUANTIZATION_FILES
)

# Number of samples of tensor data, and their size in bytes, that ranks compare before they begin, spread evenly over
# the files: enough to distinguish two steps of a training run, and fast to read.
_SAMPLE_COUNT, _SAMPLE_NBYTES = 512, 256


@dataclass(frozen=True, slots=True)
class FileIdentities:
    """The identities of all files that were read to open checkpoints, or that will be copied.

    Attributes:
        catalogs: The checkpoints; the first is the source.
        files: The files, by location.
        by_location: Identity of each of these files when its checkpoint was opened, or when `accept` was called.
        decision_digests: Digest in hex of the contents that each of `DECISION_FILES` had with that identity; a file
            that had changed before they were read, or could not be read, has none.
    """

    catalogs: tuple[Catalog, ...]
    files: Mapping[Location, StoredFile]
    by_location: dict[Location, FileIdentity]
    decision_digests: Mapping[Location, str] = field(default_factory=dict)

    @property
    def source(self) -> Catalog:
        """The checkpoint from which tensors are read."""
        return self.catalogs[0]

    def find_touched(self) -> dict[Location, FileIdentity]:
        """Check the identity of every file again.

        Returns:
            The current identity of each file of which only the change time differs: its mode, owner or links changed,
            or its contents changed and its modification time was set back.

        Raises:
            InputError: A file was removed or changed.
        """
        touched = {}
        for location, identity in self.by_location.items():
            source, name = self.files[location]
            current = source.read_identities((name,)).get(name)
            if current is None:
                source.size(name)  # raises for a missing file
            if current is None or not current.has_same_contents(identity):
                raise changed_error(location)
            if current != identity:
                touched[location] = current
        return touched

    def accept(self, touched: Mapping[Location, FileIdentity]) -> None:
        """Record the current identities, from `find_touched`, of files whose contents turned out to be unchanged."""
        self.by_location.update(touched)

    def describe_tensor_files(self) -> list[tuple[str, tuple[int | str, ...], tuple[int | str, ...]]]:
        """Return name, version and inode of each tensor file of the source; if they differ, a resumed run starts over.

        If they are equal, the resumed run still compares the tensors that it reuses, because these values do not reveal
        a file that was rewritten in place.
        """
        identities = ((name, self.source.identities[name]) for name in self.source.files)
        # Without the device number, which may change when a disk is mounted again.
        return [(name, identity.version, identity.device_and_inode[1:]) for name, identity in identities]

    def iterate_blocks(self, data: StoredFile | bytes, size: int) -> Iterator[bytes]:
        """Iterate over bytes, or the contents of a file, at most `size` bytes at a time.

        Raises:
            InputError: The file cannot be read, or differs from its recorded identity; a file without one is not
                checked.
        """
        if isinstance(data, bytes):
            for offset in range(0, len(data), size):
                yield data[offset : offset + size]
            return
        source, name = data
        with source.open() as files:
            identity = files.identity(name)
            if self.by_location.get(data.location, identity) != identity:
                raise changed_error(data.location)
            offset = 0
            while block := files.read_up_to(name, offset, size):
                yield block
                offset += len(block)


def collect_identities(source: Catalog, *others: Catalog) -> FileIdentities:
    """Return the identities that the catalogs recorded when they were opened; reads `DECISION_FILES`."""
    catalogs = (source, *others)
    files = {
        catalog.root / name: StoredFile(catalog.source, name) for catalog in catalogs for name in catalog.identities
    }
    recorded = {catalog.root / name: identity for catalog in catalogs for name, identity in catalog.identities.items()}
    digests = {
        location: digest
        for location, identity in recorded.items()
        if location.name in DECISION_FILES and (digest := digest_small_file(files[location], identity)) is not None
    }
    return FileIdentities(catalogs, files, recorded, digests)


def digest_small_file(file: StoredFile, identity: FileIdentity) -> str | None:
    """Return the digest in hex of the contents of a file; None if it is missing, too large or has another identity.

    Raises:
        ReadError: The storage failed.
    """
    try:
        digest = bytes_digest_hex(file.source.read_small(file.name, MAX_MANIFEST_BYTES))
        return digest if file.source.read_identities((file.name,)).get(file.name) == identity else None
    except ReadError:
        raise
    except CkptxError:
        return None


def describe_source(source: Catalog, files: SourceFiles, *values: str) -> dict[str, str]:
    """Return the values that the ranks of a run compare before they begin, see `is_same_source`.

    Args:
        source: The checkpoint as this rank opened it.
        files: Open files of the checkpoint.
        values: Other strings that must be equal.

    Returns:
        `digest`, of headers, sizes, modification times, samples of the data, and `values`; `mount`, equal for processes
        on one machine with the same mounts, or empty; and `inodes`, a digest of device and inode of the files, which is
        compared only if `mount` is equal.
    """
    states = [(name, source.identities[name].version) for name in source.files]
    leaves = [leaf_digest(text.encode("utf-8", "surrogatepass")) for text in (repr(states), *values)]
    leaves += [leaf_digest(text.encode("utf-8", "surrogatepass")) for text in header_strings(source)]
    leaves += [leaf_digest(sample) for sample in _iterate_samples(source, files)]
    inodes = [(name, source.identities[name].device_and_inode) for name in source.files]
    return {
        "digest": tree_digest(leaves).hex(),
        "mount": _mount_id(),
        "inodes": leaf_digest(repr(inodes).encode("utf-8", "surrogatepass")).hex(),
    }


def is_same_source(other: Mapping[str, str], own: Mapping[str, str]) -> bool:
    """Return True if two ranks have the same checkpoint and options, given their results of `describe_source`."""
    is_same_mount = bool(own["mount"]) and other["mount"] == own["mount"]
    return other["digest"] == own["digest"] and (not is_same_mount or other["inodes"] == own["inodes"])


def header_strings(source: Catalog) -> Iterator[str]:
    """Yield strings that are equal for checkpoints with the same tensors, positions, objects, config and headers."""
    for name, entry in source.tensors.items():
        chunks = entry.chunks
        chunk_list = chunks.archives if isinstance(chunks, LazyChunks) else chunks
        yield repr((name, entry.dtype.name, entry.shape, [chunk[:5] for chunk in chunk_list]))
    yield repr([tuple(entry) for entry in source.objects.values()])
    yield json.dumps(source.config, sort_keys=True, default=repr)
    yield from (repr(item) for item in sorted(source.verbatim.items()))


def _iterate_samples(source: Catalog, files: SourceFiles) -> Iterator[bytes]:
    """Yield samples of the bytes of each file, at equal distances."""
    count_per_file = max(3, _SAMPLE_COUNT // max(1, len(source.files)))
    for name, nbytes in source.files.items():
        for offset in _sample_offsets(nbytes, count_per_file):
            yield files.read_up_to(name, offset, _SAMPLE_NBYTES)


def _sample_offsets(nbytes: int, count: int) -> Iterable[int]:
    """Return at most `count` evenly spaced offsets of samples in a file, the last of which ends with the file."""
    last = max(0, nbytes - _SAMPLE_NBYTES)
    return sorted({last * index // (count - 1) for index in range(count)})


def _mount_id() -> str:
    """Return a string that is equal for processes on one machine with the same mounts; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.stat('/proc/self/ns/mnt').st_ino}"
    except OSError:
        return ""
