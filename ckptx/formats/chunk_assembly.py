"""Assemble tensors from chunks in several files, for formats without an index that lists the chunks.

Of chunks with the same region in several files, the first is a chunk of the tensor, and the others are its replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.region import CoverageFault, Region, Shape, find_coverage_fault
from ckptx.errors import InputError
from ckptx.untrusted.hash_keys import HashFlood, UniqueTuples, identity_key, salted_key


class RegionCache:
    """Cache of one object per distinct region.

    Many tensors have equal regions. `CoverageCheck` compares regions by identity, and `salted_key` requires regions
    from such a cache, see `hash_keys`.
    """

    def __init__(self) -> None:
        self._regions: UniqueTuples[Region] = UniqueTuples()

    def get(self, region: Region) -> Region | None:
        """Return the stored region that equals this one, or None."""
        return self._regions.get(region)

    def keep(self, region: Region, name: str, where: str) -> Region:
        """Store and return a region for which `get` returned None.

        Args:
            region: The region; its offsets and sizes were checked to be non-negative integers.
            name: The tensor, for error messages.
            where: The file, for error messages.

        Raises:
            InputError: Too many regions share a hash, which happens only in a crafted file.
        """
        try:
            return self._regions.add(region)
        except HashFlood as error:
            raise InputError(f'{where}: tensor "{name}": {error}; the file is damaged, copy it again') from None


class CoverageCheck:
    """Checks that chunks tile their tensor; each distinct sharding is checked only once.

    Shardings are compared by the `id` of their regions, so all regions must come from one `RegionCache`, which must
    outlive this object.
    """

    def __init__(self) -> None:
        self._covered: set[tuple[bytes, Shape]] = set()

    def fault(self, shape: Shape, chunks: Iterable[Chunk]) -> CoverageFault | None:
        """Return the first reason why chunks do not tile a shape; None if they do."""
        regions = [chunk.region for chunk in chunks]
        key = identity_key(regions), shape
        if key in self._covered:
            return None
        fault = find_coverage_fault(shape, regions)
        if fault is None:
            self._covered.add(key)
        return fault


def split_replicas(chunks: Iterable[Chunk]) -> tuple[tuple[Chunk, ...], tuple[Chunk, ...]]:
    """Return the first chunk of each region, and all other chunks; the regions must come from one `RegionCache`."""
    first: dict[tuple[int, Region], Chunk] = {}
    replicas = []
    for chunk in chunks:
        if first.setdefault(salted_key(chunk.region), chunk) is not chunk:
            replicas.append(chunk)
    return tuple(first.values()), tuple(replicas)


def replicas_with_chunks(catalog: Catalog) -> Iterator[tuple[TensorEntry, Chunk, Chunk]]:
    """Yield (tensor, chunk, replica) for each replica in a catalog; the chunk is the one with the same region.

    Regions that were read from a file must come from one `RegionCache`, see `salted_key`.
    """
    for entry in catalog.tensors.values():
        if entry.replicas:
            chunks = {salted_key(chunk.region): chunk for chunk in entry.chunks}
            for replica in entry.replicas:
                yield entry, chunks[salted_key(replica.region)], replica
